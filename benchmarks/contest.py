"""Several engines take turns at the same workload, each in a process of its own.

All are started first, one after the other; then in every round each runs the workload once, on
the same token ids (another prefix each round), while the others sleep. Every round begins with
another one: who comes first meets the caches that the measurement of the machine left. The CPU
time of those that should sleep is measured too. Peak memory is what Linux calls VmHWM, the sum
over an engine's processes, mapped weights included, unless the contestant tells it. Nothing here
knows what the engines are: see branching.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rksc.experiments.workload import Shape
from rksc.limits.rates import READ_BYTES, measure

START_SECONDS, RUN_SECONDS = 900.0, 1800.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Contestant:
    """A program that speaks peers/protocol.py. family: what its results are compared as."""

    name: str
    family: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def work(shape: Shape, seed: int, vocab_size: int) -> dict[str, Any]:
    """Random token ids, 100 .. 40000 where the vocabulary has them; another seed, other ids. All
    suffixes begin differently: equal branches could be computed once."""
    draw = random.Random(seed)
    low, high = (100, min(40000, vocab_size)) if vocab_size > 200 else (0, vocab_size)

    def tokens(n: int) -> list[int]:
        return [draw.randrange(low, high) for _ in range(n)]

    begins = draw.sample(range(low, high), shape.branches)
    return {
        "prefix": tokens(shape.prefix),
        "suffixes": [[first, *tokens(shape.suffix - 1)] for first in begins],
        "question": tokens(shape.verify),
        "new": shape.new,
    }


def run(
    contestants: Sequence[Contestant],
    shapes: Sequence[Shape],
    repeat: int,
    vocab_size: int,
    n_threads: int,
    logs: Path,
    say: Callable[[str], None] = lambda text: None,
    first: int = 0,
    read_bytes: int = READ_BYTES,
) -> tuple[dict[str, str], list[list[dict[str, Any]]]]:
    """Versions by contestant, and of each shape `repeat` rounds numbered from `first`:
    {"rates": Rates, "runs": {contestant: what peers/protocol.py says, and "peak_bytes",
    "others_cpu" (seconds of CPU that the sleeping ones took per second)}}. A round is all shapes,
    one after the other. Ctrl-C and SIGTERM keep the whole rounds so far. read_bytes: what a step
    reads, for limits.rates."""
    started: list[_Process] = []
    rounds: list[list[dict[str, Any]]] = [[] for _ in shapes]
    longest = max(shapes, key=lambda shape: (shape.branches, shape.prefix))
    try:
        for contestant in contestants:
            say(f"starting {contestant.name}")
            process = _Process(contestant, logs)
            started.append(process)
            process.wait_ready()
            small = replace(longest, prefix=min(256, longest.prefix), new=2)
            process.run(work(small, -1, vocab_size))  # what an engine does once
        for number in range(first, first + repeat):
            rates, done = asdict(measure(n_threads, read_bytes)), []
            for place, shape in enumerate(shapes):
                turn = (number + place) % len(started)
                runs = _round(started[turn:] + started[:turn], work(shape, number, vocab_size))
                done.append({"rates": rates, "runs": {p.name: runs[p.name] for p in started}})
                what = f"{shape.branches} x {shape.prefix}, " if len(shapes) > 1 else ""
                for name, run in done[-1]["runs"].items():
                    seconds = sum(run["seconds"].values())
                    say(f"round {number + 1}: {what}{name} {seconds:.3f} s")
            for each, one in zip(rounds, done, strict=True):
                each.append(one)
    except (KeyboardInterrupt, SystemExit):
        if not rounds[0]:
            raise
        say(f"interrupted after {len(rounds[0])} rounds")
    finally:
        for process in started:
            process.close()
    return {process.name: process.version for process in started}, rounds


def _round(started: Sequence[_Process], given: dict[str, Any]) -> dict[str, Any]:
    runs = {}
    for process in started:
        others = [p for p in started if p is not process]
        _settle(others)
        before, since = sum(p.cpu_seconds() for p in others), time.perf_counter()
        runs[process.name] = process.run(given)
        slept = time.perf_counter() - since
        taken = sum(p.cpu_seconds() for p in others) - before
        runs[process.name]["others_cpu"] = taken / slept
    return runs


def _settle(processes: Sequence[_Process]) -> None:
    """Wait, ten seconds at most, until they sleep: some spin for a while after their work."""
    deadline = time.monotonic() + 10
    busy = True
    while busy and time.monotonic() < deadline:
        before = sum(p.cpu_seconds() for p in processes)
        time.sleep(0.2)
        busy = sum(p.cpu_seconds() for p in processes) - before > 1 / _TICKS


class _Process:
    """A running contestant."""

    def __init__(self, contestant: Contestant, logs: Path) -> None:
        self.name, self.version = contestant.name, ""
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"{contestant.name.replace(' ', '-')}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                contestant.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, **contestant.environment},
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            line = f"no answer within {seconds:.0f} s"
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            how = line.strip() or f"ended with status {self._process.returncode}"
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
            raise RuntimeError(f"{self.name}: {how}; the end of {self._log}:\n{tail}") from None
        return answer

    def wait_ready(self) -> None:
        self.version = self._answer(START_SECONDS)["ready"]

    def run(self, given: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        answer = self._answer(RUN_SECONDS)
        return {"peak_bytes": self.peak_bytes(), **answer}

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        total = 0
        for pid in process_tree(self._process.pid):
            text = _read_proc(pid, "stat").rpartition(")")[2].split()
            total += int(text[11]) + int(text[12]) if text else 0
        return total / _TICKS

    def peak_bytes(self) -> int:
        """VmHWM, the sum over all its processes."""
        return sum(_peak(_read_proc(pid, "status")) for pid in process_tree(self._process.pid))

    def close(self) -> None:
        """End it: its input ends, and after ten seconds its process group is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):  # children too
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def process_tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:  # grows
        try:
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (thread / "children").read_text().split()]
        except OSError:
            continue
    return found


def _read_proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def _peak(status: str) -> int:
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
