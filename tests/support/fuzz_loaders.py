"""Fuzzer of all that reads a model's files: damaged files have to load or be refused, quickly.

    python tests/support/fuzz_loaders.py [--seed 1] [--runs 5000] [--only RUN] [--keep FOLDER]

A run damages one of the small models of fuzz_models.py and does with it what a user does: load it,
make its tokenizer and a session, encode, generate, decode, render a chat. What may happen is
that, or a ValueError that names the file. What may not: another exception, a crash, more than 2 s
of processor time, more than 500 MB of memory, an error that cannot be printed.

Runs are numbered, and the seed and the number decide the input: `--only` repeats one. They
happen in a worker, which this process watches; a new one takes over where one ends.
Under sanitizers as in .ci/run. Exit status 1 and the inputs in --keep when something was found.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[up]) for up in (2, 1)]

import rksc  # noqa: E402
from support import fuzz_damage, fuzz_models  # noqa: E402

SECONDS, BYTES = 2.0, 500e6
_WORK = 10.0  # seconds of processor time without a word: no end
_PATIENCE = 30.0  # seconds in which nothing is computed: a wait
_POLL = 0.05  # seconds
_WORKER_BYTES = 2 << 30
_WORKER_RUNS = 2000  # then a fresh one, so that a leak shows as memory, not as the machine's end
_TEXTS = (
    "hello, <|im_end|> a \u00e9\n",
    "",
    " " * 40,
    "a" * 3000,
    "\x00\u65e5\U0001f600 12\t<0x0A>",
)
_MESSAGES = [{"role": "user", "content": "hello <|im_end|>"}]

Trial = Callable[[random.Random, Path], str]


def trial(chance: random.Random, path: Path) -> str:
    """Load and use what is at `path`; returns how far it came. Anything wrong is raised."""
    try:
        model = rksc.load(path)
    except ValueError as error:
        _check_error(error, path)
        return "refused"
    try:
        tokenizer = model.tokenizer
    except ValueError as error:
        _check_error(error, path)
        tokenizer = None
    options: dict[str, Any] = {"dtype": chance.choice(("float32", "bfloat16", None))}
    if chance.random() < 0.2 and any(w.type.startswith("Q") for w in model.weights.values()):
        options["activations"] = "int8"
    try:
        session = model.session(kv_bytes=1 << 20, n_threads=1, tokenizer=tokenizer, **options)
    except ValueError as error:
        _check_error(error, None)
        return "no session"
    reached = "ran without text" if tokenizer is None else "ran"
    ids = [1, 2, 3]
    if tokenizer is not None:
        try:
            ids = tokenizer.encode(chance.choice(_TEXTS))[:8]
            tokenizer.decode(ids)
            if tokenizer.chat_template is not None and chance.random() < 0.1:
                rksc.text.chat_tokens.encode_chat(tokenizer, _MESSAGES)
        except ValueError as error:
            _check_error(error, None)
            reached = "ran after an error in the text"
    sampling = rksc.Sampling(temperature=chance.choice((0.0, 1.0)), top_p=0.9, seed=1)
    try:
        made = session.generate(session.prefill(ids or [1]), 3, sampling, stop_ids=None)
    except (ValueError, rksc.CapacityError) as error:
        _check_error(error, None)
        return f"{reached}, but for generation"
    str(made[0].text).encode()
    return reached


def _check_error(error: Exception, path: Path | None) -> None:
    """An error is short, can be printed anywhere, and names the file."""
    text = str(error)
    if path is not None and str(path.parent) not in text:
        raise AssertionError("the error names no file") from error
    if len(text) > 1000 or not text.isprintable() or not text.strip():
        raise AssertionError(f"an error of {len(text)} characters, printable: {text.isprintable()}")


# ---- one run ------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run did; `fault` is None where nothing was wrong."""

    number: int
    model: str
    reached: str = ""
    seconds: float = 0.0
    bytes: int = 0
    fault: str | None = None


class Runner:
    """Runs by number, in this process."""

    def __init__(self, seed: int, folder: Path, try_it: Trial = trial) -> None:
        self.seed, self.folder, self.try_it = seed, folder, try_it
        self.seeds, self.heavy = fuzz_models.seeds(), fuzz_models.heavy()

    def input(self, number: int) -> tuple[random.Random, fuzz_models.Seed, Path]:
        """The run's generator, model, and the path of its damaged files."""
        chance = random.Random(f"{self.seed}/{number}")
        model = chance.choice(self.heavy if chance.random() < 0.004 else self.seeds)
        shutil.rmtree(self.folder, ignore_errors=True)
        entry = fuzz_damage.write_damaged(chance, model, self.folder)
        return chance, model, self.folder / entry

    def run(self, number: int) -> Run:
        chance, model, path = self.input(number)
        run = Run(number, model.name)
        before, began = _reset_peak(), _seconds()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.reached = self.try_it(chance, path)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            cause = f" (from {error.__cause__!r})" if error.__cause__ else ""
            run.fault = f"{type(error).__name__}: {error}{cause}"[:1000]
        run.seconds = _seconds() - began
        run.bytes = max(0, _memory("VmHWM") - before)
        if run.fault is None and run.seconds > SECONDS:
            run.fault = f"{run.seconds:.1f} s"
        if run.fault is None and run.bytes > BYTES:
            run.fault = f"{run.bytes / 1e6:.0f} MB"
        return run


def _seconds() -> float:
    own, others = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def _memory(key: str, pid: int | str = "self") -> int:
    """A line of Linux's /proc/PID/status, in bytes."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith(key)), f"{key}: 0 kB")
    return int(line.split()[1]) << 10


def _family(pid: int) -> Iterator[tuple[str, float]]:
    """State and seconds of processor time of a process and of those that it started: R runs or
    could, D waits for a disk, S sleeps, Z has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return
    yield fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    for child in children:
        yield from _family(int(child))


