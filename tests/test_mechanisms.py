"""ASKS, CGEE and RSBCM inside a session: each decision is the one that its formula gives, and
what they leave alone keeps its bits (off the CPU: to the tolerance of sessions.py, in float32 and
in bfloat16)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from conftest import Factory
from numpy.typing import NDArray
from support.models import ALL, GROWING, KEEN, T4, Small
from support.reference import Reference, log_softmax, softmax
from support.sessions import (
    DEFAULTS,
    DEVICE,
    assert_books,
    assert_same,
    block_bytes,
    n_same_tokens,
    open_session,
    tolerance,
)

from rksc import ASKS, CGEE, Branch, BranchSession, CapacityError, Sampling, Verdict

Array = NDArray[Any]


@pytest.fixture(autouse=True, params=["float32"] if DEVICE == "cpu" else ["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of all sessions. A GPU has kernels of its own for each."""
    monkeypatch.setitem(DEFAULTS, "dtype", request.param)


def reference(model: Small) -> Reference:
    """Of the model with its matrices as sessions hold them."""
    return (model if DEFAULTS["dtype"] == "float32" else model.rounded).reference


def margin() -> float:
    """Cosines, sigma and shares of the reference are the session's to this."""
    return 1e-4 if DEFAULTS["dtype"] == "float32" else 2e-2


# ---- ASKS: the gate's arithmetic --------------------------------------------------------------

PREFIX, SUFFIX = T4.tokens(18, seed=1), T4.tokens(7, seed=2)
ROOT = PREFIX + T4.tokens(6, seed=3) + SUFFIX
OWN = [*PREFIX, 4, *T4.tokens(8, seed=4), 5, *SUFFIX]
CENTER = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32) / 4


def span(root: list[int], own: list[int], pool: str) -> tuple[slice, slice]:
    """The positions that are compared: of the tokens that differ, or the last."""
    if pool == "last":
        return slice(len(root) - 1, None), slice(len(own) - 1, None)
    head = next(i for i, (a, b) in enumerate(zip(root, own, strict=False)) if a != b)
    pairs = zip(root[head:][::-1], own[head:][::-1], strict=False)
    tail = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
    return slice(head, len(root) - tail), slice(head, len(own) - tail)


def expected_cosines(model: Small, pool: str, center: Array | None) -> Array:
    at_root, at_own = span(ROOT, OWN, pool)
    a = reference(model).forward(ROOT).hidden[:, at_root].mean(1)
    b = reference(model).forward(OWN).hidden[:, at_own].mean(1)
    if center is not None:
        a, b = a - center, b - center
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    out: Array = (a * b).sum(1) / norms
    return out


def weights_of(n: int, alpha: float) -> Array:
    w = np.exp(alpha * np.arange(1, n + 1) / n)
    out: Array = w / w.sum()
    return out


def gate(**settings: Any) -> ASKS:
    return ASKS(**{"center": CENTER, "guard": None, **settings})


def exact_logits(model: Small | str, tokens: Any) -> Array:
    return open_session(model, kv_bytes=16 << 20).prefill(tokens).logits


@pytest.mark.parametrize("pool", ["mean", "last"])
@pytest.mark.parametrize("n_layers", [1, 2, 3, 4])
@pytest.mark.parametrize("alpha", [0.0, 1.5, -3.0])
def test_sigma_of_the_prefix_probe(
    pool: str, n_layers: int, alpha: float, make_session: Factory
) -> None:
    """All cosines and sigma; just below it the gate opens, just above it does not."""
    cosines = expected_cosines(T4, pool, CENTER.astype(float))[:n_layers]
    sigma = float(weights_of(n_layers, alpha) @ cosines)
    for step_tokens, tau in itertools.product((5, 512), (-2.0, sigma - margin(), sigma + margin())):
        session = make_session(T4, step_tokens=step_tokens)
        session.asks = gate(pool=pool, probe_layers=n_layers, alpha=alpha, tau=tau)
        branch = session.prefill(OWN, similar_to=session.prefill(ROOT), suffix=[7])
        found = branch.gate
        n = len(found.cosines)
        assert np.abs(found.cosines - cosines[:n]).max() < margin()
        assert found.accepted == (tau < sigma)
        if tau < sigma:
            assert n == n_layers
            assert found.sigma == pytest.approx(sigma, abs=margin() / 10)
            assert found.reason == "accepted"
        else:
            assert found.reason == ("rejected" if n == n_layers else "unreachable")
        assert_books(session)


