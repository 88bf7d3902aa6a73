"""A tensor as a file stores it, before anyone interprets its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._core import Tensor

_STEP = 1 << 22  # bytes compared at once
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class Stored:
    """`raw` holds exactly the bytes of `shape` (logical elements, row-major) in `type`."""

    path: Path
    name: str
    type: str
    shape: tuple[int, ...]
    raw: memoryview

    def equals(self, other: Stored) -> bool:
        """Are type, shape and all bytes the same?"""
        if (self.type, self.shape, len(self.raw)) != (other.type, other.shape, len(other.raw)):
            return False
        mine, theirs = np.frombuffer(self.raw, np.uint8), np.frombuffer(other.raw, np.uint8)
        return all(
            np.array_equal(mine[at : at + _STEP], theirs[at : at + _STEP])
            for at in range(0, len(mine), _STEP)
        )

    def tensor(self, name: str | None = None) -> Tensor:
        """The bytes in place as a `rksc.Tensor` called `name`; ValueError for other types.

        Plain elements that the file left unaligned are copied.
        """
        size = _ELEMENT_BYTES.get(self.type, 1)
        buffer: Any = self.raw
        if len(self.raw) and np.frombuffer(self.raw, np.uint8).ctypes.data % size:
            buffer = np.frombuffer(self.raw, np.uint8).copy()
        try:
            tensor = Tensor(buffer, self.type, self.shape)
        except ValueError as error:
            raise ValueError(f"{self.path}: tensor {self.name}: {error}") from None
        tensor.name = name if name is not None else self.name
        return tensor
