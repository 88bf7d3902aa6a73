"""Break the CUDA backend, one way at a time: does some test notice?

    python tests/cuda_host/mutate.py [--list] [NUMBER ...]

Every barrier and every wait for an asynchronous copy of the kernels is taken out in turn, then
each change of CHANGES is made. A copy of csrc with one change is built for the host runtime (only
what includes it is compiled again), and the tests of ops and sessions run on it until one fails,
those of the changed file first; a crash, or a kernel that does not end, counts as a failure. A
change that nobody notices is printed and makes the exit status 1: a barrier that is not needed
should go, or a test is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KERNELS = ROOT / "csrc" / "cuda"
MUTANT = ROOT / "build" / "mutant"
OPS, SESSIONS = "tests/test_cuda_ops.py", "tests/test_cuda_session.py"
LEND, WORK = "tests/test_cuda_lend.py", "tests/test_cuda_work.py"
FIRST = {  # what a change of the file most likely breaks; all others come after it
    "attention": [OPS, "-k", "attention or tree"],
    "block": [OPS, "-k", "norm or answer or pick"],
    "panels": [WORK],
    "pick": [OPS, "-k", "pick"],
    "pool": [LEND],
    "rows": [OPS, "-k", "not attention and not tree and not pick"],
    "work": [WORK],
}
MEETINGS = re.compile(r"(?<!return )(?:__syncthreads|rk_copy_wait<\d>|__syncwarp)\(\);")


class Change(NamedTuple):
    """In csrc/cuda/`file`, the occurrence of `old` at offset `at` becomes `new`."""

    file: str
    old: str
    new: str
    at: int = -1

    def __str__(self) -> str:
        text = (KERNELS / self.file).read_text("utf-8")
        line = text.count("\n", 0, self.at if self.at >= 0 else text.index(self.old)) + 1
        old, new = (" ".join(part.split()) for part in (self.old, self.new))
        return f"{self.file}:{line}: {old} -> {new or 'nothing'}"


CHANGES = [
    # tails: the last key, row, column, unit
    Change("attention.cuh", "min(t.key_end, position + 1)", "min(t.key_end, position)"),
    Change("attention.cuh", "min(t.unit.key_end, t.unit.first_position + 1)", "t.unit.key_end"),
    Change("attention.cu", "at < t.key_end && chunk * 8", "at <= t.key_end && chunk * 8"),
    Change("attention.cu", "i + S::STEP > t.full_end", "i + S::STEP > t.full_end + 1"),
    Change("attention_plain.cu", "min(KEYS, t.key_end - key)", "KEYS"),
    Change("attention_plain.cu", "nullptr && j < n", "nullptr && j <= n"),
    Change("step.c", "batch->positions, n, rows", "batch->positions, n - 1, rows"),
    # an instance of the kernel that is not launched
    *(
        Change("attention.cu", f"launch<{size}>(a, stream)", "(void)stream")
        for size in ("64, 1", "64, 2", "128, 1", "128, 2", "256, 1")
    ),
    # more shared memory than the smallest of the GPUs has
    Change("attention.cu", "STAGES = 2;", "STAGES = 3;"),
    # merging: base, weights, order
    Change("attention.cuh", "exp2f(m - all)", "exp2f(all - m)"),
    Change("attention.cu", "max * LOG2_E", "max"),
    Change("attention.cu", "chunk < end; chunk += RK_WARP", "chunk < end; chunk += 1 << 20"),
    Change("attention.cu", "(mine + j) * step", "mine * step"),
    # a barrier that counts, besides those that meetings() finds
    Change("pick.cu", "__syncthreads_or(bad)", "bad"),
    # a buffer that is used again too early, or a copy that comes too late
    Change("step.c", "cudaEventSynchronize, s->sent[s->turn]", "cudaGetLastError"),
    Change("step.c", "    send(dev);\n    cuda_graph *graph", "    cuda_graph *graph"),
    Change("step.c", "    forget_graphs(dev); /*", "    /*"),
    Change("device.c", "    wait(dev); /* `host`", "    /* `host`"),
    # what was recorded comes before other work
    *(
        Change(
            "device.c",
            f"    cuda_play(dev);\n    CUDA_TRY(dev, {call}",
            f"    CUDA_TRY(dev, {call}",
        )
        for call in ("cudaMemcpyAsync, block", "cudaMemsetAsync, block")
    ),
    # memory on loan: its next user, its consumer, its contents
    Change("pool.c", "p->resting = resting;", "p->resting = resting && false;"),
    Change("pool.c", "cudaDeviceSynchronize() != cudaSuccess", "false"),
    Change(
        "pool.c",
        "cudaStreamWaitEvent((cudaStream_t)stream,",
        "stream > 0 ? cudaSuccess : cudaStreamWaitEvent((cudaStream_t)stream,",
    ),
    Change(
        "device.c",
        "    cuda_play(dev);\n    rk_status status = device_check",
        "    rk_status status = device_check",
    ),
    # the host's side
    Change("step.c", "slots[i] = -1;", "slots[i] = 0;"),
    Change("launch.c", "layer * dev->layer_bytes", "(layer & 0) * dev->layer_bytes"),
    Change("launch.c", "op->layer >= c->window_from", "op->layer > c->window_from"),
    Change("launch.c", "dev->qkv + queries + keys", "dev->qkv + queries"),
    Change("work.c", "pairs > w->rule.narrow_pairs &&", "pairs >= w->rule.narrow_pairs &&"),
    Change("work.c", "saved >= w->share_keys + 4 * n_rows", "saved >= w->share_keys + n_rows"),
]


def meetings() -> list[Change]:
    """Every barrier and wait, taken out."""
    found = []
    for path in sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")]):
        for match in MEETINGS.finditer(path.read_text("utf-8")):
            found.append(Change(path.name, match[0], ";", match.start()))
    return found


def apply(change: Change) -> None:
    """MUTANT becomes a copy of the sources with the change."""
    shutil.rmtree(MUTANT, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", MUTANT / "csrc")
    path = MUTANT / "csrc" / "cuda" / change.file
    text = path.read_text("utf-8")
    at = change.at if change.at >= 0 else text.index(change.old)
    path.write_text(text[:at] + change.new + text[at + len(change.old) :], "utf-8")


def noticed(change: Change) -> str:
    """The first test that fails, "the compiler", or nothing."""
    apply(change)
    variables = {**os.environ, "RKSC_CUDA_ROOT": str(MUTANT)}
    made = subprocess.run(
        [sys.executable, str(HERE / "build.py")], env=variables, capture_output=True, check=False
    )
    if made.returncode:
        return "the compiler"
    first = FIRST.get(change.file.partition(".")[0].partition("_")[0], [SESSIONS])
    for tests in (first, [OPS, SESSIONS, LEND, WORK]):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False,
                timeout=300,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "the time limit"
        if done.returncode:
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            return failed[0] if failed else f"exit status {done.returncode}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("numbers", nargs="*", type=int, help="only these (default: all)")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    changes = [*meetings(), *CHANGES]
    unnoticed = 0
    for number, change in enumerate(changes):
        if arguments.numbers and number not in arguments.numbers:
            continue
        by = "" if arguments.list else noticed(change)
        unnoticed += not by
        result = "" if arguments.list else f"  [{by or 'NOBODY NOTICED'}]"
        print(f"{number:3} {change}{result}", flush=True)
    shutil.rmtree(MUTANT, ignore_errors=True)
    return 0 if arguments.list else int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