@pytest.mark.parametrize("center", [None, CENTER], ids=["bare", "centred"])
def test_sigma_of_the_suffix_probe(center: Array | None, make_session: Factory) -> None:
    """The paper's: the suffix over the root's KV, its last token against the root's last."""
    suffix = T4.tokens(9, seed=8)
    a = reference(T4).hidden(ROOT)
    b = reference(T4).hidden(ROOT + suffix)
    if center is not None:
        a, b = a - center, b - center
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    sigma = float(weights_of(4, 1.5) @ cosines)
    for tau in (sigma - margin(), sigma + margin()):
        session = make_session(T4)
        session.asks = ASKS(
            center=center, uncentered=center is None, guard=None, probe="suffix", pool="last",
            tau=tau,
        )  # fmt: skip
        root = session.prefill(ROOT)
        branch = session.prefill(OWN, similar_to=root, suffix=suffix)
        found = branch.gate
        n = len(found.cosines)
        assert np.abs(found.cosines - cosines[:n]).max() < margin()
        assert found.accepted == branch.approximate == (tau < sigma)
        assert found.own_token_layers == len(suffix) * 4
        base = ROOT if found.accepted else OWN
        assert branch.tokens.tolist() == base + suffix
        assert branch.prompt.tolist() == OWN
        assert_same(branch.logits, exact_logits(T4, base + suffix))
        assert_books(session)


@pytest.mark.parametrize("step_tokens", [3, 512])
@pytest.mark.parametrize("n_layers", [1, 2, 4])
@pytest.mark.parametrize("name", ["T4", "mistral-window", "qwen2-tied-window"])
def test_a_rejected_prefix_probe_is_an_exact_prefill(
    name: str, n_layers: int, step_tokens: int, make_session: Factory
) -> None:
    """To the bit, also for what is generated; and its blocks serve later exact requests."""
    session = make_session(name, step_tokens=step_tokens)
    session.asks = gate(tau=1.5, probe_layers=n_layers)
    root = session.prefill(ROOT)
    computed = session.stats().tokens_computed
    branch = session.prefill(OWN, similar_to=root, suffix=[3, 4, 5])
    assert branch.gate.reason == ("rejected" if n_layers == 1 else "unreachable")
    assert not branch.approximate
    assert branch.tokens.tolist() == [*OWN, 3, 4, 5]
    assert branch.n_computed >= len(OWN)
    # rows are computed once: what the probe ran is the beginning of the prefill
    assert session.stats().tokens_computed - computed <= len(OWN) - 16 + 3
    plain = open_session(name)
    other = plain.prefill([*OWN, 3, 4, 5])
    other.stream = branch.stream
    assert_same([branch.logits, branch.hidden], [other.logits, other.hidden])
    hot = Sampling(1.0, seed=3)
    a = session.generate(branch, 8, hot, stop_ids=())[0]
    b = plain.generate(other, 8, hot, stop_ids=())[0]
    n = n_same_tokens(a.tokens, b.tokens, name, [*OWN, 3, 4, 5], hot)
    assert_same(a.logprobs[:n], b.logprobs[:n])
    reused = session.stats().tokens_reused
    again = session.prefill([*OWN, 9])
    assert session.stats().tokens_reused - reused >= len(OWN) // 16 * 16
    assert_same(again.logits, exact_logits(name, [*OWN, 9]))


def test_a_hopeless_probe_ends_early(make_session: Factory) -> None:
    """As soon as cos = 1 on all remaining layers could not reach tau; then nothing more is run."""
    cosines = expected_cosines(T4, "mean", CENTER.astype(float))
    weights = weights_of(4, 1.5)
    best = [1 - float(weights[:n] @ (1 - cosines[:n])) for n in range(1, 5)]
    assert best[0] > best[1] > best[2] > best[3]
    for n in range(1, 5):
        session = make_session(T4)
        session.asks = gate(tau=(best[n - 1] + (best[n - 2] if n > 1 else 1)) / 2, probe_layers=4)
        root = session.prefill(ROOT)
        found = session.prefill(OWN, similar_to=root).gate
        assert len(found.cosines) == n
        assert found.reason == ("unreachable" if n < 4 else "rejected")
        assert found.own_token_layers == (len(OWN) - 16) * n  # one block is the root's too


