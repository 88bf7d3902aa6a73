"""What the tests of CUDA's ops share: the backend on the host runtime, arrays in device memory.

A `CudaRig` takes and returns NumPy arrays: each goes to device memory between guard words, NaN
around inputs and a pattern around outputs.
"""

from __future__ import annotations

import ctypes as c
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from support import native
from support.native import RK_BF16, RK_OK
from support.oprig import GUARD, Array, Plan, Shape, describe, matrix

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cuda_host"))
import build as cuda_host

ORDERS = ("forward", "reverse", "random")


class Calls(c.Structure):
    """rk_cuda_calls"""

    _fields_ = [
        ("abi", c.c_uint64),
        ("open", c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_int, c.c_void_p)),
        ("close", c.CFUNCTYPE(None, c.c_void_p)),
        ("stream", c.CFUNCTYPE(c.c_size_t, c.c_void_p)),
        ("fetch", c.c_void_p),
        ("settle", c.c_void_p),
        ("create", c.CFUNCTYPE(c.c_int, *[c.c_void_p] * 5)),
    ]


Library = tuple[c.CDLL, Calls, c.c_void_p]


def opened(path: str, ordinal: int = 0) -> Library:
    """The backend at `path`, what it exports, and a GPU."""
    loaded = c.CDLL(path)
    calls = Calls.in_dll(loaded, "rk_cuda_library")
    gpu, error = c.c_void_p(), native.Error()
    assert calls.open(c.byref(gpu), ordinal, c.byref(error)) == RK_OK, error.text
    return loaded, calls, gpu


@cache
def library() -> Library:
    """The one on the host runtime."""
    return opened(str(cuda_host.build()))


def set_order(order: str, seed: int = 0) -> None:
    """In which order threads and blocks run from now on."""
    library()[0].rk_host_set_order(ORDERS.index(order), c.c_uint64(seed))


class Output:
    """Device memory between guard words; `get()` checks them and copies what lies between."""

    def __init__(self, rig: CudaRig, shape: tuple[int, ...], dtype: Any, old: Array | None) -> None:
        self._rig, self.shape = rig, shape
        n = int(np.prod(shape))
        self._all = np.zeros(n + 2 * GUARD, dtype)
        self._all.view(np.uint8)[:] = 0xA5
        if old is not None:
            self._all[GUARD:-GUARD] = old.ravel()
        self._memory = rig.send(self._all)
        self.address = self._memory + GUARD * self._all.itemsize

    def get(self) -> Array:
        whole = self._rig.fetch(self._memory, self._all)
        edges = np.concatenate([whole[:GUARD], whole[-GUARD:]])
        assert (edges.view(np.uint8) == 0xA5).all(), "written outside the output"
        return whole[GUARD:-GUARD].reshape(self.shape)


class CudaRig(native.Device):
    """A device of one shape and type, made by the CUDA backend."""

    def __init__(self, shape: Shape, compute: int, where: Library | None = None) -> None:
        config, extent, freq = describe(shape, compute)
        _, calls, gpu = where or library()
        self._memory, error = c.c_void_p(), native.Error()
        status = calls.create(
            c.byref(self._memory), gpu, c.byref(config), c.byref(extent), c.byref(error)
        )
        if status != RK_OK:
            raise RuntimeError(f"{native.STATUS[status]}: {error.text.decode()}")
        self._ops = c.cast(self._memory, c.POINTER(native.DeviceHead)).contents.ops.contents
        self.config, self.extent, self.shape = config, extent, shape
        self.compute, self.freq, self._held = compute, freq, list[int]()
        self._act = np.uint16 if compute == RK_BF16 else np.float32

    # -- memory

    def send(self, array: Array) -> int:
        """Address of a copy on the device, there until the rig is closed."""
        array = np.ascontiguousarray(array)
        address = self.alloc(max(array.nbytes, 1))
        assert address, "no device memory"
        self._held.append(address)
        self.upload(address, array.ctypes.data, array.nbytes)
        return int(address)

    def put(self, array: Array) -> int:
        """The same with NaN before and after it: reading past an end spoils the result."""
        whole = np.zeros(array.size + 2 * GUARD, array.dtype)
        whole.view(np.uint8)[:] = 0xFF
        whole[GUARD:-GUARD] = array.ravel()
        return self.send(whole) + GUARD * whole.itemsize

    def fetch(self, address: int, like: Array) -> Array:
        """A copy of device memory; the device is still sound."""
        out = np.empty_like(like)
        self.download(out.ctypes.data, address, out.nbytes)
        error = native.Error()
        assert self.check(c.byref(error)) == RK_OK, error.text
        return out

    def close(self) -> None:
        """Free all arrays and the device."""
        while self._memory and self._held:
            self.free(self._held.pop())
        super().close()

    def poison(self) -> None:
        """NaN in all of the pool."""
        for block in range(self.shape.n_blocks):
            self.kv_fill(block, 0xFF)

    # -- ops on arrays

    def out(self, shape: tuple[int, ...], dtype: Any = np.float32, old: Any = None) -> Output:
        return Output(self, shape, dtype, old)

    def act_out(self, shape: tuple[int, ...]) -> Output:
        return Output(self, shape, self._act, None)

    def query_out(self, shape: tuple[int, ...]) -> Output:
        """Of what qkv gives and attention takes."""
        dtype = np.uint16 if self.extent.kv_type == RK_BF16 else np.float32
        return Output(self, shape, dtype, None)

    def weights(self, data: Array, bias: Array | None = None, dtype: int | None = None) -> Any:
        """rk_matrix on the device."""
        made = matrix(data, None, dtype)
        made.data = self.put(data)
        made.bias = None if bias is None else self.put(bias)
        return made

    def start(self, plan: Plan) -> None:
        """`begin`, with the plan kept for as long as the device may look at it."""
        self._plan = plan
        self.begin(c.byref(plan.batch))
