"""Results that stay on the GPU: `device_logits` and `device_hidden` as DLPack hands them over.

On the host runtime, where streams do nothing until somebody waits and then in any order: whoever
does not wait for the right stream, or gives memory to the next too early, reads wrong numbers.
"""

from __future__ import annotations

import ctypes as c
import gc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import producer as p
from support.cudarig import ORDERS, library, set_order
from support.models import T4
from support.sessions import assert_books, open_session
from test_cuda_session import TO_HOST, on_host_runtime

import rksc

__all__ = ["on_host_runtime"]  # a fixture of every test here

python = c.pythonapi
python.PyCapsule_SetName.argtypes = (c.py_object, c.c_char_p)
TAKE = c.PYFUNCTYPE(c.c_void_p, c.py_object, c.c_char_p)(("PyCapsule_GetPointer", python))
USED = {  # once renamed, the capsule no longer frees anything
    b"dltensor": b"used_dltensor",
    b"dltensor_versioned": b"used_dltensor_versioned",
}


class Taken:
    """A consumer: owns what it took until `delete`, and reads it on a stream of its own."""

    def __init__(self, array: Any, version: tuple[int, int] | None = (1, 0)) -> None:
        self.runtime, self.stream = library()[0], c.c_void_p()
        assert self.runtime.cudaStreamCreateWithFlags(c.byref(self.stream), 1) == 0
        capsule = array.__dlpack__(stream=self.stream.value, max_version=version)
        name = b"dltensor_versioned" if version else b"dltensor"
        self.address = TAKE(capsule, name)
        python.PyCapsule_SetName(capsule, USED[name])
        kind: Any = p._Versioned if version else p._Legacy
        self.managed = kind.from_address(self.address)
        self.host = np.zeros(self.shape, np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.managed.tensor.shape[: self.managed.tensor.ndim])

    def queue(self) -> None:
        """Ask for a copy into `host`; it is there after `wait`."""
        to, data = c.c_void_p(self.host.ctypes.data), c.c_void_p(self.managed.tensor.data)
        size = c.c_size_t(self.host.nbytes)
        assert self.runtime.cudaMemcpyAsync(to, data, size, TO_HOST, self.stream) == 0

    def wait(self) -> NDArray[np.float32]:
        assert self.runtime.cudaStreamSynchronize(self.stream) == 0
        return self.host

    def delete(self, prototype: Any = c.CFUNCTYPE) -> None:
        """CFUNCTYPE: without the GIL; PYFUNCTYPE: with it."""
        prototype(None, c.c_void_p)(self.managed.deleter)(self.address)


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> None:
    set_order(request.param, seed=3)


def open_one() -> Any:
    return open_session(T4, device="cuda")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("version", [(1, 0), None])
def test_the_numbers_are_those_of_logits_and_hidden(order: None, version: Any, dtype: str) -> None:
    """The consumer's stream waits for ours, and nobody else does."""
    session = open_session(T4, device="cuda", dtype=dtype)
    branch = session.prefill(T4.tokens(20))
    taken = [Taken(branch.device_logits, version), Taken(branch.device_hidden, version)]
    for found in taken:
        found.queue()
    for found, expected in zip(taken, [branch.logits, branch.hidden], strict=True):
        tensor = found.managed.tensor
        assert (tensor.device.type, tensor.device.id) == (p.CUDA, 0)
        assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (p.FLOAT, 32, 1)
        assert tensor.strides[: tensor.ndim] == [expected.shape[-1], 1][-tensor.ndim :]
        assert found.shape == expected.shape
        assert np.array_equal(found.wait(), expected)
        found.delete()
    assert_books(session)


@pytest.mark.parametrize("prototype", [c.CFUNCTYPE, c.PYFUNCTYPE])
def test_an_export_outlives_branch_and_session(order: None, prototype: Any) -> None:
    """Until its deleter has run; what is left of the pool goes with the last of them."""
    runtime = library()[0]
    before = runtime.rk_host_used(0)
    session = open_one()
    branch = session.prefill(T4.tokens(20))
    expected, array = branch.logits, branch.device_logits
    first, second = Taken(array), Taken(array)
    branch.drop()
    del branch, session, array
    gc.collect()
    assert runtime.rk_host_used(0) > before
    for found in (first, second):
        found.queue()
        assert np.array_equal(found.wait(), expected)
        found.delete(prototype)
    assert runtime.rk_host_used(0) == before


