"""The host runtime of the CUDA tests: does it compute what CUDA would, and does it see faults?

What kernels and runtime have in common could be wrong in both. So matrix fragments are held
against the tables of the PTX manual, written down here once more, and the matrix products against
SciPy's.
"""

from __future__ import annotations

import ctypes as c
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.oprig import to_bf16

sys.path.insert(0, str(Path(__file__).resolve().parent / "cuda_host"))
import build as cuda_host

Array = NDArray[Any]
KERNELS = Path(__file__).resolve().parent.parent / "csrc" / "cuda"
FORWARD, REVERSE, RANDOM = range(3)
LAUNCH_FAILURE, CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 719, 900, 901
TO_DEVICE, TO_HOST = 1, 2


class Runtime:
    """The runtime with the kernels of probes.cu; calls return the error's number."""

    def __init__(self) -> None:
        self.library = c.CDLL(str(cuda_host.build(probes=True)))
        self.kept: list[Array] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)

    def new(self, data: Array) -> c.c_void_p:
        """A copy of `data` on the device."""
        address = c.c_void_p()
        assert self.cudaMalloc(c.byref(address), c.c_size_t(data.nbytes)) == 0
        data = np.ascontiguousarray(data)
        assert self.copy(address, data.ctypes.data, data.nbytes, TO_DEVICE) == 0
        return address

    def copy(self, to: Any, source: Any, n: int, kind: int, stream: Any = None) -> int:
        """cudaMemcpyAsync"""
        to, source = (
            c.c_void_p(getattr(to, "value", to)),
            c.c_void_p(getattr(source, "value", source)),
        )
        return int(self.cudaMemcpyAsync(to, source, c.c_size_t(n), kind, stream))

    def get(
        self, address: c.c_void_p, shape: tuple[int, ...], dtype: Any, stream: Any = None
    ) -> Array:
        """What lies at `address` when `stream` comes to it."""
        out = np.zeros(shape, dtype)
        assert self.copy(out.ctypes.data, address, out.nbytes, TO_HOST, stream) == 0
        assert self.cudaDeviceSynchronize() == 0
        return out

    def sync(self) -> int:
        """cudaDeviceSynchronize"""
        return int(self.cudaDeviceSynchronize())

    def stream(self) -> c.c_void_p:
        """A new stream."""
        stream = c.c_void_p()
        assert self.cudaStreamCreateWithFlags(c.byref(stream), 1) == 0
        return stream


@pytest.fixture
def cuda() -> Iterator[Runtime]:
    """A runtime in forward order, without faults from other tests."""
    runtime = Runtime()
    runtime.rk_host_reset()
    runtime.rk_host_set_order(FORWARD, c.c_uint64(0))
    yield runtime
    runtime.rk_host_reset()
    runtime.rk_host_set_order(FORWARD, c.c_uint64(0))
    runtime.rk_host_set_devices(1, 8, 0, c.c_size_t(32 << 30))


# ---- fragments: the manual's tables -----------------------------------------------------------


def a_place(lane: int, i: int) -> tuple[int, int]:
    """mma.m16n8k16, 16-bit A: row and column of element a_i, i in 0 .. 7."""
    row = lane >> 2 if i in (0, 1, 4, 5) else (lane >> 2) + 8
    return row, (lane % 4) * 2 + (i & 1) + (8 if i >= 4 else 0)


def b_place(lane: int, i: int) -> tuple[int, int]:
    """mma.m16n8k16, 16-bit B: row and column of element b_i, i in 0 .. 3."""
    return (lane % 4) * 2 + (i & 1) + (8 if i >= 2 else 0), lane >> 2


def c_place(lane: int, i: int) -> tuple[int, int]:
    """mma.m16n8k16, float32 C and D: row and column of element c_i, i in 0 .. 3."""
    return (lane >> 2) + (8 if i >= 2 else 0), (lane % 4) * 2 + (i & 1)


def fragments(matrix: Array, place: Any, n: int) -> Array:
    """(32, n) elements of the lanes."""
    return np.array([[matrix[place(lane, i)] for i in range(n)] for lane in range(32)])


