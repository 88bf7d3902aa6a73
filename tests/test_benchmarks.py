"""benchmarks/: what the figures mean (bounds, ratios, goals), and that the contest really runs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import branching
import compare
import contest
import decode_table
import engines
import gpu_check
import mechanisms
import numpy as np
import pytest
from contest import Contestant
from support.model_files import TINY, random_weights, write_gguf

from rksc import _core, load
from rksc.engine.defaults import best_dtype
from rksc.experiments import workload
from rksc.experiments.workload import Shape, flop
from rksc.limits import bounds
from rksc.limits.rates import Rates, measure
from rksc.model.config import ModelConfig

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ModelConfig.of(dict(TINY))
SHAPE = Shape(prefix=24, branches=3, suffix=4, new=5, verify=3)


# ---- bounds ------------------------------------------------------------------------------------


def test_decode_operations_are_those_of_the_workload() -> None:
    """Two counts that share no code: operations of the decode phase."""
    ops = bounds.decode_ops(CONFIG, SHAPE, 2, 2)
    begin = SHAPE.prefix + SHAPE.suffix - 1
    expected = SHAPE.branches * flop(CONFIG, begin, begin + SHAPE.new, outputs=SHAPE.new)
    assert sum(op.count * op.flop for op in ops) == expected


def test_decode_reads_weights_each_step_and_shared_keys_once() -> None:
    c, s = CONFIG, SHAPE
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    layer = c.width * (2 * q + 2 * kv) + 3 * c.width * c.ffn_width
    weights = c.n_layers * layer + c.vocab_size * c.width
    unique = sum(s.prefix + s.branches * (s.suffix + step) for step in range(s.new))
    ops = bounds.decode_ops(c, s, weight_bytes=1, kv_bytes=4)
    expected = s.new * weights + c.n_layers * unique * 2 * kv * 4
    assert sum(op.count * op.read for op in ops) == expected


def test_bound_takes_the_slower_side_of_each_op() -> None:
    ops = [bounds.Op(2, flop=100.0, read=10.0), bounds.Op(1, flop=10.0, read=100.0)]
    assert bounds.seconds(ops, read=10.0, products=10.0) == 2 * 10.0 + 10.0
    assert bounds.seconds(bounds.from_rows(bounds.as_rows(ops)), 10.0, 10.0) == 30.0


def test_a_window_limits_the_keys() -> None:
    windowed = ModelConfig.of(
        {**TINY, "model_type": "mistral", "architectures": [], "sliding_window": 8}
    )
    begin = SHAPE.prefix + SHAPE.suffix - 1
    expected = SHAPE.branches * flop(windowed, begin, begin + SHAPE.new, outputs=SHAPE.new)
    ops = bounds.decode_ops(windowed, SHAPE, 2, 2)
    assert sum(op.count * op.flop for op in ops) == expected
    assert sum(op.read for op in ops) < sum(
        op.read for op in bounds.decode_ops(CONFIG, SHAPE, 2, 2)
    )


@pytest.mark.parametrize(("kind", "dtype", "expected"),
    [("F32", "bfloat16", 2.0), ("F32", "float32", 4.0), ("Q8_0", "float32", 34 / 32)],
)  # fmt: skip
@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_block_types_as_they_are(
    tmp_path: Path, kind: str, dtype: str, expected: float, tied: bool
) -> None:
    """And an embedding only as the head: here it alone is of another type."""
    weights = random_weights({**TINY, "tie_word_embeddings": tied}, seed=1)
    write_gguf(tmp_path / "m.gguf", weights, {**TINY, "tie_word_embeddings": tied}, kind)
    model = load(tmp_path / "m.gguf", tokenizer=False)
    assert model.config.tied is tied
    assert bounds.weight_bytes(model.weights, model.config, dtype) == expected
    ops = bounds.decode_ops(model.config, SHAPE, expected, 2)
    read = {n: t for n, t in model.weights.items() if tied or n != "model.embed_tokens.weight"}
    matrices = sum(np.prod(t.shape) for t in read.values() if len(t.shape) == 2)
    assert sum(op.count * op.read for op in ops[:5]) == SHAPE.new * matrices * expected


@pytest.mark.parametrize(
    ("isa", "arithmetic", "expected"),
    [("amx", "bfloat16", 3.0), ("avx512_bf16", "bfloat16", 2.0), ("avx2", "bfloat16", 1.0),
     ("amx", "float32", 1.0), ("avx512_bf16", "int16", 4.0), ("portable", "int8", 5.0)],
)  # fmt: skip
def test_a_limit_is_that_of_the_arithmetic(isa: str, arithmetic: str, expected: float) -> None:
    rates = Rates(fma=1.0, bf16=2.0, amx=3.0, int16=4.0, int8=5.0, read=6.0)
    assert rates.products(isa, arithmetic) == expected


# ---- what is made of the rounds ----------------------------------------------------------------


def _run(seconds: float, chosen: list[list[int]], peak: int = 100) -> dict[str, Any]:
    phases = {"prefill": seconds / 2, "decode": seconds / 2}
    return {
        "seconds": phases, "tokens": 7, "chosen": chosen, "scores": [0.5], "peak_bytes": peak,
        "others_cpu": 0.01,
    }  # fmt: skip


def _data(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    rates = {"fma": 1e9, "bf16": 2e9, "amx": 8e9, "int16": 4e9, "int8": 16e9, "read": 1e9}
    names = list(rounds[0])
    return {
        "model": "m.gguf", "numbers": "bfloat16", "dtype": "bfloat16", "threads": 2,
        "workload": "W1", "machine": "a machine", "shape": vars(SHAPE),
        "families": {n: "rksc" if n == "rksc" else n for n in names}, "isas": {"rksc": "amx"},
        "prefill_flop": 4e9, "decode_ops": [[2, 2e9, 0.2e9]],
        "rounds": [{"rates": rates, "runs": runs} for runs in rounds],
    }  # fmt: skip


def test_summary_takes_medians_ratios_and_fractions() -> None:
    rounds = [
        {"rksc": _run(t, [[1, 2], [3, 4]]), "vLLM": _run(u, [[1, 2], [9, 4]], 200)}
        for t, u in ((1.0, 4.0), (2.0, 5.0), (4.0, 6.0))
    ]
    made = compare.summary(_data(rounds))
    assert made["rows"]["rksc"]["total"] == {"median": 2.0, "low": 1.0, "high": 4.0}
    (ratio,) = made["ratios"]
    assert (ratio["value"], ratio["low"], ratio["high"]) == (0.4, 0.25, 4 / 6)
    assert (ratio["must"], ratio["aim"]) == (0.50, 0.42)
    assert made["memory"][0]["value"] == 0.5
    assert made["rows"]["vLLM"]["agreement"] == 0.5
    # in the median run: 4e9 operations in 1 s at 8e9; two ops of max(0.2 s, 0.25 s) in 1 s.
    assert made["limits"]["rksc"]["prefill"]["median"] == 0.5
    assert made["limits"]["rksc"]["decode step"]["median"] == 0.5
    text = compare.table(_data(rounds))
    assert "rksc / vLLM" in text and "aim reached" in text


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("rksc, prefill", {"prefill_flop": 5e9}),
        ("rksc, decode step", {"decode_ops": [[9, 1, 6e7]]}),
    ],
)
def test_nothing_is_faster_than_the_machine(what: str, changed: dict[str, Any]) -> None:
    """A fraction above 1 says that the limit is wrong: no table is made of it."""
    data = {**_data([{"rksc": _run(1.0, [[1, 2]])}]), **changed}
    with pytest.raises(ValueError, match=rf"{what}: 1\.\d+ of the machine's limit"):
        compare.table(data)


@pytest.mark.parametrize("read_bytes", [1, 5000, 1 << 20])
def test_limits_are_measured_on_areas_of_any_size(read_bytes: int) -> None:
    rates = measure(2, read_bytes)
    assert rates.fma > 1e9
    assert rates.read > 1e8
    assert (rates.bf16 > 1e9) == ("avx512_bf16" in _core.isas)  # some multiply floats faster
    assert (rates.amx > rates.bf16) == ("amx" in _core.isas)
    assert rates.int8 > rates.int16 > 0


def test_the_best_way_of_a_peer_counts() -> None:
    """By the median total; one that draws its own tokens agrees with nothing."""
    own = {"seconds": {"prefill": 1.0, "decode": 1.0}, "tokens": None, "chosen": None,
           "peak_bytes": 50, "others_cpu": 0.0}  # fmt: skip
    runs = {
        "rksc": _run(2.0, [[1, 2]]), "rksc int8": _run(1.0, [[1, 3]], 120),
        "llama.cpp": _run(5.0, [[1, 2]]), "llama.cpp -fa": _run(4.0, [[1, 2]]),
        "ik_llama.cpp": own,
    }  # fmt: skip
    families = {
        "rksc": "rksc", "rksc int8": "rksc", "llama.cpp": "llama.cpp",
        "llama.cpp -fa": "llama.cpp", "ik_llama.cpp": "ik_llama.cpp",
    }  # fmt: skip
    data = _data([runs]) | {
        "workload": "W3", "numbers": "Q4_K", "families": families, "in_place_bytes": 80,
        "isas": {"rksc": "amx", "rksc int8": "amx"}, "activations": {"rksc int8": "int8"},
        "decode_ops": [],
    }  # fmt: skip
    made = compare.summary(data)
    found = [(r["ours"], r["theirs"], r["value"], r["must"]) for r in made["ratios"]]
    assert found == [
        ("rksc", "llama.cpp -fa", 0.5, 0.62), ("rksc", "ik_llama.cpp", 1.0, 0.90),
        ("rksc int8", "llama.cpp -fa", 0.25, 0.42), ("rksc int8", "ik_llama.cpp", 0.5, 0.60),
    ]  # fmt: skip
    assert made["rows"]["ik_llama.cpp"]["agreement"] is None
    in_place = [(m["ours"], m["value"], m["must"]) for m in made["memory"][-2:]]
    assert in_place == [("rksc", 1.25, 1.15), ("rksc int8", 1.5, 1.15)]
    assert "file and KV" in compare.table(data)


def _cell(branches: int, prefix: int, ms: dict[str, list[float]]) -> dict[str, Any]:
    shape = Shape(prefix=prefix, branches=branches, suffix=1, new=4, verify=0)
    rates = _data([{"rksc": _run(1.0, [])}])["rounds"][0]["rates"]
    rounds = [
        {"rates": rates,
         "runs": {name: {"seconds": {"prefill": 9.0, "decode": each[i] * 4e-3}}
                  for name, each in ms.items()}}
        for i in range(len(ms["rksc"]))
    ]  # fmt: skip
    return {"shape": vars(shape), "read_bytes": 5_000_000, "rounds": rounds}


def _steps(*cells: dict[str, Any]) -> dict[str, Any]:
    names = list(cells[0]["rounds"][0]["runs"])
    return {
        "model": "m.gguf", "numbers": "Q4_K", "threads": 2, "machine": "a machine",
        "families": {n: n.partition(" ")[0] for n in names}, "activations": {},
        "skipped": ["vLLM skipped: no"], "cells": list(cells),
    }  # fmt: skip


def test_a_decode_table_has_medians_goals_and_the_read_rate() -> None:
    slow = {"rksc": [9.0, 8.0, 7.0], "llama.cpp": [20.0, 5.0, 10.0], "llama.cpp -fa": [99.0] * 3}
    fast = {"rksc": [10.0, 30.0, 20.0], "llama.cpp": [90.0] * 3, "llama.cpp -fa": [40.0] * 3}
    data = _steps(_cell(1, 128, slow), _cell(8, 128, fast), _cell(8, 2048, fast))
    one, eight, far = decode_table.summary(data)
    assert one["ms"] == pytest.approx({"rksc": 8.0, "llama.cpp": 10.0, "llama.cpp -fa": 99.0})
    ratio = one["ratios"]["rksc / llama.cpp"]
    assert [ratio[key] for key in ("value", "low", "high")] == pytest.approx([0.8, 0.45, 1.6])
    assert (ratio["must"], ratio["aim"]) == (1.10, 0.90)
    ratio = eight["ratios"]["rksc / llama.cpp -fa"]
    assert (ratio["value"], ratio["must"]) == (pytest.approx(0.5), 0.42)
    assert far["ratios"]["rksc / llama.cpp -fa"]["must"] is None  # no goals at that prefix
    assert one["read"]["rksc"] == pytest.approx([5 / 9, 5 / 8, 5 / 7])  # of 1 GB/s
    assert not eight["read"]
    text = decode_table.table(data)
    assert "vLLM skipped: no" in text
    assert "MISSED" in text and "aim reached" in text
    with pytest.raises(ValueError, match=r"rksc, reads at one branch: 1\.25\d* of the machine's"):
        decode_table.table(_steps(_cell(1, 128, {"rksc": [4.0], "llama.cpp": [9.0]})))


def test_cells_of_a_decode_table() -> None:
    cells = decode_table.shapes(None, None, None)
    assert {(s.prefix, s.branches) for s in cells} == {
        (p, n) for p in (128, 2048) for n in (1, 2, 4, 8, 16, 32)
    }
    assert {s.new for s in cells} == {32}
    assert vars(decode_table.largest(cells)) == vars(
        Shape(prefix=2048, branches=32, suffix=1, new=32, verify=0)
    )
    assert [(s.prefix, s.branches, s.new) for s in decode_table.shapes(16, 3, 5)] == [(16, 3, 5)]


@pytest.mark.parametrize("loop", ["registers", "loads"])
def test_sums_of_the_limits_stay_in_registers(loop: str, tmp_path: Path) -> None:
    """A sum in memory waits for its last store: a third of the rate. Stack, here: (%rsp)."""
    source = ROOT / "rksc" / "limits" / "peak.c"
    command = ["cc", "-S", "-O3", "-march=native", str(source), "-o", str(tmp_path / "peak.s")]
    subprocess.run(command, check=True)
    text = (tmp_path / "peak.s").read_text()
    found = re.findall(rf"^(\w+_{loop}):\n(.*?)^\s*\.size\s+\1,", text, re.DOTALL | re.MULTILINE)
    found = [(name, body) for name, body in found if not name.startswith("amx")]
    assert {name for name, _ in found} >= {f"{kind}_{loop}" for kind in ("fma", "int16", "int8")}
    for name, body in found:
        assert "(%rsp)" not in body, name


def test_a_difference_without_sharing_is_told() -> None:
    same = {"rksc": _run(1.0, [[1, 2]]), "No-KV": _run(9.0, [[1, 2]])}
    other = {"rksc": _run(1.0, [[1, 2]]), "No-KV": _run(9.0, [[1, 3]])}
    assert compare.summary(_data([same]))["exact"]
    assert not compare.summary(_data([same, other]))["exact"]
    assert "DIFFERENT" in compare.table(_data([same, other]))


@pytest.mark.parametrize(
    ("value", "most", "expected"),
    [(0.5, True, "aim reached"), (0.6, True, "reached"), (0.8, True, "MISSED"),
     (0.8, False, "aim reached"), (0.5, False, "MISSED")],
)  # fmt: skip
def test_verdict(value: float, most: bool, expected: str) -> None:
    must, aim = (0.7, 0.55) if most else (0.55, 0.75)
    assert compare.verdict(value, must, aim, most) == expected
    assert compare.verdict(value, None, None, most) == ""


def test_rounds_of_another_comparison_are_not_added() -> None:
    data = _data([{"rksc": _run(1.0, [[1]])}])
    assert len(branching.together(data, data)["rounds"]) == 2
    with pytest.raises(ValueError, match="numbers was float32"):
        branching.together({**data, "numbers": "float32"}, data)


def test_mechanisms_compare_equal_work() -> None:
    """Medians of seconds; runs that computed different things are not averaged."""
    costs = [mechanisms.Cost(seconds, 5, 10, "kept") for seconds in (3.0, 1.0, 2.0)]
    assert mechanisms.median(costs) == mechanisms.Cost(2.0, 5, 10, "kept")
    with pytest.raises(RuntimeError, match="runs of the same work differ"):
        mechanisms.median([*costs, mechanisms.Cost(1.0, 6, 10, "kept")])
    line = str(mechanisms.Line("gate", mechanisms.Cost(4.0, 9, 90), costs[1]))
    assert line.split() == ["gate", "1.000", "4.000", "0.25", "5", "9", "10", "90", "0.11", "kept"]


# ---- the first run on a GPU --------------------------------------------------------------------


def gpu_options(folder: Path, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"json": folder / "found.json", "parts": ["correct", "speed"], "models": ["1B", "7B"],
           "no_build": False, "budget": 100.0, "device": "cuda", **more}
    )  # fmt: skip


def test_parts_share_a_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One gets what is left, a second call what the first has left; the rest is named."""
    clock, given = [0.0], {}

    def apart(name: str, options: Any, limit: float) -> dict[str, Any]:
        given[name] = limit
        clock[0] += min(limit, 40.0)
        return {"took": min(limit, 40.0)}

    monkeypatch.setattr(gpu_check, "apart", apart)
    monkeypatch.setattr(gpu_check.time, "perf_counter", lambda: clock[0])
    options = gpu_options(tmp_path, json=tmp_path / "found.json")
    assert gpu_check.run(options, ["build"]) == 0
    assert gpu_check.run(options, ["small", "machine", "logits:1B", "tests"]) == 0
    assert given == {"build": 100.0, "small": 60.0, "machine": 20.0}
    found = json.loads(options.json.read_text("utf-8"))
    assert found["not_run"] == ["logits:1B", "tests"]
    assert sum(found["seconds"].values()) == 100.0
    assert gpu_check.run(options, ["small"]) == 0  # again: its first time no longer counts
    assert given["small"] == 40.0
    found = json.loads(options.json.read_text("utf-8"))
    assert found["not_run"] == ["logits:1B", "tests"]  # not asked for this time


