"""Replays of the policies, held against the core and against real runs."""

from __future__ import annotations

import ctypes as c
import math
from typing import Any

import numpy as np
import pytest
import test_policy as policy
from support.labs import asked, lab_of

from rksc import ASKS, CGEE, Model
from rksc.calibration.fitting import (
    Verified,
    see,
)
from rksc.calibration.measure import LENSES, answers, centres, difference, wordings
from rksc.calibration.replay import Lenses, judge, majority, select, sigma
from rksc.calibration.tasks import Pair, Problem
from rksc.experiments import Lab
from rksc.reasoning.prompts import Wordings


@pytest.mark.parametrize("alpha", [0.0, 1.5, -3.0, 2000.0])
def test_sigma_is_the_cores(alpha: float) -> None:
    rng = np.random.default_rng(7)
    for n in (1, 4, 30):
        cosines = rng.uniform(-1, 1, n).astype(np.float32)
        expected = policy.decide(cosines.tolist(), policy.weights(n, alpha), 0.5)[1]
        assert float(sigma(cosines, alpha)) == pytest.approx(expected, abs=1e-12)
    assert sigma(np.ones((2, 3)), alpha).tolist() == [1.0, 1.0]


CGEES = [
    CGEE(kappa=0.0), CGEE(), CGEE(kappa=0.9), CGEE(kappa=0.97, verify_batch=1),
    CGEE(kappa=0.0, skip_top=0.6, skip_lead=0.02), CGEE.fast(verify_batch=2),
    CGEE(kappa=0.0, skip_top_relative=0.5, skip_lead_relative=0.05),
    CGEE(kappa=0.0, verify_batch=1), CGEE(kappa=0.0, verify_batch=3),
]  # fmt: skip


def by_the_core(cgee: CGEE, confidence: list[float], scores: list[float]) -> tuple[list[bool], int]:
    """Who is verified, and the winner, by csrc/policy."""
    fields: dict[str, Any] = {
        name: getattr(cgee, name)
        for name in ("skip_top", "skip_lead", "skip_top_relative", "skip_lead_relative", "kappa")
        if getattr(cgee, name) is not None
    }
    order = policy.order_of(confidence)
    _, n = policy.skip_of(fields, confidence)
    made, best = [math.nan] * len(scores), math.nan
    for begin in range(0, n, cgee.verify_batch):
        some = [i for i in order[begin : min(begin + cgee.verify_batch, n)]
                if policy.can_win(confidence[i], best)]  # fmt: skip
        for i in some:
            made[i] = scores[i]
        for i in some:
            best = np.fmax(best, policy.mark(scores[i], confidence[i]))
    return [not math.isnan(s) for s in made], policy.select(made, confidence)


@pytest.mark.parametrize("cgee", CGEES)
def test_replays_are_the_cores_decisions(cgee: CGEE) -> None:
    rng = np.random.default_rng(11)
    nothing_seen = Lenses(np.empty((0, 0)), np.empty((0, 0)))
    for _ in range(200):
        n = int(rng.integers(1, 9))
        confidence = np.round(rng.uniform(0.3, 1, n), int(rng.integers(1, 4))).tolist()
        scores = np.round(rng.uniform(0, 1, n), 2).tolist()
        made = judge(cgee, confidence, scores, nothing_seen, 4)
        verified, winner = by_the_core(cgee, confidence, scores)
        assert (~np.isnan(made.scores)).tolist() == verified
        assert made.winner == winner and made.skipped == (not any(verified))
        assert made.layers.tolist() == [4 * v for v in verified]


def test_exits_are_the_cores() -> None:
    rng = np.random.default_rng(13)
    library = policy.policy()
    for _ in range(200):
        entropies = rng.uniform(0, 3, (1, 12))
        scores = rng.uniform(0, 1, (1, 12))
        cgee = CGEE(
            kappa=0.0, lens="full", theta=float(rng.uniform(0, 3)),
            epsilon=float(rng.uniform(0, 2)), min_layer=int(rng.integers(1, 8)),
            lens_every=int(rng.integers(1, 4)),
        )  # fmt: skip
        raw = policy.cgee(theta=cgee.theta, epsilon=cgee.epsilon, min_layer=cgee.min_layer,
                          lens_every=cgee.lens_every)  # fmt: skip
        layer, checks, previous = 12, 0, math.nan
        for at in range(1, 12):
            if not library.rk_cgee_check(c.byref(raw), at, 12):
                continue
            h = entropies[0, at - 1]
            checks += 1
            if library.rk_cgee_exit(c.byref(raw), at, 12, c.c_double(h), c.c_double(previous)):
                layer = at
                break
            previous = h
        made = judge(cgee, [0.5], [0.25], Lenses(entropies, scores), 12)
        assert (made.layers[0], made.checks[0]) == (layer, checks)
        assert made.scores[0] == (0.25 if layer == 12 else scores[0, layer - 1])


