"""Requests of one call: what they have in common, and what has come of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .. import _core
from .._core import Branch
from ..text.decoding import TextStream
from .options import CGEE, Sampling
from .results import Token

Event = tuple[
    "Request", int, int, float, float, float, str | None, int, int, Exception | None
]  # as `_step` appends them: see csrc/py/generate.c

Arguments = tuple[
    int, float, int, float, float, int, Sequence[int], Sequence[bytes], float, float, int
]

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

    def arguments(self) -> Arguments:
        """As `_generate` and `_submit` take them."""
        s, cgee = self.sampling, self.cgee
        early: tuple[float, float, int] = (_OFF, 0.0, 1)
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


class Request(_core.Request):
    """A continuation under way, with the settings of its call and its text so far.

    streamed: its tokens are a `stream`'s, not `step`'s. new_text: makes a TextStream, or None
    where the session has no tokenizer.
    """

    plan: Plan
    streamed: bool
    _new_text: Callable[[], TextStream] | None
    _text: TextStream | None
    _tokens: list[int]  # of all events that have come
    _n_fed: int  # tokens that the text holds; -1: it has to be made again

    def __new__(
        cls,
        branch: Branch,
        plan: Plan,
        new_text: Callable[[], TextStream] | None,
        *,
        streamed: bool,
    ) -> Request:
        self = super().__new__(cls, branch)
        self.plan, self.streamed = plan, streamed
        self._new_text, self._text, self._tokens, self._n_fed = new_text, None, [], -1
        return self

    def token(self, event: Event) -> Token:
        """The event as the user sees it. An event may come twice: when a step was interrupted
        before it was handed out."""
        _, index, token, logprob, top_prob, entropy, finish, stop_bytes, stop_index, error = event
        piece = None
        if self._new_text is not None:
            piece = self._feed(self._new_text, index, token, finish is not None, stop_bytes)
        stop = self.plan.stopped_by(finish, stop_index)
        return Token(self.branch, token, logprob, top_prob, entropy, finish, piece, error, stop)

    def _feed(
        self, new_text: Callable[[], TextStream], index: int, token: int, last: bool, cut: int
    ) -> str:
        """Text that has become final with token `index`."""
        text = self._text
        if text is None or self._n_fed != index:
            self._text = text = new_text()
            for earlier in self._tokens[:index]:
                text.feed(earlier)
        self._n_fed = -1  # until this is through
        piece = ""
        if token >= 0:
            self._tokens[index:] = [token]
            piece = text.feed(token)
        if last:
            return piece + text.finish(cut)
        self._n_fed = index + 1
        return piece
