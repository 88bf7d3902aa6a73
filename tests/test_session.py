"""BranchSession: text, units, settings and records over the engine's session."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from support.letters import BOS, PIECES, Letters
from support.models import T4
from support.reference import philox, softmax
from support.sessions import DEVICE, assert_same, block_bytes

from rksc import ASKS, CGEE, RSBCM, BranchSession, CapacityError, Sampling, search, solve
from rksc.clients import OpenAI
from rksc.engine.arguments import parse_bytes, parse_dtype
from rksc.engine.results import Stats, Token
from rksc.text.decoding import TextStream, final_text

Make = Callable[..., BranchSession]
HOT = Sampling(temperature=1.5, seed=10)  # no near ties: test_no_token_is_a_near_tie


@pytest.fixture
def session(make_session: Make) -> BranchSession:
    return make_session("T4", tokenizer=Letters())


@pytest.fixture
def bare(make_session: Make) -> BranchSession:
    return make_session("T4")


def text_of(tokens: Any) -> str:
    return b"".join(PIECES[t] for t in tokens).decode(errors="replace")


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1), (np.int64(4096), 4096), ("1024", 1024), ("2GiB", 2 << 30), ("2 gb", 2 << 30),
        ("512MB", 512 << 20), ("0.5k", 512), ("1T", 1 << 40), ("3 B", 3),
    ],
)  # fmt: skip
def test_bytes(value: int | str, expected: int) -> None:
    assert parse_bytes(value) == expected


@pytest.mark.parametrize("value", [0, -1, "", "GiB", "2XB", "2 GiB more", True, None, "nan", "inf"])
def test_bad_bytes(value: Any) -> None:
    with pytest.raises(ValueError, match="kv_bytes"):
        parse_bytes(value)


def test_dtype_names() -> None:
    class TorchLike:
        def __str__(self) -> str:
            return "torch.bfloat16"

    for name in ("float32", "f32", "fp32", "FLOAT32", "torch.float32", np.float32):
        assert parse_dtype(name) == "float32"
    for other in ("bfloat16", "bf16", TorchLike()):
        assert parse_dtype(other) == "bfloat16"
    assert parse_dtype(None) is None
    for bad in ("float16", "int8", 32):
        with pytest.raises(ValueError, match="dtype"):
            parse_dtype(bad)


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:-1", "cuda:1x", "CPU", None])
def test_an_unknown_device_is_named(make_session: Make, device: Any) -> None:
    with pytest.raises(ValueError, match=f"device.*{device}"):
        make_session("T4", device=device)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cgee": "fast"}, r"CGEE\.fast\(\)"),
        ({"rsbcm": None}, "rsbcm"),
        ({"asks": "paper"}, r"asks must .* ASKS\.paper\(\)"),
        ({"tokenizer": "gpt2"}, "tokenizer"),
        ({"kv_bytes": "much"}, "kv_bytes"),
        ({"dtype": "int4"}, "dtype"),
        ({"asks": ASKS(center=np.ones((4, 64), np.float32))}, "guard"),  # no tokenizer
    ],
)
def test_bad_options_are_named(make_session: Make, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make_session("T4", **options)


def test_a_bad_cgee_changes_nothing(session: BranchSession) -> None:
    with pytest.raises(ValueError, match="cgee"):
        session.cgee = 0.7  # type: ignore[assignment]
    assert session.cgee == CGEE()


def test_a_budget_beyond_all_memory_is_named(make_session: Make) -> None:
    with pytest.raises(MemoryError, match="kv_bytes"):
        make_session("T4", kv_bytes="1000TB")
    with pytest.raises(ValueError, match="kv_bytes must be in"):
        make_session("T4", kv_bytes=2**64 - 1)


def test_bad_asks_is_named_and_changes_nothing(session: BranchSession) -> None:
    layers, width = session.config.n_layers, session.config.width
    good = ASKS(center=np.ones((layers, width), np.float32))
    session.asks = good
    for bad, field in (
        (ASKS(center=np.ones((layers + 1, width), np.float32)), "center"),
        (ASKS(center=good.center, probe_layers=layers + 1), "probe_layers"),
    ):
        with pytest.raises(ValueError, match=field):
            session.asks = bad
    assert session.asks is good


def test_defaults() -> None:
    s = BranchSession(T4.weights, T4.config, kv_bytes="1MiB")
    assert s.cgee == CGEE()
    assert s.rsbcm == RSBCM()
    assert s.asks is None
    assert (s.dtype, s.device, s.block_tokens) == ("float32", "cpu", 16)


# ---- text and tokens ---------------------------------------------------------------------------


def test_text_gets_one_bos_and_tokens_none(session: BranchSession, bare: BranchSession) -> None:
    assert session.prefill("abc").tokens.tolist()[0] == BOS
    assert session.prefill("<s>abc").tokens.tolist() == session.prefill("abc").tokens.tolist()
    assert session.prefill([5, 6]).tokens.tolist() == [5, 6]
    with_suffix = session.prefill("abc", suffix="YES")
    assert with_suffix.tokens.tolist() == [BOS, PIECES.index(b"abc"), PIECES.index(b"YES")]
    with pytest.raises(ValueError, match="tokens: text needs"):
        bare.prefill("abc")
    with pytest.raises(ValueError, match="suffix: text needs"):
        bare.prefill([5], suffix="abc")
    with pytest.raises(ValueError, match="tokenizer"):
        bare.decode([5])


def test_where_ids_are_wanted_a_text_is_told_the_way(session: BranchSession) -> None:
    root = session.prefill("abc")
    calls: list[Callable[[], object]] = [
        lambda: root.fork(["YES"]),  # type: ignore[list-item]
        lambda: root.fork("YES"),  # type: ignore[arg-type]
        lambda: root.extend("YES"),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"ids.*session\.encode|sequences.*session\.encode"):
            call()
    assert root.fork([session.encode("YES")])[0].n_tokens == root.n_tokens + 1


def test_half_a_character_is_named(session: BranchSession) -> None:
    """A lone surrogate has no bytes; the error names field and place, not a codec."""
    root, half = session.prefill("abc"), "ab\ud800"
    calls: dict[str, Callable[[], object]] = {
        "tokens": lambda: session.prefill(half),
        "suffix": lambda: session.prefill("abc", suffix=half),
        "continuations": lambda: session.score(root, [half]),
        "prompt": lambda: session.verify([root], half, 5, 6),
        "yes": lambda: session.verify([root], "abc", half, 6),
        "stop": lambda: session.generate(root, 3, stop=half),
    }
    for field, call in calls.items():
        with pytest.raises(
            ValueError, match=rf"^{field}(\[0\])?: .*at 2 is a lone surrogate, half a char"
        ):
            call()
    assert session.stats().branches == 1


def test_a_suffix_is_a_fork_in_all_but_name(session: BranchSession) -> None:
    prompt = T4.tokens(20)
    forked = session.prefill(prompt).fork([[7, 8]])[0]
    assert_same(session.prefill(prompt, suffix=[7, 8]).logits, forked.logits)


def test_logits_of_many_positions(session: BranchSession) -> None:
    """Those of each prefix alone; spans are cut to the tokens."""
    tokens = T4.tokens(90)
    branch = session.prefill(tokens)
    got = session._logits_at(branch, 3, 500)
    assert got.shape == (87, T4.vocab)
    for i in (3, 15, 66, 89):
        assert_same(got[i - 3], branch.fork(1, at=i + 1)[0].logits)
    assert session._logits_at(branch, 90, 95).shape == (0, T4.vocab)
    with pytest.raises(ValueError, match="end"):
        session._logits_at(branch, 5, 4)


def test_a_prompt_may_wait_to_be_computed(session: BranchSession) -> None:
    tokens = T4.tokens(50)
    first = session.prefill(tokens, compute=False)
    assert (first.n_tokens, first.n_computed) == (50, 0)
    assert session.stats().tokens_computed == 0
    expected = session.prefill(tokens).logits
    second = session.prefill(tokens, compute=False)
    assert second.n_computed == 48
    assert_same([first.logits, second.logits], [expected, expected])


def test_scores_tell_the_most_likely_tokens(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(20))
    continuation = T4.tokens(9, seed=1)
    (_, tops), (_, none) = session._score(root, [continuation, []])
    rows = T4.reference.forward([*T4.tokens(20), *continuation]).logits[19:-1]
    assert tops.dtype == np.int32
    assert np.diff(np.sort(rows)[:, -2:]).min() > 1e-3  # no near ties
    assert tops.tolist() == rows.argmax(1).tolist()
    assert none.size == 0


def test_score_is_the_log_softmax(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(10))
    first, second = session.score(root, [[5, 6], "abcYES"])
    assert first.dtype == np.float32
    assert second.shape == (2,)
    kid = root.fork([[5]])[0]
    for logits, token, got in ((root.logits, 5, first[0]), (kid.logits, 6, first[1])):
        x = logits.astype(np.float64)
        expected = x[token] - x.max() - np.log(np.exp(x - x.max()).sum())
        assert got == pytest.approx(expected, abs=1e-5)
    assert root.n_tokens == 10
    with pytest.raises(ValueError, match="continuations"):
        session.score(root, "abc")


def test_stats_is_the_record(session: BranchSession) -> None:
    session.prefill(T4.tokens(20))
    stats = session.stats()
    assert isinstance(stats, Stats)
    assert stats.tokens_computed == 20
    assert stats.bytes_total == stats.blocks_total * stats.block_bytes


# ---- layer means and ASKS ----------------------------------------------------------------------


def test_layer_means_of_last_positions(session: BranchSession) -> None:
    prompts = [T4.tokens(9, seed) for seed in range(3)]
    expected = np.mean([session.prefill(p).hidden for p in prompts], axis=0)
    means = session.layer_means(prompts, pool="last")
    assert means.dtype == np.float32
    assert means == pytest.approx(expected, abs=1e-5)


def test_layer_means_over_what_differs(session: BranchSession) -> None:
    """Common beginning and end are left out, and so is position 0 always."""
    head, tail = [0, 1, 2], [90, 91]
    prompts = [[*head, 10, 11, *tail], [*head, 20, 21, 22, *tail]]

    def mean(prompt: list[int], begin: int, end: int) -> Any:
        rows = [session.prefill(prompt[: i + 1]).hidden for i in range(begin, end)]
        return np.mean(rows, axis=0)

    expected = (mean(prompts[0], 3, 5) + mean(prompts[1], 3, 6)) / 2
    assert session.layer_means(prompts) == pytest.approx(expected, abs=1e-5)
    alone = session.layer_means(prompts[:1])
    assert alone == pytest.approx(mean(prompts[0], 1, 7), abs=1e-5)


def test_layer_means_refuses_what_is_no_list(session: BranchSession) -> None:
    none: list[Any] = [[], "abc", [[]]]
    for prompts in none:
        with pytest.raises(ValueError, match="prompts"):
            session.layer_means(prompts)
    with pytest.raises(ValueError, match="pool"):
        session.layer_means([[1]], pool="first")  # type: ignore[arg-type]


def asks(session: BranchSession, **changes: Any) -> ASKS:
    center = session.layer_means([T4.tokens(12, seed) for seed in range(4)])
    return ASKS(**{"center": center, "guard": None, "tau": -1.0, **changes})


def test_without_asks_similar_to_is_exact(session: BranchSession) -> None:
    root = session.prefill("abc th")
    other = session.prefill("abc e ", similar_to=root, suffix="NO")
    assert other.gate is None
    assert other.prompt is None
    assert not other.approximate
    own = session.prefill("abc e ").fork([session.encode("NO")])[0]
    assert_same(other.logits, own.logits)


def test_an_accepted_wording_stands_on_the_roots_tokens(session: BranchSession) -> None:
    session.asks = asks(session)
    root, own = session.prefill(T4.tokens(20)), T4.tokens(20, seed=1)
    other = session.prefill(own, similar_to=root, suffix=[5, 6])
    assert other.gate.accepted
    assert other.gate.reason == "accepted"
    assert len(other.gate.cosines) == max(1, session.config.n_layers // 8)
    assert other.approximate
    assert other.tokens.tolist() == [*root.tokens.tolist(), 5, 6]
    assert other.prompt.tolist() == own
    assert_same(other.logits, root.fork([[5, 6]])[0].logits)


def test_a_rejected_wording_is_exact(session: BranchSession, make_session: Make) -> None:
    session.asks = asks(session, tau=2.0, probe_layers=3)
    root, own = session.prefill(T4.tokens(20)), T4.tokens(20, seed=1)
    other = session.prefill(own, similar_to=root, suffix=[5])
    assert other.gate.reason == "unreachable"
    assert len(other.gate.cosines) == 1
    assert not other.gate.accepted
    assert not other.approximate
    assert other.tokens.tolist() == [*own, 5]
    assert_same(other.logits, make_session("T4").prefill([*own, 5]).logits)


def test_equal_tokens_need_no_gate(session: BranchSession) -> None:
    def guard(own: str, root: str) -> bool:
        raise AssertionError(f"called with {own!r}, {root!r}")

    session.asks = asks(session, tau=2.0, guard=guard)
    root = session.prefill(T4.tokens(20))
    same = session.prefill(T4.tokens(20), similar_to=root)
    assert same.gate.accepted
    assert same.gate.reason == "equal"
    assert not same.approximate


def test_the_guard_sees_whole_texts_and_spares_the_probe(session: BranchSession) -> None:
    seen: list[tuple[str, str]] = []

    def guard(own: str, root: str) -> bool:
        seen.append((own, root))
        return False

    session.asks = asks(session, guard=guard)
    root = session.prefill("abc 12 th")
    before = session.stats()
    other = session.prefill("abc 12 e ", similar_to=root)
    assert seen == [("abc 12 e ", "abc 12 th")]
    assert other.gate.reason == "guard"
    assert other.gate.sigma is None
    assert other.gate.own_token_layers == other.gate.root_token_layers == 0
    assert session.stats().gate_rejected == before.gate_rejected + 1


def test_the_number_guard_is_the_default(session: BranchSession) -> None:
    session.asks = asks(session, guard="numbers")
    root = session.prefill("3 YES 4")
    assert session.prefill("4 NO 3", similar_to=root).gate.accepted
    assert session.prefill("3 YES 5", similar_to=root).gate.reason == "guard"


@pytest.mark.parametrize("pool", ["last", "mean"])
def test_sigma_is_the_weighted_centred_cosine(session: BranchSession, pool: str) -> None:
    """The formula of the specification, from hidden states read one by one."""
    root_tokens, own = [*T4.tokens(8), 3], [*T4.tokens(8, seed=1), 3]
    setting = asks(session, pool=pool, probe_layers=3, alpha=1.5)
    session.asks = setting
    gate = session.prefill(own, similar_to=session.prefill(root_tokens)).gate
    session.asks = None
    span = range(8, 9) if pool == "last" else range(8)  # the last token is common
    assert setting.center is not None
    a, b = (
        np.mean([session.prefill(t[: i + 1]).hidden for i in span], axis=0)[:3] - setting.center[:3]
        for t in (root_tokens, own)
    )
    cosines = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    weights = np.exp(1.5 * np.arange(1, 4) / 3)
    assert gate.cosines == pytest.approx(cosines, abs=1e-4)
    assert gate.sigma == pytest.approx((weights * cosines).sum() / weights.sum(), abs=1e-4)


def test_the_suffix_probe_needs_a_suffix(session: BranchSession) -> None:
    session.asks = asks(session, probe="suffix", pool="last")
    root = session.prefill(T4.tokens(20))
    with pytest.raises(ValueError, match="suffix"):
        session.prefill(T4.tokens(20, seed=1), similar_to=root)
    other = session.prefill(T4.tokens(20, seed=1), similar_to=root, suffix=[5, 6])
    assert len(other.gate.cosines) == session.config.n_layers


# ---- generation --------------------------------------------------------------------------------


def same_generations(a: Any, b: Any) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.tokens.tolist() == y.tokens.tolist()
        for name in ("top_probs", "logprobs", "entropies"):
            assert_same(getattr(x, name), getattr(y, name))
        assert x.confidence == pytest.approx(y.confidence, abs=1e-6)
        assert (x.finish_reason, x.stop, x.text) == (y.finish_reason, y.stop, y.text)


def test_generate_with_and_without_progress(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(20))
    counted: list[int] = []
    options: dict[str, Any] = {"max_new_tokens": 12, "sampling": HOT, "stop_ids": [3, 5]}
    a = session.generate(root.fork(5), **options)
    b = session.generate(root.fork(5), **options, progress=counted.append)
    same_generations(a, b)
    assert sum(counted) == sum(len(g.tokens) for g in a)
    assert session.n_requests == 0


def test_a_branch_dropped_by_the_callback_is_cancelled(session: BranchSession) -> None:
    """Its result is there, with what came of it until then; the others get theirs."""
    root = session.prefill(T4.tokens(20))
    expected = session.generate(root.fork(2), 5, stop_ids=())
    kids = root.fork(2)
    drops = [kids[0].drop]
    dropped, other = session.generate(
        kids, 5, stop_ids=(), progress=lambda n: drops.pop()() if drops else None
    )
    assert dropped.finish_reason == "cancelled"
    assert dropped.tokens.tolist() == expected[0].tokens.tolist()[:1]
    assert_same(dropped.confidence, float(expected[0].top_probs[0]))
    same_generations([other], [expected[1]])
    assert kids[1].n_tokens == 25
    assert session.n_requests == 0


def test_many_branches_take_time_in_proportion(make_session: Make) -> None:
    """With a loop over all requests for each of them this would take minutes."""
    session = make_session("T4", kv_bytes=1 << 20)
    kids = session.prefill(T4.tokens(20)).fork(30000 if DEVICE == "cpu" else 3000)
    tokens = {g.tokens.tolist()[0] for g in session.generate(kids, 1, stop_ids=())}
    assert len(tokens) == 1
    requests = session.stream(kids, 1, stop_ids=())
    assert {token.token for token in itertools.islice(requests, len(kids) // 6)} != {-1}
    del requests, kids
    assert session.n_requests == 0
    assert session.stats().branches == 0
    session.check()


def test_text_is_that_of_the_tokens(session: BranchSession, bare: BranchSession) -> None:
    root = session.prefill(T4.tokens(20))
    for g in session.generate(root.fork(6), 20, HOT, stop_ids=()):
        assert g.finish_reason == "length"
        assert g.text == final_text(PIECES, g.tokens)
    assert bare.generate(bare.prefill([1]), 2, stop_ids=())[0].text is None


def test_end_tokens(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(20))
    free = session.generate(root.fork(1), 16, HOT, stop_ids=())[0].tokens.tolist()
    end = free[5]
    at = free.index(end)
    g = session.generate(root.fork(1), 16, HOT, stop_ids=(96, end))[0]
    assert (g.finish_reason, g.stop) == ("eos", end)
    assert g.tokens.tolist() == free[:at]
    assert g.branch.n_tokens == 20 + at
    with pytest.raises(ValueError, match="stop_ids"):
        session.generate(root.fork(1), 4, stop_ids=[97])


def test_stop_strings_match_where_the_text_has_them(session: BranchSession) -> None:
    """Every stop string cut out of a free run ends a new run just before it, across tokens."""
    root = session.prefill(T4.tokens(20))
    free = session.generate(root.fork(1), 24, HOT, stop_ids=())[0].tokens.tolist()
    whole = b"".join(PIECES[t] for t in free)
    tried = 0
    every = 1 if DEVICE == "cpu" else 3
    for begin, size in itertools.product(range(2, len(whole) - 6, every), (1, 2, 5)):
        try:
            stop = whole[begin : begin + size].decode()
        except UnicodeDecodeError:
            continue
        tried += 1
        g = session.generate(root.fork(1), 24, HOT, stop=["never this", stop], stop_ids=())[0]
        first = whole.index(stop.encode())
        n = next(n for n in range(1, 25) if stop.encode() in b"".join(PIECES[t] for t in free[:n]))
        assert (g.finish_reason, g.stop) == ("stop", stop)
        assert g.tokens.tolist() == free[:n]
        assert g.text == final_text([whole[:first]], [0])
        pieces = [t.text for t in session.stream(root.fork(1), 24, HOT, stop, stop_ids=())]
        assert "".join(piece or "" for piece in pieces) == g.text
    assert tried > 20 // every


def test_bad_generation_settings(session: BranchSession, bare: BranchSession) -> None:
    root, other = session.prefill([5]), bare.prefill([5])
    for kwargs, field in (
        ({"stop": ""}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"sampling": 0.7}, "sampling"),
        ({"max_new_tokens": -1}, "max_new_tokens must be in 0"),
        ({"max_new_tokens": 10**30}, "max_new_tokens must be in 0"),
    ):
        for call in (session.generate, session.stream, session.submit):
            with pytest.raises(ValueError, match=field):
                call(root, **kwargs)  # type: ignore[operator]
        with pytest.raises(ValueError, match=field):
            session.check_settings(**kwargs)
    with pytest.raises(TypeError, match="max_new_tokens"):
        session.check_settings(max_new_tokens=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stop: text needs"):
        bare.generate(other, stop="x")
    assert session.n_requests == 0


def test_seed_none_is_fresh_and_a_seed_is_not(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(8))

    def draw(seed: int | None) -> list[int]:
        sampling = Sampling(temperature=5.0, seed=seed)
        tokens = session.generate(root.fork(1), 12, sampling, stop_ids=())[0].tokens
        return [int(token) for token in tokens]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert draw(None) != draw(None)


def test_no_token_is_a_near_tie(make_session: Make) -> None:
    """The texts that tests of this file compare: what a device's rounding may move decides none of
    them. Greedy: the largest logit is the largest by 1e-3. Drawn: the number lies 1e-4 or more from
    the edges of the token's share."""
    session = make_session("T4", device="cpu")
    root = session.prefill(T4.tokens(20))
    kids, greedy = root.fork(6), root.fork(1)
    streams = [branch.stream for branch in (root, *kids)]
    runs = [*session.generate(kids, 30, HOT, stop_ids=()),
            *session.generate(root, 40, HOT, stop_ids=())]  # fmt: skip
    first = session.generate(greedy, 6, stop_ids=())[0]
    rows = np.sort(T4.reference.forward([*T4.tokens(20), *first.tokens]).logits[19:])
    assert (rows[:, -1] - rows[:, -2]).min() > 1e-3
    for g, stream in zip(runs, (*streams[1:], streams[0]), strict=True):
        rows = T4.reference.forward([*T4.tokens(20), *g.tokens]).logits[19:]
        for i, token in enumerate(g.tokens.tolist()):
            edges = np.cumsum(softmax(rows[i] / HOT.temperature))
            u = philox(HOT.seed or 0, stream, 20 + i)
            assert token == 0 or u > edges[token - 1] + 1e-4, i
            assert token == T4.vocab - 1 or u < edges[token] - 1e-4, i