def test_mma_fragments_are_those_of_the_manual(cuda: Runtime) -> None:
    """D = A B + C over the manual's maps; small integers are exact."""
    rng = np.random.default_rng(11)
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((16, 16), (16, 8)))
    start = rng.integers(-8, 9, (16, 8)).astype(np.float32)
    d = cuda.new(fragments(start, c_place, 4).astype(np.float32))
    left = cuda.new(to_bf16(fragments(a, a_place, 8)).view(np.uint32))
    right = cuda.new(to_bf16(fragments(b, b_place, 4)).view(np.uint32))
    assert cuda.probe_mma(d, left, right) == 0
    expected = fragments(a @ b + start, c_place, 4)
    assert np.array_equal(cuda.get(d, (32, 4), np.float32), expected)


@pytest.mark.parametrize("trans", [0, 1])
def test_ldmatrix_fragments_are_those_of_the_manual(cuda: Runtime, trans: int) -> None:
    """Matrix i comes from the addresses of lanes 8 i .. 8 i + 7; lane l gets row l / 4 of it,
    elements 2 (l % 4) and the next; .trans: of the transposed matrix."""
    rows = np.random.default_rng(12).integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16)
    out = cuda.new(np.zeros((32, 4), np.uint32))
    assert cuda.probe_ldmatrix(out, cuda.new(rows), trans) == 0
    seen = cuda.get(out, (32, 4), np.uint32).view(np.uint16).reshape(32, 4, 2)
    matrices = rows.swapaxes(1, 2) if trans else rows
    for lane in range(32):
        at = lane % 4 * 2
        assert np.array_equal(seen[lane], matrices[:, lane // 4, at : at + 2]), lane


# ---- numbers -------------------------------------------------------------------------------------


def test_rounding_is_to_nearest_even(cuda: Runtime) -> None:
    """float16 as NumPy rounds it, over all exponents, halves and specials; bfloat16 likewise."""
    rng = np.random.default_rng(13)
    all_f16 = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(all_f16[np.isfinite(all_f16)])
    ties = (finite[1:] + finite[:-1]) / np.float32(2)
    x = np.concatenate([all_f16[~np.isnan(all_f16)], ties, np.nextafter(ties, np.float32(9e9))])
    x = np.concatenate(
        [x, rng.normal(size=4096).astype(np.float32) * 10.0 ** rng.integers(-9, 9, 4096)]
    )
    x = x.astype(np.float32)
    bf16, f16 = np.zeros(x.size, np.uint16), np.zeros(x.size, np.uint16)
    wide = np.zeros(x.size, np.float32)
    cuda.probe_round(*(c.c_void_p(v.ctypes.data) for v in (bf16, f16, wide, x)), x.size)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    assert np.array_equal(f16, expected.view(np.uint16))
    assert np.array_equal(wide, expected.astype(np.float32))
    fits = np.isfinite(x)
    assert np.array_equal(bf16[fits], to_bf16(x[fits]))


@pytest.mark.parametrize("seed", range(24))
def test_gemm_is_scipys(cuda: Runtime, seed: int) -> None:
    """cublasGemmEx and BLAS read the same bytes in the same (column-major) way."""
    blas = pytest.importorskip("scipy.linalg.blas")
    rng = np.random.default_rng([14, seed])
    m, n, k = (int(v) for v in rng.integers(1, 20, 3))
    trans_a, trans_b = (int(v) for v in rng.integers(0, 2, 2))
    alpha, beta = (float(v) for v in rng.choice([0.0, 1.0, -1.5], 2))
    kind = int(rng.integers(3))  # float32, float16, bfloat16
    code = (0, 2, 14)[kind]

    def stored(rows: int, cols: int) -> tuple[Array, int]:
        ld = rows + int(rng.integers(0, 5))
        return rng.normal(size=(ld, cols)).astype(np.float32, order="F"), ld

    def cast(x: Array) -> tuple[Array, Array]:
        """The array's bytes as they lie in memory, and its values after rounding."""
        flat = x.ravel(order="F")
        if kind == 0:
            return flat, x
        bits = flat.astype(np.float16).view(np.uint16) if kind == 1 else to_bf16(flat)
        values = (
            bits.view(np.float16).astype(np.float32)
            if kind == 1
            else (bits.astype(np.uint32) << 16).view(np.float32)
        )
        return bits, values.reshape(x.shape, order="F")

    a, lda = stored(*((k, m) if trans_a else (m, k)))
    b, ldb = stored(*((n, k) if trans_b else (k, n)))
    out, ldc = stored(m, n)
    (a_bytes, a_values), (b_bytes, b_values) = cast(a), cast(b)
    handle, workspace = c.c_void_p(), cuda.new(np.zeros(1024, np.uint8))
    assert cuda.cublasCreate_v2(c.byref(handle)) == 0
    assert cuda.cublasSetStream_v2(handle, None) == 0
    assert cuda.cublasSetWorkspace_v2(handle, workspace, c.c_size_t(1024)) == 0
    result = cuda.new(out.ravel(order="F"))
    alpha_, beta_ = c.c_float(alpha), c.c_float(beta)
    status = cuda.cublasGemmEx(
        handle, trans_a, trans_b, m, n, k, c.byref(alpha_), cuda.new(a_bytes), code, lda,
        cuda.new(b_bytes), code, ldb, c.byref(beta_), result, 0, ldc, 68, -1,
    )  # fmt: skip
    assert status == 0
    seen = cuda.get(result, (n, ldc), np.float32).T
    rows_a, rows_b = (k if trans_a else m), (n if trans_b else k)
    expected = blas.sgemm(
        alpha, a_values[:rows_a], b_values[:rows_b], beta, out[:m], trans_a, trans_b
    )
    assert np.allclose(seen[:m], expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(seen[m:], out[m:]), "written between the columns"
    assert cuda.cublasDestroy_v2(handle) == 0


def test_a_row_in_another_batch_is_the_same_to_rounding(cuda: Runtime) -> None:
    """cuBLAS picks its algorithm by the shape: the same row may get other bits from it when other
    rows come along. The stand-in does that on purpose, and gives equal calls equal bits."""
    rng = np.random.default_rng(15)
    k, m, most = 64, 30, 12
    a, b = (rng.normal(size=(n, k)).astype(np.float32) for n in (m, most))
    handle, workspace = c.c_void_p(), cuda.new(np.zeros(1024, np.uint8))
    assert cuda.cublasCreate_v2(c.byref(handle)) == 0
    assert cuda.cublasSetStream_v2(handle, None) == 0
    assert cuda.cublasSetWorkspace_v2(handle, workspace, c.c_size_t(1024)) == 0
    one, zero = c.c_float(1), c.c_float(0)
    left, right = cuda.new(a), cuda.new(b)

    def first_row(n: int) -> Array:
        out = cuda.new(np.zeros((n, m), np.float32))
        status = cuda.cublasGemmEx(
            handle, 1, 0, m, n, k, c.byref(one), left, 0, k, right, 0, k, c.byref(zero), out, 0,
            m, 68, -1,
        )  # fmt: skip
        assert status == 0
        return cuda.get(out, (n, m), np.float32)[0]

    rows = [first_row(n) for n in range(1, most + 1)]
    bound = 2.0**-20 * (np.abs(a) @ np.abs(b[0]))
    for n, row in enumerate(rows, 1):
        assert np.array_equal(row, first_row(n))
        assert (np.abs(row - a.astype(np.float64) @ b[0]) <= bound).all()
    assert len({row.tobytes() for row in rows}) >= 8
    assert cuda.cublasDestroy_v2(handle) == 0


def test_gemm_wants_a_workspace_and_memory_of_the_device(cuda: Runtime) -> None:
    """A capture could not allocate one; setting a stream takes the workspace away."""
    handle, one = c.c_void_p(), c.c_float(1.0)
    assert cuda.cublasCreate_v2(c.byref(handle)) == 0
    x, small = cuda.new(np.ones(16, np.float32)), cuda.new(np.ones(15, np.float32))

    def run(a: Any) -> int:
        return int(
            cuda.cublasGemmEx(
                handle, 0, 0, 4, 4, 4, c.byref(one), a, 0, 4, x, 0, 4, c.byref(one), x, 0, 4, 68, -1
            )
        )

    assert run(x) != 0
    assert cuda.cublasSetWorkspace_v2(handle, x, c.c_size_t(64)) == 0
    assert run(x) == 0
    assert run(small) != 0
    assert cuda.cublasSetStream_v2(handle, None) == 0
    assert run(x) != 0
    cuda.cublasDestroy_v2(handle)


# ---- threads that meet ---------------------------------------------------------------------------


def test_shuffles_and_votes(cuda: Runtime) -> None:
    """Sums, running sums, votes and neighbours of each warp, in three orders."""
    x = np.random.default_rng(15).integers(-9, 10, 64).astype(np.float32)
    warps = x.reshape(2, 32)
    below = x.reshape(8, 8)
    expected = [
        np.repeat(warps.sum(1), 32),
        warps.cumsum(1).ravel(),
        np.repeat((warps > 0).sum(1), 32),
        np.concatenate([below[:, 1:], below[:, -1:]], 1).ravel(),
    ]
    for order in (FORWARD, REVERSE, RANDOM):
        cuda.rk_host_set_order(order, c.c_uint64(order))
        out = cuda.new(np.zeros((4, 64), np.float32))
        assert cuda.probe_warps(out, cuda.new(x)) == 0
        assert np.array_equal(cuda.get(out, (4, 64), np.float32), expected)


def test_a_missing_barrier_shows(cuda: Runtime) -> None:
    """With both barriers every order is right; without one some order is wrong."""
    x = np.arange(64, dtype=np.float32)
    wrong = {0: 0, 1: 0, 2: 0, 3: 0}
    for rules in wrong:
        for order in (FORWARD, REVERSE, RANDOM):
            cuda.rk_host_set_order(order, c.c_uint64(7))
            out = cuda.new(np.zeros(64, np.float32))
            assert cuda.probe_reverse(out, cuda.new(x), 64, rules) == 0
            wrong[rules] += not np.array_equal(cuda.get(out, (64,), np.float32), x)
    assert wrong[3] == 0
    assert all(wrong[rules] > 0 for rules in (0, 1, 2)), wrong


@pytest.mark.parametrize(
    "rule, text",
    [
        (0, "a barrier that others never reach"),
        (1, "reads a lane that is not in its mask"),
        (2, "lanes wait for others in their mask"),
        (3, "not aligned to 16 bytes"),
        (4, "an asynchronous copy under way"),
        (5, "lanes wait for others in their mask"),
    ],
)
def test_a_broken_rule_ends_the_kernel(
    cuda: Runtime, rule: int, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The fault is printed, the error stays until the runtime is reset; then all works again."""
    x = np.arange(64, dtype=np.float32)
    out = cuda.new(x)
    assert cuda.probe_broken(out, cuda.new(x), rule) == 0
    assert cuda.sync() == LAUNCH_FAILURE
    assert text in capfd.readouterr().err
    assert cuda.cudaGetLastError() == LAUNCH_FAILURE
    cuda.rk_host_reset()
    assert cuda.probe_broken(out, cuda.new(x), 9) == 0
    assert np.array_equal(cuda.get(out, (64,), np.float32), x)


def test_copied_data_comes_with_the_wait(cuda: Runtime) -> None:
    """Before the wait the target is poison, after it the data, and zeros where not valid."""
    x = np.arange(1, 129, dtype=np.float32)
    out = cuda.new(np.zeros(128, np.float32))
    assert cuda.probe_copy(out, cuda.new(x), 100, c.c_bool(True)) == 0
    assert np.array_equal(cuda.get(out, (128,), np.float32), np.where(x <= 100, x, 0))
    assert cuda.probe_copy(out, cuda.new(x), 100, c.c_bool(False)) == 0
    assert np.isnan(cuda.get(out, (128,), np.float32)).all()


def test_shared_memory_starts_as_poison_and_has_a_limit(cuda: Runtime) -> None:
    """Every block finds NaN. More than 48 KiB needs the attribute; 99 KiB, with what is
    static, is the end: capabilities 8.6, 8.9 and 12.0 have no more."""
    out = cuda.new(np.zeros(32, np.float32))
    assert cuda.probe_fresh(out, 3, 32, 1024, 0) == 0
    assert np.isnan(cuda.get(out, (32,), np.float32)).all()
    assert cuda.probe_fresh(out, 1, 32, 49 << 10, 0) != 0
    assert cuda.probe_fresh(out, 1, 32, 64 << 10, 64 << 10) == 0
    assert cuda.probe_fresh(out, 1, 32, 65 << 10, 0) != 0
    assert cuda.probe_fresh(out, 1, 32, 64 << 10, 100 << 10) != 0


def test_static_shared_memory_counts(cuda: Runtime, capfd: pytest.CaptureFixture[str]) -> None:
    """What a kernel declares comes on top of what the launch asks for: 99 KiB for both."""
    out, most = cuda.new(np.zeros(32, np.float32)), 99 << 10
    assert cuda.probe_fresh(out, 1, 32, most - 256, most) == 0
    assert cuda.sync() == 0
    assert cuda.probe_fresh(out, 1, 32, most, most) == 0
    assert cuda.sync() == LAUNCH_FAILURE
    assert "more shared memory than there is" in capfd.readouterr().err


KERNEL = re.compile(r"__global__ void\s+(?:__launch_bounds__\((\w+)[^{]*?\)\s+)?(\w+)\(")
LAUNCH = re.compile(r"RK_LAUNCH\(\(?(\w+)")


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.cu")), ids=lambda p: p.name)
def test_blocks_keep_to_their_launch_bounds(path: Path) -> None:
    """The compiler gives registers for so many threads; a launch with more fails on hardware. The
    host's compiler is told nothing of bounds, so launches are read: each names its kernel's."""
    text = path.read_text("utf-8")
    bounds = {name: bound for bound, name in KERNEL.findall(text)}
    launches = list(LAUNCH.finditer(text))
    assert {launch[1] for launch in launches} == bounds.keys()
    for launch in launches:
        bound, statement = bounds[launch[1]], text[launch.start() : text.index(";", launch.end())]
        assert bound, f"{launch[1]} has no bound"
        assert re.search(rf",\s+(?:{bound}|rk_row_threads\(width, {bound}\)),", statement), (
            statement
        )


def test_limits_of_grid_and_block(cuda: Runtime) -> None:
    """A launch that hardware refuses is refused; all threads of all blocks run."""
    out = cuda.new(np.zeros(1, np.int32))
    for grid, block in ((0, 32), (1, 0), (1, 1025)):
        assert cuda.probe_count(out, grid, block, None) != 0
    assert cuda.probe_count(out, 5, 1000, None) == 0
    assert cuda.get(out, (1,), np.int32)[0] == 5 * 2 * 1000


def test_a_kernel_is_given_no_address_of_the_host(cuda: Runtime) -> None:
    """On a GPU it would be an illegal access."""
    x = np.zeros(64, np.float32)
    cuda.probe_broken(c.c_void_p(x.ctypes.data), cuda.new(x), 9)
    assert cuda.sync() == LAUNCH_FAILURE


# ---- memory, streams, graphs ------------------------------------------------------------------


def test_the_host_cannot_look_into_device_memory(cuda: Runtime) -> None:
    """It ends there and then: in a process of its own."""
    code = f"""
import ctypes as c
library = c.CDLL({str(cuda_host.build(probes=True))!r})
address = c.c_void_p()
assert library.cudaMalloc(c.byref(address), c.c_size_t(64)) == 0
print("got", flush=True)
c.string_at(address.value, 1)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stdout == "got\n"
    assert done.returncode != 0


def test_copies_check_both_ends(cuda: Runtime) -> None:
    """A wrong direction, and a copy beyond the end of an allocation."""
    x = np.zeros(64, np.float32)
    address = cuda.new(x)
    assert cuda.copy(address, x.ctypes.data, 256, TO_HOST) != 0
    assert cuda.copy(address, x.ctypes.data, 257, TO_DEVICE) != 0
    assert cuda.copy(x.ctypes.data, address, 256, TO_HOST) == 0
    assert cuda.sync() == 0


def test_streams_do_nothing_until_waited_for(cuda: Runtime) -> None:
    """A kernel's result is not there before its stream is waited for, nor for another stream that
    does not wait for its event; pinned memory is read when the copy runs."""
    one, two = cuda.stream(), cuda.stream()
    counter = cuda.new(np.zeros(1, np.int32))
    assert cuda.sync() == 0
    event, seen = c.c_void_p(), c.c_void_p()
    assert cuda.cudaEventCreateWithFlags(c.byref(event), 2) == 0
    assert cuda.cudaMallocHost(c.byref(seen), c.c_size_t(4)) == 0
    value = c.c_int.from_address(seen.value or 0)
    value.value = -1
    assert cuda.probe_count(counter, 1, 16, one) == 0
    assert cuda.cudaEventRecord(event, one) == 0
    assert cuda.cudaEventQuery(event) == 600
    assert cuda.cudaStreamWaitEvent(two, event, 0) == 0
    assert cuda.copy(seen, counter, 4, TO_HOST, two) == 0
    assert value.value == -1
    assert cuda.cudaStreamSynchronize(two) == 0
    assert value.value == 32
    assert cuda.cudaEventQuery(event) == 0
    value.value = 5
    assert cuda.copy(counter, seen, 4, TO_DEVICE, one) == 0
    value.value = 6
    assert cuda.get(counter, (1,), np.int32, one)[0] == 6
    for handle in (one, two):
        assert cuda.cudaStreamDestroy(handle) == 0
    assert cuda.cudaEventDestroy(event) == 0
    assert cuda.cudaFreeHost(seen) == 0


def test_a_graph_replays_what_was_captured(cuda: Runtime) -> None:
    """A capture runs nothing; each launch of its graph runs all of it."""
    stream, graph, exec_ = cuda.stream(), c.c_void_p(), c.c_void_p()
    counter = cuda.new(np.zeros(1, np.int32))
    assert cuda.cudaStreamBeginCapture(stream, 1) == 0
    assert cuda.probe_count(counter, 1, 8, stream) == 0
    assert cuda.probe_count(counter, 1, 1, stream) == 0
    assert cuda.cudaStreamEndCapture(stream, c.byref(graph)) == 0
    assert cuda.cudaGraphInstantiate(c.byref(exec_), graph, c.c_ulonglong(0)) == 0
    assert cuda.cudaGraphDestroy(graph) == 0
    assert cuda.get(counter, (1,), np.int32)[0] == 0
    for _ in range(3):
        assert cuda.cudaGraphLaunch(exec_, stream) == 0
    assert cuda.get(counter, (1,), np.int32, stream)[0] == 3 * 18
    assert cuda.cudaGraphExecDestroy(exec_) == 0
    assert cuda.cudaStreamDestroy(stream) == 0


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaStreamSynchronize", "cudaEventRecord"])
def test_what_a_capture_forbids_spoils_it(cuda: Runtime, call: str) -> None:
    """The call fails, and so does the end of the capture."""
    stream, out = cuda.stream(), c.c_void_p()
    arguments = {
        "cudaMalloc": (c.byref(out), c.c_size_t(16)),
        "cudaStreamSynchronize": (stream,),
        "cudaEventRecord": (None, stream),
    }[call]
    assert cuda.cudaStreamBeginCapture(stream, 1) == 0
    assert getattr(cuda, call)(*arguments) == CAPTURE_UNSUPPORTED
    assert cuda.cudaStreamEndCapture(stream, c.byref(out)) == CAPTURE_INVALIDATED
    assert cuda.cudaStreamDestroy(stream) == 0