@pytest.mark.parametrize("lens", ["answer", "full"])
@pytest.mark.parametrize("norm", [True, False])
def test_a_replayed_verification_is_a_real_one(small: Model, lens: Any, norm: bool) -> None:
    """Thresholds are taken from the middle between what was seen, so that rounding decides
    nothing."""
    lab = lab_of(small)
    problem = {"id": "p", "question": "th 3 abc", "answer": "3", "choices": []}
    (seen,) = answers(lab.bench, [asked(problem)])
    verified = Verified.of("p", seen)
    assert list(seen["lenses"]) == list(LENSES) and verified.n_layers == 4
    session = lab.bench.session
    words, kids = branches_of(lab, problem)
    name = f"{lens}{' norm' if norm else ''}"
    h = np.sort(verified.lenses[name].entropies[:, 1:3].ravel())
    unit = math.log(2) if lens == "answer" else 1.0
    layers_seen = set()
    for at in range(1, len(h)):
        if h[at] - h[at - 1] < 1e-4:
            continue
        cgee = CGEE(kappa=0.0, lens=lens, norm=norm, theta=float(h[at - 1] + h[at]) / 2 / unit,
                    epsilon=100.0, min_layer=1)  # fmt: skip
        verdicts = session.verify(kids, words.verification(), *words.answers(None, None), cgee=cgee)
        replayed = verified.judge(cgee)
        assert replayed.layers.tolist() == [v.layers for v in verdicts]
        assert replayed.scores == pytest.approx([v.score for v in verdicts], abs=1e-5)
        assert session.select(kids) is kids[replayed.winner]
        layers_seen.update(replayed.layers.tolist())
    assert len(layers_seen) > 1


@pytest.mark.parametrize("cgee", [None, CGEE(), CGEE(kappa=0.97, verify_batch=1), CGEE.fast()])
def test_a_replayed_choice_is_a_real_one(small: Model, cgee: CGEE | None) -> None:
    lab = lab_of(small)
    for i in range(3):
        problem = {"id": "p", "question": f"th {i} abc", "answer": "3", "choices": []}
        verified = Verified.of("p", answers(lab.bench, [asked(problem)])[0])
        words, kids = branches_of(lab, problem)
        session = lab.bench.session
        verdicts = session.verify(kids, words.verification(), *words.answers(None, None), cgee=cgee)
        replayed = verified.judge(cgee)
        assert (~np.isnan(replayed.scores)).tolist() == [v.score is not None for v in verdicts]
        assert session.select(kids) is kids[replayed.winner]


def test_answers_do_not_depend_on_what_is_asked_with_them(small: Model) -> None:
    """A run that was stopped goes on with other company in its batches."""
    lab = lab_of(small)
    items = [
        asked({"id": "p", "question": f"th {i} abc", "answer": "3", "choices": ["yes", "no"][:i]})
        for i in range(3)
    ]
    items[1] |= {"n_branches": 3, "max_new_tokens": 5, "seed": 1}
    assert answers(lab.bench, items) == [answers(lab.bench, [item])[0] for item in items]


