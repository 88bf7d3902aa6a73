"""The pure decisions of ASKS, CGEE and RSBCM (csrc/policy), as tables of cases."""

from __future__ import annotations

import ctypes as c
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support import native
from support.corerig import Cgee

NAN = math.nan
OFF = 2.0  # a confidence that nothing reaches


class Candidate(c.Structure):
    """rk_candidate"""

    _fields_ = [("omega", c.c_double), ("last_use", c.c_uint64), ("id", c.c_uint64)]


def policy() -> c.CDLL:
    lib = native.load("policy")
    for name in ("rk_cgee_stop", "rk_cgee_can_win", "rk_cgee_exit", "rk_cgee_check"):
        getattr(lib, name).restype = c.c_bool
    lib.rk_rsbcm_before.restype = c.c_bool
    lib.rk_cgee_mark.restype = lib.rk_rsbcm_omega.restype = c.c_double
    return lib


def doubles(values: Sequence[float]) -> c.Array[c.c_double]:
    return (c.c_double * max(len(values), 1))(*values)


# ---- ASKS ----------------------------------------------------------------------

OPEN, ACCEPTED, REJECTED, UNREACHABLE, UNDEFINED = range(5)


def weights(n_layers: int, alpha: float) -> list[float]:
    out = doubles([0.0] * n_layers)
    policy().rk_asks_weights(out, n_layers, c.c_double(alpha))
    return list(out)


def decide(cosines: Sequence[float], w: Sequence[float], tau: float) -> tuple[int, float]:
    """The gate after these cosines, of len(w) layers, and sigma."""
    sigma = c.c_double(-9)
    seen = (c.c_float * max(len(cosines), 1))(*cosines)
    gate = policy().rk_asks_decide(
        seen, len(cosines), doubles(w), len(w), c.c_double(tau), c.byref(sigma)
    )
    return int(gate), sigma.value


@pytest.mark.parametrize("alpha", [1.5, 0.0, -2.0, 30.0])
@pytest.mark.parametrize("n_layers", [1, 2, 24])
def test_asks_weights_are_the_formula(n_layers: int, alpha: float) -> None:
    layer = np.arange(1, n_layers + 1)
    expected = np.exp(alpha * layer / n_layers)
    np.testing.assert_allclose(weights(n_layers, alpha), expected / expected.sum(), rtol=1e-14)


@pytest.mark.parametrize("alpha", [1e4, -1e4])
def test_asks_weights_do_not_overflow(alpha: float) -> None:
    w = weights(4, alpha)
    assert w == ([0, 0, 0, 1] if alpha > 0 else [1, 0, 0, 0])


def test_asks_weights_of_the_paper_grow_with_the_layer() -> None:
    w = weights(24, 1.5)
    assert w == sorted(w) and w[-1] / w[0] == pytest.approx(math.exp(1.5 * 23 / 24))


QUARTERS = [0.25, 0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    ("cosines", "tau", "gate", "sigma"),
    [
        ([1, 1, 1, 1], 0.8, ACCEPTED, 1.0),
        ([0.5, 0.5, 0.5, 0.5], 0.5, ACCEPTED, 0.5),  # met exactly
        ([0.5, 0.5, 0.5, 0.5], math.nextafter(0.5, 1), REJECTED, 0.5),
        ([1, 0, 1, 0], 0.5, ACCEPTED, 0.5),
        ([-1, -1, -1, -1], -1, ACCEPTED, -1.0),
        ([], 0.8, OPEN, 0.0),
        ([], 1.0, OPEN, 0.0),
        ([], 1.25, UNREACHABLE, 0.0),  # tau above 1: never
        ([1, 1, 1, 1], 1.25, REJECTED, 1.0),
        ([1, 1], 1.0, OPEN, 0.5),
        ([0.5], 1.0, UNREACHABLE, 0.125),
        ([0.5, 0.5], 0.75, OPEN, 0.25),  # ones would just do
        ([0.5, 0.5], math.nextafter(0.75, 1), UNREACHABLE, 0.25),
        ([0, 0, 0], 0.25, OPEN, 0.0),
        ([0, 0, 0, 0.5], 0.25, REJECTED, 0.125),
    ],
)
def test_asks_gate(cosines: list[float], tau: float, gate: int, sigma: float) -> None:
    assert decide(cosines, QUARTERS, tau) == (gate, sigma)


