"""Measurements are made once, remembered, and shared out among processes."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.labs import as_model, asked, lab_of
from support.models import KEEN, SHARP

from rksc import Model
from rksc.calibration import runner
from rksc.calibration.measure import answers, wordings
from rksc.calibration.runner import Bench, Log
from rksc.cli import experiment as command_module
from rksc.experiments import EXPERIMENTS, Lab

CALLS: list[int] = []


def square(bench: Bench, x: int) -> dict[str, Any]:
    CALLS.append(x)
    if x < 0:
        raise ValueError("negative")
    return {"square": x * x, "float": x / 3}


def test_measurements_are_made_once(tmp_path: Path, small: Model) -> None:
    items = [{"x": x} for x in (3, 1, 2)]
    CALLS.clear()
    first = lab_of(small, out=tmp_path).measure(square, items)
    assert [r["square"] for r in first] == [9, 1, 4] and CALLS == [3, 1, 2]
    again = lab_of(small, out=tmp_path).measure(square, [*items, {"x": 5}])
    assert again == [*first, {"square": 25, "float": 5 / 3}] and CALLS == [3, 1, 2, 5]
    lab_of(as_model(SHARP), out=tmp_path).measure(square, items[:1])
    assert CALLS[4:] == [3]  # the same configuration, other weights
    lab_of(as_model(KEEN), out=tmp_path).measure(square, items[:1])
    assert CALLS[5:] == []  # the same model, made anew
    bfloat16 = replace(lab_of(small, out=tmp_path), engine={"dtype": "bfloat16"})
    bfloat16.measure(square, items[:1])
    assert CALLS[5:] == [3]


def test_times_are_of_one_processor_and_results_of_one_version(
    tmp_path: Path, small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(timed: bool, threads: int) -> list[int]:
        CALLS.clear()
        lab = replace(
            lab_of(small, out=tmp_path), engine={"dtype": "float32", "n_threads": threads}
        )
        lab.measure(square, [{"x": 1}], timed=timed)
        return CALLS

    assert measure(True, 1) == [1] and measure(True, 1) == []
    assert measure(True, 2) == [1] and measure(False, 2) == [1] and measure(False, 1) == []
    monkeypatch.setattr("rksc.calibration.runner.processor", lambda: "another")
    assert measure(True, 1) == [1] and measure(False, 1) == []
    monkeypatch.setattr("rksc.calibration.runner.__version__", "another")
    assert measure(False, 1) == [1]


def say(bench: Bench, text: str) -> dict[str, Any]:
    return {"text": text}


def test_any_text_is_remembered(tmp_path: Path, small: Model) -> None:
    """Among them what `str.splitlines` takes for the end of a line."""
    items = [{"text": f"a{end}b"} for end in "\u2028\u0085\x0b\x1c\n\r"]
    made = lab_of(small, out=tmp_path).measure(say, items)
    kept = Log(tmp_path / "raw", "say").read().values()
    assert made == items == [record["result"] for record in kept]


def test_only_what_was_asked_for_is_counted(tmp_path: Path, small: Model) -> None:
    """The folder may hold other runs; what is asked for twice was made once."""
    lab_of(small, out=tmp_path).measure(square, [{"x": x} for x in range(5)])
    log = Log(tmp_path / "raw", "square")
    records = [json.loads(line) for line in log.path.read_text().splitlines()]
    log.path.unlink()
    for record in records:
        log.append({**record, "seconds": 2.0, "cpu": 1.0})
    lab = lab_of(small, out=tmp_path)
    for _ in range(2):
        lab.measure(square, [{"x": 3}, {"x": 1}])
    assert sum(spent.seconds for spent in lab.spent.values()) == 4
    assert lab.noise() is None


def test_kept_measurements_are_mentioned(small: Model, tmp_path: Path) -> None:
    first, second = lab_of(small, out=tmp_path), lab_of(small, out=tmp_path)
    for _ in range(2):
        first.measure(square, [{"x": 1}, {"x": 2}], timed=True)
    assert first.kept() is None
    second.measure(square, [{"x": 1}, {"x": 3}, {"x": 2}], timed=True)
    assert str(second.kept()).startswith("2 of 3 measurements are those of an earlier run")


def test_times_that_ray_does_not_take_are_mentioned(small: Model, tmp_path: Path) -> None:
    lab = lab_of(small)
    lab.measure(square, [{"x": 1}, {"x": 2}], timed=True)
    assert lab.not_on_ray() is None
    object.__setattr__(lab, "ray", True)
    assert str(lab.not_on_ray()).startswith("2 timed measurements ran on this machine")


@pytest.mark.parametrize(
    ("missing", "plots", "told"),
    [
        ({"matplotlib"}, True, "need matplotlib: pip install 'rksc\\[experiments\\]'; --no-plots"),
        ({"matplotlib", "scipy"}, True, "need SciPy and matplotlib: pip install"),
        ({"scipy"}, False, "need SciPy: pip install"),
        ({"matplotlib"}, False, None),
    ],
)
def test_what_the_end_of_a_run_needs_is_asked_for_first(
    monkeypatch: pytest.MonkeyPatch, missing: set[str], plots: bool, told: str | None
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else name)
    with pytest.raises(ImportError, match=told) if told else contextlib.nullcontext():
        command_module.require_packages(plots)


def test_others_on_the_machine_are_mentioned(small: Model) -> None:
    lab = lab_of(small)
    lab.measure(square, [{"x": 1}], timed=True)
    for cpu, said in ((0.9, False), (0.5, True)):
        lab.spent.update(dict.fromkeys(lab.spent, runner.Spent(1.0, cpu, True, False)))
        assert (lab.noise() is not None) is said
    assert "0.5 of 1 processors" in str(lab.noise())


def test_a_process_of_ray_keeps_its_model(monkeypatch: pytest.MonkeyPatch, small: Model) -> None:
    loaded = []
    monkeypatch.setattr(runner, "_bench", None)
    monkeypatch.setattr(runner, "load", lambda path: loaded.append(path) or small)
    (work,) = runner.Work.of(model_of, {"key": {}}, None)
    for path, threads in (("a", 1), ("a", 1), ("b", 1), ("b", 2), ("b", 2)):
        made = runner._run_there(path, {"n_threads": threads}, work)
        assert made["key"]["result"] == {"layers": 4}
    assert loaded == ["a", "b", "b"]


def model_of(bench: Bench) -> dict[str, Any]:
    return {"layers": bench.model.config.n_layers}


def test_a_stopped_run_goes_on(tmp_path: Path, small: Model) -> None:
    CALLS.clear()
    with pytest.raises(ValueError, match="negative"):
        lab_of(small, out=tmp_path).measure(square, [{"x": 1}, {"x": -1}, {"x": 2}])
    log = tmp_path / "raw" / "square.jsonl"
    with log.open("a") as file:
        file.write('{"key": "cut o')  # the machine went down here
    made = lab_of(small, out=tmp_path).measure(square, [{"x": 1}, {"x": 2}])
    assert [r["square"] for r in made] == [1, 4] and CALLS == [1, -1, 2]
    assert len(log.read_text().splitlines()) == 2


def test_a_broken_memory_is_named(tmp_path: Path) -> None:
    log = Log(tmp_path, "square")
    whole = '{"key": "a", "seconds": 1, "cpu": 1, "result": {}}'
    log.path.write_text(f'{whole}\n{{"key": 1\n{whole}\n')
    with pytest.raises(ValueError, match=r"square\.jsonl: line 2 is broken"):
        log.read()


def test_results_must_be_plain(small: Model) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        lab_of(small).measure(nothing, [{}])


def nothing(bench: Bench) -> dict[str, Any]:
    return {"value": math.nan}


def test_workers_give_the_same_results(tmp_path: Path, smollm2: Model) -> None:
    items = [
        {"root": f"Tom has {n} apples.", "others": [f"There are {n} apples that Tom owns."],
         "centre": ["What is red?", "Who sings?"], "instruction": "Think."}
        for n in (3, 4)
    ]  # fmt: skip
    engine = {"kv_bytes": "64MiB", "n_threads": 1}
    alone = Lab(smollm2, engine=dict(engine), progress=False).measure(wordings, items)
    lab = Lab(smollm2, n_workers=2, engine=dict(engine), progress=False, out=tmp_path)
    assert lab.measure(wordings, items) == alone
    assert Lab(smollm2, engine=dict(engine), out=tmp_path).measure(wordings, items) == alone
    problems = [
        asked({"id": "p", "question": f"What is {n} + 4?", "answer": "7", "choices": []})
        for n in (1, 2, 3)
    ]
    apart = Lab(smollm2, engine=dict(engine), progress=False).measure(answers, problems, together=3)
    assert lab.measure(answers, problems, together=2) == apart


def test_ray_gives_the_same_results(smollm2: Model) -> None:
    pytest.importorskip("ray")
    items = [{"root": "Tom has 3 apples.", "others": ["Tom owns 3 apples."],
              "centre": ["What is red?", "Who sings?"], "instruction": "Think."}]  # fmt: skip
    engine = {"kv_bytes": "64MiB", "n_threads": 1}
    alone = Lab(smollm2, engine=dict(engine), progress=False).measure(wordings, items)
    over = Lab(smollm2, ray=True, engine=dict(engine), progress=False)
    assert over.measure(wordings, items) == alone


def test_a_lab_checks_its_settings(small: Model) -> None:
    with pytest.raises(ValueError, match="n_workers must be"):
        lab_of(small, n_workers=0)
    for n in (1, 2.0, True):
        with pytest.raises(ValueError, match="n must be"):
            lab_of(small, n=n)
    lab = lab_of(small, n=np.int64(3), n_workers=np.int32(1))
    assert type(lab.size(12, None)) is int and lab.n == 3 and type(lab.n_workers) is int
    with pytest.raises(ValueError, match="from its path"):
        lab_of(small, n_workers=2)
    with pytest.raises(ValueError, match="already has its quick"):
        EXPERIMENTS["cgee"](lab_of(small), quick=True)


def test_the_progress_bar_counts_items(capsys: pytest.CaptureFixture[str], small: Model) -> None:
    replace(lab_of(small), progress=True).measure(square, [{"x": 1}, {"x": 2}])
    err = capsys.readouterr().err
    assert "square" in err and "item" in err
