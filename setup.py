"""Build rksc._core: every .c below csrc (but the CUDA backend), each with the flags of its file.

RKSC_WERROR=1 makes warnings errors, RKSC_SANITIZE=1 adds the address and undefined-behaviour
sanitizers, CFLAGS and CC work as usual. RKSC_DLPACK_INCLUDE names a folder with dlpack/dlpack.h
where apache-tvm-ffi is not installed. Objects compile side by side and only when they, a header or
their flags changed.

RKSC_CUDA=auto|on|off: the CUDA backend, rksc._cuda, a shared object that nothing but
rksc.cuda.library opens. auto builds it where nvcc, the runtime and cuBLAS are found, in a CUDA
toolkit 13 or in NVIDIA's wheels; on says what is missing. RKSC_CUDA_ARCHS="90,120" limits it to
some compute capabilities.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path("csrc")
ABI = runpy.run_path(str(SOURCE / "abi.py"))["flag"](SOURCE)
FLAGS = [
    *("-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"),
    *("-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Wno-cast-function-type"),
    "-D_GNU_SOURCE",
]
SANITIZE = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]

AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
ISA_FLAGS = {
    "kernels_avx2.c": ["-mavx2", "-mfma", "-mf16c"],
    "kernels_avx512.c": AVX512,
    "int16_avx2.c": ["-mavx2", "-mfma", "-mf16c"],
    "int16_avxvnni.c": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "int16_avx512vnni.c": [*AVX512, "-mavx512vnni"],
    "int8_avx2.c": ["-mavx2", "-mfma", "-mf16c"],
    "int8_avxvnni.c": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "int8_avx512vnni.c": [*AVX512, "-mavx512vnni"],
    "kernels_avx512_bf16.c": [*AVX512, "-mavx512bf16"],
    "kernels_amx.c": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}


def dlpack_include() -> str:
    """Folder of <dlpack/dlpack.h>, found without importing the package that brings it."""
    given = os.environ.get("RKSC_DLPACK_INCLUDE")
    spec = importlib.util.find_spec("tvm_ffi")
    found = [Path(p) / "include" for p in (spec.submodule_search_locations or [])] if spec else []
    for include in [Path(given)] if given else found:
        if (include / "dlpack" / "dlpack.h").is_file():
            return str(include)
    raise SystemExit(
        f"RKSC_DLPACK_INCLUDE={given}: no dlpack/dlpack.h there"
        if given
        else "building rksc needs dlpack.h: pip install apache-tvm-ffi, or name the folder with "
        "dlpack/dlpack.h in RKSC_DLPACK_INCLUDE"
    )


def sources() -> list[str]:
    """The .c files, sorted, relative to this file."""
    return sorted(str(p) for p in SOURCE.rglob("*.c") if p.relative_to(SOURCE).parts[0] != "cuda")


# ---- CUDA --------------------------------------------------------------------------------------

ARCHS = ("80", "86", "89", "90", "100", "120")
"""Compute capabilities with machine code; others newer than the first take its PTX."""


class Cuda(NamedTuple):
    """What builds rksc._cuda: a compiler, folders of headers and of libraries."""

    nvcc: str
    include: list[str]
    lib: list[str]


def _cuda_roots() -> Iterator[Path]:
    """Folders that may hold a toolkit: named, on PATH, usual, in wheels."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name])
    found = shutil.which("nvcc")
    if found:
        yield Path(found).resolve().parent.parent
    yield Path("/usr/local/cuda")
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield Path(folder) / "cu13"


def _is_older(root: Path) -> bool:
    """Are there headers of a CUDA before 13?"""
    header = root / "include" / "cuda_runtime_api.h"
    text = header.read_text("utf-8", "replace") if header.is_file() else ""
    found = re.search(r"^#define CUDART_VERSION +(\d+)", text, re.MULTILINE)
    return found is not None and int(found[1]) < 13000


