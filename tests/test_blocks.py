"""Weights of GGUF block types, used where they lie.

The measure is always the session, or the operation, whose weights were dequantised beforehand:
equal to the bit, for each type and instruction set, any number of rows and threads.
"""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import model_files, native
from support.blockrig import IDS, SIZES, beforehand, in_place, random_blocks, run_linear
from support.model_files import BLOCK_TYPES, TINY
from support.native import RK_BF16, RK_F32, RK_ROUND_INT8
from support.oprig import (
    TYPES,
    Array,
    Output,
    Plan,
    Rig,
    Row,
    Shape,
    act,
    act_output,
    library,
    matrix,
)

import rksc
from rksc._core import Tensor

ISAS = native.isas(library())
CONFIG: dict[str, Any] = {
    **TINY,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


# ---- operations --------------------------------------------------------------------------------


@pytest.mark.parametrize("type", BLOCK_TYPES)
@pytest.mark.parametrize("compute", TYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize("isa", ISAS, ids=lambda i: native.ISAS[i])
def test_linear(isa: int, compute: int, type: str) -> None:
    rng = np.random.default_rng(seed := IDS[type])
    n, k = 71, 768
    raw = random_blocks(rng, type, n, k)
    bias = rng.standard_normal(n).astype(np.float32)
    a = act(rng.standard_normal((300, k)), compute)
    whole = beforehand(raw, type, n, k, compute)
    shape = Shape(width=k, max_rows=300)
    with Rig(shape, compute, isa, 1) as one, Rig(shape, compute, isa, 3) as three:
        for m in (1, 2, 7, 8, 33, 65, 300):
            results = []
            for rig, w in ((one, matrix(whole)), (one, in_place(raw, type, n, k)),
                           (three, in_place(raw, type, n, k))):  # fmt: skip
                w.bias = bias.ctypes.data
                out = Output((m, n), np.float32)
                rig.linear(out.address, a[-m:].ctypes.data, c.byref(w), m, False)
                results.append(out.get())
            assert np.isfinite(results[0]).all()
            assert all(np.array_equal(results[0], r) for r in results[1:]), (m, f"seed {seed}")


@pytest.mark.parametrize("type", BLOCK_TYPES)
@pytest.mark.parametrize("isa", ISAS, ids=lambda i: native.ISAS[i])
def test_every_half_and_integer(isa: int, type: str) -> None:
    """Infinite and NaN scales too: the one weight of each product is what dequantising gives."""
    rng = np.random.default_rng(seed := 11)
    elements, size = SIZES[type]
    n = 64
    raw = rng.integers(0, 256, (n, size), np.uint8)
    w = in_place(raw, type, n, elements)
    for compute in TYPES:
        want = beforehand(raw, type, n, elements, compute)
        with Rig(Shape(width=elements), compute, isa, 1) as rig:
            a = act(np.ones((1, elements)), compute)
            results = []
            for m in (matrix(want), w):
                out = Output((1, n), np.float32)
                rig.linear(out.address, a.ctypes.data, c.byref(m), 1, False)
                results.append(out.get())
        assert np.array_equal(*results, equal_nan=True), f"seed {seed}"


@pytest.mark.parametrize("isa", ISAS, ids=lambda i: native.ISAS[i])
@pytest.mark.parametrize("m", [1, 9, 200])
def test_swiglu_of_two_types(isa: int, m: int) -> None:
    rng = np.random.default_rng(m)
    ffn, k = 100, 256
    raw = {type: random_blocks(rng, type, ffn, k) for type in ("Q4_K", "Q8_0")}
    for compute in TYPES:
        a = act(rng.standard_normal((m, k)), compute)
        before = [beforehand(raw[t], t, ffn, k, compute) for t in raw]
        with Rig(Shape(width=k, ffn_width=ffn), compute, isa, 2) as rig:
            results = []
            for gate, up in (
                [matrix(w) for w in before],
                [in_place(raw[t], t, ffn, k) for t in raw],
            ):
                out = act_output((m, ffn), compute)
                rig.swiglu(out.address, a.ctypes.data, c.byref(gate), c.byref(up), m)
                results.append(out.get())
        assert np.array_equal(*results)


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_rows_of_tables_are_float32(type: str) -> None:
    """Embedding rows, and the head's rows of an answer, whatever the compute type."""
    rng = np.random.default_rng(5)
    raw = random_blocks(rng, type, 101, 256)
    table = in_place(raw, type, 101, 256)
    values = beforehand(raw, type, 101, 256, RK_F32)
    plan = Plan([Row([0] * 20, i, token=int(t)) for i, t in enumerate([100, 0, 7])], 16)
    ids = np.array([100, 3], np.int32)
    for compute in TYPES:
        with Rig(Shape(width=256), compute, ISAS[-1], 2) as rig:
            rig.begin(c.byref(plan.batch))
            out = Output((3, 256), np.float32)
            rig.embed(out.address, c.byref(table))
            x = out.get()
            assert np.array_equal(x, values[plan.tokens])
            marks = []
            for head in (table, matrix(values)):
                out = Output((3, 2), np.float32)
                rig.answer(out.address, x.ctypes.data, None, c.byref(head), ids.ctypes.data, 3, 2)
                marks.append(out.get())
            assert np.array_equal(*marks)


# ---- sessions ----------------------------------------------------------------------------------


def weights_of(path: Path, type: str, dtype: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Configuration, weights in blocks, and the same ones dequantised; the embedding is BF16,
    because rows that are looked up are not rounded to the compute type."""
    model_files.write_gguf(path, model_files.random_weights(CONFIG, seed=2), CONFIG, type)
    model = rksc.load(path, tokenizer=False)
    weights: dict[str, Any] = dict(model.weights)
    name = "model.embed_tokens.weight"
    table = weights[name].numpy()
    weights[name] = Tensor(act(table, RK_BF16).tobytes(), "BF16", table.shape)
    plain = {name: w.numpy() for name, w in weights.items()}
    if dtype == "bfloat16":
        plain = {
            name: Tensor(act(w, RK_BF16).tobytes(), "BF16", w.shape) if w.ndim == 2 else w
            for name, w in plain.items()
        }
    return model.config, weights, plain


@pytest.mark.parametrize("type", BLOCK_TYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_session_computes_as_with_converted_weights(
    tmp_path: Path, type: str, dtype: str
) -> None:
    config, weights, plain = weights_of(tmp_path / "x.gguf", type, dtype)
    results = []
    for lent, n_threads in ((plain, 1), (weights, 1), (weights, 2)):
        session = rksc.BranchSession(
            lent, config, dtype=dtype, kv_bytes="4MiB", n_threads=n_threads,
            activations="bfloat16" if dtype == "bfloat16" else None,
        )  # fmt: skip
        root = session.prefill(TOKENS)
        kids = root.fork([[7], [8, 9], [7]])
        made = session.generate(kids, 8, rksc.Sampling(temperature=0.8, seed=1))
        marks = session.verify(kids, [5, 6], yes=11, no=12, cgee=None)
        results.append(
            (
                root.logits.tobytes(),
                [g.tokens.tolist() for g in made],
                [g.confidence for g in made],
                [m.score for m in marks] if dtype == "float32" else None,
            )
        )
    assert results[0] == results[1] == results[2]


def test_nothing_is_copied(tmp_path: Path) -> None:
    """Not even q and k, whose rows llama.cpp reorders; the embedding is the head as well."""
    config = CONFIG | {"tie_word_embeddings": True}
    path = tmp_path / "x.gguf"
    model_files.write_gguf(path, model_files.random_weights(config), config, "Q4_K")
    for dtype in ("float32", "bfloat16"):
        session = rksc.load(path, tokenizer=False).session(dtype=dtype, kv_bytes="4MiB")
        assert session.copied_bytes == 0
        before = session.prefill(TOKENS).logits
        session.invalidate()
        assert np.array_equal(session.prefill(TOKENS).logits, before)


# ---- activations="int8" ------------------------------------------------------------------------


def rounded(a: Array) -> tuple[Array, Array]:
    """Scales (m, blocks) and integers (m, blocks, 32) of activations, in float32 arithmetic."""
    x = a.reshape(len(a), -1, 32)
    top = np.abs(x).max(2)
    scale = (top / np.float32(127)).astype(np.float32)
    inverse = np.where(top > 0, np.float32(127) / np.where(top > 0, top, 1), 0)
    return scale, np.rint(x * inverse[:, :, None].astype(np.float32)).astype(np.int32)


def int8_rig(isa: int, compute: int, k: int, n_threads: int = 1) -> Rig:
    return Rig(Shape(width=k, max_rows=300, rounding=RK_ROUND_INT8), compute, isa, n_threads)


@pytest.mark.parametrize("type", BLOCK_TYPES)
@pytest.mark.parametrize("compute", TYPES, ids=["f32", "bf16"])
def test_int8_linear(compute: int, type: str) -> None:
    """Against float64 over the rounded activations, which come as float32; a row alone, in a
    batch, on any number of threads and on every instruction set with fused multiply-adds has the
    same bits."""
    rng = np.random.default_rng(seed := IDS[type])
    n, k = 71, 768
    raw = random_blocks(rng, type, n, k)
    a = rng.standard_normal((300, k)) * np.exp(rng.standard_normal((300, 1)))
    a = a.astype(np.float32)
    a[5] = 0
    w = in_place(raw, type, n, k)
    scale, q = rounded(a)
    exact = (q * scale.astype(np.float64)[:, :, None]).reshape(300, k)
    weights = Tensor(raw.tobytes(), type, (n, k)).numpy().astype(np.float64)
    # Codes and offsets are multiplied apart, so they may cancel.
    bound = 2.0**-18 * (np.abs(exact).sum(1)[:, None] * np.abs(weights).max())
    fused = []
    for isa in ISAS:
        with int8_rig(isa, compute, k) as one, int8_rig(isa, compute, k, 3) as three:
            whole = run_linear(one, a, w)
            assert (np.abs(whole - exact @ weights.T) <= bound).all(), f"seed {seed}"
            for rig, m in [(one, m) for m in (1, 3, 8, 70)] + [(three, m) for m in (1, 13, 300)]:
                assert np.array_equal(run_linear(rig, a[-m:].copy(), w), whole[-m:]), m
        fused += [whole] if native.ISAS[isa] != "portable" else []
    assert all(np.array_equal(fused[0], other) for other in fused[1:])


@pytest.mark.parametrize("isa", ISAS, ids=lambda i: native.ISAS[i])
def test_int8_extremes(isa: int) -> None:
    """The largest integers of both sides; tiny, huge and missing activations; NaN is not lost."""
    k = 64
    raw = np.zeros((1, 68), np.uint8)
    for at in (0, 34):
        raw[0, at : at + 2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
        raw[0, at + 2 : at + 34] = 0x80  # -128
    w = in_place(raw, "Q8_0", 1, k)
    rows = np.zeros((7, k), np.float32)
    rows[0], rows[1], rows[2] = 1, -1, 3e38
    rows[3, :32], rows[4, 40], rows[5, 0] = 1e-38, 1e-30, np.nan
    rows[6, 63] = np.inf
    with int8_rig(isa, RK_F32, k) as rig:
        got = run_linear(rig, rows, w)[:, 0]
    assert np.allclose(got[:2], [-64 * 128, 64 * 128], rtol=1e-6)
    assert got[2] == -np.inf and got[3] == 0 and np.isclose(got[4], -128e-30)
    assert np.isnan(got[5:]).all()


def test_int8_sessions_are_reproducible(tmp_path: Path) -> None:
    """Alone or beside others, whole or in chunks, any threads: equal; another mode: close."""
    config, weights, _ = weights_of(tmp_path / "x.gguf", "Q4_K", "float32")
    options = {"dtype": "float32", "kv_bytes": "4MiB", "activations": "int8"}
    whole = rksc.BranchSession(weights, config, n_threads=2, **options)
    assert whole.activations == "int8"
    kids = whole.prefill(TOKENS).fork([[7], [8, 9], [7, 1]])
    made = whole.generate(kids, 8)
    exact = rksc.BranchSession(weights, config, dtype="float32", kv_bytes="4MiB")
    assert exact.activations is None
    for kid, generation in zip(kids, made, strict=True):
        alone = rksc.BranchSession(weights, config, n_threads=1, step_tokens=3, **options)
        branch = alone.prefill(kid.tokens)
        assert np.array_equal(branch.logits, kid.logits)
        near, far = branch.logits, exact.prefill(kid.tokens).logits
        assert 0 < np.abs(near - far).max() < 0.1 * np.abs(far).max()
        n = len(generation.tokens)
        start = alone.prefill(kid.tokens[:-n])
        assert alone.generate([start], 8)[0].tokens.tolist() == generation.tokens.tolist()


def test_int8_needs_blocks() -> None:
    weights = model_files.random_weights(TINY)
    with pytest.raises(ValueError, match=r"activations.*block types"):
        rksc.BranchSession(weights, TINY, activations="int8")
    with pytest.raises(ValueError, match="activations must be"):
        rksc.BranchSession(weights, TINY, activations="int4")  # type: ignore[arg-type]