def test_branches_ask_in_turn_and_share_where_the_gate_lets_them(small: Model) -> None:
    """On their own KV they are what each wording gives alone; shared, what the root gives."""
    lab, problem = lab_of(small), {"id": "p", "question": "th 3 abc e the", "answer": "3",
                                   "choices": []}  # fmt: skip
    item, others = asked(problem), ["3 more e th abc"]
    (alone,) = answers(lab.bench, [item])
    (apart,) = answers(lab.bench, [{**item, "others": others}])
    assert apart["confidence"][::2] == alone["confidence"][::2]
    assert apart["confidence"][1::2] != alone["confidence"][1::2]
    assert not any(apart["approximate"])
    for centre, accepted in ((["the", "abc 9"], True), (["a 1 the", "b 2 the e"], False)):
        (made,) = answers(lab.bench, [{**item, "others": others, "centre": centre}])
        assert made["approximate"] == [False, accepted] * 2
        assert made["confidence"] == (alone if accepted else apart)["confidence"]
        assert lab.bench.session.asks is None


def branches_of(lab: Lab, problem: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The branches that `answers` verified, once more."""
    from rksc.calibration.measure import sampling

    row = Problem(problem["id"], problem["question"], problem["answer"])
    words = Wordings(lab.bench.session, row.instruction)
    kids = lab.bench.session.prefill(words.problem(row.text)).fork(4)
    for i, kid in enumerate(kids):
        kid.stream = i
    lab.bench.session.generate(kids, 8, sampling(0))
    return words, kids


def test_centres_are_those_of_the_prompts_with_their_header(small: Model) -> None:
    """A worker keeps them; experiments with and without worked examples come one after the
    other."""
    lab, questions = lab_of(small), ["th 1 abc", "a 2"]
    plain, headed = (
        centres(lab.bench, Wordings(lab.bench.session, "x", header), questions)
        for header in (None, "th 9")
    )
    assert not np.array_equal(plain["mean"], headed["mean"])


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_a_replayed_gate_is_the_real_one(small: Model, pool: Any) -> None:
    lab = lab_of(small)
    roots = ["3 more th abc", "the abc e 7", "fewer e th 12 the"]
    others = ["e abc fewer 3 th", "3 more th abd", "the e e"]

    words = Wordings(lab.bench.session, "Think.")
    centre = centres(lab.bench, words, roots)[pool]
    for root in roots:
        seen = wordings(lab.bench, root, others, roots, "Think.")["others"]
        for depth, alpha in ((1, 1.5), (4, 0.0)):
            for text, measured in zip(others, seen, strict=True):
                session = lab.bench.session
                session.asks = ASKS(center=centre, tau=-1.0, alpha=alpha, probe_layers=depth,
                                    pool=pool, guard=None)  # fmt: skip
                own = session.prefill(
                    words.problem(text), similar_to=session.prefill(words.problem(root))
                )
                session.asks = None
                cosines = measured[pool][:depth]
                assert own.gate.cosines == pytest.approx(cosines, abs=1e-5)
                assert own.gate.sigma == pytest.approx(float(sigma(cosines, alpha)), abs=1e-5)


def test_a_pair_is_measured_against_its_own_root(small: Model) -> None:
    """A question may have several first texts."""
    lab, centre = lab_of(small), ["th 1 abc", "a 2"]
    pairs = [Pair("g", "k", root, "e abc fewer 3 th", True) for root in ("3 more th abc", "the 7")]
    for made, pair in zip(see(lab, pairs, centre, "Think."), pairs, strict=True):
        (other,) = wordings(lab.bench, pair.root, [pair.own], centre, "Think.")["others"]
        assert made.cosines is not None and made.cosines["mean"].tolist() == other["mean"]


def test_the_tokens_that_differ() -> None:
    assert difference([1, 2, 3, 9], [1, 5, 6, 7, 9]) == (1, 3, 4)
    assert difference([1, 2, 9], [1, 2, 3, 9]) == (2, 3, 4)  # an insertion: one neighbour
    assert difference([1, 2], [1, 2, 3]) == (1, 2, 3)


def test_select_and_majority() -> None:
    assert select([0.5, math.nan, 0.5], [0.25, 1.0, 0.25]) == 0
    assert select([None, None], [0.1, 0.2]) == 1
    assert majority(["3", "", "4", "4", "", ""]) == 2
    assert majority(["", ""]) == 0
    assert majority(["5", "4.00", "5", "$4", "4", "5 M"]) == 1  # one answer in three notations
    assert majority(["30", "12:30", "-3", "3", "12:30"]) == 1
    assert majority(["a", "b", "A", "b.", "A."]) == 0
    assert majority([r"\frac{1}{2}", "2", "0.5", "2"]) == 0