# ---- streams and requests ----------------------------------------------------------------------


def test_a_stream_is_generate_in_pieces(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(20))
    a = session.generate(root.fork(4), 12, HOT, stop="e", stop_ids=[3])
    kids = root.fork(4)
    seen: dict[int, list[Token]] = {kid.id: [] for kid in kids}
    for token in session.stream(kids, 12, HOT, stop="e", stop_ids=[3]):
        seen[token.branch.id].append(token)
    for g, kid in zip(a, kids, strict=True):
        tokens = seen[kid.id]
        assert [t.token for t in tokens if t.token >= 0] == g.tokens.tolist()
        assert "".join(t.text or "" for t in tokens) == g.text
        assert [t.finish_reason for t in tokens[:-1]] == [None] * (len(tokens) - 1)
        assert tokens[-1].finish_reason == g.finish_reason
        assert "e" not in (g.text or "")


def test_closing_a_stream_cancels(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(20))
    kids = root.fork(3)
    stream = session.stream(kids, 500, HOT, stop_ids=())
    got = [next(stream) for _ in range(7)]
    stream.close()  # type: ignore[attr-defined]
    assert session.n_requests == 0
    assert all(kid.n_tokens > 20 for kid in kids)
    kept = {kid.id: kid.tokens.tolist()[20:] for kid in kids}
    for token in got:
        assert token.token in kept[token.branch.id]
    again = session.generate(kids, 2, HOT, stop_ids=())
    assert all(len(g.tokens) == 2 for g in again)


