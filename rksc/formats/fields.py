"""Typed reads of what a file says under a name; each error names the field."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..scalars import as_float, as_int
from .files import reading, shown

_INT32_MAX = 2**31 - 1
_MAX = sys.float_info.max


class Fields:
    """The entries of a JSON object, or the keys of a GGUF that begin with `prefix`.

    null counts as missing. Without a default a field has to be there.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values, self._prefix = values, prefix

    def __contains__(self, name: str) -> bool:
        """Is the field there, be it null?"""
        return self.full(name) in self._values

    def full(self, name: str) -> str:
        """As the file spells it."""
        return self._prefix + name

    def get(self, name: str) -> Any:
        """Whatever stands there, or None."""
        return self._values.get(self.full(name))

    def wrong(self, name: str, must: str) -> ValueError:
        return ValueError(f"{self.full(name)} must be {must}, got {shown(self.get(name))}")

    def unsupported(self, name: str) -> ValueError:
        return ValueError(f"{self.full(name)} = {shown(self.get(name))} is not supported")

    def _need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ValueError(f"{self.full(name)} is missing")
        return value

    def integer(self, name: str, least: int = 0, default: int | None = None) -> int:
        if default is not None and self.get(name) is None:
            return default
        number = as_int(self._need(name))
        if number is None or not least <= number <= _INT32_MAX:
            raise self.wrong(name, f"an integer from {least} to 2**31 - 1")
        return number

    def number(
        self, name: str, default: float | None = None, positive: bool = False, most: float = _MAX
    ) -> float:
        """From 0, or above it, to `most`; never infinite."""
        if default is not None and self.get(name) is None:
            return default
        number = as_float(self._need(name))
        if number is None or not 0 <= number <= most or (positive and number == 0):
            bounds = (
                "positive" if positive else "0 or more" if most == _MAX else f"from 0 to {most}"
            )
            raise self.wrong(name, f"a finite number, {bounds}")
        return number

    def flag(self, name: str) -> bool:
        """False where it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, (bool, np.bool_)):
            raise self.wrong(name, "true or false")
        return bool(value)

    def integers(self, name: str, n: int | None = None) -> NDArray[np.integer[Any]]:
        """A list or array of integers; with `n` of so many."""
        value = self._need(name)
        with reading(self.full(name)):  # lists of unequal lists are no array
            array = np.asarray(value) if isinstance(value, (list, tuple, np.ndarray)) else None
        if array is None or array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
            raise self.wrong(name, "a list of integers")
        if n is not None and len(array) != n:
            raise ValueError(f"{self.full(name)} must have {n} entries, not {len(array)}")
        return array


def token_ids(value: Any, field: str, vocab_size: int) -> tuple[int, ...]:
    """One id of the vocabulary, a list of ids or None, as a tuple without repetitions."""
    ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    found = [as_int(i) for i in ids]
    if None in found:
        raise ValueError(f"{field} must be token ids, got {shown(value)}")
    kept = tuple(dict.fromkeys(i for i in found if i is not None))
    for i in kept:
        if not 0 <= i < vocab_size:
            raise ValueError(f"{field} {i} is outside the vocabulary of {vocab_size}")
    return kept