@pytest.mark.parametrize("cosines", [[NAN], [1, NAN], [1, NAN, 1, 1], [0, 0, 0, NAN], [NAN] * 4])
@pytest.mark.parametrize("tau", [-1.0, 0.5, 1.25])
def test_asks_nan_is_undefined_whatever_tau(cosines: list[float], tau: float) -> None:
    gate, sigma = decide(cosines, QUARTERS, tau)
    assert gate == UNDEFINED and math.isnan(sigma)


def test_asks_nan_tau_accepts_nothing() -> None:
    assert decide([1, 1, 1, 1], QUARTERS, NAN)[0] == REJECTED
    assert decide([1], QUARTERS, NAN)[0] == UNREACHABLE


@pytest.mark.parametrize("n_layers", [1, 3, 7, 24, 30, 80])
def test_asks_equal_directions_reach_tau_1_exactly(n_layers: int) -> None:
    """The weights' sum may round below 1, and a device's cosine above it."""
    w = weights(n_layers, 1.5)
    assert decide([1.0] * n_layers, w, 1.0) == (ACCEPTED, 1.0)
    assert decide([1.0000001] * n_layers, w, 1.0) == (ACCEPTED, 1.0)
    assert decide([1.0] * (n_layers - 1), w, 1.0)[0] == OPEN


def test_asks_paper_accepts_what_was_measured_for_unrelated_questions() -> None:
    """Median raw cosine 0.960 of unrelated prompts: the paper's tau lets it in."""
    gate, sigma = decide([0.96] * 24, weights(24, 1.5), 0.82)
    assert gate == ACCEPTED and sigma == pytest.approx(0.96)


@pytest.mark.parametrize("seed", range(5))
def test_asks_an_early_rejection_is_the_final_decision(seed: int) -> None:
    """Had the rest been cos = 1, the full sum would have rejected as well; else it is open."""
    rng = random.Random(seed)
    early = 0
    for _ in range(300):
        n = rng.randint(1, 12)
        w = weights(n, rng.choice([0.0, 1.5, 4.0]))
        cosines = [rng.uniform(-0.2, 1) for _ in range(n)]
        # Often a threshold that is met or missed by a rounding error.
        tau = rng.choice([0.5, 0.8, decide(cosines, w, 0)[1]])
        for seen in range(n):
            gate, sigma = decide(cosines[:seen], w, tau)
            best, _ = decide(cosines[:seen] + [1.0] * (n - seen), w, tau)
            assert gate == (OPEN if best == ACCEPTED else UNREACHABLE)
            assert sigma == pytest.approx(
                sum(a * b for a, b in zip(w, cosines[:seen], strict=False)), abs=1e-6
            )
            if gate == UNREACHABLE:
                early += 1
                assert decide(cosines, w, tau)[0] == REJECTED
    assert early > 100


# ---- CGEE: stop while generating -----------------------------------------------


def cgee(**fields: float) -> Cgee:
    """Everything off, but for the fields named."""
    base: dict[str, Any] = {
        "min_steps": 3,
        "stop_top": OFF,
        "skip_top": OFF,
        "skip_top_relative": OFF,
        "verify_batch": 4,
        "min_layer": 2,
        "lens_every": 1,
    }
    return Cgee(**(base | fields))


PAPER_STOP = {"stop_top": 0.72, "stop_lead": 0.10}


