"""Build the CUDA backend for the host runtime: `python tests/cuda_host/build.py` prints its path.

The same .c and .cu files as for a GPU, compiled by the ordinary compilers, and the runtime of this
folder in place of NVIDIA's. RKSC_NATIVE_FLAGS adds flags, CC and CXX choose compilers; objects lie
in build/native under the hash of all that goes into each.
"""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "native"
ABI = runpy.run_path(str(ROOT / "csrc" / "abi.py"))["flag"]

COMMON = ["-O2", "-g", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"]
COMMON += ["-Wall", "-Wextra", "-Werror"]
C = ["-std=c11", "-D_GNU_SOURCE", *COMMON]
CXX = ["-std=c++17", "-Wno-unknown-pragmas", *COMMON]


def sources(root: Path) -> list[Path]:
    """What makes the library, from the tree at `root`."""
    found = [root / "csrc" / "error.c", *sorted((root / "csrc" / "cuda").glob("*.c*"))]
    return [p for p in found if p.suffix in (".c", ".cu")] + runtime()


def runtime() -> list[Path]:
    """The host runtime itself."""
    return sorted(HERE.glob("*.cpp"))


def _included(source: Path, folders: list[Path], found: dict[Path, bytes]) -> None:
    """Our headers that `source` reads, directly or not, with their texts, into `found`."""
    text = source.read_bytes()
    for name in re.findall(rb'#include ["<]([^">]+)[">]', text):
        for folder in [source.parent, *folders]:
            path = folder / name.decode()
            if path.is_file():
                if path not in found:
                    found[path] = path.read_bytes()
                    _included(path, folders, found)
                break


def compiled(source: Path, root: Path) -> Path:
    plain = source.suffix == ".c"
    compiler = shlex.split(os.environ.get(*(("CC", "cc") if plain else ("CXX", "c++"))))
    abi = [ABI(root / "csrc")] if plain else []
    flags = [*(C if plain else CXX), *abi, *shlex.split(os.environ.get("RKSC_NATIVE_FLAGS", ""))]
    folders = [HERE / "include", HERE, root / "csrc", root / "csrc" / "cuda"]
    command = [*compiler, *flags, *(f"-I{folder}" for folder in folders)]
    headers: dict[Path, bytes] = {}
    _included(source, folders, headers)
    texts = [source.read_bytes(), *(headers[path] for path in sorted(headers))]
    key = hashlib.sha256(b"\0".join([*texts, shlex.join(command).encode()]))
    target = BUILD / f"cuda-host-{source.stem}-{key.hexdigest()[:16]}.o"
    if not target.exists():
        part = target.with_suffix(f".{os.getpid()}.part")
        language = [] if plain else ["-x", "c++"]
        _run([*command, *language, "-c", str(source), "-o", str(part)])
        part.replace(target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")


@cache
def build(probes: bool = False) -> Path:
    """Path of the shared object; RuntimeError with the compiler's text.

    RKSC_CUDA_ROOT: another tree than this one, for mutate.py. probes: the runtime with the kernels
    of probes.cu instead, for the runtime's own tests.
    """
    root = Path(os.environ.get("RKSC_CUDA_ROOT", ROOT))
    files = [*runtime(), HERE / "probes.cu"] if probes else sources(root)
    BUILD.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda p: compiled(p, root), files))
    key = hashlib.sha256("\0".join(map(str, objects)).encode()).hexdigest()[:16]
    library = BUILD / f"rksc_cuda_host-{key}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}.part")
        extra = shlex.split(os.environ.get("RKSC_NATIVE_FLAGS", ""))
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        _run(
            [
                *compiler,
                "-shared",
                "-pthread",
                "-Wl,-Bsymbolic",
                *extra,
                *map(str, objects),
                "-o",
                str(part),
            ]
        )
        part.replace(library)
    return library


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