def test_two_streams_at_once_get_their_own_tokens(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(20))
    alone = [g.tokens.tolist() for g in session.generate(root.fork(2), 9, HOT, stop_ids=())]
    kids = root.fork(2)
    streams = [session.stream(kid, 9, HOT, stop_ids=()) for kid in kids]
    got: list[list[int]] = [[], []]
    for pair in itertools.zip_longest(*streams):
        for mine, token in zip(got, pair, strict=True):
            if token is not None:
                mine.append(token.token)
    assert got == alone


def test_streams_in_two_threads(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(20))
    alone = [g.tokens.tolist() for g in session.generate(root.fork(4), 30, HOT, stop_ids=())]
    kids = root.fork(4)
    got: dict[int, list[int]] = {}

    def run(i: int) -> None:
        got[i] = [t.token for t in session.stream(kids[i], 30, HOT, stop_ids=())]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[i] for i in range(4)] == alone


def test_submit_step_cancel(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(20))
    expected = [g.tokens.tolist() for g in session.generate(root.fork(2), 6, HOT, stop_ids=())]
    kids = root.fork(2)
    first = session.submit(kids[0], 6, HOT, stop_ids=())
    late = session.submit(kids[1], 500, HOT, stop_ids=())
    got: list[Token] = []
    while any(t.finish_reason for t in got) is False:
        got += session.step()
    assert [t.token for t in got if t.branch is kids[0]] == expected[0]
    session.cancel(late)
    session.cancel(late)
    session.cancel(first)
    session.cancel(12345)
    assert session.n_requests == 0
    assert session.step() == []
    assert kids[1].tokens.tolist()[20:26] == expected[1]


