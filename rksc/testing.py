"""Assertions for prompts under test: answers, confidences, and fidelity of shared KV.

The pytest plugin (`pytest --rksc-model PATH`) brings the session; these work without it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._core import Branch
from .answers.characters import tidy
from .answers.final import holds_answer, is_answer
from .answers.numerals import read
from .engine.logits import log_softmax
from .engine.results import Generation
from .engine.session import BranchSession, Text
from .engine.types import Tokens
from .reasoning.solve import Solution


@dataclass(frozen=True)
class Fidelity:
    """How near a branch's distributions are to a reference's over the same continuation.

    kl: mean KL(reference || branch) in nats over n positions; worst_kl: the largest of them;
    agreement: share of the positions with the same most likely token.
    """

    kl: float
    worst_kl: float
    agreement: float
    n: int


def fidelity(branch: Branch, reference: Branch, continuation: Text) -> Fidelity:
    """Compare two branches of a session, teacher-forced over a continuation of both.

    For KV that ASKS shared: branch stands on another wording's, reference on its own.
    """
    session = reference.session
    assert isinstance(session, BranchSession)
    tokens = session.encode(continuation, field="continuation")
    if not len(tokens):
        raise ValueError("continuation is empty: fidelity is measured over its tokens")
    rows = [log_softmax(_logits(b, tokens)) for b in (branch, reference)]
    own, wanted = rows
    kl = (np.exp(wanted) * (wanted - own)).sum(1)
    agreement = float((own.argmax(1) == wanted.argmax(1)).mean())
    return Fidelity(float(kl.mean()), float(kl.max()), agreement, len(kl))


def normalised(text: str) -> str:
    """The text without what seldom makes an answer another one: white space, case, a closing full
    stop, and how a number is written (1,234.50 is 1234.5; $12.00 is 12; 3/4 is 0.75)."""
    text = tidy(text)
    parts = []
    at = 0
    for number in read(text):
        before = text[at : number.start].casefold()
        joins = before.endswith((",", ".", ":", "/", "'"))  # 5,$30 is no 5,30
        parts += [before, " " * joins, number.spelling]
        at = number.end
    return " ".join("".join([*parts, text[at:].casefold()]).split()).rstrip(".")


def assert_answer(
    result: Solution | Generation | str,
    expected: str | Sequence[str],
    *,
    normalise: Callable[[str], str] = normalised,
) -> None:
    """The answer is one of those expected: a Solution's answer equals it, a text contains it, as
    whole words and numbers ("2" is not in "12", "2.5", "-2" or "3/2"). Both after `normalise`.
    Numbers are equal however they are written; an expected one without a unit equals "50%", too.

    ValueError: nothing is expected, or an empty text.
    """
    __tracebackhide__ = True
    wanted = [expected] if isinstance(expected, str) else list(expected)
    if not wanted or not all(normalise(text) for text in wanted):
        raise ValueError(f"expected must be non-empty texts, got {expected!r}")
    if isinstance(result, Solution):
        found = result.answer
        right = any(is_answer(normalise(found), normalise(text)) for text in wanted)
    else:
        found = result if isinstance(result, str) else (result.text or "")
        right = any(holds_answer(normalise(found), normalise(text)) for text in wanted)
    if not right:
        tree = f"\n{result}" if isinstance(result, Solution) else ""
        raise AssertionError(f"answer {found!r}, expected {' or '.join(map(repr, wanted))}{tree}")


def assert_confidence(
    results: Generation | Sequence[Generation] | Solution, at_least: float, *, best: bool = False
) -> None:
    """Every confidence is at least this; best=True: the largest of them. Of a Solution: that
    of its best node."""
    __tracebackhide__ = True
    if isinstance(results, Solution):
        found = [results.best.confidence]
    else:
        rows = [results] if isinstance(results, Generation) else list(results)
        found = [row.confidence for row in rows]
    numbers = [-1.0 if value is None else value for value in found]
    if not numbers:
        raise ValueError("results: none has a confidence")
    reached = max(numbers) if best else min(numbers)
    if not reached >= at_least:
        shown = ", ".join("none" if v is None else f"{v:.3f}" for v in found)
        raise AssertionError(f"confidence {shown}; expected at least {at_least}")


def assert_fidelity(
    branch: Branch,
    reference: Branch,
    continuation: Text,
    *,
    max_kl: float = 0.05,
    min_agreement: float = 0.9,
) -> Fidelity:
    """The branch says nearly what the reference says; `Fidelity` of the two."""
    __tracebackhide__ = True
    found = fidelity(branch, reference, continuation)
    if not (found.kl <= max_kl and found.agreement >= min_agreement):
        raise AssertionError(
            f"mean KL {found.kl:.4f} nats (at most {max_kl}), same most likely token in "
            f"{found.agreement:.0%} of {found.n} positions (at least {min_agreement:.0%})"
        )
    return found


def _logits(branch: Branch, continuation: Tokens) -> NDArray[np.float32]:
    """Logits before each token of the continuation: float32 (tokens, vocabulary)."""
    session = branch.session
    assert isinstance(session, BranchSession)
    (child,) = branch.fork([continuation])
    begin = branch.n_tokens - 1
    logits = session._logits_at(child, begin, begin + len(continuation))
    child.drop()
    return logits