def find_cuda() -> Cuda | None:
    """None: without CUDA, as RKSC_CUDA and the machine have it."""
    wish = os.environ.get("RKSC_CUDA", "auto")
    if wish not in ("auto", "on", "off"):
        raise SystemExit(f"RKSC_CUDA={wish}: it is auto, on or off")
    if wish == "off":
        return None
    roots = [root for root in _cuda_roots() if not _is_older(root)]
    wanted = {
        "nvcc": [root / "bin" / "nvcc" for root in roots],
        "cuda_runtime.h": [root / "include" / "cuda_runtime.h" for root in roots],
        "cublas_v2.h": [root / "include" / "cublas_v2.h" for root in roots],
    }
    wanted["nv/target"] = [
        root / "include" / folder / "nv" / "target" for root in roots for folder in ("cccl", "")
    ]
    for name in ("libcudart.so.13", "libcublas.so.13"):
        wanted[name] = [root / lib / name for root in roots for lib in ("lib64", "lib")]
    found = {name: next((p for p in paths if p.is_file()), None) for name, paths in wanted.items()}
    missing = [name for name, path in found.items() if path is None]
    if missing and wish == "on":
        raise SystemExit(
            f"RKSC_CUDA=on: {', '.join(missing)} not found. Install a CUDA toolkit 13 and set "
            "CUDA_HOME, or NVIDIA's wheels beside what builds rksc (pip install "
            "'nvidia-cuda-nvcc>=13,<14' 'nvidia-cuda-runtime>=13,<14' 'nvidia-cublas>=13,<14' "
            "'nvidia-cuda-cccl>=13,<14', then pip install --no-build-isolation)"
        )
    paths = {name: path for name, path in found.items() if path is not None}
    if missing:
        return None
    include = [str(paths[name].parent) for name in ("cuda_runtime.h", "cublas_v2.h")]
    lib = [str(paths[name].parent) for name in ("libcudart.so.13", "libcublas.so.13")]
    return Cuda(str(paths["nvcc"]), list(dict.fromkeys(include)), list(dict.fromkeys(lib)))


def nvcc_flags(cuda: Cuda) -> list[str]:
    """Machine code for each capability, and PTX of the oldest for those that come later."""
    archs = os.environ.get("RKSC_CUDA_ARCHS", ",".join(ARCHS)).replace(" ", "").split(",")
    if not all(arch in ARCHS for arch in archs):
        raise SystemExit(f"RKSC_CUDA_ARCHS={','.join(archs)}: known are {','.join(ARCHS)}")
    code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    code.append(f"-gencode=arch=compute_{archs[0]},code=compute_{archs[0]}")
    include = [f"-I{folder}" for folder in ("csrc", "csrc/cuda", *cuda.include)]
    host = "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra"
    strict = ["-Werror", "all-warnings"] if os.environ.get("RKSC_WERROR") == "1" else []
    return ["-std=c++17", "-O3", *strict, host, *code, *include]


# ---- compiling ---------------------------------------------------------------------------------


def flags() -> list[str]:
    extra = ["-Werror"] if os.environ.get("RKSC_WERROR") == "1" else []
    extra += SANITIZE if os.environ.get("RKSC_SANITIZE") == "1" else []
    return [*FLAGS, ABI, *extra]


