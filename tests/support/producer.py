"""A counting DLPack producer: every field can be set, every deleter call is counted.

`Producer(array)` exports the array's memory through __dlpack__ as numpy or torch would, but any
field of the struct may lie. `exports` counts the structs handed out, `deleted` the deleter calls;
a correct consumer makes them equal, each exactly once. Structs are kept for ever, so that a
second deleter call is counted (`deleted > exports`) instead of crashing.
"""

from __future__ import annotations

import ctypes as c
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL, FLOAT8_E4M3FN = 0, 1, 2, 4, 5, 6, 10
CPU, CUDA = 1, 2
READ_ONLY, IS_COPIED = 1, 2


class _Device(c.Structure):
    _fields_ = (("type", c.c_int32), ("id", c.c_int32))


class _DataType(c.Structure):
    _fields_ = (("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16))


class _Tensor(c.Structure):
    _fields_ = (
        ("data", c.c_void_p),
        ("device", _Device),
        ("ndim", c.c_int32),
        ("dtype", _DataType),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    )


class _Legacy(c.Structure):
    _fields_ = (("tensor", _Tensor), ("context", c.c_void_p), ("deleter", c.c_void_p))


class _Versioned(c.Structure):
    _fields_ = (
        ("major", c.c_uint32),
        ("minor", c.c_uint32),
        ("context", c.c_void_p),
        ("deleter", c.c_void_p),
        ("flags", c.c_uint64),
        ("tensor", _Tensor),
    )


_NAMES = {_Legacy: b"dltensor", _Versioned: b"dltensor_versioned"}
_python = c.PyDLL(None)  # pythonapi is shared: others set its types, too
_python.PyCapsule_New.restype = c.py_object
_python.PyCapsule_New.argtypes = (c.c_void_p, c.c_char_p, c.c_void_p)
_python.PyCapsule_IsValid.argtypes = (c.c_void_p, c.c_char_p)
_python.PyCapsule_GetPointer.restype = c.c_void_p
_python.PyCapsule_GetPointer.argtypes = (c.c_void_p, c.c_char_p)

# address -> (owner, struct, arrays it points to); never emptied
_exported: dict[int, tuple[Producer, Any, Any]] = {}


def _count_deletion(address: int) -> None:
    _exported[address][0].deleted += 1


def _free_unconsumed(capsule: int) -> None:
    """What a producer owes: a capsule that nobody consumed frees its tensor."""
    for name in _NAMES.values():
        if _python.PyCapsule_IsValid(capsule, name):
            _count_deletion(_python.PyCapsule_GetPointer(capsule, name))


_delete = c.CFUNCTYPE(None, c.c_void_p)(_count_deletion)
_capsule_dies = c.PYFUNCTYPE(None, c.c_void_p)(_free_unconsumed)


_KINDS = {"i": INT, "u": UINT, "f": FLOAT, "c": COMPLEX, "b": BOOL}


class Producer:
    """Exports `array` (None: no memory at all) with these fields instead of its own.

    strides: "own", None for a NULL pointer, or elements. version: (major, minor) of a versioned
    capsule, None for a producer from before DLPack 1.0. max_version: whether __dlpack__ knows the
    keyword. data: another address. error: raised by __dlpack__.
    """

    def __init__(
        self,
        array: NDArray[Any] | None,
        *,
        code: int | None = None,
        bits: int | None = None,
        lanes: int = 1,
        shape: tuple[int, ...] | None = None,
        ndim: int | None = None,
        strides: tuple[int, ...] | Literal["own"] | None = "own",
        byte_offset: int = 0,
        data: int | None = None,
        device: tuple[int, int] = (CPU, 0),
        version: tuple[int, int] | None = (1, 0),
        flags: int = 0,
        max_version: bool = True,
        deleter: bool = True,
        error: Exception | None = None,
    ) -> None:
        self.array = array
        kind = "f" if array is None else array.dtype.kind
        size = 4 if array is None else array.dtype.itemsize
        self.dtype = _DataType(
            _KINDS[kind] if code is None else code, 8 * size if bits is None else bits, lanes
        )
        self.shape = (() if array is None else array.shape) if shape is None else shape
        self.ndim = len(self.shape) if ndim is None else ndim
        if strides == "own":
            strides = None if array is None else tuple(s // size for s in array.strides)
        self.strides = strides
        self.byte_offset = byte_offset
        self.data = (0 if array is None else array.ctypes.data) if data is None else data
        self.device, self.version, self.flags = device, version, flags
        self.max_version, self.deleter, self.error = max_version, deleter, error
        self.exports = self.deleted = 0
        self.asked: list[dict[str, Any]] = []
        """The keywords of each __dlpack__ call that reached the producer."""

    @property
    def alive(self) -> int:
        """Structs that are out and not deleted."""
        return self.exports - self.deleted

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **keywords: Any) -> Any:
        if "max_version" in keywords and not self.max_version:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.asked.append(keywords)
        if self.error is not None:
            raise self.error
        asked = keywords.get("max_version")
        managed: Any
        if self.version is None or asked is None or asked[0] < 1:
            managed = _Legacy()
        else:
            managed = _Versioned(major=self.version[0], minor=self.version[1], flags=self.flags)
        shape = (c.c_int64 * max(1, len(self.shape)))(*self.shape)
        tensor = managed.tensor
        tensor.data, tensor.device = self.data, _Device(*self.device)
        tensor.ndim, tensor.dtype = self.ndim, self.dtype
        tensor.shape, tensor.byte_offset = shape, self.byte_offset
        strides = None
        if self.strides is not None:
            strides = (c.c_int64 * max(1, len(self.strides)))(*self.strides)
            tensor.strides = strides
        if self.deleter:
            managed.deleter = c.cast(_delete, c.c_void_p).value
        address = c.addressof(managed)
        _exported[address] = (self, managed, (shape, strides))
        self.exports += 1
        destructor = c.cast(_capsule_dies, c.c_void_p) if self.deleter else None
        return _python.PyCapsule_New(address, _NAMES[type(managed)], destructor)


def legacy(array: NDArray[Any], **fields: Any) -> Producer:
    """A producer from before DLPack 1.0: no max_version keyword, unversioned capsules."""
    return Producer(array, version=None, max_version=False, **fields)


def bfloat16(array: NDArray[np.float32], **fields: Any) -> Producer:
    """The array rounded to bfloat16 (nearest even), exported with DLPack's own code for it."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return Producer(rounded, code=BFLOAT, bits=16, **fields)
