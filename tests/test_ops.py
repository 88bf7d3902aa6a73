"""Each op of the CPU backend against plain float64 NumPy, and the identities that it promises.

Every test runs once for each instruction set of this machine and for float32 and bf16. Seeds are
the parametrised numbers, so a failure names its own.
"""

from __future__ import annotations

import ctypes as c
import itertools
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from support import native
from support.native import RK_BF16, RK_F16, RK_F32, RK_TILE
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
    eps,
    guarded,
    library,
    matrix,
    value,
)
from support.reference import philox

ISAS = native.isas(library())
FLOAT32 = ("portable", "avx2", "avx512")
# The float32 kernels of the last two are those of avx512, compiled once more.
KINDS = [(isa, t) for isa in ISAS for t in TYPES if t == RK_BF16 or native.ISAS[isa] in FLOAT32]
NAMES = [f"{native.ISAS[isa]}-{'bf16' if t == RK_BF16 else 'f32'}" for isa, t in KINDS]


@pytest.fixture(params=KINDS, ids=NAMES)
def kind(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


def close(got: Array, want: Array, bound: Any) -> None:
    """|got - want| <= bound everywhere, NaN nowhere."""
    error = np.abs(got.astype(np.float64) - want)
    worst = int(np.argmax(error - bound))
    assert (error <= bound).all(), (
        f"{got.flat[worst]} for {want.flat[worst]}, "
        f"bound {np.broadcast_to(bound, want.shape).flat[worst]}"
    )


# ---- matrix products --------------------------------------------------------------------------

SIZES = [(1, 1, 1), (1, 5, 7), (3, 4, 8), (5, 9, 31), (8, 64, 64), (13, 66, 33), (2, 3, 1001)]
SIZES += [(33, 70, 96), (65, 131, 65), (130, 67, 200), (7, 12, 4096)]


def linear(rig: Rig, a: Array, w: native.Matrix, old: Array | None = None) -> Array:
    out = Output((len(a), w.rows), np.float32)
    if old is not None:
        c.memmove(out.address, old.ctypes.data, old.nbytes)
    rig.linear(out.address, a.ctypes.data, c.byref(w), len(a), old is not None)
    return out.get()


@pytest.mark.parametrize("m,n,k", SIZES)
def test_linear(kind: tuple[int, int], m: int, n: int, k: int) -> None:
    isa, compute = kind
    rng = np.random.default_rng(m * n * k)
    a = guarded(act(rng.standard_normal((m, k)), compute))
    w = guarded(act(rng.standard_normal((n, k)), compute))
    bias = rng.standard_normal(n).astype(np.float32)
    old = rng.standard_normal((m, n)).astype(np.float32)
    product = value(a) @ value(w).T
    bound = 2.0**-21 * (np.abs(value(a)) @ np.abs(value(w)).T + 4)
    with Rig(Shape(width=k), compute, isa, 2) as rig:
        close(linear(rig, a, matrix(w)), product, bound)
        close(linear(rig, a, matrix(w, bias)), product + bias, bound)
        close(linear(rig, a, matrix(w), old), product + old, bound)
        close(linear(rig, a, matrix(w, bias), old), product + bias + old, bound)


@pytest.mark.parametrize("n,k", [(70, 96), (129, 45), (576, 576)])
def test_linear_row_alone(kind: tuple[int, int], n: int, k: int) -> None:
    """A row has the same bits alone, in any batch, on any number of threads."""
    isa, compute = kind
    rng = np.random.default_rng(n)
    a = act(rng.standard_normal((150, k)), compute)
    w = matrix(keep := act(rng.standard_normal((n, k)), compute))
    shape = Shape(width=k)
    with Rig(shape, compute, isa, 1) as one, Rig(shape, compute, isa, 3) as three:
        whole = linear(one, a, w)
        for rig in (one, three):
            for m in (1, 2, 3, 4, 5, 6, 7, 8, 31, 64, 65, 150):
                assert np.array_equal(linear(rig, a[-m:].copy(), w), whole[-m:]), m
    del keep


@pytest.mark.parametrize("m,ffn,k", [(1, 40, 48), (3, 7, 5), (70, 131, 33)])
def test_swiglu(kind: tuple[int, int], m: int, ffn: int, k: int) -> None:
    isa, compute = kind
    rng = np.random.default_rng(ffn)
    a = act(rng.standard_normal((m, k)), compute)
    gate = act(rng.standard_normal((ffn, k)), compute)
    up = act(rng.standard_normal((ffn, k)), compute)
    g, u = value(a) @ value(gate).T, value(a) @ value(up).T
    want = g / (1 + np.exp(-g)) * u
    with Rig(Shape(width=k, ffn_width=ffn), compute, isa, 2) as rig:
        out = act_output((m, ffn), compute)
        args = (a.ctypes.data, c.byref(matrix(gate)), c.byref(matrix(up)))
        rig.swiglu(out.address, *args, m)
        close(value(out.get()), want, eps(compute) * np.abs(want) + 2e-5)
        alone = act_output((1, ffn), compute)
        rig.swiglu(alone.address, a[-1:].ctypes.data, *args[1:], 1)
        assert np.array_equal(alone.get()[0], out.get()[-1])


def test_swiglu_extremes(kind: tuple[int, int]) -> None:
    """silu of huge, tiny and zero gates neither overflows nor gives NaN."""
    isa, compute = kind
    gates = np.array([-3e4, -200, -90, -87, -30, 0, 1e-20, 30, 87, 200, 3e4], np.float32)
    one = act(np.ones((1, 1)), compute)
    gate = act(gates[:, None], compute)
    up = act(np.ones((len(gates), 1)), compute)
    g = value(gate)[:, 0]
    with np.errstate(over="ignore"):
        want = g / (1 + np.exp(-g))
    with Rig(Shape(width=1, ffn_width=len(gates)), compute, isa) as rig:
        out = act_output((1, len(gates)), compute)
        rig.swiglu(out.address, one.ctypes.data, c.byref(matrix(gate)), c.byref(matrix(up)), 1)
        close(value(out.get())[0], want, eps(compute) * np.abs(want) + 1e-30)


# ---- rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 7, 48, 576, 4096])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_norm(kind: tuple[int, int], width: int, size: float) -> None:
    isa, compute = kind
    rng = np.random.default_rng(width)
    x = (rng.standard_normal((37, width)) * size).astype(np.float32)
    weight = rng.standard_normal(width).astype(np.float32)
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * weight
    with Rig(Shape(width=width), compute, isa, 3) as rig:
        out = act_output(x.shape, compute)
        rig.norm(out.address, x.ctypes.data, weight.ctypes.data, len(x))
        close(value(out.get()), want, (eps(compute) + 1e-6) * np.abs(want) + 1e-30)
        alone = act_output((1, width), compute)
        rig.norm(alone.address, x[-1:].ctypes.data, weight.ctypes.data, 1)
        assert np.array_equal(alone.get()[0], out.get()[-1])
        rig.norm(out.address, x.ctypes.data, None, len(x))
        assert np.array_equal(out.get(), act(x, compute))


@pytest.mark.parametrize("dtype", [RK_F32, RK_F16, RK_BF16])
def test_embed(kind: tuple[int, int], dtype: int) -> None:
    isa, compute = kind
    rng = np.random.default_rng(dtype)
    table = rng.standard_normal((101, 48))
    held = table.astype(np.float16) if dtype == RK_F16 else act(table, dtype)
    rows = [Row([0] * 20, i, token=int(t)) for i, t in enumerate(rng.integers(0, 101, 40))]
    plan = Plan(rows, 16)
    with Rig(Shape(), compute, isa, 2) as rig:
        rig.begin(c.byref(plan.batch))
        out = Output((40, 48), np.float32)
        rig.embed(out.address, c.byref(matrix(held, dtype=dtype)))
        want = held.astype(np.float64) if dtype == RK_F16 else value(held)
        assert np.array_equal(out.get(), want[plan.tokens].astype(np.float32))


def test_gather() -> None:
    """Any order into another array, and compaction in place."""
    x = np.arange(70, dtype=np.float32).reshape(10, 7)
    rows = np.array([9, 0, 3, 3], np.int32)
    with Rig(Shape(), RK_F32, ISAS[-1]) as rig:
        out = Output((4, 7), np.float32)
        rig.gather(out.address, x.ctypes.data, rows.ctypes.data, 4, 7)
        assert np.array_equal(out.get(), x[rows])
        rows = np.array([0, 2, 3, 9], np.int32)
        want = x[rows]
        rig.gather(x.ctypes.data, x.ctypes.data, rows.ctypes.data, 4, 7)
        assert np.array_equal(x[:4], want)


@pytest.mark.parametrize("dtype", [RK_F32, RK_BF16])
@pytest.mark.parametrize("normed", [True, False])
def test_answer(kind: tuple[int, int], dtype: int, normed: bool) -> None:
    isa, compute = kind
    rng = np.random.default_rng(dtype)
    x = rng.standard_normal((35, 48)).astype(np.float32) * 9
    weight = rng.standard_normal(48).astype(np.float32)
    head = act(rng.standard_normal((101, 48)), dtype)
    ids = np.array([100, 0, 7], np.int32)
    y = x.astype(np.float64)
    if normed:
        y = y / np.sqrt((y**2).mean(1, keepdims=True) + 1e-5) * weight
    want = y @ value(head)[ids].T
    with Rig(Shape(), compute, isa, 2) as rig:
        out = Output((35, 3), np.float32)
        rig.answer(
            out.address,
            x.ctypes.data,
            weight.ctypes.data if normed else None,
            c.byref(matrix(head, dtype=dtype)),
            ids.ctypes.data,
            35,
            3,
        )
        close(out.get(), want, 1e-5 * (np.abs(y) @ np.abs(value(head)[ids]).T) * 0.1 + 1e-6)


def test_mean_carries() -> None:
    """One call and several calls that carry the sum give the same bits."""
    x = np.random.default_rng(3).standard_normal((50, 48)).astype(np.float32)
    with Rig(Shape(), RK_F32, ISAS[-1]) as rig:
        results = []
        for cuts in ([0, 50], [0, 1, 17, 50]):
            total = np.zeros(48)
            out = Output((48,), np.float32)
            for i, j in itertools.pairwise(cuts):
                rig.mean(out.address, total.ctypes.data, x[i:].ctypes.data, j - i, 50)
            results.append(out.get())
        assert np.array_equal(results[0], results[1])
        close(results[0], x.astype(np.float64).mean(0), 1e-7)


def test_cosine() -> None:
    rng = np.random.default_rng(4)
    a = rng.standard_normal((5, 48)).astype(np.float32)
    a[1], b = 0, rng.standard_normal(48).astype(np.float32)
    a[2], a[3, 5] = 3 * b, np.nan
    center = rng.standard_normal(48).astype(np.float32)
    with Rig(Shape(), RK_F32, ISAS[-1]) as rig:
        for mid in (None, center):
            u = a.astype(np.float64) - (0 if mid is None else mid)
            v = b.astype(np.float64) - (0 if mid is None else mid)
            with np.errstate(invalid="ignore"):
                want = u @ v / (np.linalg.norm(u, axis=1) * np.linalg.norm(v))
            out = Output((5,), np.float32)
            address = None if mid is None else mid.ctypes.data
            rig.cosine(out.address, a.ctypes.data, b.ctypes.data, address, 5)
            assert np.allclose(out.get(), want, rtol=1e-6, atol=1e-7, equal_nan=True)
            assert np.isnan(out.get()[3]) and np.isnan(out.get()[1]) == (mid is None)


# ---- query, key, value ------------------------------------------------------------------------


def rotate(x: Array, positions: Array, freq: Array, interleaved: bool) -> Array:
    """RoPE in float64; x: (rows, heads, head_dim)."""
    angle = positions[:, None, None] * freq
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
    u = a * np.cos(angle) - b * np.sin(angle)
    v = b * np.cos(angle) + a * np.sin(angle)
    return np.stack([u, v], -1).reshape(x.shape) if interleaved else np.concatenate([u, v], -1)


def layer_of(weights: list[Array], biases: list[Array] | None) -> native.Layer:
    made = native.Layer()
    query, key, val = weights
    q, k, v = biases or (None, None, None)
    made.query, made.key, made.value = matrix(query, q), matrix(key, k), matrix(val, v)
    return made


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "m,shape", [(1, Shape()), (70, Shape(head_dim=10)), (9, Shape(head_dim=64))]
)
def test_qkv(kind: tuple[int, int], m: int, shape: Shape, interleaved: bool) -> None:
    """Q by itself; K and V through attention with one key, which gives V back."""
    isa, compute = kind
    rng = np.random.default_rng(m)
    shape.rope_interleaved = interleaved
    heads, kv, dim = shape.n_heads, shape.n_kv_heads, shape.head_dim
    a = act(rng.standard_normal((m, shape.width)), compute)
    weights = [act(rng.standard_normal((h * dim, shape.width)), compute) for h in (heads, kv, kv)]
    biases = [rng.standard_normal(h * dim).astype(np.float32) for h in (heads, kv, kv)]
    rows = [Row([int(b)], 0) for b in rng.permutation(shape.n_blocks)[: min(m, 60)]]
    rows += [Row([0] * 900, 900 * 16 - 1 - i, write=False) for i in range(m - len(rows))]
    plan = Plan(rows, 16)
    with Rig(shape, compute, isa, 2) as rig:
        rig.poison()
        rig.begin(c.byref(plan.batch))
        layer = layer_of(weights, biases)
        out = act_output((m, heads * dim), compute)
        rig.qkv(out.address, a.ctypes.data, c.byref(layer), 1)
        q = (value(a) @ value(weights[0]).T + biases[0]).reshape(m, heads, dim)
        want = rotate(q, plan.positions, rig.freq, interleaved).reshape(m, -1)
        close(value(out.get()), want, eps(compute) * np.abs(want) + 1e-4)
        n = min(m, 60)
        first = Plan(rows[:n], 16)
        rig.begin(c.byref(first.batch))
        got = act_output((n, heads * dim), compute)
        rig.attention(got.address, out.address, 1)
        v = (value(a) @ value(weights[2]).T + biases[2]).reshape(m, kv, 1, dim)[:n]
        want = np.broadcast_to(v, (n, kv, heads // kv, dim)).reshape(n, -1)
        close(value(got.get()), want, 2 * eps(compute) * np.abs(want) + 2e-5)


# ---- attention ---------------------------------------------------------------------------------


class Cache:
    """Sequences whose q, k and v are chosen: selection matrices and no rotation write them."""

    def __init__(self, rng: np.random.Generator, shape: Shape, compute: int) -> None:
        self.rng, self.shape, self.compute = rng, shape, compute
        n = (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim
        shape.width, shape.inv_freq = n, [0.0] * (shape.head_dim // 2)
        eye = act(np.eye(n), compute)
        ends = np.cumsum([shape.n_heads, shape.n_kv_heads]) * shape.head_dim
        self._weights = [np.ascontiguousarray(w) for w in np.split(eye, ends)]
        self.layer = layer_of(self._weights, None)
        self.facts: dict[tuple[int, int], Array] = {}

    def fact(self, block: int, offset: int) -> Array:
        """[q, k, v] of a slot, in the compute type."""
        if (block, offset) not in self.facts:
            x = self.rng.standard_normal(self.shape.width)
            self.facts[block, offset] = act(x, self.compute)
        return self.facts[block, offset]

    def inputs(self, rows: list[Row]) -> Array:
        bt = self.shape.block_tokens
        return np.stack([self.fact(r.table[r.position // bt], r.position % bt) for r in rows])

    def run(self, rig: Rig, plan: Plan, layer: int = 1) -> Array:
        """qkv then attention: (rows, n_heads * head_dim) in the compute type."""
        a = self.inputs(plan.rows)
        shape = (len(a), self.shape.n_heads * self.shape.head_dim)
        q, out = act_output(shape, rig.extent.kv_type), act_output(shape, self.compute)
        rig.begin(c.byref(plan.batch))
        rig.qkv(q.address, a.ctypes.data, c.byref(self.layer), layer)
        q.get()
        rig.attention(out.address, q.address, layer)
        return out.get()

    def want(self, row: Row, window: int = 0) -> Array:
        """float64 attention of one row."""
        s, bt = self.shape, self.shape.block_tokens
        heads, kv, dim = s.n_heads, s.n_kv_heads, s.head_dim
        lo = max(0, row.position + 1 - window) if window else 0
        slots = [(row.table[p // bt], p % bt) for p in range(lo, row.position + 1)]
        facts = value(np.stack([self.fact(*slot) for slot in slots]))
        q, k, v = np.split(facts, np.cumsum([heads * dim, kv * dim]), axis=1)
        q = q[-1].reshape(kv, heads // kv, dim)
        k, v = k.reshape(-1, kv, dim), v.reshape(-1, kv, dim)
        score = np.einsum("hgd,thd->hgt", q, k) / np.sqrt(dim)
        p = np.exp(score - score.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return np.einsum("hgt,thd->hgd", p, v).reshape(-1)


def written(table: list[int], length: int) -> list[Row]:
    return [Row(table, p) for p in range(length)]


def tree(rng: np.random.Generator, shape: Shape, shared: int, own: list[int]) -> list[list[int]]:
    """Block tables of branches that share the blocks of `shared` tokens."""
    bt = shape.block_tokens
    ids = [int(i) for i in rng.permutation(shape.n_blocks)]
    trunk = [ids.pop() for _ in range(shared // bt)]
    need = [-(-(shared % bt + n) // bt) for n in own]
    return [trunk + [ids.pop() for _ in range(n)] for n in need]


ATTENTION_SHAPES = [
    Shape(),
    Shape(n_heads=3, n_kv_heads=3, head_dim=10, block_tokens=1, n_blocks=600),
    Shape(n_heads=8, n_kv_heads=1, head_dim=64, block_tokens=32),
    Shape(n_heads=2, n_kv_heads=1, head_dim=24, block_tokens=4, n_blocks=200),
    Shape(n_heads=4, n_kv_heads=2, head_dim=128, block_tokens=256, n_blocks=16),
    Shape(n_heads=7, n_kv_heads=1, head_dim=34, block_tokens=8, n_blocks=128),
]


@pytest.mark.parametrize("index", range(len(ATTENTION_SHAPES)))
@pytest.mark.parametrize("window", [0, 1, 5, 300])
def test_attention(kind: tuple[int, int], index: int, window: int) -> None:
    """Branches over a shared trunk, some in the middle of a tile, on poisoned memory."""
    isa, compute = kind
    rng = np.random.default_rng(index)
    shape = Shape(**vars(ATTENTION_SHAPES[index]))
    shape.window, shape.window_from = window, 1
    shared = 280 // shape.block_tokens * shape.block_tokens
    own = [5, 40, 1, 17]
    cache = Cache(rng, shape, compute)
    tables = tree(rng, shape, shared, own)
    with Rig(shape, compute, isa, 2) as rig:
        rig.poison()
        prefill = Plan(written(tables[0], shared), shape.block_tokens) if shared else None
        got = []
        rows = []
        if prefill:
            for layer in (0, 1):
                first = cache.run(rig, Plan(prefill.rows[:100], shape.block_tokens), layer)
                rest = cache.run(rig, Plan(prefill.rows[100:], shape.block_tokens), layer)
            got, rows = [first, rest], list(prefill.rows)
        branch = [Row(t, shared + p) for t, n in zip(tables, own, strict=True) for p in range(n)]
        got.append(cache.run(rig, Plan(branch, shape.block_tokens)))
        rows += branch
        result = value(np.concatenate(got))
        sample = rng.choice(len(rows), 40, replace=False)
        want = np.stack([cache.want(rows[i], window) for i in sample])
        close(result[sample], want, eps(compute) * np.abs(want) + 2e-6 * 4)
        if window:  # layer 0 lies below window_from
            full = cache.run(rig, Plan(branch[-1:], shape.block_tokens), 0)
            if shared <= 0:
                close(value(full)[0], cache.want(branch[-1]), 1e-2)


@pytest.mark.parametrize("head_dim,group,window", [(8, 3, 0), (64, 3, 70), (64, 7, 0), (16, 1, 3)])
def test_attention_same_bits(kind: tuple[int, int], head_dim: int, group: int, window: int) -> None:
    """Alone or together, on 1, 2 or 3 threads, merged or split segments, any chunk, any block."""
    isa, compute = kind
    reference: Array | None = None
    heads = 2 * group
    for bt, n_threads, cut, chunk in [
        (16, 1, "shared", 32),
        (16, 1, "rows", 32),
        (16, 2, "shared", 7),
        (1, 3, "rows", 32),
        (2, 1, "shared", 1),
        (8, 2, "shared", 32),
        (64, 3, "rows", 5),
        (128, 2, "shared", 32),
        (256, 1, "shared", 32),
    ]:
        rng = np.random.default_rng(7)  # the same numbers for every setting
        shape = Shape(n_heads=heads, head_dim=head_dim, block_tokens=bt, n_blocks=2048 // bt + 8)
        shape.window = window
        n = (heads + 2 * shape.n_kv_heads) * head_dim
        own = [3, 90, 1, 30]
        numbers = {(0, p): act(rng.standard_normal(n), compute) for p in range(256)}
        for b, length in enumerate(own):
            for p in range(length):
                numbers[b + 1, 256 + p] = act(rng.standard_normal(n), compute)
        cache = Cache(rng, shape, compute)
        tables = tree(rng, shape, 256, own)
        for b, table in enumerate(tables):
            for p in range(256 + own[b]):
                cache.facts[table[p // bt], p % bt] = numbers[(0, p) if p < 256 else (b + 1, p)]
        branch = [Row(t, 256 + p) for t, k in zip(tables, own, strict=True) for p in range(k)]
        with Rig(shape, compute, isa, n_threads) as rig:
            rig.poison()
            plan = Plan(written(tables[0], 256), bt, cut, chunk, rng)
            first = cache.run(rig, plan)
            second = cache.run(rig, Plan(branch, bt, cut, chunk, rng))
            for i in (0, 2, 50, 93, len(branch) - 1):
                alone = cache.run(rig, Plan(branch[i : i + 1], bt, cut, chunk, rng))
                assert np.array_equal(alone[0], second[i]), (bt, n_threads, cut, i)
        result = np.concatenate([first, second])
        if reference is None:
            reference = result
        assert np.array_equal(result, reference), (bt, n_threads, cut, chunk)


@pytest.mark.parametrize("index", range(len(ATTENTION_SHAPES)))
@pytest.mark.parametrize("kv_type", TYPES, ids=["kv-f32", "kv-bf16"])
@pytest.mark.parametrize("isa", ISAS, ids=[native.ISAS[isa] for isa in ISAS])
def test_attention_follows_kv_type(isa: int, kv_type: int, index: int) -> None:
    """Whatever products are computed in: the same bits, rounded to what enters the next one. A
    block is copied whole, and its neighbours stay as they were."""
    results = {}
    for compute in TYPES:
        rng = np.random.default_rng(index)  # the same numbers, which either type holds
        shape = Shape(**{**vars(ATTENTION_SHAPES[index]), "kv_type": kv_type})
        bt, own = shape.block_tokens, [5, 17]
        shared = 280 // bt * bt
        cache = Cache(rng, shape, compute)
        tables = tree(rng, shape, shared, own)
        branch = [Row(t, shared + p) for t, n in zip(tables, own, strict=True) for p in range(n)]
        trunk = written(tables[0], shared)
        for row in trunk + branch:
            number = value(act(rng.standard_normal(shape.width), RK_BF16))
            cache.facts[row.table[row.position // bt], row.position % bt] = act(number, compute)
        with Rig(shape, compute, isa, 2) as rig:
            rig.poison()
            for begin in range(0, len(trunk), 100):
                cache.run(rig, Plan(trunk[begin : begin + 100], bt))
            results[compute] = cache.run(rig, Plan(branch, bt))
            spare = next(b for b in range(shape.n_blocks) if b not in tables[0] + tables[1])
            copied = Row([*tables[1][:-1], spare], branch[-1].position, write=False)
            cache.facts[spare, copied.position % bt] = cache.inputs(branch[-1:])[0]
            rig.kv_copy(spare, tables[1][-1])
            again = cache.run(rig, Plan([copied, Row(tables[0], shared + 4, write=False)], bt))
            assert np.array_equal(again, results[compute][[-1, 4]])
    assert np.array_equal(act(results[RK_F32], RK_BF16), results[RK_BF16])
    close(results[RK_F32], np.stack([cache.want(row) for row in branch]), 1e-4)


def test_kv_copy(kind: tuple[int, int]) -> None:
    """A copied block serves like the first one, in every layer."""
    isa, compute = kind
    rng = np.random.default_rng(11)
    shape = Shape()
    cache = Cache(rng, shape, compute)
    with Rig(shape, compute, isa) as rig:
        rig.poison()
        for layer in (0, 1):
            cache.run(rig, Plan(written([5], 16), 16), layer)
        rig.kv_copy(9, 5)
        for offset in range(16):
            cache.facts[9, offset] = cache.fact(5, offset)
        for layer in (0, 1):
            rows = [[Row([b], 15, write=False)] for b in (5, 9)]
            old, new = (cache.run(rig, Plan(r, 16), layer) for r in rows)
            assert np.array_equal(old, new) and np.isfinite(value(new)).all()


# ---- pick ----------------------------------------------------------------------------------------


def pick(rig: Rig, logits: Array, draws: list[native.Draw]) -> list[native.Pick]:
    out = Output((len(draws), 6), np.float32)
    array = (native.Draw * len(draws))(*draws)
    rig.pick(out.address, logits.ctypes.data, array, len(draws))
    raw = out.get().tobytes()
    size = c.sizeof(native.Pick)
    return [native.Pick.from_buffer_copy(raw, i * size) for i in range(len(draws))]


def draw(**fields: Any) -> native.Draw:
    return native.Draw(**{"top_p": 1.0, "forced": -1, **fields})


def test_philox_reference() -> None:
    """The test's own generator gives the published answer for a zero counter and key."""
    assert philox(0, 0, 0) == ((0xE169C58D << 32 | 0x6627E8D5) >> 11) * 2.0**-53


@pytest.mark.parametrize("vocab", [1, 7, 101, 4096, 4097, 49152])
def test_pick_statistics(kind: tuple[int, int], vocab: int) -> None:
    isa, compute = kind
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((3, vocab)) * [[1], [8], [0]]).astype(np.float32)
    if vocab > 1:
        logits[1, ::3] = -np.inf
    x = logits.astype(np.float64)
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(1)
    forced = vocab - 1
    with Rig(Shape(vocab_size=vocab), compute, isa, 2) as rig:
        draws = [draw(), draw(), draw(forced=forced)]
        got = pick(rig, logits, draws)
        for i, one in enumerate(got):
            assert one.top == logits[i].argmax()
            assert one.token == (forced if i == 2 else one.top)
            assert one.top_prob == pytest.approx(p[i].max(), rel=1e-5)
            assert one.top_logprob == pytest.approx(np.log(p[i].max()), rel=1e-5, abs=1e-5)
            assert one.logprob == pytest.approx(np.log(p[i, one.token]), rel=1e-5, abs=1e-5)
            assert one.entropy == pytest.approx(entropy[i], rel=1e-4, abs=1e-5)
        for i in range(3):
            (alone,) = pick(rig, logits[i : i + 1].copy(), [draws[i]])
            assert bytes(alone) == bytes(got[i])


def candidates(x: Array, d: native.Draw) -> Array:
    """Probabilities after the filters, by sorting; ties go to low ids."""
    order = np.lexsort((np.arange(len(x)), -x))
    p = np.exp((x - x.max()) / d.temperature)
    keep = np.ones(len(x), bool)
    if d.top_k:
        keep[order[d.top_k :]] = False
    p = np.where(keep, p, 0)
    if d.top_p < 1:
        before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
        keep[order[1:]] &= before[1:] < float(d.top_p) * p.sum()
    p = np.where(keep & (p >= d.min_p * p.max()), p, 0)
    return p / p.sum()


@pytest.mark.parametrize("vocab", [5, 101, 5000])
def test_pick_sampling(kind: tuple[int, int], vocab: int) -> None:
    """The token is where the running probability passes the uniform number."""
    isa, compute = kind
    rng = np.random.default_rng(vocab)
    settings: list[dict[str, Any]] = [
        {},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.3},
        {"top_k": vocab + 9},
        {"top_p": 0.0},
        {"top_p": 1e-9},
        {"top_k": 1},
    ]
    checked = 0
    with Rig(Shape(vocab_size=vocab), compute, isa, 2) as rig:
        for trial, extra in enumerate(settings * 4):
            logits = np.round(rng.standard_normal((4, vocab)) * 6).astype(np.float32) / 2
            fields: dict[str, Any] = {"temperature": 1.0, "seed": 1 << 40 | trial, **extra}
            draws = [draw(stream=3 + i, position=trial, **fields) for i in range(4)]
            for i, one in enumerate(pick(rig, logits, draws)):
                p = candidates(logits[i].astype(np.float64), draws[i])
                u = philox(1 << 40 | trial, 3 + i, trial)
                after = np.cumsum(p)
                assert p[one.token] > 0, (extra, i)
                if np.abs(after - u).min() > 1e-5:
                    assert one.token == np.searchsorted(after, u, side="right"), (extra, i)
                    checked += 1
    assert checked > 100


def test_pick_top_k_across_a_gap(kind: tuple[int, int]) -> None:
    """The k-th largest logit lies far below the others and has equals: the lowest id counts."""
    isa, compute = kind
    logits = np.full((1, 300), -3.0, np.float32)
    logits[0, [50, 200]] = 0.0
    with Rig(Shape(vocab_size=300), compute, isa) as rig:
        seen = set()
        for position in range(200):
            (one,) = pick(rig, logits, [draw(temperature=1.0, top_k=3, position=position)])
            seen.add(one.token)
    assert seen == {0, 50, 200}


def check_extremes(
    vocab: int, picked: Callable[[Array, list[native.Draw]], list[native.Pick]]
) -> None:
    """NaN, infinities, one token that is possible, huge and equal logits; `picked`: the op."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((8, vocab)).astype(np.float32)
    logits[1, 7] = np.nan
    logits[2] = -np.inf
    logits[3] = -np.inf
    logits[3, 9] = -5.0
    logits[4] *= 1e30
    logits[5, 11] = np.inf
    logits[6] = -1e38
    logits[6, 40:42] = 1e38
    for fields in ({}, {"temperature": 1e-5}, {"temperature": 1e-40}, {"temperature": 2.0}):
        got = picked(logits, [draw(position=i, **fields) for i in range(8)])
        assert [got[i].token for i in (1, 2, 5)] == [-1, -1, -1]
        assert got[3].token == 9 and got[3].logprob == 0 and got[3].entropy == 0
        assert got[4].token == logits[4].argmax()
        assert got[6].token in (40, 41) and got[6].top == 40
        assert got[6].entropy == pytest.approx(np.log(2), rel=1e-5)
        assert all(0 <= got[i].token < vocab for i in (0, 7))
        if fields.get("temperature", 0) < 1e-4:
            assert got[0].token == logits[0].argmax()


def test_pick_extremes(kind: tuple[int, int]) -> None:
    isa, compute = kind
    with Rig(Shape(vocab_size=300), compute, isa) as rig:
        check_extremes(300, partial(pick, rig))


# ---- threads -----------------------------------------------------------------------------------


def test_many_small_jobs() -> None:
    """More threads than processors, jobs of few units, pauses in which workers fall asleep."""
    rng = np.random.default_rng(5)
    a, w = (act(rng.standard_normal(s), RK_F32) for s in ((9, 48), (130, 48)))
    with (
        Rig(Shape(), RK_F32, ISAS[-1], 1) as one,
        Rig(Shape(), RK_F32, ISAS[-1], 7) as seven,
    ):
        want = linear(one, a, matrix(w))
        for i in range(300):
            assert np.array_equal(linear(seven, a, matrix(w)), want), i
            if i % 60 == 0:
                time.sleep(0.01)


def test_forked_child() -> None:
    """A child of fork() has no workers: it computes alone, the same, and can destroy the device."""
    rng = np.random.default_rng(6)
    a, w = (act(rng.standard_normal(s), RK_F32) for s in ((9, 48), (130, 48)))
    rig = Rig(Shape(), RK_F32, ISAS[-1], 3)
    want = linear(rig, a, matrix(w))
    child = os.fork()
    if child == 0:
        same = np.array_equal(linear(rig, a, matrix(w)), want)
        rig.close()
        os._exit(0 if same else 1)
    deadline = time.monotonic() + 60
    done = (0, 0)
    while done[0] == 0 and time.monotonic() < deadline:
        done = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if done[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)
    assert np.array_equal(linear(rig, a, matrix(w)), want)
    rig.close()


def test_default_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The affinity bounds them, variables lower them, and nonsense in a variable is nothing."""
    for name in ("OMP_NUM_THREADS", "RKSC_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    most = library().rk_cpu_default_threads()
    assert 1 <= most <= len(os.sched_getaffinity(0))
    for name in ("OMP_NUM_THREADS", "RKSC_NUM_THREADS"):
        for text, want in (("1", 1), ("100000", most), ("0", most), ("x", most), ("-3", most)):
            monkeypatch.setenv(name, text)
            assert library().rk_cpu_default_threads() == want, (name, text)
        monkeypatch.delenv(name)


# ---- creation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field,bad",
    [
        *(("block_tokens", 3), ("block_tokens", 512), ("block_tokens", 0), ("n_blocks", 0)),
        *(("max_rows", 0), ("head_dim", 7), ("n_kv_heads", 4), ("n_blocks", 1 << 40)),
    ],
)
def test_create_refuses(field: str, bad: int) -> None:
    with pytest.raises(RuntimeError, match=r"EVALUE|ENOMEM"):
        Rig(Shape(**dict[str, Any]({field: bad})), RK_F32, 0)


@pytest.mark.parametrize("bad", [native.RK_F16, 7, -1])
def test_create_refuses_a_kv_type(bad: int) -> None:
    with pytest.raises(RuntimeError, match=r"^EVALUE: kv_type: .* F32 or BF16"):
        Rig(Shape(kv_type=bad), RK_F32, 0)


def test_create_needs_address_space() -> None:
    with pytest.raises(RuntimeError, match=r"ENOMEM.*KV blocks"):
        Rig(Shape(n_layers=100000, block_tokens=256, n_blocks=2**31 - 1), RK_F32, 0)


def test_pool_is_committed_late() -> None:
    """A pool far larger than memory costs nothing until blocks are written."""
    shape = Shape(block_tokens=RK_TILE, n_blocks=2_000_000)
    cache = Cache(np.random.default_rng(0), shape, RK_F32)
    with Rig(shape, RK_F32, ISAS[-1]) as rig:
        out = cache.run(rig, Plan(written([1_999_999], 3), RK_TILE))
        close(value(out)[2], cache.want(Row([1_999_999], 2)), 1e-5)
