"""Does each mechanism really do what it says, on this model and this machine?

Each probe runs the real thing, prints what it saw and is PASS or FAIL by a computed condition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .._core import Branch
from ..data import examples, problems
from ..engine.load import Model
from ..engine.options import ASKS, CGEE, Sampling
from ..engine.session import BranchSession
from ..reasoning.prompts import Wordings

WORDING = "Tom has 3 red apples and buys 4 green apples. How many apples does Tom have?"
REWORDED = "Tom owns 3 red apples. He then buys 4 green apples. How many apples has Tom got?"
OTHER_NUMBERS = WORDING.replace("4", "5")
UNRELATED = "Which 3 planets are nearest to the sun, and which 4 of them all have rings?"


@dataclass(frozen=True)
class Finding:
    """One probe: what it shows, whether it did, and what was seen."""

    name: str
    passed: bool
    seen: str

    def __str__(self) -> str:
        return f"{'PASS' if self.passed else 'FAIL'}  {self.name}: {self.seen}"


def selftest(model: Model, **options: object) -> Iterator[Finding]:
    """Run all probes, each in a fresh session. An exception in one is its FAIL."""
    if model.tokenizer is None or model.tokenizer.chat_template is None:
        raise ValueError("the self-test needs a model with a tokenizer and a chat template")
    for probe in PROBES:
        try:
            yield probe(lambda **more: model.session(**{**options, **more}))
        except Exception as error:
            yield Finding(_name(probe), False, f"{type(error).__name__}: {error}")


def _name(probe: Callable[..., Finding]) -> str:
    return probe.__name__.strip("_").replace("_", " ")


_Make = Callable[..., BranchSession]


def _fork(make: _Make) -> Finding:
    session, cold = make(), make()
    words = Wordings(session)
    prompt = words.problem(WORDING)
    kid = session.prefill(prompt).fork([words.suffix("Let us see.")])[0]
    own = cold.prefill([*prompt, *words.suffix("Let us see.")])
    same = np.array_equal(kid.logits, own.logits)
    return Finding(
        "exact sharing", same, "a fork's logits "
        + ("equal" if same else "DIFFER FROM") + " those of its own prefill, bit for bit",
    )  # fmt: skip


def _calibrated(session: BranchSession) -> Wordings:
    words = Wordings(session)
    texts = [problem.question for problem in (*problems()[:8], *examples())]
    session.asks = ASKS(center=session.layer_means([words.problem(text) for text in texts]))
    return words


def _asks_accepts(make: _Make) -> Finding:
    session = make()
    words = _calibrated(session)
    root = session.prefill(words.problem(WORDING))
    other = session.prefill(words.problem(REWORDED), similar_to=root)
    gate = other.gate
    shares = other.approximate and np.array_equal(other.tokens, root.tokens)
    return Finding(
        "ASKS accepts a rewording", gate.accepted and shares,
        f"{gate.reason}, sigma {gate.sigma:.3f}, tau {gate.tau}, cosines {_list(gate.cosines)}",
    )  # fmt: skip


def _asks_rejects(make: _Make) -> Finding:
    session, cold = make(), make()
    words = _calibrated(session)
    root = session.prefill(words.problem(WORDING))
    prompt = words.problem(UNRELATED)
    other = session.prefill(prompt, similar_to=root)
    gate = other.gate
    exact = np.array_equal(other.logits, cold.prefill(prompt).logits)
    return Finding(
        "ASKS rejects another question", not gate.accepted and gate.reason != "guard" and exact,
        f"{gate.reason}, sigma {gate.sigma:.3f}, tau {gate.tau}, cosines {_list(gate.cosines)}; "
        f"its logits {'equal' if exact else 'DIFFER FROM'} an own prefill's",
    )  # fmt: skip


def _asks_guard(make: _Make) -> Finding:
    session = make()
    words = _calibrated(session)
    root = session.prefill(words.problem(WORDING))
    gate = session.prefill(words.problem(OTHER_NUMBERS), similar_to=root).gate
    return Finding(
        "ASKS' guard stops another number", gate.reason == "guard" and not len(gate.cosines),
        f"{gate.reason}; {gate.own_token_layers} token-layers probed",
    )  # fmt: skip


def _answers(session: BranchSession, n: int, tokens: int) -> tuple[Wordings, list[Branch]]:
    words = Wordings(session)
    kids = session.prefill(words.problem(problems()[0].question)).fork(n)
    session.generate(kids, tokens, Sampling(temperature=1.0, seed=1))
    return words, kids


def _level_1(make: _Make) -> Finding:
    """The lead that these branches happen to have is taken as the threshold."""
    session = make()
    words, kids = _answers(session, 8, 12)
    top, second = sorted((kid.confidence or 0.0 for kid in kids), reverse=True)[:2]
    cgee = CGEE(kappa=0.0, skip_top=top * 0.999, skip_lead=max(0.0, (top - second) * 0.999))
    before = session.stats()
    yes, no = words.answers(None, None)
    marks = session.verify(kids, words.verification(), yes, no, cgee=cgee)
    after = session.stats()
    skipped = all(mark.outcome == "skipped: lead" and mark.layers == 0 for mark in marks)
    nothing = after.tokens_computed == before.tokens_computed
    best = session.select(kids)
    return Finding(
        "CGEE level 1 skips a verification", skipped and nothing and best.confidence == top,
        f"top {top:.3f}, lead {top - second:.3f} (thresholds set just below): "
        f"{marks[0].outcome}, {after.tokens_computed - before.tokens_computed} tokens computed",
    )  # fmt: skip


def _level_2(make: _Make) -> Finding:
    """Thresholds are tried until branches of one batch leave at different layers."""
    session = make()
    words, kids = _answers(session, 8, 12)
    yes, no = words.answers(None, None)
    question = words.verification()
    full = session.verify(kids, question, yes, no, cgee=None)
    lens = CGEE(kappa=0.0, verify_batch=len(kids), lens="answer", epsilon=10.0, min_layer=1)
    for theta in np.linspace(0.02, 0.98, 33):
        before = session.stats().layers_saved
        cgee = replace(lens, theta=float(theta))
        marks = session.verify(kids, question, yes, no, cgee=cgee)
        ran = [m for m in marks if m.outcome == "verified"]
        layers = [mark.layers for mark in ran]
        if len(set(layers)) > 1 and min(layers) < marks[0].n_layers:
            break
    saved = session.stats().layers_saved - before
    stayed = [(a, b) for a, b in zip(marks, full, strict=True) if a.layers == a.n_layers]
    exact = all(a.score == b.score for a, b in stayed)
    return Finding(
        "CGEE level 2 leaves at different layers", len(set(layers)) > 1 and exact and saved > 0,
        f"layers {layers} of {marks[0].n_layers} (theta {theta:.2f} ln 2, chosen so that it "
        f"happens; it says nothing about winners); {saved} branch-layers saved; {len(stayed)} "
        f"that stayed {'equal' if exact else 'DIFFER FROM'} the full pass",
    )  # fmt: skip


def _eviction(make: _Make) -> Finding:
    roomy = make()
    words = Wordings(roomy)
    prompt = words.problem(WORDING)
    others = [words.problem(problem.question) for problem in problems()[:6]]
    kid = roomy.prefill(prompt).fork(1)[0]
    expected = [roomy.generate(kid, 8, stop_ids=())[0].tokens.tolist() for _ in range(2)]
    stats = roomy.stats()
    need = -(-(len(prompt) + 16) // stats.block_tokens)
    longest = -(-max(map(len, others)) // stats.block_tokens)
    small = make(kv_bytes=(max(need, longest) + 2) * stats.block_bytes)
    kid = small.prefill(prompt).fork(1)[0]
    first = small.generate(kid, 8, stop_ids=())[0].tokens.tolist()
    held = [small.prefill(other) for other in others]
    gone = not kid.resident
    second = small.generate(kid, 8, stop_ids=())[0].tokens.tolist()
    after = small.stats()
    small.check()
    same = [first, second] == expected
    return Finding(
        "RSBCM evicts and recomputes",
        gone and same and after.evictions > 0 and after.tokens_recomputed > 0,
        f"{after.blocks_total} blocks for {len(held) + 1} prompts: {after.evictions} evicted, "
        f"{after.tokens_recomputed} tokens recomputed, the next tokens "
        + ("are identical" if same else "DIFFER"),
    )  # fmt: skip


def _list(cosines: NDArray[np.float32]) -> str:
    return "[" + " ".join(f"{c:.2f}" for c in cosines) + "]"


PROBES = (_fork, _asks_accepts, _asks_rejects, _asks_guard, _level_1, _level_2, _eviction)