def test_a_refused_branch_leaves_no_request(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(20))
    kid = root.fork(1)[0]
    endless = session.submit(kid, 10**6, stop_ids=())
    with pytest.raises(RuntimeError, match="generating"):
        next(session.stream([root, kid], 5, stop_ids=()))
    session.cancel(endless)
    assert session.n_requests == 0
    assert root.n_tokens == kid.n_tokens == 20
    assert len(session.generate(kid, 3, stop_ids=())[0].tokens) == 3


def test_a_branch_that_stands_there_twice_is_named(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(20))
    kid = root.fork(1)[0]
    for call in (session.generate, session.stream):
        with pytest.raises(ValueError, match=f"branch {kid.id} is given twice"):
            call([kid, root, kid], 5)
    assert session.n_requests == 0
    assert kid.n_tokens == 20


@pytest.mark.parametrize("order", ["large first", "small first"])
def test_an_error_reaches_the_stream_that_it_belongs_to(make_session: Make, order: str) -> None:
    """Two iterators share the steps; the one that outgrows the budget fails, in its own hands."""
    alone, session = make_session("T4"), make_session("T4", kv_bytes=8 * block_bytes(T4))
    expected = alone.generate(alone.prefill(T4.tokens(20)), 40, HOT, stop_ids=())[0].tokens
    small, large = session.prefill(T4.tokens(20)), session.prefill(T4.tokens(60, seed=1))
    streams = {
        "large": session.stream(large, 400, HOT, stop_ids=()),
        "small": session.stream(small, 40, HOT, stop_ids=()),
    }
    got: dict[str, list[int]] = {"large": [], "small": []}
    failed = []
    turns = sorted(streams, reverse=order == "small first")
    while turns:
        for name in list(turns):
            try:
                got[name].append(next(streams[name]).token)
            except StopIteration:
                turns.remove(name)
            except CapacityError as error:
                failed.append(name)
                assert "KV blocks" in str(error)
                turns.remove(name)
    assert failed == ["large"]
    assert got["small"] == expected.tolist()
    assert large.tokens.tolist()[60:] == got["large"]
    assert session.n_requests == 0