def test_the_roots_side_is_remembered(make_session: Factory) -> None:
    session = make_session(T4)
    session.asks = gate(tau=0.99, probe_layers=2)
    root = session.prefill(ROOT)
    first = session.prefill(OWN, similar_to=root).gate
    second = session.prefill(OWN, similar_to=root).gate
    assert first.root_token_layers == 6 * 2
    assert second.root_token_layers == 0
    assert_same(first.cosines, second.cosines)
    session.invalidate()
    third = session.prefill(OWN, similar_to=root).gate
    assert_same(first.cosines, third.cosines)


def test_equal_tokens_are_shared_exactly_whatever_tau(make_session: Factory) -> None:
    session = make_session(T4)
    for asks in (gate(tau=5.0), gate(tau=5.0, probe="suffix", pool="last")):
        session.asks = asks
        branch = session.prefill(ROOT, similar_to=session.prefill(ROOT), suffix=[1])
        assert branch.gate.reason == "equal"
        assert branch.gate.sigma == 1.0
        assert branch.gate.own_token_layers == branch.gate.root_token_layers == 0
        assert not branch.approximate
        assert_same(branch.logits, exact_logits(T4, [*ROOT, 1]))


@pytest.mark.parametrize("probe", ["prefix", "suffix"])
def test_hidden_states_of_zero_share_nothing(probe: Any, make_session: Factory) -> None:
    """cos of a zero vector is undefined, and undefined is no permission, whatever tau."""

    def silence(weights: dict[str, Any]) -> None:
        for name, w in weights.items():
            if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
                w[:] = 0

    session = make_session(T4.changed("silent", silence))
    session.asks = ASKS(
        uncentered=True, guard=None, probe=probe, pool="last", tau=-9.0, probe_layers=4
    )
    branch = session.prefill(OWN, similar_to=session.prefill(ROOT), suffix=[2])
    assert branch.gate.reason == "undefined"
    assert not branch.gate.accepted
    assert branch.tokens.tolist() == [*OWN, 2]
    assert not branch.approximate


@pytest.mark.parametrize("probe", ["prefix", "suffix"])
def test_approximate_branches_never_serve_exact_requests(probe: str, make_session: Factory) -> None:
    """Nor do their descendants; evicted, they come back as the lineage that they were."""
    session = make_session(T4, kv_bytes=24 * block_bytes(T4))
    session.asks = gate(tau=-2.0, probe=probe, pool="last", probe_layers=4)
    root = session.prefill(ROOT)
    own = OWN + T4.tokens(20, seed=11)
    suffix = T4.tokens(40, seed=12)
    branch = session.prefill(own, similar_to=root, suffix=suffix)
    kid = branch.fork([T4.tokens(20, seed=13)])[0]
    grandkid = kid.fork(1, at=40)[0]
    assert branch.gate.accepted
    assert all(b.approximate for b in (branch, kid, grandkid))
    assert not root.approximate
    lineage = ROOT + suffix
    session.compute([branch, kid, grandkid])
    for b, tokens in (
        (branch, lineage),
        (kid, lineage + T4.tokens(20, seed=13)),
        (grandkid, lineage[:40]),
    ):
        assert b.tokens.tolist() == tokens
        assert_same(b.logits, exact_logits(T4, tokens))
    assert kid.prompt is None or kid.prompt.tolist() == own
    # of the approximate text only the root's own blocks are found
    reused = session.stats().tokens_reused
    exact = session.prefill([*lineage, 1])
    assert session.stats().tokens_reused - reused <= len(ROOT)
    assert not exact.approximate
    reused = session.stats().tokens_reused
    assert_same(session.prefill(own).logits, exact_logits(T4, own))
    assert session.stats().tokens_reused - reused <= 16
    # push them out, then use them again
    others = [session.prefill(T4.tokens(120, seed=seed + 50)) for seed in range(3)]
    assert all(other.resident for other in others)
    assert not branch.resident
    assert_same(kid.logits, exact_logits(T4, lineage + T4.tokens(20, seed=13)))
    assert branch.approximate
    assert kid.approximate
    assert_books(session)


