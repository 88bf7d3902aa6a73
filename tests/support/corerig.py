"""The session core (csrc/session.h) through ctypes, over a random model of a few kilobytes.

`Core` is a session with Python's types. Every failed call raises `Failure`; `core.fuse` makes the
k-th look for a signal interrupt the call. `alone` answers what a branch must give: the same call
on the same tokens in a session of its own, where nothing is shared, evicted, chunked or batched.
"""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support import native as N

Floats = NDArray[np.float32]

PICK = np.dtype(
    [("token", "i4"), ("top", "i4")]
    + [(name, "f4") for name in ("logprob", "top_prob", "entropy", "top_logprob")]
)
"""rk_pick"""

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, POSITIONS = 3, 32, 4, 2, 8, 48, 29, 96

# ---- session.h, tree.h -------------------------------------------------------------------------


def _structure(name: str, *fields: tuple[str, Any]) -> type[c.Structure]:
    return type(name, (c.Structure,), {"_fields_": list(fields)})


Interrupted = c.CFUNCTYPE(c.c_bool, c.c_void_p)


class Options(c.Structure):
    """rk_options"""

    _fields_ = [
        ("cuda", c.c_void_p),
        ("isa", c.c_int),
        ("n_threads", c.c_int32),
        ("kv_bytes", c.c_int64),
        ("kv_type", c.c_int),
        ("block_tokens", c.c_int32),
        ("step_tokens", c.c_int32),
        ("rounding", c.c_int),
        ("share", c.c_bool),
        ("hash_bits", c.c_int),
        ("poison", c.c_bool),
        ("interrupted", Interrupted),
        ("context", c.c_void_p),
    ]


class Branch(c.Structure):
    """The first fields of rk_branch_facts, with which a rk_branch begins."""

    _fields_ = [
        ("id", c.c_uint64),
        ("parent_id", c.c_uint64),
        ("depth", c.c_int32),
        ("tokens", c.POINTER(c.c_int32)),
        ("n_tokens", c.c_int32),
        ("n_prompt", c.c_int32),
        ("n_computed", c.c_int32),
        ("n_ever", c.c_int32),
        ("blocks", c.POINTER(c.c_int32)),
        ("n_blocks", c.c_int32),
        ("stream", c.c_uint64),
        ("score", c.c_double),
        ("confidence", c.c_double),
        ("approximate", c.c_bool),
        ("pins", c.c_int32),
        ("busy", c.c_bool),
    ]


class Cgee(c.Structure):
    """rk_cgee"""

    _fields_ = [
        ("min_steps", c.c_int32),
        *((name, c.c_double) for name in ("stop_top", "stop_lead", "skip_top", "skip_lead")),
        *((name, c.c_double) for name in ("skip_top_relative", "skip_lead_relative", "kappa")),
        ("verify_batch", c.c_int32),
        ("min_layer", c.c_int32),
        ("lens_every", c.c_int32),
        ("theta", c.c_double),
        ("epsilon", c.c_double),
    ]


class Generation(c.Structure):
    """rk_generation_options"""

    _fields_ = [
        ("max_new_tokens", c.c_int32),
        ("draw", N.Draw),
        ("stop_ids", c.c_void_p),
        ("n_stop_ids", c.c_int32),
        ("stop_strings", c.c_void_p),
        ("stop_lengths", c.c_void_p),
        ("n_stop_strings", c.c_int32),
        ("token_bytes", c.c_void_p),
        ("token_offsets", c.c_void_p),
        ("special", c.c_void_p),
        ("cgee", Cgee),
    ]


class Token(c.Structure):
    """rk_token"""

    _fields_ = [
        ("request", c.c_uint64),
        ("token", c.c_int32),
        *((name, c.c_float) for name in ("logprob", "top_prob", "entropy")),
        ("finish", c.c_int),
        ("stop_bytes", c.c_int32),
        ("stop_index", c.c_int32),
    ]


