"""Each op of the CUDA backend, on the host runtime, against plain float64 NumPy.

The kernels are those that nvcc compiles (tests/cuda_host); threads and blocks run forward, in
reverse or at random. Seeds are the parametrised numbers.
"""

from __future__ import annotations

import ctypes as c
import itertools
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from support import native
from support.cudarig import ORDERS, CudaRig, Output, library, set_order
from support.native import RK_BF16, RK_F16, RK_F32
from support.oprig import TYPES, Array, Plan, Rig, Row, Shape, act, eps, value
from support.reference import philox
from test_ops import (
    Cache,
    candidates,
    check_extremes,
    close,
    draw,
    rotate,
    tree,
    written,
)


@pytest.fixture(autouse=True)
def order(request: pytest.FixtureRequest) -> None:
    """Each test has its own order of threads and blocks, always the same."""
    number = zlib.crc32(request.node.nodeid.encode())
    set_order(ORDERS[number % len(ORDERS)], number)


@pytest.fixture(params=TYPES, ids=["f32", "bf16"])
def compute(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# ---- failures ---------------------------------------------------------------------------------


def test_a_broken_device_takes_no_more_ops(capfd: pytest.CaptureFixture[str]) -> None:
    """Staging memory that could not grow is not there: nothing is laid down in it, and no kernel is
    given an address that leads nowhere."""
    rng = np.random.default_rng(1)
    tables = rng.integers(0, 64, (64, 1200)).tolist()
    rows = [Row(table, 1199, i, False) for i, table in enumerate(tables)]
    plan, error = Plan(rows, 1, "rows", rng=rng), native.Error()
    some = np.array([2, 0], np.int32)
    with CudaRig(Shape(block_tokens=1), RK_F32) as rig:
        out, x = rig.out((2, 4)), rig.put(np.ones((3, 4), np.float32))
        library()[0].rk_host_fail_at(b"cudaMallocHost", 1)
        rig.start(plan)
        rig.gather(out.address, x, some.ctypes.data, 2, 4)
        assert rig.check(c.byref(error)) != native.RK_OK
        assert b"cudaMallocHost" in error.text
        got = np.zeros((2, 4), np.float32)
        rig.download(got.ctypes.data, out.address, got.nbytes)
        assert np.isnan(got).all()
    capfd.readouterr()


# ---- steps ------------------------------------------------------------------------------------


def decode(rig: CudaRig, cache: DeviceCache, table: list[int]) -> Callable[[int], None]:
    """A function that runs one row of the sequence as a step that can be replayed: the same ops
    on the same buffers, but another position each time. It checks what comes out."""
    shape, layer = cache.shape, layer_on(rig, cache._weights, None)
    q, out = (rig.act_out((1, shape.n_heads * shape.head_dim)) for _ in range(2))
    x = rig.send(cache.fact(0, 0))

    def step(position: int) -> None:
        plan = Plan([Row(table, position)], shape.block_tokens)
        plan.batch.roomy = True
        fact = cache.inputs(plan.rows)
        rig.upload(x, fact.ctypes.data, fact.nbytes)
        rig.start(plan)
        rig.qkv(q.address, x, c.byref(layer), 1)
        rig.attention(out.address, q.address, 1)
        cache.check(out.get()[0], plan.rows[0])

    return step


def test_a_graph_does_not_outlive_the_facts_it_reads(compute: int) -> None:
    """A step whose facts need more staging memory moves it: what was captured before knows the old
    address. One-token blocks make long tables; eight to sixteen of them are the same graph."""
    rng, shape = np.random.default_rng(5), Shape(block_tokens=1)
    cache, table = DeviceCache(rng, shape, compute), list(range(20, 36))
    tables = rng.integers(0, 64, (64, 1200)).tolist()
    large = Plan([Row(t, 1199, write=False) for t in tables], 1, "rows", rng=rng)
    with CudaRig(shape, compute) as rig:
        rig.poison()
        fill(cache, rig, [table], [8])
        step = decode(rig, cache, table)
        for position in range(8, 12):
            step(position)
        rig.start(large)
        for position in range(12, 16):
            step(position)


def test_what_was_recorded_comes_first(compute: int) -> None:
    """A small step waits until somebody asks for a result. A copy of a block and a fill
    come behind it, not before."""
    shape = Shape()
    cache = DeviceCache(np.random.default_rng(6), shape, compute)
    with CudaRig(shape, compute) as rig:
        layer = layer_on(rig, cache._weights, None)
        rig.poison()

        def write(block: int) -> None:
            plan = Plan(written([block], 16), 16)
            plan.batch.roomy = True
            q = rig.act_out((16, shape.n_heads * shape.head_dim))
            x = rig.put(cache.inputs(plan.rows))
            rig.start(plan)
            rig.qkv(q.address, x, c.byref(layer), 1)

        def read(block: int) -> Array:
            return cache.run(rig, Plan([Row([block], 15, write=False)], 16))[0]

        write(5)
        rig.kv_copy(9, 5)
        cache.facts.update({(9, p): cache.fact(5, p) for p in range(16)})
        cache.check(read(9), Row([9], 15))
        write(7)
        rig.kv_fill(7, 0xFF)
        assert np.isnan(value(read(7))).all()


def test_an_upload_has_read_what_it_was_given(compute: int) -> None:
    """Pinned memory, which the device reads when it comes to it, is the caller's again."""
    runtime, pinned = library()[0], c.c_void_p()
    data = np.arange(64, dtype=np.float32)
    assert runtime.cudaMallocHost(c.byref(pinned), c.c_size_t(data.nbytes)) == 0
    c.memmove(pinned, data.ctypes.data, data.nbytes)
    with CudaRig(Shape(), compute) as rig:
        address = rig.send(np.zeros_like(data))
        rig.upload(address, pinned.value, data.nbytes)
        c.memset(pinned, 0xFF, data.nbytes)
        assert np.array_equal(rig.fetch(address, data), data)
    assert runtime.cudaFreeHost(pinned) == 0


# ---- products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("m,n,k", [(1, 5, 7), (9, 66, 33), (33, 70, 96)])
def test_linear(compute: int, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m * n * k)
    a = act(rng.standard_normal((m, k)), compute)
    w = act(rng.standard_normal((n, k)), compute)
    bias = rng.standard_normal(n).astype(np.float32)
    old = rng.standard_normal((m, n)).astype(np.float32)
    product = value(a) @ value(w).T
    bound = 2.0**-21 * (np.abs(value(a)) @ np.abs(value(w)).T + 4)
    with CudaRig(Shape(width=k), compute) as rig:
        for use_bias, accumulate in itertools.product((False, True), repeat=2):
            out = rig.out((m, n), old=old)
            held = rig.weights(w, bias if use_bias else None)
            rig.linear(out.address, rig.put(a), c.byref(held), m, accumulate)
            want = product + (bias if use_bias else 0) + (old if accumulate else 0)
            close(out.get(), want, bound)


@pytest.mark.parametrize("m,ffn,k", [(1, 40, 48), (3, 7, 5), (17, 136, 32)])
def test_swiglu(compute: int, m: int, ffn: int, k: int) -> None:
    rng = np.random.default_rng(ffn)
    a = act(rng.standard_normal((m, k)), compute)
    gate, up = (act(rng.standard_normal((ffn, k)), compute) for _ in range(2))
    g, u = value(a) @ value(gate).T, value(a) @ value(up).T
    want = g / (1 + np.exp(-g)) * u
    with CudaRig(Shape(width=k, ffn_width=ffn), compute) as rig:
        out = rig.act_out((m, ffn))
        held = rig.weights(gate), rig.weights(up)
        rig.swiglu(out.address, rig.put(a), *map(c.byref, held), m)
        close(value(out.get()), want, eps(compute) * np.abs(want) + 2e-5)


def test_swiglu_extremes(compute: int) -> None:
    """silu of huge, tiny and zero gates neither overflows nor gives NaN."""
    gates = np.array([-3e4, -200, -90, -87, -30, 0, 1e-20, 30, 87, 200, 3e4], np.float32)
    gate = act(gates[:, None], compute)
    g = value(gate)[:, 0]
    with np.errstate(over="ignore"):
        want = g / (1 + np.exp(-g))
    with CudaRig(Shape(width=1, ffn_width=len(gates)), compute) as rig:
        out = rig.act_out((1, len(gates)))
        ones = act(np.ones((len(gates), 1)), compute)
        held = rig.weights(gate), rig.weights(ones)
        rig.swiglu(out.address, rig.put(act(np.ones((1, 1)), compute)), *map(c.byref, held), 1)
        close(value(out.get())[0], want, eps(compute) * np.abs(want) + 1e-30)


# ---- rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 7, 48, 576, 4104])
def test_norm(compute: int, width: int) -> None:
    rng = np.random.default_rng(width)
    x = (rng.standard_normal((5, width)) * [[1e-3], [1], [1], [300], [1]]).astype(np.float32)
    weight = rng.standard_normal(width).astype(np.float32)
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * weight
    with CudaRig(Shape(width=width), compute) as rig:
        out = rig.act_out(x.shape)
        rig.norm(out.address, rig.put(x), rig.put(weight), len(x))
        close(value(out.get()), want, (eps(compute) + 1e-6) * np.abs(want) + 1e-30)
        rig.norm(out.address, rig.put(x), None, len(x))
        assert np.array_equal(out.get(), act(x, compute))


@pytest.mark.parametrize("width", [48, 5])
@pytest.mark.parametrize("dtype", [RK_F32, RK_F16, RK_BF16])
def test_embed(compute: int, dtype: int, width: int) -> None:
    rng = np.random.default_rng(dtype)
    table = rng.standard_normal((101, width))
    held = table.astype(np.float16) if dtype == RK_F16 else act(table, dtype)
    rows = [Row([0] * 20, i, token=int(t)) for i, t in enumerate(rng.integers(0, 101, 40))]
    plan = Plan(rows, 16)
    with CudaRig(Shape(width=width), compute) as rig:
        rig.start(plan)
        out = rig.out((40, width))
        rig.embed(out.address, c.byref(rig.weights(held, dtype=dtype)))
        want = held.astype(np.float64) if dtype == RK_F16 else value(held)
        assert np.array_equal(out.get(), want[plan.tokens].astype(np.float32))


@pytest.mark.parametrize("width", [7, 300])
def test_gather(compute: int, width: int) -> None:
    """Any order into another array; compaction in place, also when rows stay where they are."""
    x = np.arange(40 * width, dtype=np.float32).reshape(40, width)
    with CudaRig(Shape(), compute) as rig:
        rows = np.array([9, 0, 3, 3] * 5, np.int32)
        out = rig.out((20, width))
        rig.gather(out.address, rig.put(x), rows.ctypes.data, len(rows), width)
        assert np.array_equal(out.get(), x[rows])
        rng = np.random.default_rng(width)
        for n in (3, 8, 9, 17, 40):
            rows = np.sort(rng.choice(40, n, replace=False)).astype(np.int32)
            out = rig.out(x.shape, old=x)
            rig.gather(out.address, out.address, rows.ctypes.data, n, width)
            assert np.array_equal(out.get()[:n], x[rows]), n


@pytest.mark.parametrize("dtype", [RK_F32, RK_F16, RK_BF16])
@pytest.mark.parametrize("width", [48, 5, 1000])
@pytest.mark.parametrize("normed", [True, False])
def test_answer(compute: int, dtype: int, width: int, normed: bool) -> None:
    rng = np.random.default_rng(dtype)
    x = rng.standard_normal((6, width)).astype(np.float32) * 9
    weight = rng.standard_normal(width).astype(np.float32)
    table = rng.standard_normal((101, width))
    head = table.astype(np.float16) if dtype == RK_F16 else act(table, dtype)
    wide = head.astype(np.float64) if dtype == RK_F16 else value(head)
    ids = np.array([100, 0, 7, 7], np.int32)
    y = x.astype(np.float64)
    if normed:
        y = y / np.sqrt((y**2).mean(1, keepdims=True) + 1e-5) * weight
    with CudaRig(Shape(width=width), compute) as rig:
        out = rig.out((6, 4))
        scale = rig.put(weight) if normed else None
        held = rig.weights(head, dtype=dtype)
        rig.answer(out.address, rig.put(x), scale, c.byref(held), ids.ctypes.data, 6, 4)
        close(out.get(), y @ wide[ids].T, 1e-6 * (np.abs(y) @ np.abs(wide)[ids].T) + 1e-6)


def test_mean_carries(compute: int) -> None:
    """One call and several calls that carry the sum give the same bits, in the order of rows."""
    x = np.random.default_rng(3).standard_normal((50, 131)).astype(np.float32)
    with CudaRig(Shape(width=131), compute) as rig:
        results = []
        for cuts in ([0, 50], [0, 1, 17, 50]):
            total, out = rig.out((131,), np.float64, np.zeros(131)), rig.out((131,))
            for i, j in itertools.pairwise(cuts):
                rig.mean(out.address, total.address, rig.put(x[i:j]), j - i, 50)
            results.append(out.get())
        assert np.array_equal(results[0], results[1])
        exact = np.zeros(131)
        for row in x:
            exact += row
        assert np.array_equal(results[0], (exact / 50).astype(np.float32))


def test_cosine(compute: int) -> None:
    rng = np.random.default_rng(4)
    width = 1000
    a = rng.standard_normal((5, width)).astype(np.float32)
    a[1], b = 0, rng.standard_normal(width).astype(np.float32)
    a[2], a[3, 5] = 3 * b, np.nan
    center = rng.standard_normal(width).astype(np.float32)
    with CudaRig(Shape(width=width), compute) as rig:
        for mid in (None, center):
            u = a.astype(np.float64) - (0 if mid is None else mid)
            v = b.astype(np.float64) - (0 if mid is None else mid)
            with np.errstate(invalid="ignore"):
                want = u @ v / (np.linalg.norm(u, axis=1) * np.linalg.norm(v))
            out = rig.out((5,))
            middle = None if mid is None else rig.put(mid)
            rig.cosine(out.address, rig.put(a), rig.put(b), middle, 5)
            got = out.get()
            assert np.allclose(got, want, rtol=1e-6, atol=1e-7, equal_nan=True)
            assert np.isnan(got[3]) and np.isnan(got[1]) == (mid is None)


# ---- query, key, value ------------------------------------------------------------------------


def layer_on(rig: CudaRig, weights: list[Array], biases: list[Array] | None) -> native.Layer:
    made = native.Layer()
    for i, name in enumerate(("query", "key", "value")):
        setattr(made, name, rig.weights(weights[i], biases[i] if biases else None))
    return made


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("m,head_dim", [(1, 8), (13, 10), (5, 64), (3, 2)])
def test_qkv(compute: int, m: int, head_dim: int, interleaved: bool) -> None:
    """Q by itself; K and V through attention with one key, which gives V back."""
    rng = np.random.default_rng(m)
    shape = Shape(head_dim=head_dim, rope_interleaved=interleaved)
    heads, kv = shape.n_heads, shape.n_kv_heads
    a = act(rng.standard_normal((m, shape.width)), compute)
    n_rows = [h * head_dim for h in (heads, kv, kv)]
    weights = [act(rng.standard_normal((n, shape.width)), compute) for n in n_rows]
    biases = [rng.standard_normal(n).astype(np.float32) for n in n_rows]
    rows = [Row([0] * 900, 900 * 16 - 1 - 7 * i, write=False) for i in range(m)]
    first = [Row([int(b)], 0) for b in rng.permutation(shape.n_blocks)[:m]]
    with CudaRig(shape, compute) as rig:
        layer = layer_on(rig, weights, biases)
        far, near = Plan(rows, 16), Plan(first, 16)
        for plan in (far, near):
            rig.start(plan)
            out = rig.act_out((m, heads * head_dim))
            rig.qkv(out.address, rig.put(a), c.byref(layer), 1)
            q = (value(a) @ value(weights[0]).T + biases[0]).reshape(m, heads, head_dim)
            want = rotate(q, plan.positions, rig.freq, interleaved).reshape(m, -1)
            close(value(out.get()), want, eps(compute) * np.abs(want) + 1e-4)
        got = rig.act_out((m, heads * head_dim))
        rig.attention(got.address, out.address, 1)
        v = (value(a) @ value(weights[2]).T + biases[2]).reshape(m, kv, 1, head_dim)
        want = np.broadcast_to(v, (m, kv, heads // kv, head_dim)).reshape(m, -1)
        close(value(got.get()), want, 2 * eps(compute) * np.abs(want) + 2e-5)


# ---- attention --------------------------------------------------------------------------------


class DeviceCache(Cache):
    """Sequences with chosen q, k and v on a CUDA device; scores grow with `loud`. A row brings one
    q, k and v for each KV head; the heads of a group have its q with signs of their own, so that
    the weights of many heads are small."""

    loud = 1.0

    def __init__(self, rng: np.random.Generator, shape: Shape, compute: int) -> None:
        self.rng, self.shape, self.compute = rng, shape, compute
        kv, dim = shape.n_kv_heads, shape.head_dim
        n = kv * dim
        shape.width, shape.inv_freq = 3 * n, [0.0] * (dim // 2)
        q, key, v = np.split(np.eye(3 * n), 3)
        signs = rng.choice([-1.0, 1.0], (kv, shape.n_heads // kv, dim, 1))
        query = (q.reshape(kv, 1, dim, -1) * signs).reshape(-1, 3 * n)
        self._weights = [act(w, compute) for w in (query, key, v)]
        self._query = query[:, :n]
        self.facts: dict[tuple[int, int], Array] = {}

    def fact(self, block: int, offset: int) -> Array:
        if (block, offset) not in self.facts:
            x = self.rng.standard_normal(self.shape.width)
            x[: self.shape.width // 3] *= self.loud
            self.facts[block, offset] = act(x, self.compute)
        return self.facts[block, offset]

    def write(self, rig: CudaRig, plan: Plan, layer: int = 1) -> Output:
        """qkv alone; rotated Q."""
        a = self.inputs(plan.rows)
        q = rig.query_out((len(a), self.shape.n_heads * self.shape.head_dim))
        rig.start(plan)
        rig.qkv(q.address, rig.put(a), c.byref(layer_on(rig, self._weights, None)), layer)
        return q

    def run(self, rig: Any, plan: Plan, layer: int = 1) -> Array:
        q = self.write(rig, plan, layer)
        out = rig.act_out(q.shape)
        rig.attention(out.address, q.address, layer)
        return out.get()

    def check(self, got: Array, row: Row, window: int = 0) -> None:
        """Against float64, up to the rounding of the result, of the weights in bf16, and of the
        scores: what moves a weight by a part of it moves a result by no more than that part of
        how far the values lie from it."""
        s, bt = self.shape, self.shape.block_tokens
        kv, dim = s.n_kv_heads, s.head_dim
        lo = max(0, row.position + 1 - window) if window else 0
        facts = [self.fact(row.table[p // bt], p % bt) for p in range(lo, row.position + 1)]
        q, k, v = np.split(value(np.stack(facts)), 3, axis=1)
        q = (self._query @ q[-1]).reshape(kv, -1, dim)
        score = np.einsum("hgd,thd->hgt", q, k.reshape(-1, kv, dim) / np.sqrt(dim))
        p = np.exp(score - score.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        v = v.reshape(-1, kv, dim)
        want = np.einsum("hgt,thd->hgd", p, v)
        far = np.abs(v.transpose(1, 0, 2)[:, None] - want[:, :, None])
        spread = np.einsum("hgt,hgtd->hgd", p, far)
        part = 2.0**-20 * np.abs(score).max() + (2.0**-8 if self.compute == RK_BF16 else 0)
        bound = eps(self.compute) * np.abs(want) + part * spread + 8e-6
        close(value(got), want.ravel(), bound.ravel())


SHAPES = [
    Shape(),
    Shape(n_heads=3, n_kv_heads=3, head_dim=10, block_tokens=1, n_blocks=600),
    Shape(n_heads=8, n_kv_heads=1, head_dim=64, block_tokens=32),
    Shape(n_heads=2, n_kv_heads=1, head_dim=24, block_tokens=4, n_blocks=200),
    Shape(n_heads=4, n_kv_heads=2, head_dim=128, block_tokens=256, n_blocks=16),
    Shape(n_heads=3, n_kv_heads=1, head_dim=80, block_tokens=8, n_blocks=128),
    Shape(n_heads=2, n_kv_heads=1, head_dim=256, n_blocks=40),
    Shape(n_heads=2, n_kv_heads=1, head_dim=264, n_blocks=40),
]


@pytest.mark.parametrize(
    "index,window",
    [(i, 0) for i in range(len(SHAPES))] + [(i, (1, 5, 200)[i % 3]) for i in range(len(SHAPES))],
)
def test_attention(compute: int, index: int, window: int) -> None:
    """Branches over a shared trunk, some in the middle of a block, on poisoned memory."""
    rng = np.random.default_rng(index)
    shape = Shape(**vars(SHAPES[index]))
    shape.window, shape.window_from = window, 1
    shared = 280 // shape.block_tokens * shape.block_tokens
    own = [5, 40, 1, 17]
    cache = DeviceCache(rng, shape, compute)
    tables = tree(rng, shape, shared, own)
    with CudaRig(shape, compute) as rig:
        rig.poison()
        rows, got = [], []
        for part in (written(tables[0], shared)[:100], written(tables[0], shared)[100:]):
            if part:
                got.append(cache.run(rig, Plan(part, shape.block_tokens)))
                rows += part
        branch = [Row(t, shared + p) for t, n in zip(tables, own, strict=True) for p in range(n)]
        got.append(cache.run(rig, Plan(branch, shape.block_tokens)))
        rows += branch
        result = np.concatenate(got)
        for i in rng.choice(len(rows), 30, replace=False):
            cache.check(result[i], rows[i], window)


def fill(cache: DeviceCache, rig: CudaRig, tables: list[list[int]], ends: list[int]) -> None:
    """Write K and V of sequences that share blocks, each slot once."""
    bt = cache.shape.block_tokens
    rows: dict[tuple[int, int], Row] = {}
    for table, end in zip(tables, ends, strict=True):
        for p in range(end):
            rows.setdefault((table[p // bt], p % bt), Row(table, p))
    some = list(rows.values())
    for i in range(0, len(some), cache.shape.max_rows):
        cache.write(rig, Plan(some[i : i + cache.shape.max_rows], bt, "rows"))


TREES = [
    (8, 2, 64, 9, 28),  # three levels, each worth reading once
    (40, 2, 16, 7, 6),  # a group of 20
    (8, 2, 128, 20, 4),  # wide units
    (4, 2, 128, 6, 28),  # long heads, few pairs
    (24, 1, 8, 40, 6),  # a panel of more pairs than a unit
    (150, 1, 8, 2, 6),  # a row of more pairs than a unit
    (4, 4, 16, 70, 6),  # no groups, three chunks
]
PLAIN = [(RK_F32, *t, 1) for t in TREES[:2]]  # its units are of one size
LOUD = [(compute, *TREES[0], 150) for compute in TYPES]  # scores of 500: e^500 is no float


@pytest.mark.parametrize(
    "compute,heads,kv,head_dim,n,trunk,loud", [*PLAIN, *((RK_BF16, *t, 1) for t in TREES), *LOUD]
)
def test_decode_of_a_deep_tree(
    compute: int, heads: int, kv: int, head_dim: int, n: int, trunk: int, loud: int
) -> None:
    """One row at the end of each of n branches that part at two depths: shared keys are read
    once, cut for the whole device, and merged; the same bits each time."""
    rng = np.random.default_rng(n)
    shape = Shape(n_heads=heads, n_kv_heads=kv, head_dim=head_dim, n_blocks=256, max_rows=128)
    ids = iter(int(i) for i in rng.permutation(shape.n_blocks))
    stem = [next(ids) for _ in range(trunk)]
    halves = [[*stem, *(next(ids) for _ in range(9))] for _ in range(2)]
    tables = sorted([*halves[2 * i // n], next(ids)] for i in range(n))
    cache = DeviceCache(rng, shape, compute)
    cache.loud = loud
    ends = [(trunk + 9) * 16 + 1 + i % 16 for i in range(n)]
    with CudaRig(shape, compute) as rig:
        rig.poison()
        fill(cache, rig, tables, ends)
        rows = [Row(t, end - 1, write=False) for t, end in zip(tables, ends, strict=True)]
        got = cache.run(rig, Plan(rows, 16))
        assert np.array_equal(got, cache.run(rig, Plan(rows, 16)))
        for i in {0, 1, n // 2, n - 1}:
            cache.check(got[i], rows[i])


@pytest.mark.parametrize("compute,head_dim", [(RK_BF16, 16), (RK_F32, 6)])
def test_merge_of_more_partials_than_lanes(compute: int, head_dim: int) -> None:
    """Four branches leave a trunk after each 13 blocks of it, so that these are a shared panel of
    their own: the last branches have a partial for each of 36 and more."""
    rng = np.random.default_rng(head_dim)
    levels, leave, blocks = 38, 4, 13
    shape = Shape(n_heads=1, n_kv_heads=1, head_dim=head_dim, n_blocks=700, max_rows=512)
    ids = iter(int(i) for i in rng.permutation(shape.n_blocks))
    stem = [next(ids) for _ in range(levels * blocks)]
    tables = [[*stem[: (i // leave + 1) * blocks], next(ids)] for i in range(levels * leave)]
    ends = [16 * len(table) - i % 16 for i, table in enumerate(tables)]
    cache = DeviceCache(rng, shape, compute)
    with CudaRig(shape, compute) as rig:
        rig.poison()
        fill(cache, rig, tables, ends)
        rows = [Row(t, end - 1, write=False) for t, end in zip(tables, ends, strict=True)]
        got = cache.run(rig, Plan(rows, 16, chunk_rows=len(rows)))
        for i in (0, 3, 4, 70, len(rows) - 1):
            cache.check(got[i], rows[i])


INSTANCES = {  # query heads (of one KV head), head_dim, keys of a tile
    "attend<64, 1>": (RK_BF16, 3, 24, 64),
    "attend<64, 2>": (RK_BF16, 66, 16, 64),
    "attend<128, 1>": (RK_BF16, 4, 128, 64),
    "attend<128, 2>": (RK_BF16, 66, 72, 64),
    "attend<256, 1>": (RK_BF16, 2, 136, 32),
    "plain": (RK_F32, 3, 12, 32),
}


@pytest.mark.parametrize("name", INSTANCES)
def test_every_end_of_a_tile(name: str) -> None:
    """One row, alone, with any number of keys up to two tiles and one: keys beyond are poison."""
    compute, heads, head_dim, tile = INSTANCES[name]
    shape = Shape(n_heads=heads, n_kv_heads=1, head_dim=head_dim, max_rows=32)
    cache = DeviceCache(np.random.default_rng(heads), shape, compute)
    table = list(range(10, 20))
    with CudaRig(shape, compute) as rig:
        rig.poison()
        for end in range(1, 2 * tile + 2):
            row = Row(table, end - 1)  # writes its own key, the others are there
            cache.check(cache.run(rig, Plan([row], 16))[0], row)


def test_blocks_beyond_2_to_31_elements(compute: int) -> None:
    """Offsets into the pool are 64 bits wide."""
    shape = Shape(n_layers=4, n_heads=2, n_kv_heads=2, head_dim=64, block_tokens=256)
    block_elements = 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * shape.block_tokens
    shape.n_blocks = (1 << 32) // block_elements + 2
    last = shape.n_blocks - 1
    assert last * block_elements >= 1 << 32
    cache = DeviceCache(np.random.default_rng(1), shape, compute)
    with CudaRig(shape, compute) as rig:
        rig.kv_fill(last, 0xFF)
        rig.kv_fill(0, 0xFF)
        rows = written([last], 5)
        cache.check(cache.run(rig, Plan(rows, 256), 3)[4], rows[4])
        rig.kv_copy(0, last)
        cache.facts.update({(0, p): cache.fact(last, p) for p in range(5)})
        again = [Row([0], 4, write=False)]
        cache.check(cache.run(rig, Plan(again, 256), 3)[0], again[0])


@pytest.mark.parametrize("index", [0, 1, 2, 4, 6, 7])
@pytest.mark.parametrize("kv_type", TYPES, ids=["kv-f32", "kv-bf16"])
def test_attention_follows_kv_type(kv_type: int, index: int) -> None:
    """Whatever products are computed in: the same bits, rounded to what enters the next one.
    Results that go out at once, and results that are merged from partials."""
    results = {}
    for compute in TYPES:
        rng = np.random.default_rng(index)  # the same numbers, which either type holds
        shape = Shape(**{**vars(SHAPES[index]), "kv_type": kv_type})
        bt = shape.block_tokens
        cache, table = DeviceCache(rng, shape, compute), list(range(-(-60 // bt)))
        for row in written(table, 60):
            number = value(act(rng.standard_normal(shape.width), RK_BF16))
            cache.facts[table[row.position // bt], row.position % bt] = act(number, compute)
        rows = written(table, 60)
        with CudaRig(shape, compute) as rig:
            rig.poison()
            first = cache.run(rig, Plan(rows, bt))
            parts = cache.run(rig, Plan(rows[-9:], bt, "rows", rng=np.random.default_rng(1)))
            results[compute] = np.concatenate([first, parts])
        cache.compute = max(compute, kv_type)  # what the bound of `check` looks at
        for row, got in zip(rows, first, strict=True):
            cache.check(got, row)
    assert np.array_equal(act(results[RK_F32], RK_BF16), results[RK_BF16])


def test_kv_copy(compute: int) -> None:
    """A copied block serves like the first one, in every layer."""
    shape = Shape()
    cache = DeviceCache(np.random.default_rng(11), shape, compute)
    with CudaRig(shape, compute) as rig:
        rig.poison()
        for layer in (0, 1):
            cache.run(rig, Plan(written([5], 16), 16), layer)
        rig.kv_copy(9, 5)
        cache.facts.update({(9, p): cache.fact(5, p) for p in range(16)})
        for layer in (0, 1):
            rows = [[Row([b], 15, write=False)] for b in (5, 9)]
            old, new = (cache.run(rig, Plan(r, 16), layer) for r in rows)
            assert np.array_equal(old, new) and np.isfinite(value(new)).all()


# ---- pick -------------------------------------------------------------------------------------


def pick(rig: CudaRig, logits: Array, draws: list[native.Draw]) -> list[native.Pick]:
    out = rig.out((len(draws), 6))
    rig.pick(out.address, rig.put(logits), (native.Draw * len(draws))(*draws), len(draws))
    raw, size = out.get().tobytes(), c.sizeof(native.Pick)
    return [native.Pick.from_buffer_copy(raw, i * size) for i in range(len(draws))]


@pytest.mark.parametrize("vocab", [1, 7, 101, 2048, 2049, 9001])
def test_pick_statistics(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((3, vocab)) * [[1], [8], [0]]).astype(np.float32)
    if vocab > 1:
        logits[1, ::3] = -np.inf
    x = logits.astype(np.float64)
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(1)
    with CudaRig(Shape(vocab_size=vocab), RK_F32) as rig:
        got = pick(rig, logits, [draw(), draw(), draw(forced=vocab - 1)])
        for i, one in enumerate(got):
            assert one.top == logits[i].argmax()
            assert one.token == (vocab - 1 if i == 2 else one.top)
            assert one.top_prob == pytest.approx(p[i].max(), rel=1e-5)
            assert one.top_logprob == pytest.approx(np.log(p[i].max()), rel=1e-5, abs=1e-5)
            assert one.logprob == pytest.approx(np.log(p[i, one.token]), rel=1e-5, abs=1e-5)
            assert one.entropy == pytest.approx(entropy[i], rel=1e-4, abs=1e-5)


SETTINGS: list[dict[str, Any]] = [
    *({}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 0.3}, {"top_k": 1}),
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    *({"top_k": 6000}, {"top_p": 0.0}, {"top_p": 1e-9}, {"top_p": 0.999}, {"top_k": 4500}),
]


@pytest.mark.parametrize("vocab,spread", [(5, 6.0), (101, 6.0), (5000, 6.0), (5000, 0.05)])
def test_pick_sampling(vocab: int, spread: float) -> None:
    """The token is where the running probability passes the uniform number; among equal logits
    the lowest ids are kept. A flat row's candidates do not fit into shared memory."""
    rng = np.random.default_rng(vocab)
    checked = 0
    with CudaRig(Shape(vocab_size=vocab), RK_F32) as rig:
        for trial, extra in enumerate(SETTINGS):
            x = rng.standard_normal((2, vocab)) * spread
            logits = (np.round(x) / 2 if spread > 1 else x).astype(np.float32)
            fields: dict[str, Any] = {"temperature": 1.0, "seed": 1 << 40 | trial, **extra}
            draws = [draw(stream=3 + i, position=trial, **fields) for i in range(2)]
            for i, one in enumerate(pick(rig, logits, draws)):
                p = candidates(logits[i].astype(np.float64), draws[i])
                u = philox(1 << 40 | trial, 3 + i, trial)
                after = np.cumsum(p)
                if np.abs(after - u).min() > 1e-4 / vocab:
                    assert one.token == np.searchsorted(after, u, side="right"), (extra, i)
                    checked += 1
    assert checked > 12


@pytest.mark.parametrize("order", ORDERS)
def test_pick_at_the_end_of_a_row(order: str) -> None:
    """All of the weight lies in the last ranges, whose running sums come last."""
    set_order(order, 7)
    vocab, n = 5120, 4
    logits = np.full((n, vocab), -60.0, np.float32)
    logits[:, -100:] = 0.0
    draws = [draw(temperature=1.0, position=i) for i in range(n)]
    with CudaRig(Shape(vocab_size=vocab), RK_F32) as rig:
        found = [one.token for one in pick(rig, logits, draws)]
    assert found == [vocab - 100 + int(100 * philox(0, 0, i)) for i in range(n)]


def test_pick_top_k_across_a_gap() -> None:
    """The k-th largest logit lies far below the others and has equals: the lowest id counts."""
    logits = np.full((6, 300), -3.0, np.float32)
    logits[:, [50, 200]] = 0.0
    p = candidates(logits[0].astype(np.float64), draw(temperature=1.0, top_k=3))
    found = [int(np.searchsorted(np.cumsum(p), philox(0, 0, i))) for i in range(200)]
    positions = [i for token in (0, 50, 200) for i in np.flatnonzero(np.equal(found, token))[:2]]
    with CudaRig(Shape(vocab_size=300), RK_F32) as rig:
        draws = [draw(temperature=1.0, top_k=3, position=int(i)) for i in positions]
        assert [one.token for one in pick(rig, logits, draws)] == [0, 0, 50, 50, 200, 200]


def test_pick_extremes() -> None:
    with CudaRig(Shape(vocab_size=300), RK_F32) as rig:
        check_extremes(300, partial(pick, rig))


def test_pick_is_the_cpus() -> None:
    """The same seed gives the same tokens, but for draws at an edge."""
    rng = np.random.default_rng(2)
    vocab, n = 3000, 2
    shape = Shape(vocab_size=vocab)
    differ = 0
    with CudaRig(shape, RK_F32) as cuda, Rig(shape, RK_F32, 0) as cpu:
        for trial, extra in enumerate(SETTINGS):
            logits = (rng.standard_normal((n, vocab)) * 3).astype(np.float32)
            fields: dict[str, Any] = {"temperature": 0.8, "seed": trial, **extra}
            draws = [draw(stream=i, position=trial, **fields) for i in range(n)]
            got = pick(cuda, logits, draws)
            out = np.zeros((n, 6), np.float32)
            array = (native.Draw * n)(*draws)
            cpu.pick(out.ctypes.data, logits.ctypes.data, array, n)
            want = out.view(np.int32)[:, 0]
            differ += sum(one.token != token for one, token in zip(got, want, strict=True))
    assert differ == 0
