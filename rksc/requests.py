"""Requests of one call: what they have in common, and what has come of each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ._core import Branch
from .options import CGEE, Sampling
from .results import Token
from .text import TextStream

Event = tuple[int, int, float, float, float, str | None, int, int, Exception | None]

_OFF = 2.0  # a confidence never reaches it


@dataclass(frozen=True)
class Plan:
    """What all requests of one call have in common."""

    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    cgee: CGEE | None
    seed: int

    @property
    def stop_strings(self) -> list[bytes]:
        return [text.encode() for text in self.stop]

    def stopped_by(self, reason: str | None, index: int) -> str | int | None:
        """The stop string or stop id of an end, None for other ends."""
        if reason == "stop":
            return self.stop[index]
        return self.stop_ids[index] if reason == "eos" else None

    def arguments(self) -> tuple[Any, ...]:
        """As `_generate` and `_submit` take them."""
        s, cgee = self.sampling, self.cgee
        early = (_OFF, 0.0, 1)
        if cgee is not None and cgee.stop_top is not None:
            early = (cgee.stop_top, cgee.stop_lead, cgee.min_steps)
        return (
            self.max_new_tokens,
            s.temperature,
            s.top_k,
            s.top_p,
            s.min_p,
            self.seed,
            self.stop_ids,
            self.stop_strings,
            *early,
        )


@dataclass
class Request:
    """A submitted continuation: tokens that wait to be handed out, and how it ended."""

    number: int
    branch: Branch
    plan: Plan
    streamed: bool
    text: TextStream | None
    waiting: deque[Token] = field(default_factory=deque)
    end: tuple[str, int, int] | None = None  # finish reason, stop_bytes, stop_index
    n_new: int = 0
    sum_top: float = 0.0  # of top_prob over new tokens
    confidence: float | None = None

    def take(self, event: Event) -> None:
        _, token, logprob, top_prob, entropy, finish, stop_bytes, stop_index, error = event
        piece = None
        if self.text is not None:
            piece = self.text.feed(token) if token >= 0 else ""
            if finish is not None:
                piece += self.text.finish(stop_bytes)
        if finish is not None:
            self.end = (finish, stop_bytes, stop_index)
        if token >= 0:
            self.n_new += 1
            self.sum_top += top_prob
            self.confidence = self.sum_top / self.n_new
        elif finish == "eos" and self.n_new == 0:
            self.confidence = top_prob
        stop = self.plan.stopped_by(finish, stop_index)
        self.waiting.append(
            Token(self.branch, token, logprob, top_prob, entropy, finish, piece, error, stop)
        )