class Verification(c.Structure):
    """rk_verification"""

    _fields_ = [
        ("prompt", c.c_void_p),
        *((name, c.c_int32) for name in ("n_prompt", "yes", "no")),
        ("shortcuts", c.c_bool),
        ("cgee", Cgee),
        ("lens", c.c_int),
        ("lens_norm", c.c_bool),
    ]


class Verdict(c.Structure):
    """rk_verdict"""

    _fields_ = [
        ("outcome", c.c_int),
        ("score", c.c_double),
        ("mass", c.c_double),
        ("yes_logit", c.c_float),
        ("no_logit", c.c_float),
        ("layers", c.c_int32),
    ]


class Asks(c.Structure):
    """rk_asks"""

    _fields_ = [
        ("probe", c.c_int),
        ("pool_mean", c.c_bool),
        ("probe_layers", c.c_int32),
        ("tau", c.c_double),
        ("alpha", c.c_double),
        ("center", c.c_void_p),
    ]


class Report(c.Structure):
    """rk_gate_report"""

    _fields_ = [
        ("gate", c.c_int),
        ("equal", c.c_bool),
        ("sigma", c.c_double),
        ("n_layers", c.c_int32),
        ("cosines", c.c_void_p),
        ("own_token_layers", c.c_int64),
        ("root_token_layers", c.c_int64),
    ]


class Stats(c.Structure):
    """rk_stats, the counts of blocks first"""

    _fields_ = [
        *((name, c.c_int32) for name in ("total", "used", "free", "cached", "shared", "peak_used")),
        ("reclaimed", c.c_int64),
        ("block_bytes", c.c_int64),
        ("block_tokens", c.c_int32),
        ("n_branches", c.c_int32),
        *((f"tokens_{how}", c.c_int64) for how in ("computed", "recomputed", "reused", "forked")),
        *((name, c.c_int64) for name in ("steps", "evictions", "layers_run", "layers_saved")),
        *((name, c.c_int64) for name in ("verifications", "verifications_skipped", "exits")),
        *((name, c.c_int64) for name in ("gate_accepted", "gate_rejected")),
    ]


NONE, LENGTH, EOS, STOP, EARLY, CANCELLED = range(6)  # rk_finish
VERIFIED, NOT_CONTENDER, BOUND = range(3)  # rk_outcome
OPEN, ACCEPTED, REJECTED, UNREACHABLE, UNDEFINED = range(5)  # rk_gate
LENS_NONE, LENS_ANSWER, LENS_FULL = range(3)
PREFIX, SUFFIX = range(2)
OFF = 2.0  # a confidence that is never reached


TOKEN_FIELDS = [field[0] for field in Token._fields_]
VERDICT_FIELDS = [field[0] for field in Verdict._fields_]


class Failure(Exception):
    """A call that did not give RK_OK."""

    def __init__(self, error: N.Error) -> None:
        self.status: int = error.status
        super().__init__(f"{N.STATUS[error.status]}: {error.text.decode()}")


# ---- a model -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Tiny:
    """A model and what keeps its arrays alive."""

    model: N.Model
    arrays: list[Any]


