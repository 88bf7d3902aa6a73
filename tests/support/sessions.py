"""Sessions over small models with the tests' defaults, the balance of their books, and when two
results are the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rksc import BranchSession, Sampling, _core
from support.models import ALL, Small

DEVICE = os.environ.get("RKSC_TEST_DEVICE", "cpu")
"""That of `pytest --device`. Equal history gives equal bits on the CPU alone."""

ISAS = _core.isas if DEVICE == "cpu" else _core.isas[-1:]
"""What a test of every instruction set goes over; the GPU has no part in it."""

DEFAULTS: dict[str, Any] = {
    "device": DEVICE, "dtype": "float32", "kv_bytes": 4 << 20, "n_threads": 2, "poison": True,
}  # fmt: skip
"""A small budget, two threads, freed blocks poisoned with NaN."""


def open_session(model: Small | str = "T4", **options: Any) -> BranchSession:
    """A session with DEFAULTS; options replace them."""
    small = ALL[model] if isinstance(model, str) else model
    return BranchSession(small.weights, small.model_config, **{**DEFAULTS, **options})


def block_bytes(model: Small, block_tokens: int = 16, dtype: str | None = None) -> int:
    """Bytes of one KV block: K and V of block_tokens positions in all layers."""
    c = model.model_config
    item = 2 if (dtype or DEFAULTS["dtype"]) == "bfloat16" else 4
    return 2 * c.n_layers * c.n_kv_heads * c.head_dim * block_tokens * item


def assert_books(session: BranchSession) -> None:
    """Every block is either used or free, and every reference is somebody's."""
    session.check()
    s = session.stats()
    assert s.blocks_used + s.blocks_free == s.blocks_total, s
    assert 0 <= s.blocks_cached <= s.blocks_free, s
    assert 0 <= s.blocks_shared <= s.blocks_used <= s.blocks_peak <= s.blocks_total, s
    if s.branches == 0:
        assert s.blocks_used == 0, s


# ---- the same ---------------------------------------------------------------------------------


def tolerance(numbers: Any, dtype: str | None = None) -> float:
    """How far these numbers may lie from those that another batch, or another device, gives.

    Nothing on the CPU. Elsewhere the order of a sum depends on the batch, so each number is off by
    what the op tests allow, as part of the row's largest (at least 1): 5e-5 in float32. In bfloat16
    a last bit of a sum moves a rounding, by 2^-8 of a number, and later layers add to that: 5e-2.
    """
    if DEVICE == "cpu":
        return 0.0
    part = 5e-5 if (dtype or DEFAULTS["dtype"]) == "float32" else 5e-2
    return float(part * max(1.0, np.abs(numbers).max(initial=0)))


def assert_same(got: Any, expected: Any, dtype: str | None = None) -> None:
    """Floats to the tolerance, which is to the bit on the CPU; all else exactly.

    Of lists and tuples each item; an item's tolerance is its own.
    """
    if isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b, dtype)
        return
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    if DEVICE == "cpu" or expected.dtype.kind != "f":
        assert np.array_equal(got, expected), (got, expected)
    else:
        assert np.isfinite(expected).all()
        assert np.abs(got - expected).max(initial=0) <= tolerance(expected, dtype)


def is_near_tie(
    logits: Any, tokens: Sequence[int], temperature: float, dtype: str | None = None
) -> bool:
    """May what the tolerance leaves open decide between the two? Greedy: both are the largest.
    Drawn: the number fell on an edge between them, with next to nothing in between."""
    off = tolerance(logits, dtype)
    first, last = sorted(tokens)
    if temperature == 0:
        return bool(logits[[first, last]].min() >= logits.max() - 2 * off)
    p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    return bool(p[first + 1 : last].sum() / p.sum() <= 2 * off / temperature)


def n_same_tokens(
    got: Any, expected: Any, model: Small | str, before: Sequence[int],
    sampling: Sampling | None = None, dtype: str | None = None,
) -> int:  # fmt: skip
    """How many tokens, which follow `before`, are the same: all of them, on the CPU. Elsewhere up
    to one at which the CPU's logits show a near tie; behind it the texts are different ones."""
    got, expected = [int(t) for t in got], [int(t) for t in expected]
    n = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(got))
    if n == len(got):
        assert got == expected
        return n
    assert DEVICE != "cpu", (got, expected)
    options = {"device": "cpu", "kv_bytes": 32 << 20, **({"dtype": dtype} if dtype else {})}
    logits = open_session(model, **options).prefill([*before, *got[:n]]).logits
    temperature = sampling.temperature if sampling else 0.0
    assert is_near_tie(logits, (got[n], expected[n]), temperature, dtype), (n, got, expected)
    return n
