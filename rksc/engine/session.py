"""BranchSession: the engine's session with text, units and the mechanisms' settings.

generate -> Session._generate (csrc/py) -> csrc/session.c: everything that computes is in C;
here text becomes tokens, settings become numbers, and rows become the records of results.py.
"""

from __future__ import annotations

import inspect
import math
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from .. import _core
from .._core import Branch
from ..answers.guard import is_rewording, same_numbers
from ..model.config import ModelConfig
from ..model.names import check_vocabulary, check_wrapped
from ..scalars import as_int
from ..text.decoding import TextStream, check_text, final_text, token_tables
from ..text.ends import all_ends
from ..text.tokenizer import Tokenizer
from .arguments import (
    as_cgee,
    as_list,
    check_branch,
    check_named,
    check_options,
    distinct,
    flag,
    integer,
    no_tokenizer,
    parse_bytes,
    parse_dtype,
)
from .options import ASKS, CGEE, RSBCM, Sampling
from .requests import Event, Plan, Request
from .results import Gate, Generation, Stats, Token, Verdict
from .types import Tokens

Text = str | Tokens


class BranchSession(_core.Session):
    """One model, one budget of KV blocks, and a tree of branches over them.

    weights: {Hugging Face tensor name: any object with __dlpack__}; used in place where
    dtype and layout fit. config: ModelConfig, a config.json's dict or a Hugging Face config.
    With config.tied (tie_word_embeddings) the embedding is the head too, unless weights hold an
    lm_head.weight: then that is used, as transformers 5 does (docs/memory.md).
    dtype: of products' inputs and KV; None takes bfloat16 for bfloat16 weights, else float32.
    kv_bytes: the budget of all KV. tokenizer: allows text wherever the session takes tokens;
    `Branch.fork` and `Branch.extend` take ids (`encode` makes them). asks: sharing between
    wordings (None: exact tokens only); can be set later, because its centre comes from
    `layer_means`. cgee: how much to verify (None: all, in full). activations: what they are
    rounded to where they meet weights of GGUF block types (docs/method.md). None: "int16" in
    bfloat16 sessions on the CPU, but "bfloat16" with AMX; as they are in float32 ones. "int8" is
    faster and less exact. ValueError where no matrix is of a block type. step_tokens: tokens that
    go through the model at once at most. share=False turns the prefix index off, to measure what
    it brings; isa, hash_bits and poison are for tests.
    """

    tokenizer: Tokenizer | None
    rsbcm: RSBCM
    _asks: ASKS | None
    _cgee: CGEE | None
    _token_bytes: list[bytes] | None
    _special: dict[int, bytes]
    _stepping: threading.RLock  # one `step` at a time

    def __new__(
        cls,
        weights: Mapping[str, Any],
        config: ModelConfig | Mapping[str, Any] | Any,
        device: Any = "cpu",
        dtype: Any = None,
        kv_bytes: int | str = "2GiB",
        block_tokens: int = 16,
        n_threads: int | None = None,
        tokenizer: Tokenizer | None = None,
        asks: ASKS | None = None,
        cgee: CGEE | None = CGEE(),  # noqa: B008 (frozen)
        rsbcm: RSBCM = RSBCM(),  # noqa: B008 (frozen)
        *,
        activations: Literal["int16", "int8", "bfloat16"] | None = None,
        step_tokens: int = 512,
        isa: str | None = None,
        share: bool = True,
        hash_bits: int = 64,
        poison: bool = False,
        **unknown: NoReturn,
    ) -> BranchSession:
        check_options("a session", unknown, SESSION_OPTIONS)
        if not isinstance(rsbcm, RSBCM):
            raise ValueError(f"rsbcm must be rksc.RSBCM, got {rsbcm!r}")
        if tokenizer is not None and not callable(getattr(tokenizer, "token_bytes", None)):
            raise ValueError(
                f"tokenizer must be a rksc.Tokenizer, got {type(tokenizer).__name__}: "
                "rksc.load(path).tokenizer is one"
            )
        config = ModelConfig.of(config)
        ends = all_ends(config.eos, config.vocab_size, tokenizer)
        config = config if ends == config.eos else replace(config, eos=ends)
        if isinstance(weights, Mapping):  # another object is refused by the engine
            check_wrapped(weights)
            if tokenizer is not None:
                check_vocabulary(weights, config.vocab_size)
        cgee = as_cgee(cgee, config.n_layers)
        token_bytes, special = token_tables(tokenizer, config.vocab_size)
        self = super().__new__(
            cls,
            weights,
            config,
            device=str(device),
            dtype=parse_dtype(dtype),
            kv_bytes=parse_bytes(kv_bytes),
            block_tokens=block_tokens,
            n_threads=n_threads,
            isa=isa,
            activations=activations,
            step_tokens=step_tokens,
            token_bytes=token_bytes and [special.get(i, b) for i, b in enumerate(token_bytes)],
            special_ids=list(special),
            share=flag("share", share),
            hash_bits=hash_bits,
            poison=flag("poison", poison),
        )
        self.tokenizer = tokenizer
        self._token_bytes, self._special = token_bytes, special
        self.cgee = cgee
        self.rsbcm = rsbcm
        self._stepping = threading.RLock()
        self.asks = asks
        return self

    def __repr__(self) -> str:
        c, s = self.config, self.stats()
        threads = f", {self.n_threads} threads" if self.device == "cpu" else ""
        return (
            f"<rksc.BranchSession {c.architecture}, {c.n_layers} layers of width {c.width}, "
            f"{self.dtype} on {self.device} ({self.isa}){threads}, {s.branches} branches, "
            f"{s.blocks_used} of {s.blocks_total} KV blocks in use>"
        )

    @property
    def asks(self) -> ASKS | None:
        """Settings of sharing between wordings; None: only equal tokens are shared."""
        return self._asks

    @asks.setter
    def asks(self, asks: ASKS | None) -> None:
        if asks is not None:
            if not isinstance(asks, ASKS):
                raise ValueError(
                    f"asks must be rksc.ASKS or None, got {asks!r} (ASKS(center=...), ASKS.paper())"
                )
            if asks.guard is not None and self.tokenizer is None:
                raise ValueError(
                    f"asks.guard={asks.guard!r} compares texts and this session has no tokenizer: "
                    "pass tokenizer=, or ASKS(guard=None) knowingly"
                )
            c = self.config
            if asks.center is not None and asks.center.shape != (c.n_layers, c.width):
                raise ValueError(
                    f"asks.center must be (layers, width) = ({c.n_layers}, {c.width}), "
                    f"got {asks.center.shape}"
                )
            if asks.probe_layers is not None and asks.probe_layers > c.n_layers:
                raise ValueError(
                    f"asks.probe_layers must be at most {c.n_layers}, got {asks.probe_layers}"
                )
        self._asks = asks

    @property
    def cgee(self) -> CGEE | None:
        """How much to verify; None: everything, in full."""
        return self._cgee

    @cgee.setter
    def cgee(self, cgee: CGEE | None) -> None:
        self._cgee = as_cgee(cgee, self.config.n_layers)

    # ---- text ------------------------------------------------------------------------------

    def encode(
        self,
        text: Text,
        *,
        bos: bool | None = False,
        start: bool | None = None,
        field: str = "tokens",
    ) -> Tokens:
        """Tokens as they are, or a text's. bos None: begin with the BOS that the model wants,
        once, even where the text (a chat template) already has it; False: without. start: does
        the text begin here, or go on? None: it goes on where bos is False."""
        if not isinstance(text, str):
            if isinstance(text, (list, tuple)) and text and isinstance(text[0], Mapping):
                raise TypeError(
                    f"{field} must be text or token ids; session.tokenizer.chat(messages) makes a "
                    "text of messages"
                )
            return text
        tokenizer = self._tokenizer_for(field)
        check_text(field, text)
        return tokenizer.encode(text, bos=bos, start=bos is not False if start is None else start)

    def decode(self, tokens: Tokens) -> str:
        """The text of tokens; ValueError in a session without a tokenizer."""
        return self._tokenizer_for("decode").decode(self._tokens(tokens, "tokens"))

    def _tokenizer_for(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise no_tokenizer(field)
        return self.tokenizer

    # ---- branches --------------------------------------------------------------------------

    def prefill(
        self,
        tokens: Text,
        *,
        similar_to: Branch | None = None,
        suffix: Text | None = None,
        compute: bool = True,
    ) -> Branch:
        """A branch with this prompt, its KV computed but for what an earlier one left.

        Text gets the model's BOS (once); tokens are taken as they are. suffix follows the
        prompt and gets no BOS. With `similar_to` and `session.asks` the branch stands on that
        branch's KV when the gate accepts: then `branch.tokens` are those of the root and the
        suffix, `branch.prompt` its own wording and `branch.gate` the decision. compute=False
        leaves the KV to be computed when it is needed; `branch.n_computed` tells what was found.
        """
        own = self.encode(tokens, bos=None)
        given: Tokens = () if suffix is None else self.encode(suffix, field="suffix")
        tail = self._tokens(given, "suffix")
        if similar_to is not None:
            check_branch("similar_to", similar_to, self)
            if self._asks is not None:
                return self._prefill_similar_to(similar_to, own, tail, self._asks)
        return self._prefill(own, tail, compute)

    def _prefill_similar_to(self, root: Branch, own: Tokens, tail: Tokens, asks: ASKS) -> Branch:
        if asks.probe == "suffix" and not len(tail):
            raise ValueError('suffix: asks.probe="suffix" compares suffixes: give one')
        n_layers = self.config.n_layers
        default = max(1, n_layers // 8) if asks.probe == "prefix" else n_layers
        probe_layers = asks.probe_layers or default
        branch, report = self._prefill_similar(
            root,
            own,
            tail,
            asks.probe,
            asks.pool,
            probe_layers,
            asks.tau,
            asks.alpha,
            None if asks.center is None else np.ascontiguousarray(asks.center[:probe_layers]),
            self._guard_allows(asks, own, root.tokens),
        )
        try:
            reason = "equal" if report["equal"] else report["gate"]
            branch.prompt = np.array(own, np.int32)
            branch.gate = Gate(
                accepted=reason in ("equal", "accepted"),
                reason=reason,
                sigma=report["sigma"],
                tau=asks.tau,
                cosines=report["cosines"],
                own_token_layers=report["own_token_layers"],
                root_token_layers=report["root_token_layers"],
            )
            return branch
        except BaseException:  # also where a traceback holds on to it
            branch.drop()
            raise

    def _guard_allows(self, asks: ASKS, own: Tokens, root: NDArray[np.int32]) -> bool:
        """The guard sees the whole texts: a number may begin before the first token that
        differs. Equal tokens need no guard."""
        if asks.guard is None or np.array_equal(np.asarray(own), root):
            return True
        named = {"numbers": same_numbers, "reworded": is_rewording}
        guard = named[asks.guard] if isinstance(asks.guard, str) else asks.guard
        return bool(guard(self.decode(own), self.decode(root)))

    def layer_means(
        self, prompts: Sequence[Text], pool: Literal["mean", "last"] = "mean"
    ) -> NDArray[np.float32]:
        """Mean residual stream after each layer, float32 (layers, width): ASKS' centre.

        pool "mean" averages each prompt over the positions in which the prompts differ (after
        what all begin with, before what all end with; never the first position), "last" takes
        each prompt's last position; then all prompts count alike.
        """
        if pool not in ("mean", "last"):
            raise ValueError(f'pool must be "mean" or "last", got {pool!r}')
        if isinstance(prompts, str) or not hasattr(prompts, "__len__") or not len(prompts):
            raise ValueError(f"prompts must be a non-empty sequence, got {prompts!r}")
        rows = [
            self._tokens(self.encode(prompt, bos=None, field=f"prompts[{i}]"), f"prompts[{i}]")
            for i, prompt in enumerate(prompts)
        ]
        for i, row in enumerate(rows):
            if not len(row):
                raise ValueError(f"prompts[{i}] has no tokens")
        total = np.zeros((self.config.n_layers, self.config.width))
        begin, end = _common(rows), _common([row[::-1] for row in rows])
        for row in rows:
            first = max(begin, 1)
            last = len(row) - end
            if pool == "last" or first >= last:
                first, last = len(row) - 1, len(row)
            total += self._prompt_means(row, first, last)
        return (total / len(rows)).astype(np.float32)

    # ---- generation ------------------------------------------------------------------------

    def generate(
        self,
        branches: Branch | Sequence[Branch],
        max_new_tokens: int = 32,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] | None = None,
        progress: Callable[[int], None] | None = None,
        **unknown: NoReturn,
    ) -> list[Generation]:
        """Continue all branches in one batch; a Generation for each, in order.

        sampling: None is greedy. stop: strings that end a branch, matched across token
        boundaries (they stay in its tokens, not in the text); they may spell special tokens.
        stop_ids: tokens that end it and are not appended; None takes the model's end tokens, ()
        forces the length.
        On an error or Ctrl-C all branches are as they were. progress(n) is called after every
        step with the number of new tokens.
        """
        check_named(self.generate, unknown)
        branches = distinct(branches)
        plan = self._plan(max_new_tokens, sampling, stop, stop_ids)
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be None or a callable, got {progress!r}")
        requests = [_core.Request(branch) for branch in branches]
        try:
            rows = self._generate(requests, *plan.arguments(), progress=progress)
            return [
                self._generation(branch, plan, *row)
                for branch, row in zip(branches, rows, strict=True)
            ]
        except BaseException:
            self._end(requests, [], undo=True)
            raise

    def check_settings(
        self,
        max_new_tokens: int = 32,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] | None = None,
    ) -> None:
        """Raise what `generate` would raise for these settings, before anything is computed."""
        self._plan(max_new_tokens, sampling, stop, stop_ids)

    def _plan(
        self,
        max_new_tokens: int,
        sampling: Sampling | None,
        stop: str | Sequence[str],
        stop_ids: Sequence[int] | None,
    ) -> Plan:
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise ValueError(f"sampling must be rksc.Sampling or None, got {sampling!r}")
        for name, value in (("stop", stop), ("stop_ids", () if stop_ids is None else stop_ids)):
            if not isinstance(value, Iterable):
                raise TypeError(f"{name} must be a sequence, got {value!r}")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        for text in stops:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop: a stop string must be a non-empty str, got {text!r}")
            check_text("stop", text)
        if stops:
            self._tokenizer_for("stop")
        ids = self.config.eos if stop_ids is None else stop_ids
        seed = secrets.randbits(64) if sampling.seed is None else int(sampling.seed)
        max_new_tokens = integer("max_new_tokens", max_new_tokens)
        return Plan(max_new_tokens, sampling, stops, tuple(ids), self.cgee, seed)

    def _generation(
        self,
        branch: Branch,
        plan: Plan,
        tokens: NDArray[np.int32],
        top_probs: NDArray[np.float32],
        logprobs: NDArray[np.float32],
        entropies: NDArray[np.float32],
        confidence: float | None,
        reason: str,
        stop_bytes: int,
        stop_index: int,
    ) -> Generation:
        text = None
        if self._token_bytes is not None:
            text = final_text(self._token_bytes, tokens, stop_bytes)
        stopped = plan.stopped_by(reason, stop_index)
        return Generation(
            branch, tokens, top_probs, logprobs, entropies, confidence, reason, stopped, text
        )

    def stream(
        self,
        branches: Branch | Sequence[Branch],
        max_new_tokens: int = 32,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] | None = None,
        **unknown: NoReturn,
    ) -> Iterator[Token]:
        """`generate`, token by token as they come; the settings are checked at once.

        Token.text is whole characters and never a part of a stop string. Closing the iterator,
        leaving a `for` by an exception, or Ctrl-C cancels what still runs; the branches keep the
        tokens that were handed out. An error of a branch that cannot go on is raised here,
        whoever ran the step that met it.
        """
        check_named(self.stream, unknown)
        branches = distinct(branches)
        plan = self._plan(max_new_tokens, sampling, stop, stop_ids)
        return self._stream(branches, plan)

    def _stream(self, branches: list[Branch], plan: Plan) -> Iterator[Token]:
        requests = [self._request(branch, plan, streamed=True) for branch in branches]
        events: list[Event] = []  # not handed out yet, the next one last
        try:
            self._submit(requests, *plan.arguments())
            # Loops stand elsewhere: Python 3.12 may jump back from a place outside of the `try`.
            yield from self._tokens_of(requests, events)
        except BaseException:
            self._end(requests, events)
            raise

    def _tokens_of(self, requests: list[Request], events: list[Event]) -> Iterator[Token]:
        while not all(request.over for request in requests):
            self._step(requests, events)
            events.reverse()
            while events:
                token = events[-1][0].token(events[-1])
                if token.error is not None:
                    raise token.error
                del events[-1]
                yield token

    # ---- requests: what streaming and servers stand on ---------------------------------------

    def submit(
        self,
        branch: Branch,
        max_new_tokens: int = 32,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: Sequence[int] | None = None,
        group: int | None = None,
        **unknown: NoReturn,
    ) -> int:
        """Queue a continuation of a branch; the id of its request. `step` makes it go on.

        A step's rows go to calls in equal shares. Submissions with the same `group` (a number
        from 1 to 2**62) count as one call there; None: each is one of its own. They never stop
        each other, whatever `cgee` says.
        """
        check_named(self.submit, unknown)
        plan = replace(self._plan(max_new_tokens, sampling, stop, stop_ids), cgee=None)
        number = 0 if group is None else integer("group", group, least=1, most=2**62)
        request = self._request(branch, plan, streamed=False)
        try:
            self._submit([request], *plan.arguments(), group=number)
            return request.number
        except BaseException:
            self._end([request], [], undo=True)
            raise

    def step(self) -> list[Token]:
        """One step over all requests: tokens of those from `submit`. `n_requests` are left.

        A request that cannot go on ends with Token.error, the others go on. Running `stream`
        iterators go on too; their tokens wait for them. When Ctrl-C interrupts it, its tokens
        come with the next step.
        """
        events: list[Event] = []
        try:
            return self._next_tokens(events)
        except BaseException:
            self._end([], events)
            raise

    def _next_tokens(self, events: list[Event]) -> list[Token]:
        requests = [r for r in list(self._requests.values()) if not r.streamed]
        with self._stepping:
            self._step(requests, events)
            return [event[0].token(event) for event in events]

    @property
    def n_requests(self) -> int:
        """Requests whose end was not handed out yet."""
        return len(self._requests)

    def cancel(self, request: int) -> None:
        """End a request now; its branch keeps the tokens that were handed out. Unknown and
        finished ids are ignored."""
        if as_int(request) is None:
            raise TypeError(f"request must be an int, got {type(request).__name__}")
        found = self._requests.get(request)
        self._end([] if found is None else [found], [])

    def _request(self, branch: Branch, plan: Plan, *, streamed: bool) -> Request:
        table, special = self._token_bytes, self._special
        new_text = None
        if table is not None:
            new_text = partial(TextStream, table, plan.stop_strings, special)
        return Request(branch, plan, new_text, streamed=streamed)

    # ---- scoring, verification, selection ----------------------------------------------------

    def score(self, branch: Branch, continuations: Sequence[Text]) -> list[NDArray[np.float32]]:
        """Natural log-probabilities of every token of each continuation of the branch.

        Teacher-forced, all in one batch; float32 (tokens of the continuation,) each. The
        branch stays as it is.
        """
        if isinstance(continuations, str):
            raise ValueError("continuations must be a sequence of texts or tokens, got one text")
        if not isinstance(continuations, Iterable):
            raise TypeError(f"continuations must be a sequence, got {continuations!r}")
        tokens = [
            self.encode(text, field=f"continuations[{i}]") for i, text in enumerate(continuations)
        ]
        return [logprobs for logprobs, _ in self._score(branch, tokens)]

    def verify(
        self,
        branches: Branch | Sequence[Branch],
        prompt: Text,
        yes: int | str,
        no: int | str,
        cgee: CGEE | Literal["session"] | None = "session",
    ) -> list[Verdict]:
        """Score branches by p(YES) / (p(YES) + p(NO)) after a short prompt on each one's own KV.

        Sets score and verdict of each. cgee: what may be spared; None: nothing, all in full.
        The prompt's tokens are forgotten afterwards. ASKS never decides here: the prompt is
        always computed. yes, no: ids, or texts of exactly one token.
        """
        branches = as_list(branches)
        cgee = self.cgee if cgee == "session" else as_cgee(cgee, self.config.n_layers)
        rows = self._verify(
            branches,
            self.encode(prompt, field="prompt"),
            self.token_id(yes, "yes"),
            self.token_id(no, "no"),
            None if cgee is None else vars(cgee),
        )
        verdicts = [
            Verdict(branch, *row, n_layers=self.config.n_layers)
            for branch, row in zip(branches, rows, strict=True)
        ]
        self._verified = verdicts  # an assignment: nothing can come between the branches
        return verdicts

    def token_id(self, token: int | str, field: str = "token") -> int:
        """An id of the vocabulary, or that of a text that is exactly one token."""
        if not isinstance(token, str):
            return integer(field, token, most=self.config.vocab_size - 1)
        ids = list(self.encode(token, field=field))
        if len(ids) != 1:
            raise ValueError(f"{field}={token!r} is {len(ids)} tokens {ids}, not one")
        return int(ids[0])

    def select(self, branches: Branch | Sequence[Branch]) -> Branch:
        """The verified branch with the largest score * sqrt(confidence); where none is verified
        the one with the largest confidence. The first on a tie; no confidence counts as 1."""
        branches = as_list(branches)
        if not branches:
            raise ValueError("branches is empty: there is nothing to select from")
        for i, branch in enumerate(branches):
            check_branch(f"branches[{i}]", branch, self)
        verified = [branch for branch in branches if branch.score is not None]
        # max keeps the first on a tie
        return max(verified or branches, key=lambda branch: mark(branch.score, branch.confidence))

    # ---- books -------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """The session's books as they are now."""
        return Stats(**self._stats())


def mark(score: float | None, confidence: float | None) -> float:
    """What `select` compares: score * sqrt(confidence), or the confidence without a score."""
    confidence = 1.0 if confidence is None else confidence
    return confidence if score is None else score * math.sqrt(confidence)


def _common(rows: list[NDArray[Any]]) -> int:
    """Length of what all rows begin with."""
    n = min(len(row) for row in rows)
    if len(rows) == 1 or n == 0:
        return 0
    same = np.all([row[:n] == rows[0][:n] for row in rows], axis=0)
    return n if same.all() else int(np.argmin(same))


SESSION_OPTIONS = tuple(inspect.signature(BranchSession.__new__).parameters)[3:-1]
"""The names of a session's options: all but the class, weights, configuration and slips."""
