"""Build rksc._core: every .c below csrc (but the CUDA backend), each with the flags of its file.

RKSC_WERROR=1 makes warnings errors, RKSC_SANITIZE=1 adds the address and undefined-behaviour
sanitizers, CFLAGS and CC work as usual. Objects compile side by side and only when they, a header
or their flags changed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path("csrc")
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
    "int8_avx2.c": ["-mavx2", "-mfma", "-mf16c"],
    "int8_avxvnni.c": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "int8_avx512vnni.c": [*AVX512, "-mavx512vnni"],
    "kernels_avx512_bf16.c": [*AVX512, "-mavx512bf16"],
    "kernels_amx.c": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}


def dlpack_include() -> str:
    """Folder of <dlpack/dlpack.h>, found without importing the package that brings it."""
    spec = importlib.util.find_spec("tvm_ffi")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        include = Path(folder) / "include"
        if (include / "dlpack" / "dlpack.h").is_file():
            return str(include)
    raise SystemExit("building rksc needs dlpack.h: pip install apache-tvm-ffi")


def sources() -> list[str]:
    """The .c files, sorted, relative to this file."""
    return sorted(str(p) for p in SOURCE.rglob("*.c") if p.relative_to(SOURCE).parts[0] != "cuda")


def flags() -> list[str]:
    extra = ["-Werror"] if os.environ.get("RKSC_WERROR") == "1" else []
    extra += SANITIZE if os.environ.get("RKSC_SANITIZE") == "1" else []
    return [*FLAGS, *extra]


class BuildExtension(build_ext):  # type: ignore[misc]  # setuptools is untyped
    """Compiles objects in parallel, each file with its own instruction set."""

    def build_extension(self, ext: Extension) -> None:
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

    def _recipe(self) -> str:
        """What an object was made with, beside its source."""
        return shlex.join([*self.compiler.compiler_so, *flags(), sys.version, np.__version__])

    def _is_stale(self, obj: str, src: str) -> bool:
        record = Path(obj).with_suffix(".flags")
        if not (os.path.exists(obj) and record.exists() and record.read_text() == self._recipe()):
            return True
        newest = max(os.path.getmtime(p) for p in [src, *map(str, SOURCE.rglob("*.h")), __file__])
        return os.path.getmtime(obj) <= newest


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
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
