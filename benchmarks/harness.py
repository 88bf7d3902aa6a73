"""lm-evaluation-harness: the `rksc` model against its `hf` model, in float32, item by item.

python benchmarks/harness.py [MODEL.gguf] [--arc 12] [--gsm8k 6] [--batch 1 --batch 8]

The tasks are those of examples/lm_eval: ARC-Challenge with 25 examples in the prompt
(log-likelihoods of four choices) and GSM8K with 5 (generation up to "Question:"). hf runs once
for each batch size and its best time counts. Needs lm-eval, transformers and torch.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path = [str(ROOT), *sys.path[1:], str(ROOT / "benchmarks")]
TASKS = ROOT / "examples" / "lm_eval"
ARC, GSM8K = "local_arc_challenge", "local_gsm8k"


def evaluate(lm: Any, task: str, limit: int, gen_kwargs: str | None = None) -> list[Any]:
    """What the model answered to each of the first `limit` items: [(logprob, is greedy), ...] of
    the choices, or the text."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=lm, tasks=[task], limit=limit, log_samples=True, gen_kwargs=gen_kwargs,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0, verbosity="ERROR",
    )  # fmt: skip
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [[tuple(r[0]) if isinstance(r[0], (list, tuple)) else r[0] for r in s["resps"]]
            for s in samples]  # fmt: skip


def hf_model(path: Path, batch_size: int) -> Any:
    """The harness' hf model on the file as transformers reads it, in float32. The tokenizer is
    the file's own pipeline: transformers would parse the whole file once more for its."""
    import settled_torch  # noqa: F401
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    import rksc

    disable_progress_bar()
    tokenizer = rksc.load(path).tokenizer
    assert tokenizer is not None
    bos, eos = (tokenizer.decode([i], special=True) for i in (tokenizer.bos_id, tokenizer.eos_id))
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), dtype=torch.float32, gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    return HFLM(
        pretrained=model,
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer._pipeline, bos_token=bos, eos_token=eos, pad_token=eos
        ),
        batch_size=batch_size,
    )


def rksc_model(path: Path) -> Any:
    from rksc.clients.lm_eval import RKSC

    return RKSC(str(path), dtype="float32")


def compare(task: str, ours: list[Any], theirs: list[Any]) -> list[str]:
    """How far the answers are from each other, then each item that differs."""
    if task == GSM8K:
        return _compare_texts(ours, theirs)
    pairs = [p for a, b in zip(ours, theirs, strict=True) for p in zip(a, b, strict=True)]
    worst = max(abs(x[0] - y[0]) for x, y in pairs)
    greedy = sum(x[1] == y[1] for x, y in pairs)
    differ = []
    for i, rows in enumerate(zip(ours, theirs, strict=True)):
        one, other = (max(range(len(r)), key=lambda c: r[c][0]) for r in rows)
        if one != other:
            margin = rows[1][other][0] - rows[1][one][0]
            differ.append(
                f"item {i}: {'ABCDE'[one]} here, {'ABCDE'[other]} there, {margin:.1e} apart"
            )
    return [
        f"log-likelihoods differ by {worst:.1e} at most, {len(ours) - len(differ)} of {len(ours)} "
        f"choices are equal, {greedy} of {len(pairs)} greedy marks",
        *differ,
    ]


def _compare_texts(ours: list[str], theirs: list[str]) -> list[str]:
    differ = []
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            pairs = zip(one + "\0", other + "\0", strict=False)
            at = next(n for n, (a, b) in enumerate(pairs) if a != b)
            differ.append(f"item {i}: {one[at:at + 24]!r} here, {other[at:at + 24]!r} there, after "
                          f"{at} characters in common")  # fmt: skip
    return [f"{len(ours) - len(differ)} of {len(ours)} texts are equal", *differ]


def main() -> int:
    from rksc.engine import defaults

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", type=Path, help="a .gguf file")
    parser.add_argument("--arc", type=int, default=12, help="items of ARC-Challenge")
    parser.add_argument("--gsm8k", type=int, default=6, help="items of GSM8K")
    parser.add_argument("--batch", type=int, action="append", help="batch sizes of hf (1, 4, 16)")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    path = options.model or Path(defaults.find_model())
    limits = {ARC: options.arc, GSM8K: options.gsm8k}
    reference = hf_model(path, 1)
    for task, limit in limits.items():
        if not limit:
            continue
        lm = rksc_model(path)
        began = time.perf_counter()
        ours = evaluate(lm, task, limit)
        own = time.perf_counter() - began
        times: dict[int, float] = {}
        theirs: list[Any] = []
        for batch in options.batch or (1, 4, 16):
            reference.batch_size_per_gpu = batch
            began = time.perf_counter()
            theirs = evaluate(reference, task, limit)
            times[batch] = time.perf_counter() - began
        best = min(times, key=lambda batch: times[batch])
        print(f"{task}, {limit} items: rksc {own:.1f} s, hf "
              + ", ".join(f"{t:.1f} s (batch {b})" for b, t in times.items())
              + f": {times[best] / own:.1f} times as fast", flush=True)  # fmt: skip
        for line in compare(task, ours, theirs):
            print(f"  {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
