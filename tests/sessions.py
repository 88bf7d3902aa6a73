"""Sessions over small models with the tests' defaults, and the balance of their books."""

from __future__ import annotations

import os
from typing import Any

from models import ALL, Small

from rksc import BranchSession, _core

DEVICE = os.environ.get("RKSC_TEST_DEVICE", "cpu")
"""That of `pytest --device`. Equal history gives equal bits on the CPU alone."""

ISAS = _core.isas if DEVICE == "cpu" else _core.isas[-1:]
"""What a test of every instruction set goes over; the GPU has no part in it."""


def open_session(model: Small | str = "T4", **options: Any) -> BranchSession:
    """A small budget, two threads, freed blocks poisoned with NaN; options replace these.

    The device is DEVICE.
    """
    small = ALL[model] if isinstance(model, str) else model
    defaults = {"kv_bytes": 4 << 20, "n_threads": 2, "poison": True, "dtype": "float32"}
    defaults["device"] = DEVICE
    return BranchSession(small.weights, small.model_config, **{**defaults, **options})


def block_bytes(model: Small, block_tokens: int = 16, dtype: str = "float32") -> int:
    """Bytes of one KV block: K and V of block_tokens positions in all layers."""
    c = model.model_config
    item = 2 if dtype == "bfloat16" else 4
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
