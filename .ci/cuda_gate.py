"""The compile gate of the CUDA backend: what the compiler made of the kernels.

    python .ci/cuda_gate.py rksc/_cuda*.so [--write | --check]

Reads the shared object with cuobjdump (CUDA toolkit, or the wheels nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm): machine code for every compute capability that setup.py lists (or
RKSC_CUDA_ARCHS), PTX, no spills and no local memory where none is meant, matrix instructions and
16-byte copies where they are meant. --write puts the table into docs/cuda.md, --check compares:
the kernels always, numbers where the compiler is the one that the table names.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "cuda.md"
BEGIN, END = "<!-- resources: .ci/cuda_gate.py --write -->", "<!-- end of resources -->"

LOCAL_IS_MEANT = ("angles",)
"""Sines of large float64 angles keep a table in local memory; they run once per row and step."""

MATRIX = r"\battend<(?:64|128|256),"
"""Kernels that multiply with mma and fill shared memory 16 bytes at a time, asynchronously."""

WIDE = r"\b(?:norm|swiglu|rotate|answer)<|\bmerge<\w+, 4>|\battend<float>"
"""Kernels that load 16 bytes at a time from global memory."""

Usage = dict[str, int]


def tool(name: str) -> str:
    """cuobjdump on PATH, or that of NVIDIA's wheels."""
    found = shutil.which(name)
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "cu13" / "bin" / name
        found = found or (str(path) if path.is_file() else None)
    if found is None:
        sys.exit(f"{name} not found: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return found


def run(*command: str, text: str | None = None) -> str:
    path = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def plain(mangled: set[str]) -> dict[str, str]:
    """Readable names: `attend<64, 2>`."""
    names = sorted(mangled)
    shown = run("c++filt", text="\n".join(names)).splitlines()
    short = [re.sub(r"\(anonymous namespace\)::|^void ", "", s).split("(")[0] for s in shown]
    return dict(zip(names, short, strict=True))


def by_arch(listing: str) -> dict[str, str]:
    """The parts of a listing, by "sm_90"."""
    parts: dict[str, str] = defaultdict(str)
    for part in re.split(r"^Fatbin elf code:$", listing, flags=re.MULTILINE)[1:]:
        part = part.split("Fatbin ptx code:")[0]
        match = re.search(r"arch = (sm_\w+)", part)
        if match:
            parts[match[1]] += part
    return parts


def resources(library: str) -> dict[str, dict[str, Usage]]:
    """{architecture: {kernel: {"REG": ..., "STACK": ..., "SHARED": ..., "LOCAL": ...}}}"""
    listing = run(tool("cuobjdump"), "--dump-resource-usage", library)
    found: dict[str, dict[str, Usage]] = {}
    for arch, part in by_arch(listing).items():
        kernels = {}
        for name, usage in re.findall(r"Function ([^:\s]+):\s*\n\s*([^\n]+)", part):
            kernels[name] = {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", usage)}
        names = plain(set(kernels))
        found[arch] = {names[name]: usage for name, usage in kernels.items()}
    return found


def instructions(library: str) -> dict[str, dict[str, list[str]]]:
    """{architecture: {kernel: its instructions' names}}"""
    listing = run(tool("cuobjdump"), "--dump-sass", library)
    found: dict[str, dict[str, list[str]]] = {}
    for arch, part in by_arch(listing).items():
        bodies = re.split(r"^\s*Function : (\S+)$", part, flags=re.MULTILINE)[1:]
        names = plain(set(bodies[::2]))
        found[arch] = {
            names[name]: re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", body)
            for name, body in zip(bodies[::2], bodies[1::2], strict=True)
        }
    return found


def complaints(library: str, used: dict[str, dict[str, Usage]]) -> list[str]:
    sys.path.insert(0, str(ROOT))
    archs = (
        os.environ.get("RKSC_CUDA_ARCHS")
        or re.search(r"^ARCHS = \(([^)]*)\)", (ROOT / "setup.py").read_text("utf-8"), re.MULTILINE)[
            1
        ]
    )  # type: ignore[index]
    wanted = {f"sm_{number}" for number in re.findall(r"\d+", str(archs))}
    found = [f"no machine code for {arch}" for arch in sorted(wanted - set(used))]
    if "Fatbin ptx code:" not in run(tool("cuobjdump"), "--list-ptx", library) + run(
        tool("cuobjdump"), "--dump-resource-usage", library
    ):
        found.append("no PTX")
    for arch, kernels in used.items():
        for name, usage in kernels.items():
            meant = any(word in name for word in LOCAL_IS_MEANT)
            if (usage["STACK"] or usage["LOCAL"]) and not meant:
                found.append(f"{arch}: {name} uses local memory: {usage}")
    for arch, code in instructions(library).items():
        for name, words in code.items():
            joined = "\n".join(words)
            if re.search(MATRIX, name) and not (
                "HMMA" in joined and re.search(r"LDGSTS\S*\.128", joined) and "LDSM" in joined
            ):
                found.append(f"{arch}: {name} lacks HMMA, LDSM or 16-byte LDGSTS")
            if re.search(WIDE, name) and not re.search(r"LDG\S*\.128", joined):
                found.append(f"{arch}: {name} has no 16-byte loads")
        if not any(re.search(MATRIX, name) for name in code):
            found.append(f"{arch}: no attention kernel with matrix instructions")
    return found


def compiler(library: str) -> str:
    """The compiler's version as its machine code tells it: "13.0.88"."""
    listing = run(tool("cuobjdump"), "--dump-elf", library)
    found = re.search(r"Tool Version: .* release [\d.]+, V([\d.]+)", listing)
    return found[1] if found else "unknown"


def reserved(arch: str) -> int:
    """Bytes of shared memory that the system keeps for itself and the listing counts."""
    return 1024 if int(arch.removeprefix("sm_")) >= 90 else 0


def table(used: dict[str, dict[str, Usage]], version: str) -> str:
    """Registers by architecture, and the largest static shared memory and stack."""
    archs = sorted(used, key=lambda arch: int(arch.removeprefix("sm_")))
    lines = [
        f"nvcc {version}.",
        "",
        f"| kernel | {' | '.join(archs)} | static shared bytes | stack bytes |",
        "|---|" + "---|" * (len(archs) + 2),
    ]
    for name in sorted(set().union(*used.values())):
        each = {arch: used[arch][name] for arch in archs if name in used[arch]}
        registers = " | ".join(str(each[arch]["REG"]) if arch in each else "-" for arch in archs)
        shared = max(max(u["SHARED"] - reserved(arch), 0) for arch, u in each.items())
        stack = max(u["STACK"] for u in each.values())
        lines.append(f"| `{name}` | {registers} | {shared} | {stack} |")
    return "\n".join(lines)


def is_old(written: str, made: str) -> bool:
    """Does the table `written` tell of other kernels, or other numbers of the same compiler?"""
    ours, theirs = written.strip().splitlines(), made.splitlines()
    if ours[:1] == theirs[:1]:
        return ours != theirs
    return [line.split("|")[1:2] for line in ours] != [line.split("|")[1:2] for line in theirs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("library")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    used = resources(arguments.library)
    found = complaints(arguments.library, used)
    if arguments.write or arguments.check:
        text = PAGE.read_text("utf-8")
        head, _, rest = text.partition(BEGIN)
        written, _, tail = rest.partition(END)
        made = table(used, compiler(arguments.library))
        if arguments.write:
            PAGE.write_text(f"{head}{BEGIN}\n{made}\n{END}{tail}", "utf-8")
        elif is_old(written, made):
            found.append(f"the table of {PAGE.name} is old: run this with --write")
    for line in found:
        sys.stderr.write(f"{line}\n")
    kernels = set().union(*used.values())
    sys.stdout.write(f"{len(kernels)} kernels for {', '.join(sorted(used))}\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