def test_a_gate_that_cannot_fit_changes_nothing(make_session: Factory) -> None:
    session = make_session(T4, kv_bytes=5 * block_bytes(T4))
    session.asks = gate(tau=0.5, probe_layers=4)
    root = session.prefill(ROOT)
    before = session.stats().branches
    with pytest.raises(CapacityError, match="blocks"):
        session.prefill(PREFIX + T4.tokens(100, seed=9), similar_to=root)
    assert session.stats().branches == before
    assert root.tokens.tolist() == ROOT
    assert_books(session)
    assert_same(root.logits, exact_logits(T4, ROOT))


def test_a_pure_insertion_has_something_to_compare(make_session: Factory) -> None:
    """One wording is the other with words added: at the front, inside, at the end."""
    session = make_session(T4)
    session.asks = gate(tau=-2.0)
    root = session.prefill(ROOT)
    for own in ([3, 3, *ROOT], [*ROOT[:9], 3, 3, *ROOT[9:]], [*ROOT, 3, 3], ROOT[:-4], ROOT[4:]):
        found = session.prefill(own, similar_to=root)
        assert found.gate.reason == "accepted"
        assert np.isfinite(found.gate.cosines).all()
        assert found.tokens.tolist() == ROOT


# ---- CGEE: verification -----------------------------------------------------------------------

ASK, YES, NO = KEEN.tokens(9, seed=77), 9, 47  # scores from 0.01 to 0.95


def answered(session: BranchSession, n: int, confidences: Any = None) -> list[Branch]:
    """n branches of one prompt with short answers, with these confidences."""
    root = session.prefill(KEEN.tokens(40))
    kids = root.fork([KEEN.tokens(3 + i, seed=i) for i in range(n)])
    for kid, confidence in zip(kids, confidences or (), strict=False):
        kid.confidence = confidence
    return kids


def marks(verdicts: list[Verdict]) -> list[tuple[Any, ...]]:
    return [(v.outcome, v.score, v.mass, v.yes_logit, v.no_logit, v.layers) for v in verdicts]


def full_verdicts(n: int) -> list[Verdict]:
    session = open_session(KEEN)
    return session.verify(answered(session, n), ASK, YES, NO, cgee=None)


def test_verification_leaves_nothing_behind(make_session: Factory) -> None:
    session = make_session(KEEN)
    kids = answered(session, 4)
    session.compute(kids)
    before = session.stats(), [kid.tokens.tolist() for kid in kids]
    logits = [kid.logits for kid in kids]
    verdicts = session.verify(kids, ASK, YES, NO, cgee=None)
    after = session.stats()
    assert after.blocks_used == before[0].blocks_used
    assert after.branches == before[0].branches
    assert [kid.tokens.tolist() for kid in kids] == before[1]
    assert_same([kid.logits for kid in kids], logits)
    assert after.verifications - before[0].verifications == 1
    assert_same(marks(verdicts), marks(full_verdicts(4)))
    assert [kid.score for kid in kids] == [v.score for v in verdicts]


def test_contenders(make_session: Factory) -> None:
    """confidence >= kappa * top; the others keep no score and are reported."""
    confidences = [0.9, 0.54, 0.53, 0.2, 0.95]
    session = make_session(KEEN)
    kids = answered(session, 5, confidences)
    verdicts = session.verify(kids, ASK, YES, NO, cgee=CGEE(kappa=0.57, verify_batch=8))
    contender = [c >= 0.57 * 0.95 for c in confidences]
    assert [v.outcome != "not a contender" for v in verdicts] == contender
    full = full_verdicts(5)
    for verdict, expected, kid, held in zip(verdicts, full, kids, contender, strict=True):
        assert kid.verdict == verdict
        if held:
            assert_same(marks([verdict]), marks([expected]))
        else:
            assert verdict.score is kid.score is verdict.mass is None
            assert verdict.layers == 0
    assert session.stats().verifications == 1
    assert session.stats().verifications_skipped == 0