def test_a_step_tells_which_request_cannot_go_on(make_session: Make) -> None:
    session = make_session("T4", kv_bytes=8 * block_bytes(T4))
    small, large = session.prefill(T4.tokens(20)), session.prefill(T4.tokens(60, seed=1))
    session.submit(large, 400, stop_ids=())
    session.submit(small, 40, stop_ids=())
    ends = {}
    while session.n_requests:
        for token in session.step():
            if token.finish_reason:
                ends[token.branch.id] = (token.finish_reason, type(token.error))
    assert ends == {
        large.id: ("failed", CapacityError),
        small.id: ("length", type(None)),
    }


def test_an_error_undoes_a_generation_with_progress(make_session: Make) -> None:
    """Branches that had ended too, and whether the engine or the callback raised it."""
    session = make_session("T4", kv_bytes=8 * block_bytes(T4))
    small, large = session.prefill(T4.tokens(20)), session.prefill(T4.tokens(60, seed=1))
    before = [(b.tokens.tolist(), b.confidence) for b in (small, large)]
    with pytest.raises(CapacityError, match="KV blocks"):
        session.generate([small, large], 400, stop_ids=(), progress=lambda n: None)
    assert [(b.tokens.tolist(), b.confidence) for b in (small, large)] == before

    def fail(n: int) -> None:
        raise OSError("no terminal")

    with pytest.raises(OSError, match="no terminal"):
        session.generate([small, large], 9, stop_ids=(), progress=fail)
    assert [(b.tokens.tolist(), b.confidence) for b in (small, large)] == before
    assert session.n_requests == 0


