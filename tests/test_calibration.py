"""Calibration: what is fitted on one half and measured on the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.labs import lab_of, verified_problem

from rksc import CGEE, Model, calibrate, calibrate_cgee
from rksc.calibration import stats
from rksc.calibration import tasks as task_module
from rksc.calibration.fitting import (
    Effect,
    Gate,
    Seen,
    effect,
    fit,
    fit_cgee,
    lens_costs,
)
from rksc.calibration.fitting import report as gate_report
from rksc.calibration.measure import LENSES
from rksc.calibration.replay import Lenses
from rksc.calibration.tasks import wording_pairs


def pair(group: int, kind: str, same: bool, level: float, passes: str = "both") -> Seen:
    guards = {"both": {"numbers", "reworded", None}, "numbers": {"numbers", None}, "none": {None}}
    cosines = {pool: np.full(8, level) for pool in ("mean", "last")}
    return Seen(f"q{group}", kind, same, frozenset(guards[passes]), cosines)


def test_what_is_separable_is_separated() -> None:
    rng = np.random.default_rng(17)
    seen = [pair(i, "same", True, rng.uniform(0.6, 0.9)) for i in range(100)]
    seen += [pair(i, "other", False, rng.uniform(-0.2, 0.3)) for i in range(100)]
    gate = fit(seen, 8, 0.01)
    assert gate is not None
    assert 0.3 < gate.tau < 0.65 and gate.probe_layers == 1 and gate.guard == "numbers"
    assert all(gate.accepts(s) is bool(s.same) or s.same for s in seen)
    assert np.mean([gate.accepts(s) for s in seen if s.same]) >= 0.97


def test_near_duplicates_are_the_guards_to_stop() -> None:
    """They are more alike than rewordings: only a guard that refuses them leaves any reuse."""
    seen = [pair(i, "same", True, 0.8) for i in range(50)]
    seen += [pair(i, "turned", False, 0.99, "numbers") for i in range(50)]
    gate = fit(seen, 8, 0.01)
    assert gate is not None and gate.guard == "reworded"
    assert not any(gate.accepts(s) for s in seen if not s.same)
    assert fit(seen, 8, 0.01, guards=("numbers",)) is None
    tolerant = fit(seen, 8, 1.0, guards=("numbers",))
    assert tolerant is not None and all(tolerant.accepts(s) for s in seen)


def test_what_is_inseparable_stays_closed() -> None:
    rng = np.random.default_rng(19)
    seen = [pair(i, "same", True, rng.uniform(0, 0.9)) for i in range(200)]
    seen += [pair(i, "other", False, rng.uniform(0.1, 1.0)) for i in range(200)]
    assert fit(seen, 8, 0.0) is None


def test_the_allowed_errors_are_counted() -> None:
    seen = [pair(i, "same", True, 0.5) for i in range(10)]
    seen += [pair(i, "other", False, 0.9 if i < 2 else 0.1) for i in range(100)]
    assert fit(seen, 8, 0.01) is None
    gate = fit(seen, 8, 0.02)
    assert gate is not None and sum(gate.accepts(s) for s in seen if not s.same) == 2


def test_pairs_of_both_kinds_are_needed() -> None:
    with pytest.raises(ValueError, match="there must be some that may share"):
        fit([pair(0, "same", True, 0.5)], 8, 0.01)
    with pytest.raises(ValueError, match="unprobed"):
        Gate(None, "mean", 1, 1.5).accepts(Seen("q", "k", True, frozenset({None})))


def test_level_2_is_taken_where_it_pays() -> None:
    """Lenses that see the final score from the first layer on."""
    problems = [verified_problem(i, [0.9, 0.89], [0.2, 0.8]) for i in range(16)]
    found = fit_cgee(problems, 0.0, {"answer": 0.01, "full": 5.0})
    assert found.level2 and found.cgee.lens == "answer"
    assert found.held_out.saved > 0.5 and found.held_out.changed.k == 0
    assert "Level 2 pays" in found.says
    dear = fit_cgee(problems, 0.0, {"answer": 100.0, "full": 100.0})
    assert not dear.level2 and dear.cgee.lens is None and "Level 2 is off" in dear.says


def test_level_2_must_surely_pay() -> None:
    """Its lens sees the score in one problem of eight on the half that chooses."""
    problems = [verified_problem(i, [0.9, 0.89], [0.2, 0.8]) for i in range(16)]
    first, _ = stats.halves([p.group for p in problems])
    blind = Lenses(np.full((2, 8), 9.0), np.zeros((2, 8)))
    problems = [p if p.group == min(first) else replace(p, lenses=dict.fromkeys(LENSES, blind))
                for p in problems]  # fmt: skip
    found = fit_cgee(problems, 0.0, {"answer": 0.0, "full": 0.0})
    assert found.cgee.lens is None and "no sure saving" in found.says


def test_the_held_out_half_only_measures() -> None:
    """What the choosing half decides stands, also where the other half speaks against it."""
    problems = [verified_problem(i, [0.9, 0.89], [0.2, 0.8]) for i in range(16)]
    _, second = stats.halves([p.group for p in problems])
    misleading = Lenses(np.full((2, 8), 0.01), np.tile([[0.9], [0.1]], 8))
    problems = [
        replace(p, lenses=dict.fromkeys(LENSES, misleading)) if p.group in second else p
        for p in problems
    ]
    found = fit_cgee(problems, 0.0, {"answer": 0.01, "full": 5.0})
    assert found.level2 and found.chosen_on.changed.k == 0
    assert found.held_out.changed == stats.Rate(8, 8)
    assert found.keeps is False and "The wanted 0.0% is missed." in found.says


def test_kappa_is_as_large_as_the_wanted_rate_allows() -> None:
    """The rival is 0.8 as confident and wins in one problem of four."""
    problems = [
        verified_problem(i, [0.8, 0.64], [0.1 if i % 4 == 0 else 0.9, 0.9]) for i in range(32)
    ]
    problems = [replace(p, lenses={n: Lenses(np.full((2, 8), 9.0), np.zeros((2, 8)))
                                   for n in LENSES}) for p in problems]  # fmt: skip
    costs = {"answer": 0.01, "full": 1.0}
    strict, loose = (fit_cgee(problems, rate, costs) for rate in (0.0, 0.5))
    assert strict.cgee.kappa <= 0.8 and strict.held_out.saved == 0
    assert loose.held_out.saved == 1.0 and 0 < loose.held_out.changed.value < 0.5
    assert not strict.level2 and not loose.level2
    whole = effect(CGEE(kappa=0.0), problems, 0.0)
    assert whole == Effect(0.0, stats.Rate(0, 32))


def test_a_calibration_says_whether_it_could_tell() -> None:
    """Of eight nothing changed: that is no proof of one in a hundred, but of one in two."""
    problems = [verified_problem(i, [0.9, 0.1], [0.8, 0.2]) for i in range(16)]
    for limit, keeps, said in ((0.01, None, "takes 381"), (0.5, True, "is kept")):
        found = fit_cgee(problems, limit, {"answer": 0.01, "full": 5.0})
        assert found.held_out.changed == stats.Rate(0, 8)
        assert found.keeps is keeps and said in found.says
    held = [pair(i, "other", False, 0.1) for i in range(3)] + [pair(9, "same", True, 0.9)]
    for level, keeps in ((0.5, None), (0.0, False)):
        made = gate_report(None, Gate("numbers", "mean", 1, 1.5, level), held, 0.01)
        assert made.keeps is keeps


def test_calibrate_on_a_model(data: Path, small: Model) -> None:
    pairs = [p for of in wording_pairs(data).values() for p in of]
    found = calibrate(small, pairs, 1.0, guards=(None,), progress=False, engine=dict(ENGINE))
    assert found.asks is not None and found.same.n == 4
    assert found.accepted[task_module.REWORDING] == found.same
    assert str(found.same) in found.says
    session = small.session(asks=found.asks, dtype="float32")
    assert session.asks is found.asks
    plain = [
        (f"th {i}", own, same)
        for i in range(4)
        for own, same in (("e", np.bool_(True)), ("the", np.bool_(False)))
    ]
    found = calibrate(small, plain, 0.0, guards=(None,), progress=False, engine=dict(ENGINE))
    assert (found.same.n, found.other.n) == (2, 2)


ENGINE: dict[str, Any] = {"dtype": "float32", "kv_bytes": "8MiB", "n_threads": 1}


@pytest.mark.parametrize("pairs", [[("a", "b", True)], [("a", "b")], [("a", 3, True)]])
def test_calibrate_refuses(small: Model, pairs: Any) -> None:
    with pytest.raises(ValueError, match="pairs"):
        calibrate(small, pairs, progress=False, engine=dict(ENGINE))


def test_calibrate_cgee_on_a_model(small: Model) -> None:
    problems = [(f"th {i} abc", str(i)) for i in range(6)]
    found = calibrate_cgee(small, problems, 0.5, n_branches=3, max_new_tokens=6, progress=False,
                           engine=dict(ENGINE))  # fmt: skip
    assert found.held_out.changed.n == 3 and found.says in str(found)
    with pytest.raises(ValueError, match="max_changed"):
        calibrate_cgee(small, problems, 2.0)
    for bad in (problems[:1], ["a question"], [("a", 1)], [("a", "")]):
        with pytest.raises(ValueError, match="problems"):
            calibrate_cgee(small, bad, engine={"dtype": "no session is opened"})  # type: ignore[arg-type]
    costs = lens_costs(lab_of(small))
    assert 0 < costs["answer"] < costs["full"]