def make_model(seed: int = 0, broken: bool = False) -> Tiny:
    """Random weights; broken: the head is NaN."""
    rng = np.random.default_rng(seed)
    arrays: list[Any] = []

    def matrix(rows: int, cols: int, scale: float = 1.0) -> N.Matrix:
        data = rng.standard_normal((rows, cols)) * (scale / np.sqrt(cols))
        arrays.append(data.astype(np.float32))
        return N.Matrix(arrays[-1].ctypes.data, None, N.RK_F32, rows, cols)

    ones = np.ones(WIDTH, np.float32)
    frequencies = 10000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    layers = (N.Layer * LAYERS)()
    heads, kv_heads = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in layers:
        layer.attention_norm = layer.ffn_norm = ones.ctypes.data
        layer.query, layer.key = matrix(heads, WIDTH), matrix(kv_heads, WIDTH)
        layer.value, layer.output = matrix(kv_heads, WIDTH), matrix(WIDTH, heads)
        layer.gate, layer.up = matrix(FFN, WIDTH), matrix(FFN, WIDTH)
        layer.down = matrix(WIDTH, FFN)
    embedding, head = matrix(VOCAB, WIDTH), matrix(VOCAB, WIDTH, 3.0)
    if broken:
        arrays[-1][:] = np.nan
    config = N.Config(LAYERS, WIDTH, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, POSITIONS)
    config.norm_eps, config.inv_freq = 1e-5, frequencies.ctypes.data
    arrays += [ones, frequencies, layers]
    return Tiny(N.Model(config, N.RK_F32, embedding, head, ones.ctypes.data, layers), arrays)


MODEL = make_model()


def block_bytes(block_tokens: int, kv_type: int = N.RK_F32) -> int:
    item = 2 if kv_type == N.RK_BF16 else 4
    return 2 * LAYERS * KV_HEADS * HEAD_DIM * block_tokens * item


# ---- a session ---------------------------------------------------------------------------------


def ints(values: Sequence[int]) -> Any:
    return (c.c_int32 * max(len(values), 1))(*values)


def pointers(arrays: Sequence[Any]) -> Any:
    return (c.c_void_p * max(len(arrays), 1))(*(c.addressof(a) for a in arrays))


def cgee(**changes: Any) -> Cgee:
    """Everything off but the bound."""
    result = Cgee(
        min_steps=1,
        stop_top=OFF,
        skip_top=OFF,
        skip_top_relative=OFF,
        verify_batch=1,
        min_layer=1,
        lens_every=1,
    )
    for name, value in changes.items():
        setattr(result, name, value)
    return result


@dataclass(frozen=True)
class Event:
    """One rk_token."""

    request: int
    token: int
    logprob: float
    top_prob: float
    entropy: float
    finish: int
    stop_bytes: int
    stop_index: int


Handle = Any  # a pointer to Branch


@dataclass
class Before:
    """A request's branch before it was submitted, and the tokens that have come since."""

    branch: Handle
    n_tokens: int
    confidence: float
    n_new: int = 0