def test_a_dropped_branch_ends_its_stream(session: BranchSession) -> None:
    root = session.prefill(T4.tokens(20))
    kids = root.fork(2)
    ends = {}
    for n, token in enumerate(session.stream(kids, 8, HOT, stop_ids=())):
        if n == 2:
            kids[0].drop()
        if token.finish_reason:
            ends[token.branch.id] = token.finish_reason
    assert ends.get(kids[1].id) == "length"
    assert session.n_requests == 0


def test_a_dropped_branch_waits_for_nobody(session: BranchSession) -> None:
    """Its stream ends although another request would go on for long."""
    root = session.prefill(T4.tokens(20))
    other, kid = root.fork(2)
    endless = session.submit(other, 10**6, HOT, stop_ids=())
    stream = session.stream(kid, 100, HOT, stop_ids=())
    next(stream)
    kid.drop()
    assert len(list(stream)) <= 1
    session.cancel(endless)
    assert session.n_requests == 0


# ---- text ------------------------------------------------------------------------------------


def test_half_characters_wait_and_stay_out_of_the_end() -> None:
    first, second = PIECES.index("😀".encode()[:2]), PIECES.index("😀".encode()[2:])
    stream = TextStream(PIECES)
    assert [stream.feed(first), stream.feed(second), stream.feed(first)] == ["", "😀", ""]
    assert stream.finish() == ""
    assert final_text(PIECES, [first, second, first]) == "😀"
    assert final_text(PIECES, [second]) == "\N{REPLACEMENT CHARACTER}" * 2


def test_what_may_begin_a_stop_string_waits() -> None:
    stream = TextStream([b"a", b"b", b"c", b"bc!"], [b"bcd", b"ccc"])
    assert stream.feed(0) == "a"
    assert stream.feed(1) == ""
    assert stream.feed(2) == ""
    assert stream.feed(0) == "bca"
    assert stream.feed(2) == ""
    assert stream.feed(3) == "cbc!"
    assert stream.finish() == ""


# ---- verification and selection --------------------------------------------------------------


def grown(session: BranchSession, n: int = 4) -> list[Any]:
    kids = session.prefill(T4.tokens(20)).fork(n)
    session.generate(kids, 5, HOT, stop_ids=())
    return kids


def test_verify_sets_score_and_verdict(session: BranchSession) -> None:
    kids = grown(session)
    before = [kid.tokens.tolist() for kid in kids]
    marks = session.verify(kids, "ab?", yes="YES", no="NO", cgee=None)
    yes, no = session.token_id("YES"), session.token_id("NO")
    for kid, mark in zip(kids, marks, strict=True):
        logits = kid.fork([session.encode("ab?")])[0].logits.astype(np.float64)
        expected = 1 / (1 + math.exp(logits[no] - logits[yes]))
        p = np.exp(logits - logits.max())
        assert mark.score == pytest.approx(expected, abs=1e-5)
        assert mark.mass == pytest.approx((p[yes] + p[no]) / p.sum(), abs=1e-5)
        assert kid.score == mark.score
        assert kid.verdict == mark
        assert (mark.outcome, mark.layers) == ("verified", session.config.n_layers)
    assert [kid.tokens.tolist() for kid in kids] == before


