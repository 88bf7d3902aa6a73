"""The written order of products on block types in 16-bit integers (csrc/cpu/int16.h), in NumPy.

Nothing is shared with the engine: blocks are unpacked here bit by bit, sums are Python's and
int64's, and a fused multiply-add is one in 64 bits of mantissa, rounded to float32 at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from support.oprig import Array

GROUP = {"Q2_K": 16, "Q3_K": 16, "Q6_K": 16}
"""Values of a group; others: 32."""


class Weights(NamedTuple):
    """Rows of groups: value = scale * q + offset."""

    q: Array  # int64 (n, groups, group)
    scale: Array  # float32 (n, groups)
    offset: Array  # float32 (n, groups), zeros where the type has none


def _halves(b: Array, at: int) -> Array:
    return np.ascontiguousarray(b[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _bits(b: Array, shift: int, width: int) -> Array:
    return (b.astype(np.int64) >> shift) & ((1 << width) - 1)


def _nibbles(b: Array) -> Array:
    """Bytes (..., 16) to values (..., 32): low nibbles, then high ones."""
    return np.concatenate([_bits(b, 0, 4), _bits(b, 4, 4)], -1)


def _plain(b: Array, type: str) -> tuple[Array, Array, Array]:
    """Blocks of 32."""
    d = _halves(b, 0)[..., None]
    has_offset = type in ("Q4_1", "Q5_1")
    offset = _halves(b, 2)[..., None] if has_offset else np.zeros_like(d)
    at = 4 if has_offset else 2
    if type == "Q8_0":
        return b[..., None, 2:].astype(np.uint8).view(np.int8).astype(np.int64), d, offset
    if type.startswith("Q4"):
        return _nibbles(b[..., at:])[..., None, :] - (0 if has_offset else 8), d, offset
    fifth = np.unpackbits(b[..., at : at + 4], axis=-1, bitorder="little").astype(np.int64)
    q = _nibbles(b[..., at + 4 :]) | fifth << 4
    return q[..., None, :] - (0 if has_offset else 16), d, offset


def _six_bits(b: Array) -> tuple[Array, Array]:
    """12 bytes: scales and minima of eight groups."""
    low, middle, high = b[..., :4], b[..., 4:8], b[..., 8:]
    s = [_bits(low, 0, 6), _bits(high, 0, 4) | _bits(low, 6, 2) << 4]
    m = [_bits(middle, 0, 6), _bits(high, 4, 4) | _bits(middle, 6, 2) << 4]
    return np.concatenate(s, -1), np.concatenate(m, -1)


def _pairs(b: Array) -> Array:
    """64 bytes to 256 values of two bits: each 32 bytes hold four times 32."""
    halves = b.reshape(*b.shape[:-1], 2, 1, 32)
    return np.concatenate([_bits(halves, 2 * k, 2) for k in range(4)], -2)


def _super(b: Array, type: str) -> tuple[Array, Array, Array]:
    """Blocks of 256."""
    if type == "Q2_K":
        d, dmin, s, m = _halves(b, 80), _halves(b, 82), _bits(b[..., :16], 0, 4), b[..., :16] >> 4
        q = _pairs(b[..., 16:80])
    elif type == "Q3_K":
        d, packed = _halves(b, 108), b[..., 96:108]
        low = np.concatenate([_bits(packed[..., :8], 0, 4), _bits(packed[..., :8], 4, 4)], -1)
        high = np.concatenate([_bits(packed[..., 8:], 2 * k, 2) for k in range(4)], -1)
        s, m, dmin = (low | high << 4) - 32, np.zeros_like(low), np.zeros_like(d)
        third = np.stack([_bits(b[..., :32], k, 1) for k in range(8)], -2)
        q = _pairs(b[..., 32:96]).reshape(third.shape) + 4 * third - 4
    elif type == "Q6_K":
        d, dmin = _halves(b, 208), np.zeros_like(_halves(b, 208))
        s = np.ascontiguousarray(b[..., 192:208]).view(np.int8).astype(np.int64)
        m = np.zeros_like(s)
        low = b[..., :128].reshape(*b.shape[:-1], 2, 2, 32)
        low = np.concatenate([_bits(low, 0, 4), _bits(low, 4, 4)], -2)
        q = (low | _pairs(b[..., 128:192]).reshape(low.shape) << 4) - 32
    else:
        d, dmin, (s, m) = _halves(b, 0), _halves(b, 2), _six_bits(b[..., 4:16])
        runs = b[..., -128:].reshape(*b.shape[:-1], 4, 1, 32)
        q = np.concatenate([_bits(runs, 0, 4), _bits(runs, 4, 4)], -2)
        if type == "Q5_K":
            fifth = np.stack([_bits(b[..., 16:48], k, 1) for k in range(8)], -2)
            q |= fifth.reshape(q.shape) << 4
    scale = d[..., None] * s.astype(np.float32)
    offset = -(dmin[..., None] * m.astype(np.float32))
    return q.reshape(*b.shape[:-1], -1, GROUP.get(type, 32)), scale, offset


def unpack(raw: Array, type: str, block_bytes: int) -> Weights:
    """Rows of bytes (n, row_bytes)."""
    b = np.ascontiguousarray(raw).reshape(len(raw), -1, block_bytes)
    with np.errstate(invalid="ignore"):
        q, scale, offset = (_super if type.endswith("K") else _plain)(b, type)
    n, group = len(raw), q.shape[-1]
    return Weights(q.reshape(n, -1, group), scale.reshape(n, -1), offset.reshape(n, -1))


def rounded(a: Array) -> tuple[Array, Array]:
    """Integers (m, k) and scales (m, blocks) of float32 activations (m, k), 256 at a time."""
    q = np.zeros(a.shape, np.int64)
    scales = []
    for at in range(0, a.shape[1], 256):
        x = a[:, at : at + 256].astype(np.float32)
        top = np.abs(x).max(1, keepdims=True)
        some = np.isfinite(top) & (top >= 2.0**-110)
        safe = np.where(some, top, np.float32(1))
        inverse = (np.float32(32767) / safe).astype(np.float32)
        q[:, at : at + 256] = np.rint(np.where(some, x, 0) * inverse)
        scales.append(
            np.where(some, safe / np.float32(32767), np.where(np.isfinite(top), 0, np.nan))
        )
    return q, np.concatenate(scales, 1).astype(np.float32)


def _fused(a: Array, b: Array, c: Array) -> Array:
    wide = np.longdouble
    with np.errstate(invalid="ignore", over="ignore"):
        return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(np.float32)


def product(a: Array, w: Weights) -> Array:
    """float32 (m, n): a: float32 (m, k), to the bit."""
    q, scale = rounded(a)
    n, n_groups, group = w.q.shape
    assert abs(q).max() <= 32767
    q = q.reshape(len(a), n_groups, group)
    out = np.zeros((len(a), n), np.float32)
    for block in range(scale.shape[1]):
        x = np.zeros_like(out)
        for g in range(block * 256 // group, min((block + 1) * 256 // group, n_groups)):
            dot = q[:, g] @ w.q[:, g].T
            assert abs(dot).max() < 2**31
            x = _fused(dot.astype(np.float32), w.scale[None, :, g], x)
            sums = q[:, g].sum(1).astype(np.float32)[:, None]
            x = _fused(w.offset[None, :, g], sums, x)
        out = _fused(x, scale[:, block, None], out)
    return out