@pytest.mark.parametrize(
    ("fields", "confidence", "step", "stop"),
    [
        (PAPER_STOP, [0.5, 0.9, 0.6], 3, True),
        (PAPER_STOP, [0.5, 0.9, 0.6], 2, False),  # too early
        (PAPER_STOP, [0.5, 0.9, 0.6], 100, True),
        (PAPER_STOP, [0.71, 0.2], 3, False),  # not sure enough
        (PAPER_STOP, [0.72, 0.2], 3, True),  # exactly enough
        (PAPER_STOP, [0.9, 0.85], 3, False),  # no lead
        (PAPER_STOP, [0.9, 0.9], 3, False),
        ({"stop_top": 0.5, "stop_lead": 0.25}, [0.75, 1.0], 3, True),  # lead met exactly
        ({"stop_top": 0.5, "stop_lead": 0.25}, [math.nextafter(0.75, 1), 1.0], 3, False),
        ({"stop_top": 0.5, "stop_lead": 0.0}, [0.9, 0.9], 3, True),
        (PAPER_STOP, [NAN, 0.9, 0.5], 3, True),  # NaN is nobody
        (PAPER_STOP, [0.9, NAN, 0.85], 3, False),
        (PAPER_STOP, [0.9, NAN], 3, False),  # no rival left to lead
        (PAPER_STOP, [NAN, NAN], 3, False),
        (PAPER_STOP, [0.9], 3, False),  # one branch alone goes on
        (PAPER_STOP, [], 3, False),
        (PAPER_STOP, [0.0, 0.0], 3, False),
        ({"stop_top": 0.0, "stop_lead": 0.1}, [0.0, 0.0], 3, False),  # 0 / 0 is no lead
        ({}, [1.0, 0.0], 3, False),  # off
        (PAPER_STOP | {"min_steps": 0}, [0.9, 0.1], 0, True),
    ],
)
def test_cgee_stop(
    fields: dict[str, float], confidence: list[float], step: int, stop: bool
) -> None:
    for values in {tuple(confidence), tuple(reversed(confidence))}:
        got = policy().rk_cgee_stop(c.byref(cgee(**fields)), doubles(values), len(values), step)
        assert got is stop


# ---- CGEE: order, level 1, contenders ------------------------------------------


def order_of(confidence: Sequence[float]) -> list[int]:
    out = (c.c_int32 * max(len(confidence), 1))()
    policy().rk_cgee_order(doubles(confidence), len(confidence), out)
    return list(out[: len(confidence)])


@pytest.mark.parametrize(
    ("confidence", "order"),
    [
        ([], []),
        ([0.5], [0]),
        ([0.1, 0.9, 0.5], [1, 2, 0]),
        ([0.5, 0.9, 0.5, 0.9], [1, 3, 0, 2]),
        ([NAN, 0.0, NAN, 1.0], [3, 1, 0, 2]),
        ([NAN, NAN], [0, 1]),
        ([0.0, -0.0], [0, 1]),
    ],
)
def test_cgee_order(confidence: list[float], order: list[int]) -> None:
    assert order_of(confidence) == order


@pytest.mark.parametrize("seed", range(3))
def test_cgee_order_is_a_stable_sort(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.choice([0.1, 0.2, 0.3, rng.random(), NAN]) for _ in range(60)]
    numbers = [i for i in range(60) if not math.isnan(values[i])]
    numbers.sort(key=lambda i: -values[i])
    assert order_of(values) == numbers + [i for i in range(60) if math.isnan(values[i])]


NO, LEAD, RELATIVE, ONE = range(4)
LEVEL_1 = {
    "skip_top": 0.70,
    "skip_lead": 0.06,
    "skip_top_relative": 0.63,
    "skip_lead_relative": 0.08,
}
EXACT = {"skip_top": 0.75, "skip_lead": 0.25}
EXACT_RELATIVE = {"skip_top_relative": 0.5, "skip_lead_relative": 0.25}


def skip_of(fields: dict[str, float], confidence: Sequence[float]) -> tuple[int, int]:
    order = (c.c_int32 * max(len(confidence), 1))(*order_of(confidence))
    contenders = c.c_int32(-1)
    skip = policy().rk_cgee_skip(
        c.byref(cgee(**fields)), doubles(confidence), order, len(confidence), c.byref(contenders)
    )
    return int(skip), contenders.value