class Core:
    """One rk_session."""

    def __init__(
        self,
        *,
        blocks: int = 1024,
        block_tokens: int = 4,
        step_tokens: int = 64,
        share: bool = True,
        poison: bool = True,
        isa: int | None = None,
        hash_bits: int = 64,
        model: Tiny = MODEL,
        kv_type: int = N.RK_F32,
    ) -> None:
        self.lib = N.load()
        self.lib.rk_session_stats.restype = Stats
        self.fuse = 0  # > 0: this look at signals interrupts
        self.looks = 0
        self._look = Interrupted(self._interrupted)
        self._keep: list[Any] = [model]
        self.before: dict[int, Before] = {}
        self.block_tokens, self.blocks = block_tokens, blocks
        self.session = c.c_void_p()
        options = Options(
            None,
            self.lib.rk_isa_best() if isa is None else isa,
            1,
            blocks * block_bytes(block_tokens, kv_type),
            kv_type,
            block_tokens,
            step_tokens,
            False,
            share,
            hash_bits,
            poison,
            self._look,
            None,
        )
        self._session(c.byref(self.session), c.byref(model.model), c.byref(options))

    def _interrupted(self, _: int | None) -> bool:
        self.looks += 1
        self.fuse -= 1
        return self.fuse == 0

    def _session(self, *arguments: Any) -> None:
        error = N.Error()
        if self.lib.rk_session_create(*arguments, c.byref(error)) != N.RK_OK:
            raise Failure(error)

    def call(self, name: str, *arguments: Any) -> None:
        error = N.Error()
        function = getattr(self.lib, f"rk_session_{name}")
        status = function(self.session, *arguments, c.byref(error))
        if status != N.RK_OK:
            assert error.status == status and error.text, (name, status)
            raise Failure(error)

    def close(self) -> None:
        self.lib.rk_session_free(self.session)
        self.session = c.c_void_p()

    def __enter__(self) -> Core:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def interrupted_at(self, look: int) -> Iterator[None]:
        """The look-th look at signals from here on interrupts; 0: none."""
        self.fuse, self.looks = look, 0
        try:
            yield
        finally:
            self.fuse = 0

    # -- branches

    def prefill(self, tokens: Sequence[int]) -> Handle:
        out = c.POINTER(Branch)()
        self.call("prefill", c.byref(out), ints(tokens), c.c_int32(len(tokens)))
        return out

    def fork(
        self, parent: Handle, suffixes: Sequence[Sequence[int]] | int = 1, at: int = -1
    ) -> list[Handle]:
        n = suffixes if isinstance(suffixes, int) else len(suffixes)
        out = (c.POINTER(Branch) * max(n, 1))()
        if isinstance(suffixes, int):
            lists, lengths = None, None
        else:
            held = [ints(s) for s in suffixes]
            lists, lengths = pointers(held), ints([len(s) for s in suffixes])
        self.call("fork", out, parent, c.c_int32(at), c.c_int32(n), lists, lengths)
        return [out[i] for i in range(n)]

    def extend(self, branch: Handle, tokens: Sequence[int]) -> None:
        self.call("extend", branch, ints(tokens), c.c_int32(len(tokens)))

    def compute(self, branches: Sequence[Handle]) -> None:
        self.call("compute", (c.POINTER(Branch) * len(branches))(*branches), len(branches))

    def drop(self, branch: Handle) -> None:
        place = c.addressof(branch.contents)
        for request, before in list(self.before.items()):
            if c.addressof(before.branch.contents) == place:
                del self.before[request]
        self.lib.rk_session_drop(self.session, branch)

    def invalidate(self) -> None:
        self.lib.rk_session_invalidate(self.session)

    def logits(self, branch: Handle) -> Floats:
        out = np.empty(VOCAB, np.float32)
        self.call("logits", branch, c.c_void_p(out.ctypes.data))
        return out

    def hidden(self, branch: Handle) -> Floats:
        out = np.empty((LAYERS, WIDTH), np.float32)
        self.call("hidden", branch, c.c_void_p(out.ctypes.data))
        return out

    def prompt_means(self, tokens: Sequence[int], begin: int, end: int) -> Floats:
        out = np.empty((LAYERS, WIDTH), np.float32)
        self.call(
            "prompt_means", ints(tokens), len(tokens), begin, end, c.c_void_p(out.ctypes.data)
        )
        return out

    # -- requests

    def submit(
        self,
        branch: Handle,
        n: int,
        *,
        group: int = 0,
        temperature: float = 0.0,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        stop: Sequence[bytes] = (),
        special: NDArray[np.uint8] | None = None,
        early: Cgee | None = None,
    ) -> int:
        request = c.c_uint64()
        ids, lengths = ints(stop_ids), ints([len(s) for s in stop])
        strings = (c.c_char_p * max(len(stop), 1))(*stop)
        table, offsets = token_table()
        options = Generation(
            n,
            N.Draw(temperature=temperature, top_p=1.0, seed=seed, forced=-1),
            c.addressof(ids),
            len(stop_ids),
            c.addressof(strings),
            c.addressof(lengths),
            len(stop),
            c.addressof(table),
            offsets.ctypes.data,
            special.ctypes.data if special is not None else None,
            early or cgee(),
        )
        before = Before(branch, branch.contents.n_tokens, branch.contents.confidence)
        self.call("submit", branch, c.byref(options), c.c_uint64(group), c.byref(request))
        self.before[request.value] = before
        return request.value

    def step(self) -> tuple[list[Event], int]:
        """Events and requests left; after a failure `self.events` holds the events before it."""
        events, n, active = c.POINTER(Token)(), c.c_int32(), c.c_int32()
        try:
            self.call("step", c.byref(events), c.byref(n), c.byref(active))
        finally:
            self.events = [
                Event(*(getattr(events[i], name) for name in TOKEN_FIELDS)) for i in range(n.value)
            ]
            for event in self.events:
                self.before[event.request].n_new += event.token >= 0
        return self.events, active.value

    def cancel(self, request: int) -> None:
        self.lib.rk_session_cancel(self.session, c.c_uint64(request))

    def abort(self, request: int) -> None:
        """Cancel it and undo its tokens, unless its branch has gone on or is gone."""
        self.cancel(request)
        before = self.before.pop(request, None)
        if before is None or before.branch.contents.busy:
            return
        if before.branch.contents.n_tokens == before.n_tokens + before.n_new:
            self.lib.rk_session_undo(
                self.session, before.branch, c.c_int32(before.n_tokens),
                c.c_double(before.confidence),
            )  # fmt: skip

    def blamed(self) -> int:
        """The request that the last step failed for; 0: none."""
        self.lib.rk_session_blamed.restype = c.c_uint64
        return int(self.lib.rk_session_blamed(self.session))

    def run(self, request: int) -> list[Event]:
        """Steps until this request has ended; its events."""
        found: list[Event] = []
        for _ in range(4 * POSITIONS):
            found += [e for e in self.step()[0] if e.request == request]
            if found and found[-1].finish:
                return found
        raise AssertionError("the request does not end")

    # -- judging

    def score(self, branch: Handle, continuations: Sequence[Sequence[int]]) -> list[Floats]:
        n = len(continuations)
        held = [ints(t) for t in continuations]
        out = [np.zeros(max(len(t), 1), PICK) for t in continuations]
        places = (c.c_void_p * max(n, 1))(*(o.ctypes.data for o in out))
        lengths = ints([len(t) for t in continuations])
        self.call("score", branch, pointers(held), lengths, c.c_int32(n), places)
        return [o["logprob"][: len(t)].copy() for o, t in zip(out, continuations, strict=True)]

    def verify(
        self,
        branches: Sequence[Handle],
        prompt: Sequence[int],
        yes: int = 3,
        no: int = 4,
        *,
        shortcuts: Cgee | None = None,
        lens: int = LENS_NONE,
        norm: bool = True,
    ) -> list[tuple[Any, ...]]:
        """(outcome, score, mass, yes_logit, no_logit, layers) of each branch."""
        n, tokens = len(branches), ints(prompt)
        verification = Verification(c.addressof(tokens), len(prompt), yes, no)
        verification.shortcuts = shortcuts is not None
        verification.cgee = shortcuts or cgee()
        verification.lens, verification.lens_norm = lens, norm
        out = (Verdict * max(n, 1))()
        places = (c.POINTER(Branch) * max(n, 1))(*branches)
        self.call("verify", places, c.c_int32(n), c.byref(verification), out)
        for branch, verdict in zip(branches, out, strict=False):  # the caller sets the scores
            branch.contents.score = verdict.score
        return [tuple(getattr(v, name) for name in VERDICT_FIELDS) for v in out[:n]]

    def prefill_similar(
        self,
        root: Handle,
        tokens: Sequence[int],
        suffix: Sequence[int] = (),
        *,
        probe: int = PREFIX,
        pool_mean: bool = True,
        layers: int = LAYERS,
        tau: float = 0.5,
        allowed: bool = True,
    ) -> tuple[Handle, tuple[Any, ...]]:
        """The branch and (gate, equal, sigma, cosines)."""
        out = c.POINTER(Branch)()
        cosines = np.full(layers, np.nan, np.float32)
        asks = Asks(probe, pool_mean, layers, tau, 1.5, None)
        report = Report(cosines=cosines.ctypes.data)
        self.call(
            "prefill_similar",
            c.byref(out),
            root,
            ints(tokens),
            c.c_int32(len(tokens)),
            ints(suffix) if suffix else None,
            c.c_int32(len(suffix)),
            c.byref(asks),
            c.c_bool(allowed),
            c.byref(report),
        )
        seen = cosines[: report.n_layers].tobytes()
        return out, (report.gate, report.equal, np.float64(report.sigma).tobytes(), seen)

    # -- books

    def stats(self) -> Any:
        return self.lib.rk_session_stats(self.session)

    def check(self) -> None:
        self.call("check")
        stats = self.stats()
        assert stats.used + stats.free == stats.total == self.blocks

    def blocks_of(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_tokens)