def _worked(pid: int) -> float:
    return sum(seconds for _, seconds in _family(pid))


def _reset_peak() -> int:
    """Forget the peak of memory; returns what is in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


# ---- many, in a worker --------------------------------------------------------------------


@dataclass
class Summary:
    runs: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    faults: list[Run] = field(default_factory=list)
    slowest: Run = field(default_factory=lambda: Run(-1, "none"))
    largest: Run = field(default_factory=lambda: Run(-1, "none"))

    def add(self, run: Run) -> None:
        self.runs += 1
        self.reached[run.reached or "fault"] += 1
        if run.fault is not None:
            self.faults.append(run)
        self.slowest = max(self.slowest, run, key=lambda r: r.seconds)
        self.largest = max(self.largest, run, key=lambda r: r.bytes)

    def __str__(self) -> str:
        lines = [f"{n:9,} {reached}" for reached, n in self.reached.most_common()]
        slow, large = self.slowest, self.largest
        lines.append(f"slowest: run {slow.number} ({slow.model}), {slow.seconds:.2f} s")
        lines.append(f"largest: run {large.number} ({large.model}), {large.bytes / 1e6:.0f} MB")
        return "\n".join(lines)


class Worker:
    """A child that does runs from `first` on and tells of each; its stderr is in a file."""

    def __init__(self, runner: Runner, first: int, end: int) -> None:
        self.next = first
        read, write = os.pipe()
        self.said = tempfile.TemporaryFile()  # noqa: SIM115 (as long as this object)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            _work(runner, first, min(end, first + _WORKER_RUNS), write, self.said.fileno())
        os.close(write)
        self._pipe, self._rest = read, b""

    def results(self) -> Iterator[Run]:
        """Until the child ends; a run during which it ends, or says nothing, is a fault."""
        waited, worked = 0.0, 0.0
        while True:
            ready, _, _ = select.select([self._pipe], [], [], _POLL)
            if ready:
                data = os.read(self._pipe, 1 << 16)
                if not data:
                    break
                waited, worked = 0.0, _worked(self.pid)
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    run = Run(**json.loads(line))
                    self.next = run.number + 1
                    yield run
            elif _memory("VmRSS", self.pid) > _WORKER_BYTES:
                yield self._end(f"more than {_WORKER_BYTES >> 30} GiB")
                return
            elif _worked(self.pid) - worked > _WORK:
                yield self._end(f"no end after {_WORK:.0f} s of work")
                return
            elif any(state in "RD" for state, _ in _family(self.pid)):
                waited = 0.0  # for a processor or a disk
            elif waited > _PATIENCE:
                yield self._end(f"no end after a wait of {_PATIENCE:.0f} s")
                return
            else:  # not by the clock, which jumps where a virtual machine was stopped
                waited += _POLL
        os.close(self._pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if status != 0:
            self.next += 1
            yield Run(self.next - 1, "?", fault=f"the process ends with {status}: {self._words()}")

    def _end(self, why: str) -> Run:
        """Where it is now, for the report; then kill it."""
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.5)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._pipe)
        self.next += 1
        return Run(self.next - 1, "?", fault=f"{why}: {self._words()}")

    def _words(self) -> str:
        self.said.seek(0)
        return self.said.read()[-6000:].decode(errors="replace").strip()


def _work(runner: Runner, first: int, end: int, pipe: int, said: int) -> None:
    """The child's life. Templates get less time here than the 2 s that would be most of it."""
    rksc.text.template.SECONDS = 0.25
    os.dup2(said, 2)
    os.dup2(said, 1)
    faulthandler.register(signal.SIGUSR1, file=said)
    status = 1
    try:
        for number in range(first, end):
            os.ftruncate(said, 0)
            os.write(pipe, json.dumps(vars(runner.run(number))).encode() + b"\n")
        status = 0
    finally:
        os._exit(status)


def fuzz(
    seed: int, runs: int, try_it: Trial = trial, keep: Path | None = None, first: int = 0
) -> Summary:
    """All runs; each fault is printed, and its input kept, as it comes."""
    summary = Summary()
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as scratch:
        runner = Runner(seed, Path(scratch) / "m", try_it)
        at = first
        while at < first + runs:
            worker = Worker(runner, at, first + runs)
            for run in worker.results():
                summary.add(run)
                if summary.runs % 10_000 == 0:
                    print(f"{summary.runs:,} runs", flush=True)
                if run.fault is not None:
                    print(f"run {run.number} ({run.model}): {run.fault}", flush=True)
                    _keep(runner, run.number, keep)
            at = worker.next
    return summary


def _fast_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _keep(runner: Runner, number: int, keep: Path | None) -> None:
    if keep is not None:
        target = keep / f"{runner.seed}-{number}"
        shutil.rmtree(target, ignore_errors=True)
        keep.mkdir(parents=True, exist_ok=True)
        Runner(runner.seed, target).input(number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--only", type=int, metavar="RUN", help="this run alone")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where inputs of faults go")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("RUST_BACKTRACE", "0")
    first, runs = (0, options.runs) if options.only is None else (options.only, 1)
    began = time.monotonic()
    summary = fuzz(options.seed, runs, keep=options.keep, first=first)
    print(summary)
    print(
        f"{summary.runs:,} runs of seed {options.seed} in {time.monotonic() - began:.0f} s: "
        f"{len(summary.faults)} faults"
    )
    return int(bool(summary.faults))


if __name__ == "__main__":
    sys.exit(main())
