"""How near a model comes to the machine: a prefill and decode steps beside the machine's rates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..engine.load import Model
from ..experiments.workload import Shape, flop, kv_bytes, shared, workload
from . import bounds
from .rates import measure

SHAPE = Shape(prefix=256, branches=1, suffix=1, new=16, verify=0)
RUNS = 2  # the faster counts: the first one also brings the file into memory


def shares(model: Model, **options: Any) -> Iterator[str]:
    """A line for decode steps of one branch and a line for a prefill, each with its share of the
    machine's limit. options: the session's. OSError where there is no compiler, ValueError where
    a limit was measured too low."""
    config, seconds = model.config, dict.fromkeys(("prefill", "decode"), float("inf"))
    settings = {
        "tokenizer": None, "asks": None, "cgee": None, **options,
        "kv_bytes": kv_bytes(config, SHAPE.sequence),
    }  # fmt: skip
    for seed in range(RUNS):
        session = model.session(**settings)
        clock = shared(session, workload(config.vocab_size, SHAPE, seed)).clock
        seconds = {name: min(s, clock.phases[name].seconds) for name, s in seconds.items()}
    size = bounds.weight_bytes(model.weights, config, session.dtype)
    ops = bounds.decode_ops(config, SHAPE, size, bounds.ITEM_BYTES[session.dtype])
    read = bounds.read_bytes(ops)
    arithmetic = session.activations or session.dtype
    rates = measure(session.n_threads, read // SHAPE.new)
    products = rates.products(session.isa, arithmetic)
    least = bounds.seconds(ops, rates.read, products)
    part = bounds.fraction(least / seconds["decode"], 1.0, "decode steps")
    yield (
        f"decode        {seconds['decode'] / SHAPE.new * 1e3:.1f} ms a step of one branch after "
        f"{SHAPE.prefix} tokens: {read / seconds['decode'] / 1e9:.1f} GB/s of "
        f"{rates.read / 1e9:.1f}; {part:.0%} of the machine's limit"
    )
    speed = flop(config, 0, SHAPE.prefix) / seconds["prefill"]
    part = bounds.fraction(speed, products, "prefill")
    yield (
        f"prefill       {SHAPE.prefix / seconds['prefill']:.0f} tokens/s: {speed / 1e9:.0f} "
        f"GFLOP/s of {products / 1e9:.0f} ({arithmetic}, {session.isa}); {part:.0%} of the "
        "machine's limit"
    )