@pytest.mark.parametrize(
    ("fields", "confidence", "skip", "contenders"),
    [
        # the paper's level 1
        (LEVEL_1, [0.60, 0.71], LEAD, 0),
        (LEVEL_1, [0.71, 0.66], NO, 2),  # lead 0.05, 7 %
        (LEVEL_1, [0.65, 0.59], RELATIVE, 0),  # 9 %
        (LEVEL_1, [0.65, 0.61], NO, 2),
        (LEVEL_1, [0.62, 0.10], NO, 2),  # nobody is sure
        (LEVEL_1, [0.90, 0.84 - 1e-9, 0.2], LEAD, 0),
        (LEVEL_1, [0.70, 0.645], NO, 2),  # 5.5 points and 7.9 %
        # thresholds met exactly, and missed by one bit
        (EXACT, [0.75, 0.5], LEAD, 0),
        (EXACT, [math.nextafter(0.75, 0), 0.25], NO, 2),
        (EXACT, [0.75, math.nextafter(0.5, 1)], NO, 2),
        (EXACT_RELATIVE, [0.5, 0.375], RELATIVE, 0),
        (EXACT_RELATIVE, [0.5, math.nextafter(0.375, 1)], NO, 2),
        (EXACT_RELATIVE, [math.nextafter(0.5, 0), 0.1], NO, 2),
        # each rule alone; all off
        (LEVEL_1 | {"skip_top_relative": OFF}, [0.65, 0.1], NO, 2),
        (LEVEL_1 | {"skip_top": OFF}, [0.9, 0.1], RELATIVE, 0),
        ({}, [1.0, 0.0], NO, 2),
        # contenders
        ({"kappa": 0.6}, [0.5, 1.0, 0.6, 0.7], NO, 3),  # 0.6 * 1.0 met exactly
        ({"kappa": 0.6}, [0.5, 1.0, math.nextafter(0.6, 0)], ONE, 0),
        ({"kappa": 0.6}, [0.3, 0.29, 0.28], NO, 3),
        ({"kappa": 1.0}, [0.3, 0.3, 0.2], NO, 2),  # a tie remains two
        ({"kappa": 1.5}, [0.3, 0.3], ONE, 0),  # the top always remains
        ({"kappa": 0.0}, [0.9, 0.0, NAN], NO, 3),
        ({"kappa": 0.6}, [0.0, 0.0], NO, 2),
        # one branch
        ({"kappa": 0.0}, [0.9], NO, 1),
        ({"kappa": 0.6}, [0.9], ONE, 0),
        (LEVEL_1, [0.9], NO, 1),  # a lead over nobody is no lead
        (LEVEL_1 | {"kappa": 0.6}, [0.9], ONE, 0),
        # which rule is named
        (LEVEL_1 | {"kappa": 0.6}, [0.9, 0.1], LEAD, 0),
        (LEVEL_1 | {"kappa": 0.6}, [0.65, 0.1], RELATIVE, 0),
        # NaN and nothing
        (LEVEL_1, [0.9, NAN], NO, 2),
        ({"kappa": 0.6}, [0.9, NAN, 0.8], NO, 2),
        ({"kappa": 0.6}, [0.9, NAN], ONE, 0),
        (LEVEL_1 | {"kappa": 0.6}, [NAN, NAN], NO, 2),
        (LEVEL_1 | {"kappa": 0.6}, [NAN], NO, 1),
        (LEVEL_1 | {"kappa": 0.6}, [], NO, 0),
        ({"skip_top_relative": 0.0, "skip_lead_relative": 0.0}, [0.0, 0.0], NO, 2),
    ],
)
def test_cgee_skip(
    fields: dict[str, float], confidence: list[float], skip: int, contenders: int
) -> None:
    assert skip_of(fields, confidence) == (skip, contenders)


# ---- CGEE: marks, the bound, selection -----------------------------------------


def mark(score: float, confidence: float) -> float:
    return float(policy().rk_cgee_mark(c.c_double(score), c.c_double(confidence)))


def can_win(confidence: float, best: float) -> bool:
    return bool(policy().rk_cgee_can_win(c.c_double(confidence), c.c_double(best)))


def select(score: Sequence[float], confidence: Sequence[float]) -> int:
    return int(policy().rk_cgee_select(doubles(score), doubles(confidence), len(score)))


def test_cgee_mark() -> None:
    assert mark(0.8, 0.25) == 0.4
    assert mark(0.0, 0.9) == mark(0.9, 0.0) == 0.0
    assert math.isnan(mark(NAN, 0.5)) and math.isnan(mark(0.5, NAN))


