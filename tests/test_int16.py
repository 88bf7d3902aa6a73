"""Products on block types in 16-bit integers: the written order of csrc/cpu/int16.h, to the bit.

The measure is tests/support/integers.py, which shares nothing with the engine. Each table of
kernels gives its bits, whatever the rows beside a row, the threads and the files.
"""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import integers, model_files, native
from support.blockrig import IDS, SIZES, in_place, random_blocks, run_linear
from support.model_files import BLOCK_TYPES, TINY
from support.native import INT16_BLOCK, RK_BF16, RK_F32, RK_ROUND_ACT, RK_ROUND_INT16
from support.oprig import TYPES, Array, Output, Rig, Shape, act, library, matrix

import rksc

ISAS = native.isas(library())
FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
TABLES = [
    name
    for name, flag in {
        "portable": "", "avx2": " fma ", "avxvnni": " avx_vnni ", "avx512vnni": " avx512_vnni ",
    }.items()
    if flag in FLAGS
]  # fmt: skip
"""The tables of kernels that this machine runs, also those that it would never choose."""
CONFIG: dict[str, Any] = {
    **TINY,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def run_table(
    name: str, a: Array, raw: Array, type: str, bias: Array | None = None, old: Array | None = None
) -> Array:
    """a: float32 (m, k) by rows of blocks, with one table of kernels."""
    kernels = native.Int16Kernels.in_dll(library(), f"cpu_int16_{name}")
    m, k = a.shape
    elements, size = INT16_BLOCK
    n_blocks = -(-k // elements)
    blocks = np.zeros(m * n_blocks * size + 64, np.uint8)
    at = blocks.ctypes.data + -blocks.ctypes.data % 64
    for i in range(m):
        kernels.quantize(at + i * n_blocks * size, a[i].ctypes.data, k)
    scratch = np.zeros(kernels.scratch_bytes + 128, np.uint8)
    out = Output((m, len(raw)), np.float32)
    if old is not None:
        c.memmove(out.address, old.ctypes.data, old.nbytes)
    job = native.IntegerProduct(
        out=out.address, out_stride=len(raw), a=at, w=raw.ctypes.data, row_bytes=raw.shape[1],
        type=IDS[type], bias=None if bias is None else bias.ctypes.data, m=m, n=len(raw), k=k,
        accumulate=old is not None, scratch=scratch.ctypes.data + -scratch.ctypes.data % 128,
    )  # fmt: skip
    kernels.product(c.byref(job))
    return out.get()


def rig(isa: int, compute: int, k: int, n_threads: int = 1, **sizes: int) -> Rig:
    shape = Shape(width=k, max_rows=300, rounding=RK_ROUND_INT16, **sizes)
    return Rig(shape, compute, isa, n_threads)


def some_rows(rng: np.random.Generator, m: int, k: int) -> Array:
    """Rows of very different size, with outliers."""
    x = rng.standard_normal((m, k)) * np.exp(2 * rng.standard_normal((m, 1)))
    return (x * np.where(rng.random((m, k)) < 0.01, 50, 1)).astype(np.float32)


# ---- operations --------------------------------------------------------------------------------


@pytest.mark.parametrize("type", BLOCK_TYPES)
@pytest.mark.parametrize("table", TABLES)
def test_written_order(table: str, type: str) -> None:
    """Each table of kernels has the bits of the written order: last blocks of 64 and 96 values,
    weight rows that fill no vector, all ways to pass over few rows; bias and sums."""
    rng = np.random.default_rng(seed := IDS[type])
    elements, size = SIZES[type]
    for n, k, ms in ((37, 512, (1, 2, 3, 4, 5, 6, 7, 13)), (1, 256, (1,)), (66, 576, (5,)),
                     (3, 96, (2, 9))):  # fmt: skip
        if k % elements:
            continue
        raw = random_blocks(rng, type, n, k)
        a = some_rows(rng, max(ms), k)
        a[0, :7] = 0
        want = integers.product(a, integers.unpack(raw, type, size))
        for m in ms:
            assert np.array_equal(run_table(table, a[:m], raw, type), want[:m]), f"seed {seed}"
        bias = rng.standard_normal(n).astype(np.float32)
        old = rng.standard_normal(want.shape).astype(np.float32)
        assert np.array_equal(run_table(table, a, raw, type, bias), want + bias)
        assert np.array_equal(run_table(table, a, raw, type, bias, old), old + (want + bias))


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_row_alone(type: str) -> None:
    """A row has the same bits alone, beside 1 .. 63 others, in panels of many, on any threads, on
    every instruction set, in sessions of either dtype."""
    rng = np.random.default_rng(seed := IDS[type])
    n, k = 101, 768
    raw = random_blocks(rng, type, n, k)
    w = in_place(raw, type, n, k)
    a = some_rows(rng, 300, k)
    want = integers.product(a[-64:], integers.unpack(raw, type, SIZES[type][1]))
    for isa in ISAS:
        with rig(isa, RK_BF16, k) as one, rig(isa, RK_F32, k, 3) as three:
            whole = run_linear(one, a, w)
            assert np.array_equal(whole[-64:], want), f"seed {seed}"
            ms = range(1, 65) if isa == ISAS[-1] else (1, 2, 5, 64)
            for m in (*ms, 65, 129, 300):
                assert np.array_equal(run_linear(one, a[-m:], w), whole[-m:]), m
            for m in (1, 13, 300):
                assert np.array_equal(run_linear(three, a[-m:], w), whole[-m:]), m


def extreme_blocks(type: str, byte: int, k: int) -> Array:
    """One row of a byte repeated, its halves 1: the largest integers, scales and minima."""
    elements, size = SIZES[type]
    raw = np.full((k // elements, size), byte, np.uint8)
    one = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,),
               "Q8_0": (0,)}.get(type, (0, 2)):  # fmt: skip
        raw[:, at : at + 2] = one
    return raw.reshape(1, -1)


@pytest.mark.parametrize("type", BLOCK_TYPES)
@pytest.mark.parametrize("table", TABLES)
def test_extreme_integers(table: str, type: str) -> None:
    """No sum overflows, whatever a file holds and however activations lie."""
    k = 512
    a = np.ones((4, k), np.float32)
    a[1] = -1
    a[2, ::2] = -1
    a[3] = np.where(np.arange(k) // 16 % 2, 1, -1)
    for byte in (0x00, 0x80, 0x7F, 0xFF, 0x0F, 0xF0):
        raw = extreme_blocks(type, byte, k)
        want = integers.product(a, integers.unpack(raw, type, SIZES[type][1]))
        assert np.isfinite(want).all()
        assert np.array_equal(run_table(table, a, raw, type), want), byte


@pytest.mark.parametrize("table", TABLES)
def test_extreme_activations(table: str) -> None:
    """Tiny, huge and missing ones; what is not finite spoils its own row and is never lost."""
    k = 512
    rng = np.random.default_rng(3)
    raw = random_blocks(rng, "Q6_K", 40, k)
    a = np.zeros((9, k), np.float32)
    a[0], a[1, 3] = rng.standard_normal(k), 3e38
    a[2, 300], a[3, :256], a[3, 256:] = 1e-45, 2.0**-111, 2.0**-110
    a[4, 0], a[5, 511], a[6, 256] = np.nan, np.inf, -np.inf
    a[7], a[8] = a[0], -0.0
    with np.errstate(invalid="ignore"):
        want = integers.product(a, integers.unpack(raw, "Q6_K", 210))
    got = run_table(table, a, raw, "Q6_K")
    assert np.array_equal(got, want, equal_nan=True)
    assert np.isnan(got[4:7]).all() and np.isfinite(got[[0, 2, 3, 7, 8]]).all()
    assert (got[[2, 8]] == 0).all() and np.array_equal(got[0], got[7]) and (got[3] != 0).all()


@pytest.mark.parametrize("isa", ISAS, ids=lambda i: native.ISAS[i])
@pytest.mark.parametrize("m", [1, 9, 200])
def test_swiglu_beside_bf16(isa: int, m: int) -> None:
    """Of two matrices the one of a block type meets integers, the other activations as bf16."""
    rng = np.random.default_rng(m)
    ffn, k = 100, 256
    raw = random_blocks(rng, "Q4_K", ffn, k)
    up = act(rng.standard_normal((ffn, k)), RK_BF16)
    a = some_rows(rng, m, k)
    with (
        rig(isa, RK_BF16, k, 2, ffn_width=ffn) as mixed,
        Rig(Shape(width=k, max_rows=300, rounding=RK_ROUND_ACT), RK_BF16, isa) as plain,
    ):
        gates = run_linear(mixed, a, in_place(raw, "Q4_K", ffn, k))
        ups = run_linear(plain, act(a, RK_BF16), matrix(up))
        assert np.array_equal(run_linear(mixed, a, matrix(up)), ups)
        out = Output((m, ffn), np.float32)
        args = (c.byref(in_place(raw, "Q4_K", ffn, k)), c.byref(matrix(up)))
        mixed.swiglu(out.address, a.ctypes.data, *args, m)
    with np.errstate(over="ignore"):
        want = gates.astype(np.float64) / (1 + np.exp(-gates.astype(np.float64))) * ups
    assert np.allclose(out.get(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compute", TYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize("isa", ISAS, ids=lambda i: native.ISAS[i])
def test_norm_hands_over_float32(isa: int, compute: int) -> None:
    rng = np.random.default_rng(1)
    x, weight = some_rows(rng, 20, 48), rng.standard_normal(48).astype(np.float32)
    with rig(isa, compute, 48) as mine:
        for given in (weight, None):
            out = Output(x.shape, np.float32)
            mine.norm(out.address, x.ctypes.data, None if given is None else given.ctypes.data, 20)
            wide = x.astype(np.float64)
            want = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight
            got = out.get()
            assert np.allclose(got, want, rtol=1e-5) if given is not None else (got == x).all()


# ---- sessions ----------------------------------------------------------------------------------


def model_of(path: Path, type: str) -> rksc.Model:
    model_files.write_gguf(path, model_files.random_weights(CONFIG, seed=2), CONFIG, type)
    return rksc.load(path, tokenizer=False)


def open_session(model: rksc.Model, **options: Any) -> rksc.BranchSession:
    return model.session(kv_bytes="4MiB", **{"dtype": "bfloat16", **options})


@pytest.mark.parametrize("isa", [native.ISAS[i] for i in ISAS])
@pytest.mark.parametrize("type", ["Q4_K", "Q6_K", "Q8_0", "Q4_1"])
def test_sessions_are_reproducible(tmp_path: Path, type: str, isa: str) -> None:
    """Alone or beside others, whole or in chunks, any threads: the same bits."""
    model = model_of(tmp_path / "x.gguf", type)
    options = {"isa": isa, "activations": "int16"}
    whole = open_session(model, n_threads=2, **options)
    kids = whole.prefill(TOKENS).fork([[7], [8, 9], [7, 1]])
    made = whole.generate(kids, 8)
    for kid, generation in zip(kids, made, strict=True):
        alone = open_session(model, n_threads=1, step_tokens=3, **options)
        assert np.array_equal(alone.prefill(kid.tokens).logits, kid.logits)
        start = alone.prefill(kid.tokens[: -len(generation.tokens)])
        assert alone.generate([start], 8)[0].tokens.tolist() == generation.tokens.tolist()


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_nearer_to_float32(tmp_path: Path, type: str) -> None:
    """What is left of the distance to a float32 session is bfloat16's KV; it alone in float32
    leaves almost nothing."""
    model = model_of(tmp_path / "x.gguf", type)
    prompts = [TOKENS[i:] + TOKENS[:i] for i in range(len(TOKENS))]

    def logits(session: rksc.BranchSession) -> Array:
        return np.stack([session.prefill(prompt).logits for prompt in prompts])

    exact = logits(open_session(model, dtype="float32"))
    off = {}
    for dtype, mode in (("bfloat16", "bfloat16"), ("bfloat16", "int16"), ("bfloat16", "int8"),
                        ("float32", "int16")):  # fmt: skip
        session = open_session(model, dtype=dtype, activations=mode)
        off[dtype, mode] = np.sqrt(np.square(logits(session) - exact).mean())
    assert off["bfloat16", "int16"] < 0.7 * off["bfloat16", "bfloat16"]
    assert off["bfloat16", "int16"] < 0.7 * off["bfloat16", "int8"]
    assert 0 < off["float32", "int16"] < 0.02 * off["bfloat16", "bfloat16"]


def test_what_a_session_chooses(tmp_path: Path) -> None:
    model = model_of(tmp_path / "x.gguf", "Q4_K")
    for isa in (native.ISAS[i] for i in ISAS):
        mode = open_session(model, isa=isa).activations
        assert mode == (None if isa == "amx" else "int16")
        assert open_session(model, isa=isa, dtype="float32").activations is None
    assert open_session(model, activations="bfloat16").activations is None
    assert open_session(model, activations="int8").activations == "int8"


def test_what_is_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path / "x.gguf", "Q4_K")
    with pytest.raises(ValueError, match=r'"bfloat16" needs dtype="bfloat16"'):
        open_session(model, dtype="float32", activations="bfloat16")
    with pytest.raises(ValueError, match=r'activations must be "int8", "int16", "bfloat16" or'):
        open_session(model, activations="int4")
    with pytest.raises(ValueError, match=r'"int16" needs weights of GGUF block types'):
        rksc.BranchSession(model_files.random_weights(TINY), TINY, activations="int16")