def tokens_of(branch: Handle) -> list[int]:
    b = branch.contents
    return list(b.tokens[: b.n_tokens])


@cache
def token_table() -> tuple[Any, NDArray[np.int64]]:
    """Token t is the bytes "<t>", token 0 no byte at all."""
    texts = [b"" if t == 0 else b"<%d>" % t for t in range(VOCAB)]
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    return c.create_string_buffer(b"".join(texts)), offsets


# ---- what a branch gives alone ---------------------------------------------------------------


@contextmanager
def lonely(tokens: Sequence[int], stream: int = 0) -> Iterator[tuple[Core, Handle]]:
    with Core(blocks=64, block_tokens=16, step_tokens=128, share=False, poison=False) as core:
        branch = core.prefill(tokens)
        branch.contents.stream = stream
        yield core, branch


class alone:
    """The same calls in a session of one's own; all arguments are tuples, results are bytes."""

    @staticmethod
    @cache
    def logits(tokens: tuple[int, ...]) -> bytes:
        with lonely(tokens) as (core, branch):
            return core.logits(branch).tobytes()

    @staticmethod
    @cache
    def hidden(tokens: tuple[int, ...]) -> bytes:
        with lonely(tokens) as (core, branch):
            return core.hidden(branch).tobytes()

    @staticmethod
    @cache
    def score(tokens: tuple[int, ...], continuation: tuple[int, ...]) -> bytes:
        with lonely(tokens) as (core, branch):
            return core.score(branch, [continuation])[0].tobytes()

    @staticmethod
    @cache
    def verdict(
        tokens: tuple[int, ...], prompt: tuple[int, ...], lens: int = LENS_NONE, theta: float = 0
    ) -> tuple[Any, ...]:
        with lonely(tokens) as (core, branch):
            shortcuts = cgee(theta=theta, epsilon=1e9) if lens else None
            return core.verify([branch], prompt, shortcuts=shortcuts, lens=lens)[0]

    @staticmethod
    @cache
    def generation(
        tokens: tuple[int, ...], stream: int, n: int, temperature: float, seed: int, *stop: Any
    ) -> list[Event]:
        ids, strings = stop or ((), ())
        with lonely(tokens, stream) as (core, branch):
            request = core.submit(
                branch, n, temperature=temperature, seed=seed, stop_ids=ids, stop=strings
            )
            return core.run(request)

    @staticmethod
    @cache
    def gate(
        root: tuple[int, ...], tokens: tuple[int, ...], suffix: tuple[int, ...], *how: Any
    ) -> tuple[Any, ...]:
        probe, pool_mean, layers, tau = how
        with lonely(root) as (core, branch):
            return core.prefill_similar(
                branch, tokens, suffix, probe=probe, pool_mean=pool_mean, layers=layers, tau=tau
            )[1]


def seeds(default: int) -> range:
    """Seeds of a random program; RKSC_CORE_SEEDS=first:end chooses others."""
    first, _, end = os.environ.get("RKSC_CORE_SEEDS", f"0:{default}").partition(":")
    return range(int(first), int(end))