def test_nobody_else_writes_to_an_export() -> None:
    session = open_one()
    branch = session.prefill(T4.tokens(20))
    expected = branch.logits
    found = Taken(branch.device_logits)
    other = session.prefill(T4.tokens(31, seed=1))
    assert not np.array_equal(other.logits, expected)
    again = other.device_logits
    session.generate(other.fork(3), 6)
    found.queue()
    assert np.array_equal(found.wait(), expected)
    found.delete()
    del again


def export(branch: Any, way: int) -> None:
    """An export that goes at once: taken, as a capsule that nobody takes, or not at all."""
    array = branch.device_logits
    if way == 0:
        Taken(array).delete()
    elif way < 3:
        array.__dlpack__(max_version=(1, 0) if way == 1 else None)


def test_memory_goes_round() -> None:
    """What was given back rests, and serves again: any number of exports have 16 pieces."""
    session = open_one()
    runtime, branch = library()[0], session.prefill(T4.tokens(20))
    before, piece = runtime.rk_host_used(0), 0
    for i in range(80):
        export(branch, i % 4)
        used = runtime.rk_host_used(0) - before
        piece = piece or used
        assert used == piece * min(i + 1, 16)


def test_a_device_that_cannot_be_waited_for_costs_memory_alone() -> None:
    """While another thread captures, say: the next export gets a new piece."""
    session = open_one()
    runtime, branch = library()[0], session.prefill(T4.tokens(20))
    expected = branch.logits
    for _ in range(16):
        export(branch, 0)
    used = runtime.rk_host_used(0)
    runtime.rk_host_fail_at(b"cudaDeviceSynchronize", 1)
    found = Taken(branch.device_logits)
    runtime.rk_host_fail_at(b"cudaDeviceSynchronize", 0)
    assert runtime.rk_host_used(0) > used
    found.queue()
    assert np.array_equal(found.wait(), expected)
    found.delete()


def test_the_next_user_waits_for_the_last_ones_stream(order: None) -> None:
    """A consumer may let go while its stream has still to read. Between exports of one branch
    and another's all of the pool comes round more than once."""
    session = open_one()
    branches = session.prefill(T4.tokens(20)), session.prefill(T4.tokens(9, seed=4))
    expected = [branch.logits for branch in branches]
    queued, addresses = [], set()
    for i in range(40):
        found = Taken(branches[i % 2].device_logits)
        addresses.add(found.managed.tensor.data)
        found.queue()
        found.delete()
        queued.append(found)
    assert len(addresses) < len(queued)
    for i, found in enumerate(queued):
        assert np.array_equal(found.wait(), expected[i % 2]), i