@pytest.mark.parametrize(
    ("confidences", "cgee", "outcome"),
    [
        ([0.9, 0.3, 0.2], CGEE(), "skipped: one contender"),
        ([0.71, 0.64, 0.5], CGEE.fast(), "skipped: lead"),
        ([0.66, 0.60, 0.5], CGEE.fast(), "skipped: relative lead"),
        ([0.69, 0.65, 0.5], CGEE.fast(), None),
        ([0.71, 0.66, 0.6], CGEE.fast(), None),
        ([0.64, 0.60, 0.5], CGEE.fast(kappa=0.0), None),
        ([0.99, 0.01, 0.01], None, None),
    ],
)  # fmt: skip
def test_level_1(
    confidences: list[float], cgee: CGEE | None, outcome: str | None, make_session: Factory
) -> None:
    session = make_session(KEEN)
    kids = answered(session, 3, confidences)
    verdicts = session.verify(kids, ASK, YES, NO, cgee=cgee)
    if outcome is None:
        assert all(not v.outcome.startswith("skipped") for v in verdicts)
        assert verdicts[0].score is not None
    else:
        assert {v.outcome for v in verdicts} == {outcome}
        assert all(kid.score is None for kid in kids)
        assert session.select(kids) is kids[0]
        assert session.stats().verifications == 0
        assert session.stats().verifications_skipped == 1


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_the_bound_never_changes_the_winner(batch: int, seed: int, make_session: Factory) -> None:
    """Random confidences: same winner as verifying all; who was dropped could not have won."""
    n = 9
    confidences = np.random.default_rng(seed).uniform(0.02, 1, n).tolist()
    full, session = open_session(KEEN), make_session(KEEN)
    everyone, kids = answered(full, n, confidences), answered(session, n, confidences)
    full.verify(everyone, ASK, YES, NO, cgee=None)
    verdicts = session.verify(kids, ASK, YES, NO, cgee=CGEE(kappa=0.0, verify_batch=batch))
    best = everyone.index(full.select(everyone))
    chosen = kids.index(session.select(kids))
    values = [(b.score or 0.0) * math.sqrt(c) for b, c in zip(everyone, confidences, strict=True)]
    mark = values[best]
    assert chosen == best or values[chosen] >= mark - 2 * tolerance(mark)
    for verdict, other, confidence in zip(verdicts, everyone, confidences, strict=True):
        if verdict.outcome == "bound":
            assert verdict.score is None
            assert math.sqrt(confidence) < mark + tolerance(mark)
        else:
            assert_same(verdict.score, other.score)
    if batch == 1:
        order = np.argsort([-c for c in confidences])
        run = [verdicts[i].outcome == "verified" for i in order]
        assert run == sorted(run, reverse=True)  # the most confident first


def test_the_bound_drops_somebody(make_session: Factory) -> None:
    """So that the test above has something to look at."""
    scores = [v.score or 0.0 for v in full_verdicts(9)]
    best = int(np.argmax(scores))
    confidences = [0.05] * 9
    confidences[best] = 1.0
    assert scores[best] > math.sqrt(0.05)
    session = make_session(KEEN)
    kids = answered(session, 9, confidences)
    verdicts = session.verify(kids, ASK, YES, NO, cgee=CGEE(kappa=0.0, verify_batch=1))
    assert [v.outcome for v in verdicts].count("bound") == 8
    assert session.select(kids) is kids[best]


# ---- CGEE: exits between layers ---------------------------------------------------------------


def lens_entropies(model: Small, tokens: list[int], lens: str, norm: bool) -> Array:
    """Entropy after each layer, in the lens' own unit (nats, or ln 2 for "answer")."""
    rows = reference(model).lens(reference(model).hidden(tokens), norm)
    if lens == "answer":
        p = 1 / (1 + np.exp(rows[:, NO] - rows[:, YES]))
        q = 1 - p
        out: Array = -(p * np.log(p) + q * np.log(np.maximum(q, 1e-300))) / math.log(2)
        return out
    out = -(softmax(rows) * log_softmax(rows)).sum(1)
    return out


def expected_exit(entropies: Array, cgee: CGEE) -> int:
    """The layer after which a branch leaves."""
    previous, n = math.nan, len(entropies)
    for layer in range(cgee.min_layer, n, cgee.lens_every):
        entropy = float(entropies[layer - 1])
        if entropy < cgee.theta and abs(entropy - previous) < cgee.epsilon:
            return layer
        previous = entropy
    return n


