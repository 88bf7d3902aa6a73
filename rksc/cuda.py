"""Where the CUDA backend is: a shared object of its own, opened on first use."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sysconfig
from pathlib import Path

LIBRARIES = ("libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13")
"""What the shared object needs, each after what it needs itself."""


def library() -> str:
    """Path of the shared object, with NVIDIA's libraries opened; RuntimeError says what to do.

    `RKSC_CUDA_LIBRARY` names another one (the tests' host runtime, for example).
    """
    given = os.environ.get("RKSC_CUDA_LIBRARY")
    if given:
        return given
    found = Path(__file__).with_name(f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}")
    if not found.is_file():
        raise RuntimeError(
            'device "cuda": this installation of rksc was built without CUDA; build it again with '
            "RKSC_CUDA=on, which says what is missing (docs/cuda.md)"
        )
    for name in LIBRARIES:
        _preload(name)
    return str(found)


def describe() -> str:
    """What this build and this machine have of CUDA, in one line."""
    return f"{_build()}; {_driver()}"


def _build() -> str:
    try:
        path = library()
    except RuntimeError:
        return "not in this build (RKSC_CUDA=on adds it)"
    try:
        ctypes.CDLL(path)
    except OSError as error:
        return f"built, but {error} (pip install 'rksc[cuda]')"
    return "in this build"


def _driver() -> str:
    """The GPUs of this machine, as NVIDIA's driver names them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver here (libcuda.so.1)"
    n, status = ctypes.c_int(), driver.cuInit(0)
    status = status or driver.cuDeviceGetCount(ctypes.byref(n))
    if status:
        return f"the NVIDIA driver says error {status}"
    found = []
    for ordinal in range(n.value):
        name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
        driver.cuDeviceGetName(name, len(name), ordinal)
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), ordinal)
        found.append(f"{name.value.decode(errors='replace')} ({memory.value / 2**30:.0f} GiB)")
    return ", ".join(found) or "no GPU"


def _preload(name: str) -> None:
    """Open a library of NVIDIA's wheels, so that the loader need not search for it."""
    for package in ("nvidia.cu13", "nvidia"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or []) if spec else []:
            path = Path(folder) / "lib" / name
            if path.is_file():
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
                return
