"""Time each op of the CPU backend beside what the machine can do.

    python benchmarks/ops.py [--isa NAME ...] [--threads N] [--only TEXT] [--type bf16|f32]
        [--best]

Medians of several runs (--best: the fastest, for a busy machine), each over weights that are not
in the caches: a new copy each time.
"""

from __future__ import annotations

import argparse
import ctypes as c
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import native
from support.native import RK_BF16, RK_F32
from support.oprig import Array, Plan, Rig, Row, Shape, act, library, matrix

from rksc.limits.rates import measure

SMOL = [(576, 576), (1536, 576), (576, 1536), (49152, 576)]
WIDE = [(4096, 4096), (14336, 4096)]
ROWS = [1, 8, 32, 128, 512, 1024]
COLD_BYTES = 256 << 20


def peaks(threads: int) -> None:
    """Print the machine's own rates."""
    rates = measure(threads)
    for name in ("fma", "bf16", "amx", "int16", "int8"):
        print(f"peak {name:7} {getattr(rates, name) / 1e9:8.0f} GFLOP/s")
    print(f"peak {'read':7} {rates.read / 1e9:8.1f} GB/s")


class Timing:
    """What `median` reports: the median, or the fastest run."""

    best = False


def median(run: Callable[[int], object], seconds: float = 0.4) -> float:
    """Median time of run(i) for i = 0, 1, ... over about `seconds`, at least 5 times."""
    times: list[float] = []
    run(0)
    since = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - since < seconds and len(times) < 400):
        start = time.perf_counter()
        run(len(times) + 1)
        times.append(time.perf_counter() - start)
    return float(min(times) if Timing.best else np.median(times))


def report(name: str, seconds: float, flops: float, read: float) -> None:
    print(
        f"{name:34} {seconds * 1e6:10.1f} us {flops / seconds / 1e9:8.0f} GFLOP/s"
        f" {read / seconds / 1e9:7.1f} GB/s",
        flush=True,
    )