@pytest.mark.parametrize(
    ("model", "norm"),
    [
        (KEEN, True),
        (KEEN, False),
        (GROWING, True),
        (ALL["explicit-head-dim"], True),
        (ALL["explicit-head-dim"], False),
    ],
    ids=lambda value: value.name if isinstance(value, Small) else "norm" if value else "bare",
)
@pytest.mark.parametrize("lens", ["answer", "full"])
def test_exits(lens: Any, norm: bool, model: Small, make_session: Factory) -> None:
    """Each branch leaves after the layer that the rule gives; the others keep their bits. In
    bfloat16 the rule decides on entropies that lie clearly on one side.

    With norm the hidden state's own RMS is used: in GROWING the last layer's would be a thousand
    times too large, and the entropies near those of a uniform guess."""
    texts = [model.tokens(30 + i, seed=i) for i in range(12)]
    whole = [text + ASK for text in texts]
    entropies = np.array([lens_entropies(model, tokens, lens, norm) for tokens in whole])
    plain = make_session(model)
    full = plain.verify([plain.prefill(t) for t in texts], ASK, YES, NO, cgee=None)
    bf16 = DEFAULTS["dtype"] == "bfloat16"
    off, part = (5e-2 if lens == "answer" else 1.2e-2, 5e-2) if bf16 else (1e-3, 1e-4)
    left_at, all_clear = set(), []
    for first, every in ((1, 1), (2, 1), (1, 2), (3, 1)):
        for quantile in (0.3, 0.6) if DEVICE == "cpu" else (0.45,):
            cgee = CGEE(
                kappa=0.0, lens=lens, norm=norm, min_layer=first, lens_every=every,
                theta=float(np.quantile(entropies[:, :3], quantile)), epsilon=1e9,
            )  # fmt: skip
            while np.abs(entropies - cgee.theta).min() < 1e-3 * max(1.0, cgee.theta):
                cgee = CGEE(**{**vars(cgee), "theta": cgee.theta + 2e-3 * max(1.0, cgee.theta)})
            exits = [expected_exit(row, cgee) for row in entropies]
            looked_at = entropies[:, first - 1 : 3 : every]
            clear = np.abs(looked_at - cgee.theta).min(1) >= off * max(1.0, cgee.theta)
            all_clear.append(clear)
            session = make_session(model)
            branches = [session.prefill(t) for t in texts]
            verdicts = session.verify(branches, ASK, YES, NO, cgee=cgee)
            for i, (verdict, expected) in enumerate(zip(verdicts, full, strict=True)):
                assert verdict.layers == exits[i] or not clear[i], (i, entropies[i], cgee)
                left_at.add(verdict.layers)
                if verdict.layers == 4:
                    assert_same(marks([verdict]), marks([expected]))
                    continue
                hidden = reference(model).hidden(whole[i])[verdict.layers - 1]
                row = reference(model).lens(hidden, norm)
                scale = np.abs(row).max()
                assert verdict.yes_logit == pytest.approx(row[YES], abs=part * scale)
                assert verdict.no_logit == pytest.approx(row[NO], abs=part * scale)
                score = 1 / (1 + math.exp(row[NO] - row[YES]))
                assert verdict.score == pytest.approx(score, abs=part * scale)
                if lens == "answer":
                    assert verdict.mass is None
                else:
                    p = softmax(row)
                    assert verdict.mass == pytest.approx(p[YES] + p[NO], abs=2 * part * scale)
            stats = session.stats()
            assert stats.exits == sum(verdict.layers < 4 for verdict in verdicts)
            assert_books(session)
    assert len(left_at) >= 3
    assert np.mean(all_clear) >= (0.3 if bf16 else 1)


def test_epsilon_wants_two_looks(make_session: Factory) -> None:
    """|H - H before| < epsilon: nobody leaves at the first look, whatever theta."""
    session = make_session(KEEN)
    cgee = CGEE(kappa=0.0, lens="full", min_layer=1, theta=99.0, epsilon=99.0)
    verdicts = session.verify(answered(session, 4), ASK, YES, NO, cgee=cgee)
    assert [v.layers for v in verdicts] == [2] * 4
    none = CGEE(kappa=0.0, lens="full", min_layer=1, theta=99.0, epsilon=0.0)
    verdicts = session.verify(answered(session, 4), ASK, YES, NO, cgee=none)
    assert [v.layers for v in verdicts] == [4] * 4