def test_no_time_leaves_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A part that has no time keeps its earlier result, and a call that runs nothing fails."""
    monkeypatch.setattr(gpu_check, "apart", lambda *_: pytest.fail("there is no time"))
    options = gpu_options(tmp_path)
    earlier = {"seconds": {"build": 99.0}, "small": {"sound": True}, "not_run": ["tests"]}
    options.json.write_text(json.dumps(earlier), "utf-8")
    assert gpu_check.run(options, ["small"]) == 1
    found = json.loads(options.json.read_text("utf-8"))
    assert found == {**earlier, "not_run": ["tests", "small"]}


def test_parts_of_a_model(tmp_path: Path) -> None:
    """One that names no model is that of all; each runs once."""
    options = gpu_options(tmp_path, parts=["steps:tiny", "logits", "logits:7B", "small", "small"])
    assert gpu_check.chosen(options) == ["small", "logits:1B", "logits:7B", "steps:tiny"]


@pytest.mark.parametrize("part", ["small:7B", "correct:7B", "logits:", "logits:70B", "nothing"])
def test_parts_that_are_none_are_named(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", part])
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main()
    assert f"error: {part}: " in capsys.readouterr().err


def test_what_tells_most_comes_first(tmp_path: Path) -> None:
    """Both halves fit into less than eight minutes by default, and name every part."""
    names = gpu_check.chosen(gpu_options(tmp_path))
    assert names[0] == "build"
    assert names[-2:] == ["tests", "memcheck"]
    assert {name.partition(":")[0] for name in names} == set(gpu_check.PARTS)
    parser = subprocess.run(
        [sys.executable, gpu_check.__file__, "--help"], capture_output=True, text=True, check=True
    )
    default = re.search(r"JSON together \(default:\s+([\d.]+)\)", parser.stdout)
    assert default is not None
    assert float(default[1]) < 8 * 60


def test_time_without_a_kernel() -> None:
    """Kernels that overlap count once; a step is half of the two."""
    kernels = [("attend", 10.0, 20.0), ("merge", 15.0, 25.0), ("attend", 40.0, 45.0)]
    found = gpu_check.busy(kernels, wall=100e-6, steps=2)
    assert found["kernels_per_step"] == 1.5
    assert found["kernel_seconds_per_step"] == pytest.approx(10e-6)
    assert found["idle_fraction"] == pytest.approx(0.8)
    assert list(found["microseconds_per_step"].items()) == [("attend", 7.5), ("merge", 5.0)]


def test_rates_are_fractions_of_what_was_measured() -> None:
    measured = {"bytes_per_second": 4.0, "flop_per_second": 100.0}
    found = gpu_check.rates(2.0, 4, 50, measured)
    assert (found["bandwidth_fraction"], found["matrix_rate_fraction"]) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("found", "bad"),
    [({"sound": True, "a": {"sound": True}}, False), ({"a": {"sound": False}}, True),
     ({"error": "exit status 1"}, True), ({"returncode": 1}, True), ({"seconds": 1.0}, False)],
)  # fmt: skip
def test_a_part_within_a_part_counts(found: dict[str, Any], bad: bool) -> None:
    assert gpu_check.is_bad(found) is bad


def test_tests_that_are_cut_short_tell_what_they_saw() -> None:
    lines = [
        "collecting ... collected 4 items", "tests/test_a.py::test_x[1 2] PASSED      [ 25%]",
        "tests/test_a.py::test_y FAILED [ 50%]", "tests/test_a.py::test_z PASSED [ 75%]",
    ]  # fmt: skip
    found = gpu_check.outcome(lines)
    assert (found["passed"], found["failed"]) == (2, ["tests/test_a.py::test_y"])
    assert not found["sound"]
    assert gpu_check.outcome(lines[:2])["sound"]
    assert not gpu_check.outcome(["ERROR: no such file"])["sound"]


@pytest.mark.parametrize(
    ("last", "cut"), [("os.abort()", False), ("sys.exit(3)", False), ("time.sleep(60)", True)]
)
def test_tests_that_crash_are_bad(last: str, cut: bool) -> None:
    """What dies after a test has passed is bad; what had no more time is not."""
    script = f"import os, sys, time; print('a.py::b PASSED', flush=True); {last}"
    found = gpu_check.watched([sys.executable, "-c", script], 3.0)
    assert (found["passed"], found["failed"], found["cut"]) == (1, [], cut)
    assert gpu_check.is_bad(found) is not cut


def test_a_step_reads_an_embedding_only_as_the_head() -> None:
    weights = {"model.embed_tokens.weight": np.zeros(8, "i2"), "lm_head.weight": np.zeros(4, "i2")}
    assert gpu_check.step_bytes({"tie_word_embeddings": False}, weights) == 8
    tied = {"model.embed_tokens.weight": weights["model.embed_tokens.weight"]}
    assert gpu_check.step_bytes({"tie_word_embeddings": True}, tied) == 16


@pytest.mark.oracle
def test_the_script_runs_without_a_gpu(tmp_path: Path) -> None:
    """The parts that need torch alone, on a tiny model."""
    pytest.importorskip("torch")
    parts = ["small", "attention:tiny", "gaps:tiny", "mechanisms:tiny"]
    command = [sys.executable, gpu_check.__file__, *parts, "--device", "cpu", "--models", "tiny"]
    target = tmp_path / "found.json"
    done = subprocess.run(
        [*command, "--json", str(target)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout
    found = json.loads(target.read_text("utf-8"))
    assert found["not_run"] == []
    assert set(found["attention:tiny"]) == {"prefill", "decode 1", "decode 8", "decode 32"}
    half = found["mechanisms:tiny"]["rsbcm"]["half"]
    assert half["evictions"] > 0
    assert half["tokens_recomputed"] > 0


# ---- options -----------------------------------------------------------------------------------


def test_options() -> None:
    name, shape = branching.shape_of(branching.parse(["--workload", "W2"]))
    assert (name, shape) == ("W2", Shape(prefix=4096, branches=32))
    name, shape = branching.shape_of(branching.parse(["--new", "8"]))
    assert (name, shape) == ("custom", Shape(new=8))
    options = branching.parse(["m.gguf", "--workload", "W3", "--peers"])
    assert branching.shape_of(options) == ("W3", Shape())
    assert branching.names_of(options) == ["rksc", "rksc int8", "llama.cpp", "ik_llama.cpp"]
    options = branching.parse(["m.gguf", "--decode-table", "--peers"])
    assert branching.names_of(options) == ["rksc", "llama.cpp", "ik_llama.cpp"]
    options = branching.parse(["--peer-python", "vLLM=/a", "--peer-program", "ik_llama.cpp=/b"])
    assert options.places == {"vLLM": "/a", "ik_llama.cpp": "/b"}


def test_a_quantised_file_is_taken_as_it_is(model: Path, tmp_path: Path) -> None:
    """Unless other numbers are asked for."""
    file = tmp_path / "q.gguf"
    write_gguf(file, random_weights(TINY, seed=1), TINY, "Q8_0")
    numbers = branching.numbers_of(branching.parse([str(file), "--workload", "W3"]))
    setting = engines.Setting(file, tmp_path / "made", numbers, SHAPE, 1)
    assert (numbers, setting.quantised, setting.gguf) == ("Q8_0", True, file)
    assert not (tmp_path / "made").exists()
    asked = branching.parse([str(file), "--dtype", "float32"])
    assert branching.numbers_of(asked) == "float32"
    assert branching.numbers_of(branching.parse([str(model)])) == best_dtype()
    with pytest.raises(ValueError, match=r"tiny\.gguf is not"):
        branching.numbers_of(branching.parse([str(model), "--workload", "W3"]))


@pytest.mark.parametrize(
    "arguments",
    [["--repeat", "0"], ["--append"], ["--peer-python", "vLLM"], ["--peer-python", "x=/y"],
     ["--dtype", "float32", "--gguf-type", "Q8_0"], ["--elsewhere", "nothing"],
     ["--peer-program", "vLLM=/y"], ["--peer-python", "ik_llama.cpp=/y"],
     ["--workload", "W3"], ["--decode-table", "--elsewhere"]],
)  # fmt: skip
def test_bad_options_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        branching.parse(arguments)
    assert arguments[-2 if len(arguments) > 1 else 0].split("=")[0] in capsys.readouterr().err


def test_a_peer_that_is_not_there_says_how_to_install_it(tmp_path: Path) -> None:
    setting = engines.Setting(tmp_path / "m.gguf", tmp_path, "bfloat16", SHAPE, 1)
    line = engines.peer(setting, "vLLM", {"vLLM": str(tmp_path / "python")})
    assert isinstance(line, str)
    assert "vLLM skipped" in line and "pip install" in line and "RKSC_PEER_VLLM" in line
    quantised = engines.Setting(tmp_path / "m.gguf", tmp_path, "Q8_0", SHAPE, 1)
    assert "does not read Q8_0" in str(engines.peer(quantised, "transformers", {}))
    line = engines.peer(quantised, "ik_llama.cpp", {"ik_llama.cpp": str(tmp_path / "bench")})
    assert isinstance(line, str)
    assert "ik_llama.cpp skipped: no program" in line
    assert "cmake" in line and "RKSC_PEER_IK_LLAMA_CPP" in line and "--peer-program" in line


def test_packages_that_are_missing_here_are_named_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peers have an environment of their own; their files are written by this one."""
    known = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name in ("torch", "gguf") else known(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(engines, "_has", lambda python, module: module == "transformers")
    setting = engines.Setting(model, tmp_path / "made", "float32", SHAPE, 1)
    engines.require_packages(setting, ["rksc", "No-KV", "vLLM"], {})  # the file is F32, no vLLM
    with pytest.raises(ImportError, match=r"lacks gguf, torch.* pip install torch"):
        engines.require_packages(setting, ["rksc", "transformers"], {})
    other = engines.Setting(model, tmp_path / "made", "bfloat16", SHAPE, 1)
    with pytest.raises(ImportError, match=r"lacks gguf, needed"):
        engines.require_packages(other, ["rksc"], {})


# ---- the contest -------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, random_weights(TINY, seed=1), TINY, "F32")
    return path


def test_side_by_side_with_a_tiny_model(model: Path, tmp_path: Path) -> None:
    """The program as it is called, rksc with and without sharing, then another round."""
    file = tmp_path / "out.json"
    sizes = [x for n, v in vars(SHAPE).items() for x in (f"--{n}", str(v))]
    command = [
        sys.executable, str(ROOT / "benchmarks" / "branching.py"), str(model), *sizes,
        "--dtype", "float32", "--threads", "1", "--json", str(file), "--append", "--repeat", "1",
    ]  # fmt: skip
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    assert "the same, bit for bit" in done.stdout
    data = json.loads(file.read_text())
    assert len(data["rounds"]) == 2
    for r in data["rounds"]:
        assert set(r["rates"]) == {"fma", "bf16", "amx", "int16", "int8", "read"}
        for run in r["runs"].values():
            assert set(run["seconds"]) == set(compare.PHASES)
            assert run["peak_bytes"] > 1 << 20
            assert [len(tokens) for tokens in run["chosen"]] == [SHAPE.new] * SHAPE.branches
    first, second = (data["rounds"][i]["runs"]["rksc"] for i in (0, 1))
    assert first["tokens"] == 24 + 3 * (3 + 5 + 4)
    assert first["chosen"] != second["chosen"]  # another prefix in each round


# Answers like llama-batched-bench: a line for each prompt; 0.5 s a prompt's token, 2 s a step.
BATCHED_BENCH = r"""#!/bin/sh
[ "$1" = --version ] && { echo "version: 1 (abc)" >&2; exit 0; }
while [ $# -gt 0 ]; do
    case $1 in
        -npp) prompts=$2 ;; -ntg) new=$2 ;; -npl) branches=$2 ;; -rtr) seconds=0.125 ;;
    esac
    shift
done
for n in $(echo "$prompts" | tr , ' '); do
    echo "|  $n |  $new | $branches | 9 | ${seconds:-$n.5} | 1 | 2.250 | 1 | 1 | 1 |" >&2
done
"""


def batched_bench(folder: Path) -> Path:
    program = folder / "llama-batched-bench"
    program.write_text(BATCHED_BENCH)
    program.chmod(0o755)
    return program


def test_a_peer_that_is_a_program(model: Path, tmp_path: Path) -> None:
    """Each of its ways; phases that it does not know are prompts of as many tokens."""
    places = {"ik_llama.cpp": str(batched_bench(tmp_path))}
    setting = engines.Setting(model, tmp_path, "F32", SHAPE, 1)
    made = engines.peer(setting, "ik_llama.cpp", places)
    assert isinstance(made, list)
    assert [c.name.removeprefix("ik_llama.cpp") for c in made] == ["", " -fa", " -rtr", " -rtr -fa"]
    plain = Shape(prefix=24, branches=3, suffix=1, new=5, verify=0)
    versions, (whole, bare) = contest.run(made[1:3], [SHAPE, plain], 1, 97, 1, tmp_path)
    assert versions["ik_llama.cpp -rtr"] == "ik_llama.cpp version: 1 (abc)"
    run = whole[0]["runs"]["ik_llama.cpp -fa"]
    assert run["seconds"] == {"prefill": 24.5, "suffix": 9.5, "verify": 12.5, "decode": 2.25}
    assert run["chosen"] is None
    assert run["peak_bytes"] > 1 << 16
    assert bare[0]["runs"]["ik_llama.cpp -rtr"]["seconds"] == {"prefill": 0.125, "decode": 2.25}
    places = {"ik_llama.cpp": "/bin/false"}
    broken = engines.peer(setting, "ik_llama.cpp", places)
    with pytest.raises(RuntimeError, match=r"ik_llama.cpp: .*status 1"):
        contest.run([broken[0]], [plain], 1, 97, 1, tmp_path)  # type: ignore[list-item]


def test_a_decode_table_of_a_tiny_model(tmp_path: Path) -> None:
    """The program as it is called, beside a peer that is a program."""
    model, file = tmp_path / "tiny.gguf", tmp_path / "out.json"
    write_gguf(model, random_weights(TINY, seed=1), TINY, "Q8_0")
    command = [
        sys.executable, str(ROOT / "benchmarks" / "branching.py"), str(model), "--decode-table",
        "--engines", "rksc", "rksc int8", "ik_llama.cpp", "--prefix", "20", "--new", "3",
        "--threads", "1", "--repeat", "1", "--json", str(file),
        "--peer-program", f"ik_llama.cpp={batched_bench(tmp_path)}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    data = json.loads(file.read_text())
    assert data["numbers"] == "Q8_0"
    assert [c["shape"]["branches"] for c in data["cells"]] == [1, 2, 4, 8, 16, 32]
    for cell in data["cells"]:
        (one,) = cell["rounds"]
        run = one["runs"]["rksc"]
        n = cell["shape"]["branches"]
        costs = workload.expected(CONFIG, Shape(**cell["shape"]), shared=True).values()
        assert run["tokens"] == sum(cost.tokens for cost in costs) == 20 + n * 3
        assert [len(tokens) for tokens in run["chosen"]] == [3] * n
        assert one["runs"]["rksc int8"]["arithmetic"] == "int8"
        assert one["runs"]["ik_llama.cpp -rtr"]["seconds"]["decode"] == 2.25
    assert "20 x 32: rksc int8 / ik_llama.cpp" in done.stdout


def test_whole_rounds_are_kept_when_it_is_ended_twice(model: Path, tmp_path: Path) -> None:
    """As `timeout` does it."""
    sizes = [x for n, v in vars(SHAPE).items() for x in (f"--{n}", str(v))]
    command = [
        sys.executable, str(ROOT / "benchmarks" / "branching.py"), str(model), *sizes,
        "--engines", "rksc", "--dtype", "float32", "--threads", "1", "--repeat", "1000",
        "--json", str(tmp_path / "out.json"),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        assert p.stderr is not None
        for begin in ("round 2:", "interrupted after"):  # the first is whole then
            assert any(line.startswith(begin) for line in p.stderr)
            p.send_signal(signal.SIGTERM)
        said, log = p.communicate(timeout=120)
    assert p.returncode == 0, log
    rounds = json.loads((tmp_path / "out.json").read_text())["rounds"]
    assert f"medians of {len(rounds)} rounds" in said


def test_a_contestant_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    script = "import sys; sys.exit('no such engine')"
    broken = Contestant("broken", "peer", [sys.executable, "-c", script])
    with pytest.raises(RuntimeError, match=r"broken: .*status 1[\s\S]*no such engine"):
        contest.run([broken], [SHAPE], 1, 97, 1, tmp_path)


def test_process_tree_finds_children() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while len(tree := contest.process_tree(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.communicate("\n")
    assert len(tree) == 2 and tree[0] == process.pid