def bench_linear(rig: Rig, compute: int) -> None:
    rng = np.random.default_rng(0)
    for n, k in SMOL + WIDE:
        copies = max(1, min(64, COLD_BYTES // (n * k * (2 if compute == RK_BF16 else 4))))
        one = act(rng.standard_normal((n, k), np.float32), compute)
        weights = [one.copy() for _ in range(copies)]
        held = [matrix(w) for w in weights]
        for m in ROWS:
            if m * n > 1 << 24:
                continue
            a = act(rng.standard_normal((m, k), np.float32), compute)
            out = np.zeros((m, n), np.float32)

            def run(
                i: int, a: Array = a, out: Array = out, m: int = m, held: list[native.Matrix] = held
            ) -> None:
                w = c.byref(held[i % len(held)])
                rig.linear(out.ctypes.data, a.ctypes.data, w, m, False)

            report(f"linear {m} x {n} x {k}", median(run), 2.0 * m * n * k, one.nbytes)


def bench_swiglu(rig: Rig, compute: int) -> None:
    rng = np.random.default_rng(0)
    n, k = 1536, 576
    weights = [act(rng.standard_normal((n, k), np.float32), compute) for _ in range(64)]
    held = [matrix(w) for w in weights]
    for m in ROWS[:-1]:
        a = act(rng.standard_normal((m, k), np.float32), compute)
        out = np.zeros((m, n), np.float32)

        def run(i: int, a: Array = a, out: Array = out, m: int = m) -> None:
            pair = (c.byref(held[2 * i % 64]), c.byref(held[2 * i % 64 + 1]))
            rig.swiglu(out.ctypes.data, a.ctypes.data, *pair, m)

        report(f"swiglu {m} x 2 x {n} x {k}", median(run), 4.0 * m * n * k, 2.0 * weights[0].nbytes)


def bench_attention(rig: Rig, compute: int) -> None:
    """Prefill of 1,024 tokens in steps of 256; 8 rows of decode, shared or private; verification"""
    shape = rig.shape
    bt, heads, dim = shape.block_tokens, shape.n_heads, shape.head_dim
    trunk = list(range(1024 // bt))
    private = [[1024 // bt * (b + 1) + i for i in range(1100 // bt + 1)] for b in range(8)]
    shared = [trunk + p[:8] for p in private]
    cases = {f"prefill 256 at {at}": [Row(trunk, at + i) for i in range(256)] for at in (0, 768)}
    cases["decode 1 at 1040"] = [Row(shared[0], 1040)]
    cases["decode 8 at 1040, shared"] = [Row(t, 1040) for t in shared]
    cases["decode 8 at 1040, private"] = [Row(t, 1040) for t in private]
    cases["verify 8 x 12 at 1056"] = [Row(t, 1056 + i) for t in shared for i in range(12)]
    rng = np.random.default_rng(0)
    for block in range(shape.n_blocks):
        rig.kv_fill(block, 0x3C)
    for name, rows in cases.items():
        plan = Plan(rows, bt)
        q = act(rng.standard_normal((len(rows), heads * dim), np.float32), compute)
        out = np.zeros((len(rows), heads * dim), np.float32)
        rig.begin(c.byref(plan.batch))
        seconds = median(lambda _, out=out, q=q: rig.attention(out.ctypes.data, q.ctypes.data, 0))
        keys = sum(r.position + 1 for r in rows)
        blocks = {b for r in rows for b in r.table[: r.position // bt + 1]}
        size = 2.0 * len(blocks) * bt * shape.n_kv_heads * dim * (2 if compute == RK_BF16 else 4)
        report(f"attention {name}", seconds, 4.0 * keys * heads * dim, size)


def bench_rows(rig: Rig, compute: int) -> None:
    rng = np.random.default_rng(0)
    weight = np.ones(576, np.float32)
    for m in (8, 256):
        x = rng.standard_normal((m, 576)).astype(np.float32)
        out = np.zeros_like(x)
        args = (out.ctypes.data, x.ctypes.data, weight.ctypes.data, m)
        report(
            f"norm {m} x 576", median(lambda _, args=args: rig.norm(*args)), 4.0 * x.size, x.nbytes
        )
    logits = rng.standard_normal((8, 49152)).astype(np.float32)
    out = np.zeros((8, 6), np.float32)
    for name, fields in {
        "greedy": {},
        "sampled": {"temperature": 1.0},
        "top_k 50, top_p 0.9": {"temperature": 1.0, "top_k": 50},
    }.items():
        top_p = 0.9 if "top_p" in name else 1.0
        draws = (native.Draw * 8)(*[native.Draw(forced=-1, top_p=top_p, **fields)] * 8)
        seconds = median(lambda _, d=draws: rig.pick(out.ctypes.data, logits.ctypes.data, d, 8))
        report(f"pick 8 x 49152 {name}", seconds, 0.0, logits.nbytes)
    plan = Plan([Row(list(range(16)), i) for i in range(256)], 16)
    report("begin 256", median(lambda _: rig.begin(c.byref(plan.batch))), 0.0, 0.0)


BENCHES = {"linear": bench_linear, "swiglu": bench_swiglu, "attention": bench_attention}
BENCHES["rows"] = bench_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", nargs="*", default=[native.ISAS[library().rk_isa_best()]])
    parser.add_argument("--threads", type=int, default=library().rk_cpu_default_threads())
    parser.add_argument("--only", choices=list(BENCHES), nargs="*", default=list(BENCHES))
    parser.add_argument("--type", choices=["bf16", "f32"], default="bf16")
    parser.add_argument("--best", action="store_true")
    options = parser.parse_args()
    Timing.best = options.best
    compute = RK_BF16 if options.type == "bf16" else RK_F32
    peaks(options.threads)
    shape = Shape(
        n_layers=1,
        width=576,
        ffn_width=4096,  # the widest product below
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        n_blocks=1024,
        max_rows=1024,
        max_outputs=64,
    )
    for isa in options.isa:
        print(f"\n{isa}, {options.type}, {options.threads} threads")
        with Rig(shape, compute, native.ISAS.index(isa), options.threads) as rig:
            for name in options.only:
                BENCHES[name](rig, compute)


if __name__ == "__main__":
    main()