def test_exports_leave_the_graphs_of_decoding_alone() -> None:
    """However many there are, they are one step that is replayed."""
    session = open_one()
    runtime, branch = library()[0], session.prefill(T4.tokens(20))

    def decode() -> None:
        children = branch.fork(2)
        session.generate(children, 6)
        for child in children:
            child.drop()

    for _ in range(3):
        decode()
    runtime.rk_host_spoil_captures(10)
    decode()
    assert runtime.rk_host_spoil_captures(10) == 10  # all is captured already
    held = [branch.device_logits for _ in range(70)] + [branch.device_hidden for _ in range(5)]
    assert runtime.rk_host_spoil_captures(10) == 10 - 2 - 2  # tried twice each
    decode()
    assert runtime.rk_host_spoil_captures(0) == 10
    del held


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"stream": 0}, BufferError, "stream 0.*1 is the default"),
        ({"stream": -2}, BufferError, "stream -2"),
        ({"stream": "1"}, TypeError, "stream must be an int"),
        ({"stream": 1 << 70}, BufferError, "stream 11805"),
        ({"stream": -(1 << 70)}, BufferError, "stream -11805"),
        ({"copy": True}, BufferError, "without a copy"),
        ({"copy": 1}, BufferError, "without a copy"),
        ({"copy": np.True_}, BufferError, "without a copy"),
        ({"dl_device": (p.CPU, 0)}, BufferError, r"dl_device \(2, 0\).*branch\.logits"),
        ({"dl_device": (p.CUDA, 1)}, BufferError, r"dl_device \(2, 0\)"),
        ({"dl_device": (-1, 0)}, BufferError, r"dl_device \(2, 0\)"),
        ({"dl_device": 2}, TypeError, "dl_device must be a tuple"),
        ({"max_version": 1}, TypeError, "max_version must be a tuple"),
    ],
)
def test_what_cannot_be_asked_is_said(keywords: Any, error: Any, text: str) -> None:
    """... and loses nothing: the array is exported afterwards, to any stream that there is."""
    session = open_one()
    branch = session.prefill(T4.tokens(5))
    array = branch.device_logits
    with pytest.raises(error, match=text):
        array.__dlpack__(**keywords)
    for stream in (None, 1, -1):
        array.__dlpack__(stream=stream, dl_device=(p.CUDA, 0), copy=False)
    found = Taken(array)
    found.queue()
    assert np.array_equal(found.wait(), branch.logits)
    found.delete()


def test_an_array_tells_what_it_is() -> None:
    session = open_one()
    branch = session.prefill(T4.tokens(5))
    array = branch.device_hidden
    shape = (session.config.n_layers, session.config.width)
    assert isinstance(array, rksc.DeviceArray)
    assert (array.shape, array.device, array.__dlpack_device__()) == (shape, "cuda:0", (2, 0))
    assert repr(array) == f"<rksc.DeviceArray float32 {shape} on cuda:0>"
    with pytest.raises(TypeError):
        rksc.DeviceArray()
    with pytest.raises(TypeError, match=r"cuda:0 cannot become a NumPy array; branch\.logits"):
        np.asarray(array)


@pytest.mark.parametrize("attribute", ["device_logits", "device_hidden"])
@pytest.mark.parametrize("call", ["cudaEventCreateWithFlags", "cudaEventRecord", "cudaMalloc"])
def test_a_call_that_fails_is_named(call: str, attribute: str, capfd: Any) -> None:
    """The piece goes back, and so does all that the session had."""
    runtime, session = library()[0], open_one()
    branch = session.prefill(T4.tokens(5))
    assert branch.logits is not None
    for at in range(1, 20):
        runtime.rk_host_fail_at(call.encode(), at)
        held = []
        try:
            held += [getattr(branch, attribute) for _ in range(8)]
        except RuntimeError as error:
            assert call in str(error), error
            break
        finally:
            runtime.rk_host_fail_at(call.encode(), 0)
            held.clear()
    else:
        pytest.fail(f"{call} was not reached")
    assert_books(session)
    capfd.readouterr()


def test_a_full_gpu_says_how_much_was_wanted() -> None:
    """... and goes on when there is room again."""
    runtime, session = library()[0], open_one()
    branch = session.prefill(T4.tokens(5))
    expected = branch.logits
    runtime.rk_host_set_devices(1, 8, 0, c.c_size_t(runtime.rk_host_used(0)))
    with pytest.raises(
        MemoryError, match=f"a result: .* no memory for {expected.nbytes} bytes, .* free"
    ):
        _ = branch.device_logits
    runtime.rk_host_set_devices(1, 8, 0, c.c_size_t(32 << 30))
    found = Taken(branch.device_logits)
    found.queue()
    assert np.array_equal(found.wait(), expected)
    found.delete()


def test_on_the_cpu_they_are_numpys() -> None:
    """So the same program runs on either."""
    branch = open_session(T4, device="cpu").prefill(T4.tokens(5))
    for ours, plain in (
        (branch.device_logits, branch.logits),
        (branch.device_hidden, branch.hidden),
    ):
        assert np.array_equal(np.from_dlpack(ours), plain)
