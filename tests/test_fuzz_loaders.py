"""The loaders' fuzzer finds what it is for, repeats what it found, and finds nothing today."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import fuzz_loaders, fuzz_models
from support.fuzz_loaders import Runner, Summary, fuzz

import rksc

pytest.importorskip("tokenizers")


def at(number: int, do: Any) -> fuzz_loaders.Trial:
    """A trial that does `do` in one run and nothing in the others."""
    calls = iter(range(1 << 30))

    def trial(chance: random.Random, path: Path) -> str:
        if next(calls) == number:
            do()
        return "fine"

    return trial


def take(n: int) -> None:
    assert bytearray(n)


def work(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def raised(error: BaseException) -> Any:
    def do() -> None:
        raise error

    return do


PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


@pytest.mark.parametrize(
    ("do", "told"),
    [
        (raised(TypeError("int")), "TypeError: int"),
        (raised(MemoryError()), "MemoryError"),
        (raised(PANIC("range")), "PanicException: range"),
        (os.abort, f"the process ends with {-signal.SIGABRT}"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), f"the process ends with {-signal.SIGSEGV}"),
        (lambda: os._exit(7), "the process ends with 7"),
        (lambda: work(0.3), r"0\.3 s$"),
        (lambda: take(200 << 20), r"2\d\d MB$"),
    ],
)
def test_each_kind_of_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, do: Any, told: str
) -> None:
    """In its run, the runs after it go on, and its input is kept."""
    monkeypatch.setattr(fuzz_loaders, "SECONDS", 0.25)
    monkeypatch.setattr(fuzz_loaders, "BYTES", 100e6)
    found = fuzz(5, 6, at(3, do), keep=tmp_path / "kept")
    assert found.runs == 6
    (fault,) = found.faults
    assert fault.number == 3
    assert re.match(told, str(fault.fault)), fault.fault
    assert any((tmp_path / "kept" / "5-3").iterdir())


@pytest.mark.parametrize(
    ("do", "told"),
    [
        (lambda: time.sleep(600), "no end after a wait of 0 s.*test_fuzz_loaders.py"),
        (lambda: work(600), "no end after 1 s of work.*in work"),
    ],
)
def test_a_run_without_end_is_found(
    monkeypatch: pytest.MonkeyPatch, do: Callable[[], None], told: str
) -> None:
    """And where it hung."""
    monkeypatch.setattr(fuzz_loaders, "_PATIENCE", 0.4)
    monkeypatch.setattr(fuzz_loaders, "_WORK", 1.0)
    found = fuzz(5, 3, at(1, do))
    assert [run.number for run in found.faults] == [1]
    assert re.match(told, str(found.faults[0].fault), re.DOTALL), found.faults
    assert found.runs == 3


def test_memory_without_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_loaders, "_WORKER_BYTES", 500 << 20)

    def grow() -> None:
        held = [bytearray(50 << 20) for _ in range(14)]
        time.sleep(2 if held else 0)

    found = fuzz(5, 3, at(1, grow))
    assert [str(run.fault).partition(" ")[0] for run in found.faults] == ["more"]


@pytest.mark.parametrize(
    ("text", "named", "right"),
    [
        ("{}: bad", True, True),
        ("bad", True, False),
        ("{}: \x1b[2J", True, False),
        ("{}: " + "x" * 2000, True, False),
        ("bad", False, True),
        ("", False, False),
    ],
)
def test_errors_are_judged(tmp_path: Path, text: str, named: bool, right: bool) -> None:
    error = ValueError(text.format(tmp_path / "m"))
    path = tmp_path / "m" if named else None
    if right:
        fuzz_loaders._check_error(error, path)
    else:
        with pytest.raises(AssertionError):
            fuzz_loaders._check_error(error, path)


def test_a_number_is_an_input_for_ever(tmp_path: Path) -> None:
    def read(folder: Path) -> dict[str, Any]:
        return {p.name: p.is_file() and p.read_bytes() for p in folder.iterdir() if not p.is_fifo()}

    inputs = []
    for folder in ("a", "b"):
        runner = Runner(3, tmp_path / folder)
        inputs.append([])
        for number in (7, 8, 7):
            _, model, _ = runner.input(number)
            inputs[-1].append((model.name, read(tmp_path / folder)))
    assert inputs[0] == inputs[1]
    assert inputs[0][0] == inputs[0][2] != inputs[0][1]


@pytest.mark.parametrize("seed", fuzz_models.seeds()[-15:], ids=lambda seed: seed.name)
def test_seeds_are_whole_models(tmp_path: Path, seed: fuzz_models.Seed) -> None:
    """Undamaged they load, have a tokenizer, and run."""
    for name, data in seed.files.items():
        (tmp_path / name).write_bytes(data)
    assert fuzz_loaders.trial(random.Random(1), tmp_path / seed.entry) == "ran"
    tokenizer = rksc.load(tmp_path / seed.entry).tokenizer
    assert tokenizer is not None
    assert len(tokenizer.encode("hello")) < 6
    assert tokenizer.chat([{"role": "user", "content": "hello"}]).startswith("<|im_start|>user")


@pytest.mark.parametrize("seed", fuzz_models.heavy(), ids=lambda seed: seed.name)
def test_heavy_seeds_are_almost_1_mb(tmp_path: Path, seed: fuzz_models.Seed) -> None:
    """Undamaged they are within the limits of a run."""
    for name, data in seed.files.items():
        (tmp_path / name).write_bytes(data)
    assert 300e3 < sum(map(len, seed.files.values())) < 1e6
    before = time.process_time()
    assert fuzz_loaders.trial(random.Random(1), tmp_path / seed.entry).startswith("ran")
    assert time.process_time() - before < fuzz_loaders.SECONDS


def test_nothing_is_found_today() -> None:
    """A few runs; CI has more of them, under sanitizers. Damage both refuses and lets through."""
    found = fuzz(20260, 400)
    assert not found.faults, found.faults
    assert found.runs == 400
    assert found.reached["ran"] > 60
    assert found.reached["refused"] > 100
    assert isinstance(found, Summary)