@pytest.mark.parametrize(
    ("confidence", "best", "answer"),
    [
        (0.25, 0.4, True),
        (0.25, 0.5, True),  # a tie is still open
        (0.25, math.nextafter(0.5, 1), False),
        (0.0, 0.0, True),
        (0.0, 0.1, False),
        (1.0, 1.0, True),
        (NAN, 0.0, False),
        (0.1, NAN, True),  # nobody has a mark yet
    ],
)
def test_cgee_can_win(confidence: float, best: float, answer: bool) -> None:
    assert can_win(confidence, best) is answer


@pytest.mark.parametrize(
    ("score", "confidence", "winner"),
    [
        ([], [], -1),
        ([0.5], [0.5], 0),
        ([0.9, 0.8], [0.25, 0.64], 1),  # 0.45 < 0.64
        ([0.8, 0.4], [0.25, 1.0], 0),  # equal marks: the lower index
        ([0.4, 0.8], [1.0, 0.25], 0),
        ([NAN, 0.1, NAN], [0.9, 0.1, 0.8], 1),  # verified before unverified
        ([NAN, 0.0], [0.9, 0.0], 1),
        ([NAN, NAN, NAN], [0.2, 0.7, 0.7], 1),  # none verified: confidence
        ([NAN, NAN], [NAN, 0.0], 1),
        ([NAN, NAN], [NAN, NAN], 0),
        ([0.5, 0.1], [NAN, 0.1], 1),  # a NaN mark never wins
        ([NAN, 0.5], [0.9, NAN], 1),  # ... unless it is all there is
    ],
)
def test_cgee_select(score: list[float], confidence: list[float], winner: int) -> None:
    assert select(score, confidence) == winner


@pytest.mark.parametrize("seed", range(10))
def test_cgee_the_bound_never_changes_a_winner(seed: int) -> None:
    """Verify in order, some at a time, drop what cannot win: the winner of verifying all."""
    rng = random.Random(seed)
    dropped = ties = 0
    for _ in range(400):
        n, at_a_time = rng.randint(1, 10), rng.randint(1, 4)
        # Coarse numbers make ties; perfect scores put marks right on the bound.
        coarse = rng.random() < 0.5
        numbers = [0.0, 0.25, 0.5, 1.0] if coarse else [rng.random() for _ in range(99)]
        confidence = rng.choices(numbers, k=n)
        score = [rng.choice([1.0, s]) for s in rng.choices(numbers, k=n)]
        seen, best = [NAN] * n, NAN
        waiting = order_of(confidence)
        while waiting:
            for i in waiting[:at_a_time]:
                seen[i] = score[i]
                if not best >= mark(score[i], confidence[i]):
                    best = mark(score[i], confidence[i])
            rest = waiting[at_a_time:]
            waiting = [i for i in rest if can_win(confidence[i], best)]
            dropped += len(rest) - len(waiting)
        marks = [mark(s, p) for s, p in zip(score, confidence, strict=True)]
        ties += marks.count(max(marks)) > 1
        assert select(seen, confidence) == select(score, confidence) == marks.index(max(marks))
    assert dropped > 100 and ties > 10


# ---- CGEE: level 2 -------------------------------------------------------------

PAPER_EXIT = {"theta": 8.0, "epsilon": 3.0, "min_layer": 2}
LN2 = math.log(2)