@pytest.mark.parametrize("lens", ["answer", "full"])
def test_no_exit_has_the_bits_of_no_lens(lens: Any, isa: str, make_session: Factory) -> None:
    """A threshold that is never met, and one that would be met at the last layer only."""
    full = open_session(KEEN, isa=isa)
    expected = marks(full.verify(answered(full, 5), ASK, YES, NO, cgee=None))
    for settings in (
        {"theta": 0.0},
        {"theta": 1e-12},
        {"theta": 1e9, "epsilon": 1e9, "min_layer": 4},
    ):
        session = make_session(KEEN, isa=isa)
        cgee = CGEE(**{"kappa": 0.0, "lens": lens, **settings})
        found = session.verify(answered(session, 5), ASK, YES, NO, cgee=cgee)
        assert_same(marks(found), expected)
        assert session.stats().exits == 0


def test_layers_are_counted(make_session: Factory) -> None:
    session = make_session(KEEN)
    cgee = CGEE(kappa=0.0, lens="full", min_layer=1, theta=99.0, epsilon=99.0)
    kids = answered(session, 3)
    session.compute(kids)
    session.verify(kids, ASK, YES, NO, cgee=cgee)
    stats = session.stats()
    assert (stats.layers_run, stats.layers_saved) == (3 * 2, 3 * 2)  # branches x layers
    session.verify(kids, ASK, YES, NO, cgee=None)
    assert (session.stats().layers_run, session.stats().layers_saved) == (6 + 12, 6)


# ---- RSBCM ------------------------------------------------------------------------------------


def test_the_lowest_omega_goes_first(make_session: Factory) -> None:
    """value / (depth + 1): score, else confidence, else 1; a tie goes to the least recent use."""
    n = 6
    session = make_session(T4, kv_bytes=3 * n * block_bytes(T4))
    branches = [session.prefill(T4.tokens(48, seed=seed)) for seed in range(n)]  # 3 blocks each
    for branch, (score, confidence) in zip(
        branches,
        [(0.5, 0.1), (None, 0.3), (None, None), (0.4, None), (0.3, 0.9), (None, None)],
        strict=True,
    ):
        branch.score, branch.confidence = score, confidence
    # omegas 0.5 0.3 1 0.4 0.3 1; among equals the one that was used first
    expected = [1, 4, 3, 0, 2, 5]
    gone = []
    for i, victim in enumerate(expected[:-1]):
        big = session.prefill(T4.tokens(48, seed=100 + i))
        big.score = 9.0
        gone.append([k for k, b in enumerate(branches) if b.n_computed == 0])
        assert victim in gone[-1], (i, gone)
        assert len(gone[-1]) == i + 1
        branches.append(big)
    assert_books(session)
    assert session.stats().evictions == 3 * 5


def test_depth_divides(make_session: Factory) -> None:
    """A child at depth 1 with a higher score goes before a root with more than half of it."""
    session = make_session(T4, kv_bytes=12 * block_bytes(T4))
    deep_root = session.prefill(T4.tokens(48, seed=1))
    kid = deep_root.fork([T4.tokens(48, seed=2)])[0]
    session.compute([kid])
    shallow = session.prefill(T4.tokens(48, seed=3))
    assert (kid.depth, shallow.depth) == (1, 0)
    kid.score, shallow.score, deep_root.score = 0.9, 0.5, 0.8
    session.prefill(T4.tokens(96, seed=4))
    assert kid.n_computed == 48  # its own blocks went, the root's are still there
    assert shallow.n_computed == 48
    assert deep_root.n_computed == 48
    assert kid.tokens.tolist() == T4.tokens(48, seed=1) + T4.tokens(48, seed=2)
    assert kid.score == 0.9