class BuildExtension(build_ext):  # type: ignore[misc]  # setuptools is untyped
    """Compiles objects in parallel, each file with its own instruction set."""

    def build_extension(self, ext: Extension) -> None:
        if ext.name == "rksc._cuda":
            ext.extra_objects = self._compile_kernels()
        compiler = self.compiler
        compile_one = compiler._compile
        machine = platform.machine()

        def compile_file(obj, src, suffix, cc_args, postargs, pp_opts):  # type: ignore[no-untyped-def]
            isa = ISA_FLAGS.get(Path(src).name, []) if machine in ("x86_64", "AMD64") else []
            compile_one(obj, src, suffix, cc_args, [*postargs, *isa], pp_opts)

        def compile_all(  # type: ignore[no-untyped-def]
            sources,
            output_dir=None,
            macros=None,
            include_dirs=None,
            debug=0,
            extra_preargs=None,
            extra_postargs=None,
            depends=None,
        ):
            macros, objects, postargs, pp_opts, build = compiler._setup_compile(
                output_dir, macros, include_dirs, sources, depends, extra_postargs
            )
            cc_args = compiler._get_cc_args(pp_opts, debug, extra_preargs)
            stale = [obj for obj in objects if obj in build and self._is_stale(obj, build[obj][0])]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                jobs = []
                for obj in stale:
                    src, suffix = build[obj]
                    jobs.append(
                        pool.submit(compile_file, obj, src, suffix, cc_args, postargs, pp_opts)
                    )
                for obj, job in zip(stale, jobs, strict=True):
                    job.result()
                    Path(obj).with_suffix(".flags").write_text(self._recipe())
            return objects

        compiler.compile = compile_all
        super().build_extension(ext)

    def _compile_kernels(self) -> list[str]:
        """Objects of the .cu files, by nvcc."""
        assert CUDA is not None
        command = [CUDA.nvcc, *nvcc_flags(CUDA), "-c"]
        folder = Path(self.build_temp) / "csrc" / "cuda"
        folder.mkdir(parents=True, exist_ok=True)

        def compile_one(source: Path) -> str:
            target = folder / f"{source.stem}.cu.o"
            if self._is_stale(str(target), str(source), shlex.join(command)):
                subprocess.run([*command, str(source), "-o", str(target)], check=True)
                target.with_suffix(".flags").write_text(shlex.join(command))
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(compile_one, sorted((SOURCE / "cuda").glob("*.cu"))))

    def _recipe(self) -> str:
        """What an object was made with, beside its source."""
        return shlex.join([*self.compiler.compiler_so, *flags(), sys.version, np.__version__])

    def _is_stale(self, obj: str, src: str, recipe: str = "") -> bool:
        record = Path(obj).with_suffix(".flags")
        recipe = recipe or self._recipe()
        if not (os.path.exists(obj) and record.exists() and record.read_text() == recipe):
            return True
        headers = [str(p) for suffix in ("h", "cuh") for p in SOURCE.rglob(f"*.{suffix}")]
        return os.path.getmtime(obj) <= max(os.path.getmtime(p) for p in [src, *headers, __file__])


CUDA = find_cuda()


def cuda_extension(cuda: Cuda) -> Extension:
    """The CUDA backend; rksc.cuda opens NVIDIA's libraries before it where they are wheels."""
    return Extension(
        "rksc._cuda",
        ["csrc/error.c", *sorted(str(p) for p in (SOURCE / "cuda").glob("*.c"))],
        include_dirs=["csrc", "csrc/cuda", *cuda.include],
        depends=sorted(str(p) for p in (SOURCE / "cuda").glob("*.cu*")),
        extra_compile_args=flags(),
        extra_link_args=[
            *(f"-L{folder}" for folder in cuda.lib),
            *(f"-Wl,-rpath,{folder}" for folder in cuda.lib),
            *("-l:libcublas.so.13", "-l:libcudart.so.13", "-lstdc++", "-pthread"),
        ],
    )


setup(
    ext_modules=[
        Extension(
            "rksc._core",
            sources(),
            include_dirs=["csrc", dlpack_include(), np.get_include()],
            depends=sorted(str(p) for p in SOURCE.rglob("*.h")),
            extra_compile_args=flags(),
            extra_link_args=[
                "-pthread",
                *(SANITIZE if os.environ.get("RKSC_SANITIZE") == "1" else []),
            ],
            libraries=["m"],
        ),
        *([cuda_extension(CUDA)] if CUDA else []),
    ],
    cmdclass={"build_ext": BuildExtension},
)
