"""What all clients stand on: samples of prompts, batched as they come, over one session.

A caller submits samples and steps until they have ended; several threads may do so at once: one of
them steps, for all, and the others wait for each step's end. A prompt's first sample computes what
no earlier prompt has left; samples of equal prompts fork from it; a sample whose prompt begins like
one that is being computed waits until it can find that work in the exact-prefix index. So no prefix
is computed twice, whoever asks.

What one submission brings is a call. Calls take turns: their samples begin in turn, and a step's
rows go to calls in equal shares, however many samples each has. Results depend on none of that.

Ctrl-C may come at any moment of a turn, which does others' work too. So what a token means for its
sample is noted in one go, without a call or a loop: Python handles signals there and nowhere else.
All other books can be made again from the samples, and are at the next turn.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._core import Branch, CapacityError
from ..engine.arguments import no_model, no_tokenizer
from ..engine.load import Model
from ..engine.options import Sampling
from ..engine.results import Token
from ..engine.session import BranchSession
from ..engine.types import Tokens
from ..text.decoding import check_text, token_tables
from ..text.tokenizer import Tokenizer
from ._errors import ContextLengthError

Alternatives = tuple[NDArray[np.int64], NDArray[np.float32]]
"""The k most likely tokens and their natural log-probabilities, most likely first. The token that
came has the very value here that it has as that token."""

Score = tuple[NDArray[np.float32], NDArray[np.int32]]
"""The natural log-probability of each token of a continuation, and the tokens that would have been
most likely in their places."""

_MORE_KV = "give the session more kv_bytes (rksc serve: --kv)"
_LOGITS_AT_ONCE = 64  # rows of a vocabulary's width that are held at once
_SCORED_AT_ONCE = 512  # tokens of a prompt; others get in between
_MOST_ROWS = 512  # samples that run at once where each is its call's first


@dataclass(eq=False)
class Sample:
    """One continuation of a prompt: what is wanted, then what came of it.

    prompt: int32 (n,). max_new_tokens None: as many as there is room for. index: place among the
    samples of one request; with the seed it decides the random numbers. n_alternatives: of each
    new token, once it has ended. on_token is called in the stepping thread with each piece; news
    gets it with the sample. Both get None at an end that brings no token.
    """

    prompt: NDArray[np.int32]
    max_new_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None
    index: int = 0
    n_alternatives: int = 0
    on_token: Callable[[Sample, Token | None], None] | None = None
    news: deque[tuple[Sample, Token | None]] | None = field(default=None, repr=False)

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    """Of the `scored` tokens."""
    text: str = ""
    finish_reason: str | None = None
    stopped_by: str | int | None = None
    end_logprob: float | None = None
    """Of the end token or stop id that ended it, which is none of its tokens."""
    cached_tokens: int = 0
    """Prompt tokens whose KV an earlier prompt had left."""
    error: Exception | None = None
    _call: _Call | None = field(default=None, repr=False)
    _branch: Branch | None = field(default=None, repr=False)
    """While it runs, and with it its request."""
    _request: int = field(default=0, repr=False)
    _last: Token | None = field(default=None, repr=False)
    """The token that ended it, while alternatives are to come."""

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def scored(self) -> tuple[list[int], list[float]]:
        """All that the model chose, with its log-probabilities: the tokens and what ended them."""
        if self.end_logprob is None or not isinstance(self.stopped_by, int):
            return self.tokens, self.logprobs
        return [*self.tokens, self.stopped_by], [*self.logprobs, self.end_logprob]

    @property
    def _computing(self) -> bool:
        """Whether its prompt is being computed for the first time."""
        if self._branch is None or self.tokens:
            return False
        try:
            return self._branch.n_computed < len(self.prompt)
        except RuntimeError:  # dropped: its call was given up
            return False


@dataclass(eq=False)
class _Call:
    """The samples of one submission. branches: all that were made for them. given_up: nobody
    waits for it any more."""

    number: int
    samples: Sequence[Sample]
    waiting: deque[Sample]
    n_running: int = 0
    held_by: Sample | None = None  # whose prompt the next sample waits for
    branches: list[Branch] = field(default_factory=list)
    given_up: bool = False


class Engine:
    """A session with a queue. model: a `rksc.Model`, whose session `options` then describe, or a
    `rksc.BranchSession`, which nobody else may submit to. max_rows: samples that run at once."""

    def __init__(self, model: Model | BranchSession, *, max_rows: int = 64, **options: Any) -> None:
        self.name = "rksc"
        if isinstance(model, Model):
            self.name = model.path.stem if model.path is not None else self.name
            # Short blocks: prompts that differ in their last line share all but a few tokens.
            self.session = model.session(**{"block_tokens": 8, **options})
        elif not isinstance(model, BranchSession):
            raise no_model("model", model)
        elif options:
            raise ValueError(f"{next(iter(options))}: this session already has its options")
        else:
            self.session = model
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        if self.session.tokenizer is None:
            raise no_tokenizer("model")
        self.tokenizer: Tokenizer = self.session.tokenizer
        table, self.special = token_tables(self.tokenizer, self.session.config.vocab_size)
        self.token_bytes: list[bytes] = table or []
        self.max_rows = max_rows
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._running: dict[int, Sample] = {}  # by their branches
        self._tokens: deque[Token] = deque()  # of a step, to be given to their samples
        self._unwanted: deque[Sample] = deque()
        self._turn = threading.Lock()
        self._gate = threading.Lock()  # of the present or the last turn; held while it lasts
        self._owner: int | None = None  # the thread whose turn it is
        self._torn = False  # a turn has begun and not come to its end
        stats = self.session.stats()
        self._budget = stats.blocks_total * stats.block_tokens
        self._longest = max(map(len, (*self.token_bytes, *self.special.values())), default=1)

    # ---- prompts -----------------------------------------------------------------------------

    def encode(
        self, text: str, field: str = "prompt", bos: bool | None = None
    ) -> NDArray[np.int32]:
        """A prompt's tokens, with the BOS that the model wants unless bos says otherwise; errors
        name the field."""
        check_text(field, text)
        self.check_bytes(len(text.encode()), field)
        return np.array(self.session.encode(text, bos=bos, start=True, field=field), np.int32)

    def check_bytes(self, n: int, field: str) -> None:
        """ContextLengthError: texts of n bytes have too many tokens even if each is the longest of
        the vocabulary. So what is much too long is refused before it is made into tokens."""
        limit = min(self.session.config.max_positions, self._budget)
        if n > limit * self._longest:
            raise ContextLengthError(
                field.partition("[")[0],
                f"{field}: {n} bytes are too many. This model's maximum context length is {limit} "
                f"tokens, each of at most {self._longest} bytes: shorten it",
            )

    def check_prompt(self, prompt: Tokens, field: str) -> NDArray[np.int32]:
        """The prompt as int32; ValueError names the field of one that is empty, ContextLengthError
        that of one that has more tokens than there are positions or room for in the KV budget."""
        try:
            tokens = np.asarray(prompt)
        except ValueError:  # lists of several lengths
            tokens = None
        if tokens is None or tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            raise ValueError(f"{field}: tokens must be a sequence of ints")
        if not len(tokens):
            raise ValueError(f"{field} is empty")
        positions = self.session.config.max_positions
        if len(tokens) >= positions or len(tokens) > self._budget:
            limit, why, way = positions, "its positions, one of them for an answer", ""
            if self._budget < positions:
                limit, way = self._budget, f", or {_MORE_KV}"
                why = f"its KV budget, for {positions} positions"
            raise ContextLengthError(
                field.partition("[")[0],
                f"{field}: {len(tokens)} tokens are too many. This model's maximum context length "
                f"is {limit} tokens ({why}): shorten it{way}",
            )
        if tokens.min() < 0 or tokens.max() >= self.session.config.vocab_size:
            raise ValueError(f"{field}: a token is outside the vocabulary")
        return tokens.astype(np.int32)

    # ---- samples -----------------------------------------------------------------------------

    def submit(self, samples: Sequence[Sample]) -> None:
        """Queue samples; all or none, and without waiting. CapacityError: one would not fit even
        alone."""
        self._enter(self._call_of(samples))

    def _enter(self, call: _Call) -> None:
        if call.samples:
            self._calls[call.number] = call

    def _call_of(self, samples: Sequence[Sample]) -> _Call:
        for sample in samples:
            sample.max_new_tokens = self.check_room(len(sample.prompt), sample.max_new_tokens)
        call = _Call(next(self._numbers), list(samples), deque(samples))
        for sample in samples:
            sample._call = call
        return call

    def check_room(self, n_prompt: int, wanted: int | None, field: str = "max_tokens") -> int:
        """The new tokens after so many of a prompt; None wants as many as there is room for. What
        exceeds the model's positions is cut later, what exceeds the KV budget is a CapacityError
        that names the field."""
        positions = self.session.config.max_positions - n_prompt
        room = self._budget - n_prompt
        if wanted is None:
            wanted = max(1, min(positions, room))
        if min(wanted, positions) > room:
            raise ContextLengthError(
                field,
                f"{field}: {n_prompt} tokens of prompt and up to {wanted} new ones are too many. "
                f"This model's maximum context length is {self._budget} tokens (its KV budget): "
                f"ask for fewer, or {_MORE_KV}",
            )
        return wanted

    def cancel(self, samples: Iterable[Sample]) -> None:
        """End what has not ended; KV is freed, tokens so far stay. Waits at most for the step that
        another thread is in and for the beginning of the next."""
        left = [sample for sample in samples if not sample.ended]
        self._unwanted.extend(left)
        while not all(sample.ended for sample in left):
            self._in_turn(self._end_unwanted)

    def cancel_all(self) -> None:
        self.cancel(self._left())

    def fail_all(self, error: Exception) -> None:
        """End all that wait or run with this error."""

        def work() -> None:
            for sample in self._left():
                self._fail(sample, error)

        while not self._in_turn(work):
            pass

    def _left(self) -> list[Sample]:
        waiting = [sample for call in self._calls.copy().values() for sample in call.waiting.copy()]
        return [*waiting, *self._running.copy().values()]

    @property
    def n_waiting(self) -> int:
        return sum(len(call.waiting) for call in self._calls.copy().values())

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def busy(self) -> bool:
        return bool(self._calls)

    def step(self) -> None:
        """Start what can start, and bring all running samples a token further; while another
        thread does so, wait until it has. A sample that cannot go on ends with its error; a step
        that fails as a whole ends all that run."""
        self._in_turn(self._step)

    def _in_turn(self, work: Callable[[], None]) -> bool:
        """Do the work; False: another thread's turn has ended instead, and the caller looks what
        is left to do. (A lock held for each step would go to one thread again and again.)"""
        me = threading.get_ident()
        if self._owner == me:  # an on_token that cancels
            work()
            return True
        gate = self._gate
        if gate.locked():
            with gate:
                return False
        gate = threading.Lock()
        with self._turn, gate:
            self._gate, self._owner = gate, me
            try:
                self._do(work)
            finally:
                self._owner = None
        return True

    def _do(self, work: Callable[[], None]) -> None:
        if self._torn:
            self._mend()
        self._torn = True
        work()
        self._torn = False

    def _mend(self) -> None:
        """Make the books again after a turn that was interrupted."""
        running: dict[int, Sample] = {}
        for number, call in list(self._calls.items()):
            for sample in call.samples:
                if sample._branch is not None and sample.ended:
                    self._release(sample)
            mine = {s._branch.id: s for s in call.samples if s._branch is not None}
            self.session._drop([b for b in call.branches if b.id not in mine])
            call.waiting = deque(s for s in call.samples if s._branch is None and not s.ended)
            call.n_running = len(mine)
            running |= mine
            if not call.waiting and not mine:
                del self._calls[number]
        self._running = running

    def _step(self) -> None:
        self._end_unwanted()
        self._start()
        try:
            if self._running:
                self._tokens += self.session.step()
        except Exception as error:
            for sample in list(self._running.values()):
                self._fail(sample, error)
            return
        while self._tokens:
            self._take(self._tokens[0])
        self._look_back()

    def _end_unwanted(self) -> None:
        for call in self._calls.copy().values():
            for sample in call.samples if call.given_up else ():
                self._end(sample, "cancelled")
        while self._unwanted:
            sample = self._unwanted[0]
            self._end(sample, "cancelled")
            with contextlib.suppress(ValueError):  # an on_token that cancels came here first
                self._unwanted.remove(sample)

    def run(self, samples: Sequence[Sample], *, whichever_fail: bool = False) -> None:
        """Bring all of them to their end, those with prefixes in common one after the other.
        Raises the error of the first that failed, and nothing of the call goes on then;
        whichever_fail: each has its own."""
        call = self._call_of(sorted(samples, key=lambda sample: sample.prompt.tolist()))
        try:
            self._enter(call)
            self._bring_to_end(samples, whichever_fail)
        except BaseException:
            call.given_up = True
            self.session._drop(call.branches)
            self.cancel(samples)
            raise

    def _bring_to_end(self, samples: Sequence[Sample], whichever_fail: bool) -> None:
        while not all(sample.ended for sample in samples):
            self.step()
            for sample in () if whichever_fail else samples:
                if sample.error is not None:
                    raise sample.error

    def stream(self, samples: Sequence[Sample]) -> Iterator[tuple[Sample, Token]]:
        """Run them and yield each token as it comes. Closing the iterator cancels them."""
        news: deque[tuple[Sample, Token | None]] = deque()
        for sample in samples:
            sample.news = news
        call = self._call_of(samples)
        try:
            self._enter(call)
            yield from self._tokens_from(news, len(samples))
        except BaseException:
            call.given_up = True
            self.session._drop(call.branches)
            self.cancel(samples)
            raise

    def _tokens_from(
        self, news: deque[tuple[Sample, Token | None]], left: int
    ) -> Iterator[tuple[Sample, Token]]:
        while left:
            if not news:
                self.step()
            while news:
                sample, token = news.popleft()
                if sample.error is not None:
                    raise sample.error
                left -= token is None or token.finish_reason is not None
                if token is not None:
                    yield sample, token

    def _start(self) -> None:
        """Begin what there is room for, a sample of each call in turn: of the call that has fewest
        running ones. `max_rows` run at once; but a call that has less than its equal share of them
        need not wait for the many of another."""
        calls = [call for call in self._calls.copy().values() if not call.given_up]
        share = max(1, self.max_rows // max(1, len(calls)))
        turns = [(call.n_running, call.number, call) for call in calls if call.waiting]
        heapq.heapify(turns)
        while turns:
            n_running, number, call = heapq.heappop(turns)
            if len(self._running) >= (self.max_rows if n_running >= share else _MOST_ROWS):
                return
            if self._begin(call) and call.waiting:
                heapq.heappush(turns, (call.n_running, number, call))

    def _begin(self, call: _Call) -> bool:
        """Start the call's next sample; False: it had better wait for another one's prompt."""
        if call.held_by is not None and call.held_by._computing:
            return False
        sample, branch = call.waiting[0], None
        try:
            branch, call.held_by = self._branch_for(sample, call)
            if branch is None:
                return False
            branch.stream = sample.index
            sample.cached_tokens = min(branch.n_computed, len(sample.prompt) - 1)
            assert sample.max_new_tokens is not None
            sample._request = self.session.submit(
                branch,
                sample.max_new_tokens,
                sample.sampling,
                sample.stop,
                sample.stop_ids,
                call.number,
            )
            sample._branch = branch
        except Exception as error:
            if branch is not None:
                branch.drop()
            self._fail(sample, error)
            return True
        call.waiting.popleft()
        call.n_running += 1
        self._running[branch.id] = sample
        return True

    def _branch_for(self, sample: Sample, call: _Call) -> tuple[Branch | None, Sample | None]:
        """A branch with the sample's prompt, of the call's; None, and whose prompt it had better
        wait for."""
        computing: list[Sample] = []
        for other in self._running.values():
            if other._computing:
                computing.append(other)
            elif np.array_equal(other.prompt, sample.prompt) and self._fork(other, call):
                return call.branches[-1], None
        call.branches.append(self.session.prefill(sample.prompt, compute=False))
        branch = call.branches[-1]
        gain = branch.n_computed + self.session.block_tokens
        for other in computing:
            if _common(other.prompt, sample.prompt) >= gain:
                branch.drop()
                return None, other
        return branch, None

    def _fork(self, other: Sample, call: _Call) -> bool:
        """A branch of the call that has the other's prompt; False: that has been dropped."""
        assert other._branch is not None
        try:
            call.branches += other._branch.fork(1, at=len(other.prompt))
        except RuntimeError:
            if not other._branch.dropped:
                raise
            return False
        return True

    def _take(self, token: Token) -> None:
        """Give the first of the step's tokens to its sample."""
        sample = self._running.get(token.branch.id)
        if sample is None or sample.ended:
            del self._tokens[0]
            return
        error, reason, is_id = token.error, token.finish_reason, isinstance(token.stop, int)
        waits = reason is not None and error is None and sample.n_alternatives > 0
        told = token if error is None else None
        # One piece, down to where the token is done with: no call, no loop.
        sample.error = error
        if error is None:
            if token.token >= 0:
                sample.tokens += [token.token]
                sample.logprobs += [token.logprob]
            sample.text += token.text or ""
            if reason is not None:
                sample.stopped_by = token.stop
                sample.end_logprob = token.logprob if is_id else None
                sample._last = token if waits else None
                sample.finish_reason = None if waits else reason
        if sample.news is not None and not waits:
            sample.news += [(sample, told)]
        del self._tokens[0]
        if sample.ended:
            self._retire(sample)
        if not waits:
            self._tell(sample, told)

    def _look_back(self) -> None:
        """A piece of the alternatives that are still to be computed, for a sample of each call."""
        seen: set[int] = set()
        for sample in list(self._running.values()):
            assert sample._call is not None
            if sample._last is None or sample.ended or sample._call.number in seen:
                continue
            seen.add(sample._call.number)
            try:
                sample.alternatives += self._alternatives(sample)
            except Exception as error:
                self._fail(sample, error)
                continue
            if len(sample.alternatives) == len(sample.scored[0]):
                self._end(sample, sample._last.finish_reason, token=sample._last)

    def _fail(self, sample: Sample, error: Exception) -> None:
        self._end(sample, None, error=error)

    def _end(
        self,
        sample: Sample,
        reason: str | None,
        *,
        token: Token | None = None,
        error: Exception | None = None,
    ) -> None:
        if sample.ended:
            return
        sample.finish_reason, sample.error = reason, error
        if sample.news is not None:
            sample.news += [(sample, token)]
        self._retire(sample)
        self._tell(sample, token)

    def _retire(self, sample: Sample) -> None:
        """It has ended. The branch goes; what it computed stays in the index as long as there is
        room."""
        call = sample._call
        assert call is not None
        if sample._branch is None:
            call.waiting.remove(sample)
        else:
            del self._running[sample._branch.id]
            call.n_running -= 1
            self._release(sample)
        if not call.waiting and not call.n_running:
            self._calls.pop(call.number, None)

    def _release(self, sample: Sample) -> None:
        assert sample._branch is not None
        self.session.cancel(sample._request)
        sample._branch.drop()
        sample._branch = None

    def _tell(self, sample: Sample, token: Token | None) -> None:
        """To its on_token; where that raises, the sample fails with the error, and no other."""
        if sample.on_token is None:
            return
        try:
            sample.on_token(sample, token)
        except Exception as error:
            sample.on_token = None
            if sample.ended:
                sample.error = sample.error or error
            else:
                self._fail(sample, error)

    # ---- probabilities -----------------------------------------------------------------------

    def _alternatives(self, sample: Sample) -> list[Alternatives]:
        """The next ones, of as many tokens as are looked at at once."""
        assert sample._branch is not None
        first = len(sample.alternatives)
        last, begin = first + _LOGITS_AT_ONCE, len(sample.prompt) - 1 + first
        tokens, logprobs = sample.scored
        return self._alternatives_at(
            sample._branch, begin, tokens[first:last], logprobs[first:last], sample.n_alternatives
        )

    def _alternatives_at(
        self, branch: Branch, begin: int, tokens: Tokens, logprobs: Sequence[float], k: int
    ) -> list[Alternatives]:
        """What might have come at positions begin + 1, ... of a branch where these tokens of these
        log-probabilities did: one more pass. log p(other) = log p(token) + logit difference."""
        found: list[Alternatives] = []
        for first in range(0, len(tokens), _LOGITS_AT_ONCE):
            last = min(first + _LOGITS_AT_ONCE, len(tokens))
            logits = self.session._logits_at(branch, begin + first, begin + last)
            came = zip(tokens[first:last], logprobs[first:last], strict=True)
            for row, (token, logprob) in zip(logits, came, strict=True):
                ids = _largest(row, k)
                values = row[ids].astype(np.float64) - row[token] + logprob
                found.append((ids, values.astype(np.float32)))
        return found

    def scores(
        self, pairs: Sequence[tuple[Tokens, Tokens]]
    ) -> Iterator[tuple[int, Score | Exception]]:
        """For each (context, continuation) its place in `pairs` and its `Score`, as they are done;
        or the error (ValueError, CapacityError) of a pair that has none.

        Equal contexts are computed once and all their continuations in one batch; contexts that
        begin alike share that.
        """
        contexts: dict[tuple[int, ...], list[int]] = {}
        for i, (context, _) in enumerate(pairs):
            contexts.setdefault(tuple(int(t) for t in context), []).append(i)
        for context in sorted(contexts):
            members = contexts[context]
            found = self._scores_after(context, [pairs[i][1] for i in members])
            yield from zip(members, found, strict=True)

    def _scores_after(
        self, context: Tokens, continuations: Sequence[Tokens]
    ) -> Sequence[Score | Exception]:
        """In one batch; each by itself where that fails."""
        try:
            branch = self.session.prefill(context)
            try:
                return self.session._score(branch, continuations)
            finally:
                branch.drop()
        except (ValueError, CapacityError) as error:
            if len(continuations) == 1:
                return [error]
            return [found for c in continuations for found in self._scores_after(context, [c])]

    def score(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[Score]:
        """`scores` in the order of the pairs; the error of one is raised."""
        found: dict[int, Score] = {}
        for i, score in self.scores(pairs):
            if isinstance(score, Exception):
                raise score
            found[i] = score
        return [found[i] for i in range(len(pairs))]

    def score_prompt(
        self, prompt: NDArray[np.int32], n_alternatives: int = 0
    ) -> tuple[list[float], list[Alternatives]]:
        """Log-probabilities of a prompt's tokens from the second on, and alternatives."""
        branch = self.session.prefill(prompt[:1])
        logprobs: list[float] = []
        try:
            for begin in range(1, len(prompt), _SCORED_AT_ONCE):
                piece = prompt[begin : begin + _SCORED_AT_ONCE]
                logprobs += self.session._score(branch, [piece])[0][0].tolist()
                branch.extend(piece)
            if not n_alternatives:
                return logprobs, []
            found = self._alternatives_at(branch, 0, prompt[1:], logprobs, n_alternatives)
        finally:
            branch.drop()
        return logprobs, found


def copies(sample: Sample, n: int) -> list[Sample]:
    """n samples of one prompt with the same settings, each with random numbers of its own."""
    return [replace(sample, index=i, tokens=[], logprobs=[], alternatives=[]) for i in range(n)]


def _largest(row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Places of the k largest values, largest first, the first of equal ones."""
    k = min(k, len(row))
    among = np.flatnonzero(row >= np.partition(row, -k)[-k])
    return among[np.argsort(-row[among], kind="stable")[:k]]


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Tokens that both begin with."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