def test_a_word_of_several_tokens_is_named(session: BranchSession) -> None:
    kids = grown(session, 2)
    with pytest.raises(ValueError, match=r"yes='maybe' is 5 tokens"):
        session.verify(kids, [5], yes="maybe", no="NO")
    with pytest.raises(ValueError, match=r"no='' is 0 tokens"):
        session.verify(kids, [5], yes="YES", no="")
    with pytest.raises(ValueError, match="cgee"):
        session.verify(kids, [5], 5, 6, cgee="fast")  # type: ignore[arg-type]
    assert all(kid.score is None and kid.verdict is None for kid in kids)


def test_cgee_of_the_session_is_the_default(session: BranchSession) -> None:
    kids = grown(session)
    for kid, confidence in zip(kids, (0.9, 0.5, 0.2, 0.1), strict=True):
        kid.confidence = confidence
    session.cgee = CGEE(kappa=0.6)
    outcomes = [mark.outcome for mark in session.verify(kids, [5], 5, 6)]
    assert outcomes == ["skipped: one contender"] * 4
    outcomes = [mark.outcome for mark in session.verify(kids, [5], 5, 6, cgee=CGEE(kappa=0.5))]
    assert outcomes == ["verified", "verified", "not a contender", "not a contender"]
    assert {m.outcome for m in session.verify(kids, [5], 5, 6, cgee=None)} == {"verified"}


def test_asks_never_decides_a_verification(session: BranchSession) -> None:
    kids = grown(session)
    exact = [mark.score for mark in session.verify(kids, [5, 6], 5, 6, cgee=None)]
    session.asks = asks(session)  # accepts everything
    before = session.stats()
    assert_same([mark.score for mark in session.verify(kids, [5, 6], 5, 6, cgee=None)], exact)
    after = session.stats()
    assert (after.gate_accepted, after.gate_rejected) == (
        before.gate_accepted,
        before.gate_rejected,
    )


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([(None, 0.3), (None, 0.5), (None, 0.4)], 1),
        ([(0.5, 0.9), (0.9, 0.3), (None, 1.0)], 1),  # 0.474, 0.493
        ([(0.5, 0.5), (0.5, 0.5)], 0),
        ([(None, None), (None, 0.9)], 0),  # nothing generated counts as 1
        ([(0.0, 0.9), (None, 0.99)], 0),  # verified, if badly
    ],
)
def test_select(session: BranchSession, rows: list[tuple[Any, Any]], best: int) -> None:
    kids = session.prefill([5]).fork(len(rows))
    for kid, (score, confidence) in zip(kids, rows, strict=True):
        kid.score, kid.confidence = score, confidence
    assert session.select(kids) is kids[best]


def test_select_from_nothing_and_from_others(session: BranchSession, bare: BranchSession) -> None:
    with pytest.raises(ValueError, match="branches"):
        session.select([])
    own, foreign = session.prefill([5]), bare.prefill([5])
    with pytest.raises(ValueError, match=r"branches\[1\] belongs to another session"):
        session.select([own, foreign])
    with pytest.raises(TypeError, match=r"branches\[0\]"):
        session.select(["best"])  # type: ignore[list-item]


def test_stats_count_every_row_that_runs_again(session: BranchSession) -> None:
    """A distribution is not stored: the last row runs again for it, and is counted."""
    branch = session.prefill(T4.tokens(20))

    def again(call: Callable[[], object]) -> int:
        before = session.stats().tokens_recomputed
        call()
        return session.stats().tokens_recomputed - before

    assert again(lambda: branch.logits) == 1
    assert again(lambda: branch.hidden) == 1
    assert again(lambda: session.score(branch, [[5, 6]])) == 1
    assert again(lambda: session.generate(branch, 1, stop_ids=())) == 1
    assert again(lambda: session.generate(branch, 4, stop_ids=())) == 0  # one was not computed


