"""Dequantisation: bit for bit what the format defines."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np
import pytest
from support import model_files, native

from rksc._core import Tensor

PLAIN = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)}
BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}  # fmt: skip


def same_bits(a: Any, b: Any) -> bool:
    """Equal as bit patterns, any NaN as any other, and zeros whatever their sign."""
    both_nan = np.isnan(a) & np.isnan(b)
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | both_nan | ((a == 0) & (b == 0))))


@pytest.mark.parametrize("type", [*PLAIN, *BLOCKS])
def test_random_bytes_as_the_gguf_library_reads_them(type: str) -> None:
    """All bit patterns, NaN and infinite scales among them."""
    gguf = pytest.importorskip("gguf")
    elements, size = (PLAIN | BLOCKS)[type]
    seed = 7
    raw = np.random.default_rng(seed).integers(0, 256, 512 * size, dtype=np.uint8)
    if elements == 1 and size == 2:
        raw = np.arange(65536, dtype=np.uint16).view(np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[type]).astype(np.float32).ravel()
    values = Tensor(raw, type, (raw.size // size * elements,)).numpy()
    assert same_bits(values, expected), f"seed {seed}"


@pytest.mark.parametrize("type", model_files.ENCODINGS)
def test_encoded_values_come_back(type: str) -> None:
    """Against the tests' own encoders, which need no library."""
    x = np.random.default_rng(1).standard_normal((6, 512)).astype(np.float32)
    stored, seen = model_files.encode(x, type)
    np.testing.assert_array_equal(Tensor(stored, type, x.shape).numpy(), seen)


def half(x: float) -> bytes:
    return struct.pack("<e", x)


@pytest.mark.parametrize(
    ("type", "block", "expected"),
    [
        ("Q4_1", half(0.5) + half(-1) + bytes([0xF0] * 16), [-1.0] * 16 + [6.5] * 16),
        ("Q5_0", half(2) + b"\0\0\0\x80" + bytes(16), [-32.0] * 31 + [0.0]),
        ("Q5_1", half(1) + half(3) + b"\1\0\0\0" + bytes([2] * 16),
         [21.0] + [5.0] * 15 + [3.0] * 16),
        ("Q2_K", bytes([0x21] * 16) + bytes([0xE4] * 64) + half(3) + half(1),
         ([-2.0] * 32 + [1.0] * 32 + [4.0] * 32 + [7.0] * 32) * 2),
        ("Q3_K", bytes([0xFF] * 31 + [0xFE]) + bytes([0xE4] * 64) + bytes([1] + [0] * 11) + half(1),
         # group 0 has the scale 1 - 32, the others -32; only value 31 misses its third bit
         [-0.0] * 31 + [128.0] + ([-32.0] * 32 + [-64.0] * 32 + [-96.0] * 32) + [0.0] * 32
         + [-32.0] * 32 + [-64.0] * 32 + [-96.0] * 32),
        ("Q5_K", half(1) + half(2) + bytes([1, 0, 0, 0, 3] + [0] * 7) + bytes([1] + [0] * 31)
         + bytes([5] * 128), [15.0] + [-1.0] * 31 + [0.0] * 224),
    ],
)  # fmt: skip
def test_blocks_by_hand(type: str, block: bytes, expected: list[float]) -> None:
    values = Tensor(block, type, (len(expected),)).numpy()
    np.testing.assert_array_equal(values, np.array(expected, np.float32))


@pytest.mark.parametrize("type", BLOCKS)
def test_any_run_of_blocks_alone_is_the_same(type: str) -> None:
    """Threads may share the rows out as they like; blocks need no alignment."""
    elements, size = BLOCKS[type]
    raw = np.random.default_rng(3).integers(0, 128, 16 * size, dtype=np.uint8).tobytes()
    whole = Tensor(raw, type, (16 * elements,)).numpy()
    for first, n in ((0, 1), (5, 3), (15, 1)):
        part = Tensor(b"x" + raw, type, (n * elements,), 1 + first * size).numpy()
        assert same_bits(part, whole[first * elements : (first + n) * elements])


def test_rounding_to_bf16_is_to_nearest_even() -> None:
    """Every bf16, and the floats around the middle between it and the next."""
    library = ctypes.CDLL(str(native.build("model/quant.c")))
    high = np.arange(0, 65536, dtype=np.uint32) << 16
    bits = np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    x = bits.astype(np.uint32).view(np.float32)
    out = np.empty(x.size, np.uint16)
    library.rk_to_bf16(
        out.ctypes.data_as(ctypes.c_void_p),
        x.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(x.size),
    )
    nan = np.isnan(x)
    expected = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(out[~nan], expected[~nan])
    assert np.isnan((out[nan].astype(np.uint32) << 16).view(np.float32)).all()


def test_subnormal_halves_survive_flush_to_zero() -> None:
    """Other libraries switch subnormal floats off; small f16 weights must not vanish."""
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        halves = np.arange(1, 0x400, dtype=np.uint16)
        values = Tensor(halves, "F16", halves.shape).numpy()
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(values, np.arange(1, 0x400) * 2.0**-24)
