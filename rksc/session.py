"""BranchSession: the engine's session with text, units and the mechanisms' settings."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import _core
from ._core import Branch, Tokens
from .config import ModelConfig
from .guard import same_numbers
from .options import ASKS, CGEE, RSBCM, Sampling
from .results import Gate, Generation, Stats, Token, Verdict

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_OFF = 2.0  # a confidence never reaches it
_DTYPES = {
    "float32": "float32", "f32": "float32", "fp32": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
}  # fmt: skip


def parse_bytes(value: int | str) -> int:
    """A number of bytes from 1024 or "2GiB", "512MB" (binary units)."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        number = int(value)
    else:
        text = str(value).strip().lower()
        digits = text.rstrip("kmgtib ")
        unit = text[len(digits) :].strip().removesuffix("b").removesuffix("i")
        try:
            number = int(float(digits) * _UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            raise ValueError(f'kv_bytes must be a number or like "2GiB", got {value!r}') from None
    if number <= 0:
        raise ValueError(f"kv_bytes must be positive, got {value!r}")
    return number