def test_shared_blocks_take_the_largest_omega(make_session: Factory) -> None:
    """Eviction starts at leaves: a resident child's blocks hold the parent's."""
    session = make_session(T4, kv_bytes=10 * block_bytes(T4))
    root = session.prefill(T4.tokens(64, seed=1))  # 4 blocks
    root.score = 0.01
    kid = root.fork([T4.tokens(16, seed=2)])[0]  # 1 block
    session.compute([kid])
    kid.score = 0.9
    other = session.prefill(T4.tokens(64, seed=3))  # 4 blocks
    other.score = 0.4
    session.prefill(T4.tokens(64, seed=4))
    assert (root.n_computed, kid.n_computed) == (64, 80)
    assert other.n_computed < 64
    assert_books(session)


def test_blocks_of_a_running_request_are_pinned(make_session: Factory) -> None:
    """The lowest omega of all, and still untouched while it runs."""
    session = make_session(T4, kv_bytes=10 * block_bytes(T4))
    running = session.prefill(T4.tokens(48, seed=1))
    running.score = 0.0
    idle = session.prefill(T4.tokens(48, seed=2))
    idle.score = 1.0
    request = session.submit(running, 30, stop_ids=())
    session.step()
    session.prefill(T4.tokens(80, seed=3))
    assert running.n_computed >= 48
    assert idle.n_computed < 48
    with pytest.raises(CapacityError, match=r"\d+ (more )?KV blocks"):
        session.prefill(T4.tokens(150, seed=4))
    assert running.n_computed >= 48
    while session.n_requests:
        session.step()
    expected = open_session(T4)
    g = expected.generate(expected.prefill(T4.tokens(48, seed=1)), 30, stop_ids=())[0]
    n_same_tokens(running.tokens[48:], g.tokens, T4, T4.tokens(48, seed=1))
    session.cancel(request)
    assert_books(session)


def test_too_small_a_budget_names_the_blocks_and_changes_nothing(make_session: Factory) -> None:
    session = make_session(T4, kv_bytes=6 * block_bytes(T4))
    a = session.prefill(T4.tokens(40, seed=1))
    kids = a.fork([T4.tokens(10, seed=i) for i in range(4)])
    before = [(b.tokens.tolist(), b.score, b.confidence, b.stream, b.depth) for b in (a, *kids)]
    stats = session.stats()
    calls = (
        lambda: session.prefill(T4.tokens(97)),
        lambda: session.generate(a, 90, stop_ids=()),
        lambda: session.score(a, [T4.tokens(90)]),
        lambda: session.verify([a], T4.tokens(90), 1, 2, cgee=None),
        lambda: session.layer_means([T4.tokens(97)]),
    )
    for call in calls:
        with pytest.raises(CapacityError, match=r"\d+ (more )?KV blocks of 16 tokens"):
            call()
        assert_books(session)
        now = [(b.tokens.tolist(), b.score, b.confidence, b.stream, b.depth) for b in (a, *kids)]
        assert now == before
        assert session.stats().branches == stats.branches
    assert_same(a.logits, exact_logits(T4, T4.tokens(40, seed=1)))
    for i, kid in enumerate(kids):
        tokens = T4.tokens(40, seed=1) + T4.tokens(10, seed=i)
        assert_same(kid.logits, exact_logits(T4, tokens))


def test_a_budget_below_one_block_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="kv_bytes"):
        open_session(T4, kv_bytes=block_bytes(T4) - 1)


def test_cached_blocks_go_before_anybody_s(make_session: Factory) -> None:
    """What nobody refers to is reclaimed, least recent first, before RSBCM evicts."""
    session = make_session(T4, kv_bytes=9 * block_bytes(T4))
    kept = session.prefill(T4.tokens(48, seed=1))
    kept.score = 0.0
    for seed in (2, 3):
        session.prefill(T4.tokens(48, seed=seed)).drop()
    assert session.stats().blocks_cached >= 5
    reused = session.stats().tokens_reused
    session.prefill(T4.tokens(48, seed=2)).drop()  # now the older text is the more recent one
    assert session.stats().tokens_reused > reused
    session.prefill(T4.tokens(48, seed=4)).drop()
    assert session.stats().evictions == 0
    assert kept.n_computed == 48
    reused = session.stats().tokens_reused
    session.prefill(T4.tokens(48, seed=2)).drop()
    assert session.stats().tokens_reused - reused >= 32
    assert_books(session)
