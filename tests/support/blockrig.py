"""What tests of GGUF block types share: random blocks, and matrices of them."""

from __future__ import annotations

import ctypes as c

import numpy as np

from rksc._core import Tensor
from support import native
from support.oprig import Array, Output, Rig, act, guarded

IDS = {"Q4_0": 3, "Q4_1": 4, "Q5_0": 5, "Q5_1": 6, "Q8_0": 7,
       "Q2_K": 8, "Q3_K": 9, "Q4_K": 10, "Q5_K": 11, "Q6_K": 12}  # fmt: skip
SIZES = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24),
         "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144),
         "Q5_K": (256, 176), "Q6_K": (256, 210)}  # fmt: skip
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,),
          "Q8_0": (0,)}  # fmt: skip  # where a block's half-precision numbers are; others: (0, 2)


def random_blocks(rng: np.random.Generator, type: str, rows: int, cols: int) -> Array:
    """Any integers; halves of either sign from zero and subnormals up to about 0.06."""
    elements, size = SIZES[type]
    raw = rng.integers(0, 256, (rows * cols // elements, size), np.uint8)
    for at in HALVES.get(type, (0, 2)):
        bits = rng.integers(0, 0x2C00, len(raw), np.uint16) | rng.integers(0, 2, len(raw)) << 15
        raw[:, at : at + 2] = bits.astype(np.uint16)[:, None].view(np.uint8)
    return guarded(raw.reshape(rows, -1))


def beforehand(raw: Array, type: str, rows: int, cols: int, compute: int) -> Array:
    """The same weights in the compute type."""
    return act(Tensor(raw.tobytes(), type, (rows, cols)).numpy(), compute)


def in_place(raw: Array, type: str, rows: int, cols: int) -> native.Matrix:
    return native.Matrix(raw.ctypes.data, None, IDS[type], rows, cols)


def run_linear(rig: Rig, a: Array, w: native.Matrix) -> Array:
    out = Output((len(a), w.rows), np.float32)
    rig.linear(out.address, a.ctypes.data, c.byref(w), len(a), False)
    return out.get()
