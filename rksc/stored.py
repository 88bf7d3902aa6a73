"""A tensor as a file stores it, before anyone interprets its bytes."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ._core import Tensor

_STEP = 1 << 22  # bytes compared at once
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def map_file(path: Path) -> memoryview:
    """The whole file, mapped read-only; unmapped with the last view of it.

    ValueError where `path` is no regular file or is empty. A file that another process
    truncates while it is mapped ends this one with SIGBUS: replace files, don't rewrite them.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    if not path.is_file():
        raise ValueError(f"{path}: not a regular file")
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ValueError(f"{path}: the file is empty")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; ValueError where there is no such file or it holds anything else."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        value = json.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: malformed JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


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