# ---- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda s, b: s.prefill([1], similar_to=5), TypeError, "similar_to must be a rksc.Branch"),
        (lambda s, b: s.prefill([1], suffix=[1 << 20]), ValueError, "suffix: token 0 is 1048576"),
        (lambda s, b: s.prefill(np.ma.array([1, 2], mask=[0, 1])), TypeError, "tokens is a masked"),
        (lambda s, b: s.prefill([{"role": "user", "content": "x"}]), TypeError,
         r"tokens must be text or token ids; session\.tokenizer\.chat\(messages\) makes a text"),
        (lambda s, b: b.fork("2"), TypeError, r"number of children, an int, .*, got str \(session"),
        (lambda s, b: s.generate(b, 2, temperature=1.0), TypeError,
         r"^generate\(\) has no option 'temperature': pass sampling=rksc\.Sampling\(temperature="),
        (lambda s, b: s.stream(b, 2, seed=1), TypeError, r"^stream\(\) .*Sampling\(seed=\.\.\.\)$"),
        (lambda s, b: s.submit(b, 2, top_p=1), TypeError, r"^submit\(\) .*Sampling\(top_p="),
        (lambda s, b: solve(s, "?", min_p=1), TypeError, r"^solve\(\) .*Sampling\(min_p="),
        (lambda s, b: search(s, "?", beems=1), TypeError, r"^search\(\) .*'beems'.*mean 'beam'\?$"),
        (lambda s, b: s.generate(b, max_tokens=1), TypeError, r"generate\(\) .*'max_new_tokens'"),
        (lambda s, b: s.cancel("x"), TypeError, "request must be an int, got str"),
        (lambda s, b: s.cancel([]), TypeError, "request must be an int, got list"),
        (lambda s, b: s.cancel(None), TypeError, "request must be an int"),
        (lambda s, b: s.score(b, None), TypeError, "continuations must be a sequence, got None"),
        (lambda s, b: s.score(b, [[1], [1] * 5000]), ValueError, r"continuations\[1\]: 5020 tok"),
        (lambda s, b: s.score(b, [[1], [-1]]), ValueError, r"continuations\[1\]: token 0 is -1"),
        (lambda s, b: s.score(b, ["a", 5]), TypeError, r"continuations\[1\] must be a sequence"),
        (lambda s, b: s.decode([1.5]), TypeError, "tokens: token 0 must be an int, got float"),
        (lambda s, b: s.layer_means([[1], [-1]]), ValueError, r"prompts\[1\]: token 0 is -1"),
        (lambda s, b: s.layer_means([[1], []]), ValueError, r"prompts\[1\] has no tokens"),
        (lambda s, b: setattr(b, "score", "a"), TypeError, "score must be a number or None, got s"),
        (lambda s, b: setattr(b, "confidence", "a"), TypeError, "confidence must be a number or"),
        (lambda s, b: delattr(b, "score"), AttributeError, "score cannot be deleted"),
        (lambda s, b: delattr(b, "stream"), AttributeError, "stream cannot be deleted"),
        (lambda s, b: setattr(s, "cgee", CGEE(lens="full", min_layer=99)), ValueError,
         r"cgee\.min_layer must be at most \d+, got 99"),
        (lambda s, b: s.verify(b, [1], 1, 2, cgee=CGEE(lens="answer", min_layer=99)), ValueError,
         r"cgee\.min_layer must be at most"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named_and_nothing_lost(
    session: BranchSession, call: Any, error: type[Exception], said: str
) -> None:
    branch = session.prefill(T4.tokens(20))
    with pytest.raises(error, match=said):
        call(session, branch)
    assert session.stats().branches == 1
    assert session.n_requests == 0
    assert branch.n_tokens == 20
    session.check()


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("tokens", lambda s, b: s.prefill("Hi")),
        ("suffix", lambda s, b: s.prefill([1], suffix="Hi")),
        ("stop", lambda s, b: s.generate(b, 2, stop="x")),
        ("decode", lambda s, b: s.decode([1])),
        ("problem", lambda s, b: solve(s, "Hi")),
        ("problem", lambda s, b: search(s, "Hi")),
        ("model", lambda s, b: OpenAI(s)),
    ],
)
def test_text_without_a_tokenizer_says_what_to_install(
    make_session: Make, field: str, call: Any
) -> None:
    session = make_session(T4)
    branch = session.prefill(T4.tokens(20))
    with pytest.raises(
        ValueError, match=rf"^{field}: .*needs? a tokenizer.*pip install 'rksc\[hf]'"
    ):
        call(session, branch)
    session.check()


def test_a_branch_of_another_session_is_similar_to_none(make_session: Make) -> None:
    """Whether ASKS is on or not."""
    other = make_session("T4").prefill([1, 2])
    for asks in (None, ASKS.paper()):
        session = make_session("T4", asks=asks)
        with pytest.raises(ValueError, match="similar_to belongs to another session"):
            session.prefill([1, 3], similar_to=other, suffix=[4])


@pytest.mark.parametrize("field", ["seed", "top_k", "temperature", "top_p"])
def test_true_is_no_number(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be"):
        Sampling(**{field: True})  # type: ignore[arg-type]


def test_numbers_may_be_of_numpy_and_others(session: BranchSession) -> None:
    kids = session.prefill([1, 2]).fork(np.int64(2))
    settings: Any = (Fraction(1, 2), np.int8(5), np.float32(0.5), np.float64(0), np.uint64(3))
    stop_ids: Any = np.array([5])
    made = session.generate(kids, np.uint8(3), Sampling(*settings), stop_ids=stop_ids)
    assert len(made) == 2
    with pytest.raises(TypeError, match="max_new_tokens must be an int, got array"):
        session.generate(kids, np.array([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="temperature must be a finite number"):
        Sampling(temperature=10**400)


@pytest.mark.parametrize("field", ["share", "poison"])
def test_a_switch_is_true_or_false(make_session: Make, field: str) -> None:
    with pytest.raises(TypeError, match=f"{field} must be True or False, got None"):
        make_session("T4", **{field: None})


def test_a_lens_off_may_begin_anywhere(session: BranchSession) -> None:
    session.cgee = CGEE(min_layer=99)
    assert session.verify(session.prefill([1, 2]), [3], 1, 2)


def test_logits_that_are_nan_are_refused_everywhere() -> None:
    """What generate, score and verify refuse is not handed out either."""
    weights = dict(T4.weights)
    norm = np.array(weights["model.norm.weight"])
    norm[3] = np.nan
    weights["model.norm.weight"] = norm
    session = BranchSession(weights, T4.model_config, kv_bytes=1 << 20, dtype="float32")
    branch = session.prefill([1, 2, 3])
    assert np.isfinite(branch.hidden).all()  # before the final norm
    for call in (
        lambda: branch.logits,
        lambda: session._logits_at(branch, 2, 3),
        lambda: session.generate(branch, 1),
    ):
        with pytest.raises(ValueError, match="the logits of branch 1 at position 2 are NaN"):
            call()
    session.check()
