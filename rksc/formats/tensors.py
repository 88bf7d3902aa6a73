"""Tensors of files, called as the file calls them: the bytes stay where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._core import Tensor, tensor_types
from .files import reading


def tensor_of(name: str, type: str, shape: tuple[int, ...], raw: memoryview) -> Tensor:
    """`raw` holds exactly the bytes of `shape` (logical elements, row-major) in `type`.

    Plain elements that the file left unaligned are copied. ValueError for other types.
    """
    elements, size = tensor_types.get(type, (1, 1))
    buffer: Any = raw
    if elements == 1 and len(raw) and np.frombuffer(raw, np.uint8).ctypes.data % size:
        buffer = np.frombuffer(raw, np.uint8).copy()
    with reading(f"tensor {name}"):
        tensor = Tensor(buffer, type, shape)
    tensor.name = name
    return tensor