@pytest.mark.parametrize(
    ("fields", "layer", "entropy", "previous", "leaves"),
    [
        (PAPER_EXIT, 2, 7.9, 9.0, True),
        (PAPER_EXIT, 1, 7.9, 9.0, False),  # below min_layer
        (PAPER_EXIT, 23, 0.1, 0.2, True),
        (PAPER_EXIT, 24, 0.1, 0.2, False),  # the last layer: nothing to leave
        (PAPER_EXIT, 5, 8.0, 8.0, False),  # H < theta, not <=
        (PAPER_EXIT, 5, math.nextafter(8.0, 0), 8.0, True),
        (PAPER_EXIT, 5, 4.0, 7.0, False),  # |dH| < epsilon, not <=
        (PAPER_EXIT, 5, 4.0, 1.0, False),
        (PAPER_EXIT, 5, 4.0, math.nextafter(7.0, 0), True),
        (PAPER_EXIT, 5, 4.0, 1.0 + 1e-15, True),
        (PAPER_EXIT, 5, 4.0, NAN, False),  # the first check has nothing to compare
        (PAPER_EXIT, 5, NAN, 4.0, False),
        (PAPER_EXIT | {"theta": 0.5}, 5, 0.49, 0.5, True),  # Mistral
        (PAPER_EXIT | {"theta": 0.5}, 5, 0.51, 0.5, False),
        ({"theta": 0.5 * LN2, "epsilon": 0.1 * LN2}, 5, 0.3, 0.33, True),
        ({"theta": 0.5 * LN2, "epsilon": 0.1 * LN2}, 5, 0.3, 0.38, False),
        (PAPER_EXIT | {"theta": 0.0}, 5, 0.0, 0.0, False),  # off
        (PAPER_EXIT | {"epsilon": 0.0}, 5, 1.0, 1.0, False),
        (PAPER_EXIT | {"lens_every": 3}, 5, 4.0, 4.0, True),  # 2, 5, 8, ...
        (PAPER_EXIT | {"lens_every": 3}, 6, 4.0, 4.0, False),
    ],
)
def test_cgee_exit(
    fields: dict[str, float], layer: int, entropy: float, previous: float, leaves: bool
) -> None:
    got = policy().rk_cgee_exit(
        c.byref(cgee(**fields)), layer, 24, c.c_double(entropy), c.c_double(previous)
    )
    assert got is leaves


@pytest.mark.parametrize(
    ("fields", "checked"),
    [
        (PAPER_EXIT, [2, 3, 4, 5, 6, 7]),
        (PAPER_EXIT | {"lens_every": 2}, [2, 4, 6]),
        (PAPER_EXIT | {"lens_every": 4, "min_layer": 3}, [3, 7]),
        (PAPER_EXIT | {"min_layer": 1, "lens_every": 100}, [1]),
        (PAPER_EXIT | {"min_layer": 8}, []),  # from the last layer on: never
        (PAPER_EXIT | {"min_layer": 9}, []),
        (PAPER_EXIT | {"lens_every": 0}, []),
        (PAPER_EXIT | {"theta": 0.0}, []),  # no entropy lies below: not worth a lens
        (PAPER_EXIT | {"theta": NAN}, []),
    ],
)
def test_cgee_checked_layers(fields: dict[str, float], checked: list[int]) -> None:
    settings = c.byref(cgee(**fields))
    assert [i for i in range(1, 9) if policy().rk_cgee_check(settings, i, 8)] == checked


# ---- RSBCM ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "confidence", "depth", "omega"),
    [
        (0.8, 0.5, 0, 0.8),
        (0.8, 0.5, 3, 0.2),
        (NAN, 0.5, 1, 0.25),  # not verified: the confidence
        (NAN, NAN, 0, 1.0),  # nothing known: as good as it gets
        (NAN, NAN, 4, 0.2),
        (0.0, 0.9, 2, 0.0),  # a score of 0 is a score
        (NAN, 0.0, 0, 0.0),
        (1.0, NAN, 2**31 - 1, 2.0**-31),
    ],
)
def test_rsbcm_omega(score: float, confidence: float, depth: int, omega: float) -> None:
    got = policy().rk_rsbcm_omega(c.c_double(score), c.c_double(confidence), depth)
    assert got == pytest.approx(omega, rel=1e-15)


def before(a: Candidate, b: Candidate) -> bool:
    return bool(policy().rk_rsbcm_before(c.byref(a), c.byref(b)))


def test_rsbcm_order_is_omega_then_use_then_id() -> None:
    """All pairs of a grid in which every later field contradicts the earlier ones."""
    grid = list(itertools.product([0.0, 0.25, 1.0], [0, 7, 2**64 - 1], [1, 2**63, 2**64 - 1]))
    for a, b in itertools.product(grid, grid):
        assert before(Candidate(*a), Candidate(*b)) is (a < b)
