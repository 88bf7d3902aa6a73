"""Generation: how tokens are chosen, what is reported about them, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from conftest import Factory
from numpy.typing import NDArray
from support.models import ALL, KEEN, SHARP, T4, TWINS, make
from support.reference import softmax
from support.sessions import assert_books, assert_same, block_bytes

from rksc import CGEE, Branch, BranchSession, CapacityError, Generation, Sampling, _core

GREEDY = Sampling()


def tokens_of(generations: Sequence[Generation]) -> list[list[int]]:
    return [g.tokens.tolist() for g in generations]


# ---- greedy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ties_go_to_the_lowest_id(isa: str, dtype: str, make_session: Factory) -> None:
    """In TWINS token i and i + 48 (and 96) always have equal logits; in every slot of a batch."""
    session = make_session(TWINS, isa=isa, dtype=dtype)
    branches = [session.prefill(TWINS.tokens(n, seed=n)) for n in (1, 5, 16, 17, 40, 41, 64, 3)]
    for branch in branches:
        logits = branch.logits
        assert np.array_equal(logits[:48], logits[48:96])
    for sampling in (GREEDY, Sampling(temperature=1.0, top_k=1), Sampling(temperature=2, top_p=0)):
        made = session.generate([b.fork()[0] for b in branches], 12, sampling, stop_ids=())
        assert max(max(tokens) for tokens in tokens_of(made)) < 48


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e-5, seed=1),
        Sampling(temperature=1e-30, seed=1),
        Sampling(temperature=1e-300, seed=1),
        Sampling(temperature=1.0, top_p=0.0, seed=1),
        Sampling(temperature=1.0, top_p=1e-9, seed=1),
        Sampling(temperature=3.0, top_k=1, seed=1),
        Sampling(temperature=3.0, min_p=1.0, seed=1),
    ],
    ids=lambda s: f"T{s.temperature}-k{s.top_k}-p{s.top_p}-m{s.min_p}",
)
def test_limits_of_settings_are_greedy(sampling: Sampling, isa: str, make_session: Factory) -> None:
    session = make_session(SHARP, isa=isa)
    root = session.prefill(SHARP.tokens(20))
    greedy = session.generate(root.fork(1), 16, stop_ids=())
    made = session.generate(root.fork(4), 16, sampling, stop_ids=())
    assert tokens_of(made) == tokens_of(greedy) * 4
    for g in made:
        for numbers in (g.top_probs, g.logprobs, g.entropies):
            assert np.isfinite(numbers).all()


def test_top_k_beyond_the_vocabulary_cuts_nothing(make_session: Factory) -> None:
    session = make_session(T4)
    root = session.prefill(T4.tokens(20))
    made = [
        tokens_of(session.generate(root.fork(6), 9, Sampling(1.0, top_k=k), stop_ids=()))
        for k in (0, 97, 98, 2**31 - 1)
    ]
    assert made[0] == made[1] == made[2] == made[3]
    assert all(0 <= token < 97 for tokens in made[0] for token in tokens)


@pytest.mark.parametrize("value", [math.nan, -0.1, math.inf, -math.inf, "hot"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "top_k", "seed"])
def test_bad_settings_are_named(field: str, value: Any, make_session: Factory) -> None:
    """By the record, and by the engine for whoever calls it without one."""
    with pytest.raises((ValueError, TypeError), match=f"{field}|must be real number"):
        Sampling(**{field: value})
    session = make_session(T4)
    root = session.prefill([1, 2, 3])
    plain: dict[str, Any] = {
        "max_new_tokens": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0,
        "stop_ids": (), "stop_strings": (), "stop_top": 2.0, "stop_lead": 0.0, "min_steps": 1,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError)):
        session._generate([_core.Request(root)], **{**plain, field: value})
    assert root.n_tokens == 3
    assert len(session._generate([_core.Request(root)], **plain)[0][0]) == 1


# ---- sampling -------------------------------------------------------------------------------

SETTINGS = [
    Sampling(1.0),
    Sampling(0.5),
    Sampling(2.0),
    Sampling(1.0, top_k=5),
    Sampling(1.0, top_p=0.6),
    Sampling(1.0, min_p=0.2),
    Sampling(1.5, top_k=40, top_p=0.8, min_p=0.02),
]


def expected_distribution(logits: NDArray[np.float64], s: Sampling) -> NDArray[np.float64]:
    """softmax(logits / temperature), then top_k, top_p and min_p keep a set, in this order."""
    p = softmax(logits / s.temperature)
    order = np.argsort(-p, kind="stable")
    keep = np.ones(len(p), bool)
    if s.top_k:
        keep[order[s.top_k :]] = False
    p = np.where(keep, p, 0)
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]  # the fewest that reach top_p
    keep[order[before >= s.top_p]] = s.top_p >= 1
    p = np.where(keep & (p >= s.min_p * p.max()), p, 0)
    out: NDArray[np.float64] = p / p.sum()
    return out


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_draws_follow_the_distribution(sampling: Sampling, isa: str, make_session: Factory) -> None:
    """Chi-square over 3,000 streams; one fixed seed, so that it passes always or never."""
    n = 3000
    session = make_session(KEEN, isa=isa)
    tokens = KEEN.tokens(30)
    root = session.prefill(tokens)
    sampling = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, 99)
    made = tokens_of(session.generate(root.fork(n), 1, sampling, stop_ids=()))
    counts = np.bincount(np.ravel(made), minlength=97)
    p = expected_distribution(KEEN.reference.logits(tokens), sampling)
    assert (counts[p == 0] == 0).all()
    often = p * n >= 5
    rare = n - counts[often].sum(), n - (p * n)[often].sum()
    terms = (counts[often] - p[often] * n) ** 2 / (p[often] * n)
    chi_square = terms.sum() + ((rare[0] - rare[1]) ** 2 / rare[1] if rare[1] > 1 else 0)
    freedom = max(1, often.sum() - (rare[1] <= 1))
    assert often.sum() >= 3
    # mean `freedom`, variance twice that; beyond 4.5 deviations once in some 10,000 cases
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom) + 4


def test_positions_and_seeds_draw_apart(make_session: Factory) -> None:
    """One stream at several seeds, and several positions of one stream, are independent draws."""
    session = make_session(T4)
    root = session.prefill(T4.tokens(30))
    by_seed = [
        session.generate(root.fork(1), 1, Sampling(2.0, seed=seed), stop_ids=())[0].tokens[0]
        for seed in range(200)
    ]
    assert len(set(by_seed)) > 50
    flat = T4.changed("flat", lambda w: w["lm_head.weight"].fill(0))  # every token alike
    other = make_session(flat)
    made = other.generate(other.prefill([1]), 400, Sampling(1.0), stop_ids=())[0].tokens
    counts = np.bincount(made, minlength=97)
    assert ((counts - 400 / 97) ** 2 / (400 / 97)).sum() < 96 + 4.5 * math.sqrt(2 * 96)


# ---- streams of random numbers --------------------------------------------------------------

HOT = Sampling(temperature=1.0, seed=7)


def test_streams_are_fixed_at_the_fork(make_session: Factory) -> None:
    session = make_session(T4)
    root = session.prefill(T4.tokens(20))
    kids, again = root.fork(8), root.fork(8)
    assert len({kid.stream for kid in [*kids, root]}) == 9
    assert [kid.stream for kid in kids] == [kid.stream for kid in again]
    first = tokens_of(session.generate(kids, 6, HOT, stop_ids=()))
    assert first == tokens_of(session.generate(again, 6, HOT, stop_ids=()))
    assert len({tuple(tokens) for tokens in first}) == 8
    # whichever rows a call holds, in whichever order
    some = root.fork(8)
    for kid in some[::2]:
        kid.drop()
    made = session.generate(some[::-2], 6, HOT, stop_ids=())
    assert tokens_of(made) == first[::-2]
    # another session, another root of the same name
    other = make_session(T4)
    kids = other.prefill(T4.tokens(20)).fork(8)
    assert first == tokens_of(other.generate(kids, 6, HOT, stop_ids=()))


def test_streams_come_from_the_parents(make_session: Factory) -> None:
    """Parent's stream and the ordinal within the fork: cousins differ, a set stream passes on."""
    session = make_session(T4)
    root = session.prefill(T4.tokens(20))
    kids = root.fork(4)
    grandkids = [kid.fork(4) for kid in kids]
    streams = [b.stream for b in [root, *kids, *(g for four in grandkids for g in four)]]
    assert len(set(streams)) == 1 + 4 + 16
    kids[3].stream = kids[0].stream
    assert [g.stream for g in kids[3].fork(4)] == [g.stream for g in grandkids[0]]
    assert [g.stream for g in kids[3].fork([[1], [2]], at=5)] == streams[5:7]


def test_a_stream_can_be_set(make_session: Factory) -> None:
    session = make_session(T4)
    kids = session.prefill(T4.tokens(20)).fork(3)
    kids[2].stream = kids[0].stream
    kids[1].stream = 2**64 - 1
    made = tokens_of(session.generate(kids, 6, HOT, stop_ids=()))
    assert made[0] == made[2] != made[1]
    for bad in (-1, 2**64, 1.5, "a", None):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            kids[0].stream = bad  # type: ignore[assignment]
    assert kids[0].stream == kids[2].stream


# ---- what is reported -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_probabilities_do_not_depend_on_sampling(dtype: str, make_session: Factory) -> None:
    """The raw distribution's numbers: same context, any settings, before and after other work."""
    session = make_session(T4, dtype=dtype)
    tokens = T4.tokens(33)
    root = session.prefill(tokens)
    settings = (
        GREEDY, Sampling(0.2), Sampling(1.5), Sampling(1.0, top_p=0.1),
        Sampling(1.0, top_k=3), Sampling(1.0, min_p=0.9), GREEDY,
    )  # fmt: skip
    seen = []
    for i, sampling in enumerate(settings):
        g = session.generate(root.fork(1), 1, sampling, stop_ids=())[0]
        seen.append((float(g.top_probs[0]), float(g.entropies[0]), g.confidence))
        session.generate(session.prefill(T4.tokens(40, seed=i)), 5, Sampling(1.0))
    assert len(set(seen)) == 1
    p = softmax(root.logits.astype(np.float64))
    assert seen[0][0] == pytest.approx(p.max(), rel=1e-4)
    assert seen[0][1] == pytest.approx(-(p * np.log(p)).sum(), rel=1e-4)


def test_logprob_is_that_of_the_chosen_token(make_session: Factory) -> None:
    """Sampled tokens: also from score, and in [0, 1]."""
    session = make_session(SHARP)
    root = session.prefill(SHARP.tokens(30))
    for g in session.generate(root.fork(4), 20, Sampling(2.0, top_k=50), stop_ids=()):
        assert_same(session.score(root, [g.tokens])[0], g.logprobs)
        assert (g.logprobs <= np.log(g.top_probs) + 1e-6).all()
        assert (g.top_probs > 0).all()
        assert (g.top_probs <= 1).all()
        assert (g.entropies >= 0).all()
        assert (g.entropies <= math.log(97) + 1e-5).all()
        assert g.tokens.dtype == np.int32
        assert g.top_probs.dtype == g.logprobs.dtype == g.entropies.dtype == np.float32


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_weights_are_an_error(value: float, make_session: Factory) -> None:
    """NaN logits never become a token; the branch is as it was."""

    def spoil(weights: dict[str, Any]) -> None:
        weights["model.norm.weight"][3] = value

    session = make_session(T4.changed("spoilt", spoil))
    root = session.prefill(T4.tokens(10))
    for sampling in (GREEDY, HOT):
        with pytest.raises(ValueError, match="NaN"):
            session.generate(root, 4, sampling)
        assert root.tokens.tolist() == T4.tokens(10)
        assert_books(session)


# ---- ends -----------------------------------------------------------------------------------


def free_run(session: BranchSession, root: Branch, n: int = 24) -> list[int]:
    tokens: list[int] = session.generate(root.fork(1), n, stop_ids=())[0].tokens.tolist()
    return tokens


def test_any_of_several_end_tokens(make_session: Factory) -> None:
    """eos_token_id [..] of the configuration; the end token is not part of the tokens."""
    plain = make_session(SHARP)
    free = free_run(plain, plain.prefill(SHARP.tokens(20)), 60)
    at = next(i for i in range(4, 60) if free.index(free[i]) == i)  # new at this place
    last = free[at]
    unseen = [t for t in range(97) if t not in free][:2]
    ended = make("several ends", eos_token_id=[unseen[0], last, unseen[1]])
    session = make_session(type(SHARP)("ends", ended.config, SHARP.weights))
    root = session.prefill(SHARP.tokens(20))
    g = session.generate(root.fork(1), 60)[0]
    assert (g.finish_reason, g.stop) == ("eos", last)
    assert g.tokens.tolist() == free[:at]
    assert g.branch.tokens.tolist() == SHARP.tokens(20) + free[:at]
    assert len(g.top_probs) == len(g.logprobs) == len(g.entropies) == at
    assert g.confidence == pytest.approx(g.top_probs.mean(), rel=1e-6)
    # () forces the length, other ids replace the configuration's
    assert session.generate(root.fork(1), 60, stop_ids=())[0].tokens.tolist() == free
    g = session.generate(root.fork(1), 60, stop_ids=[free[0]])[0]
    assert (g.tokens.tolist(), g.finish_reason, g.stop) == ([], "eos", free[0])


def test_an_end_token_first(make_session: Factory) -> None:
    """An empty list, and a confidence: the probability that it ended with."""
    session = make_session(SHARP)
    root = session.prefill(SHARP.tokens(20))
    first = int(root.logits.argmax())
    g = session.generate(root.fork(1), 8, stop_ids=[first])[0]
    assert g.tokens.shape == g.top_probs.shape == g.logprobs.shape == (0,)
    assert g.finish_reason == "eos"
    assert g.confidence == pytest.approx(softmax(root.logits.astype(float)).max(), rel=1e-5)
    assert g.branch.confidence == g.confidence
    assert g.branch.n_tokens == 20


def test_no_tokens_asked_for(make_session: Factory) -> None:
    session = make_session(T4)
    root = session.prefill(T4.tokens(20))
    g = session.generate(root, 0)[0]
    assert g.tokens.shape == (0,)
    assert g.finish_reason == "length"
    assert root.tokens.tolist() == T4.tokens(20)
    assert session.generate([], 8) == []


@pytest.mark.parametrize("n_prompt", [500, 511, 512])
def test_the_model_has_positions_left_or_not(n_prompt: int, make_session: Factory) -> None:
    """512 positions: the text may fill them and is then at its end, with an honest reason."""
    session = make_session(T4, kv_bytes=16 << 20)
    root = session.prefill(T4.tokens(n_prompt))
    g = session.generate(root, 100, stop_ids=())[0]
    assert g.finish_reason == "length"
    assert len(g.tokens) == 512 - n_prompt
    whole = root.tokens.tolist()
    assert whole == T4.tokens(n_prompt) + g.tokens.tolist()
    rows = T4.reference.forward(whole).logits[n_prompt - 1 : -1]
    sure = np.diff(np.sort(rows)[:, -2:])[:, 0] > 1e-3
    assert np.array_equal(rows.argmax(1)[sure], g.tokens[sure])
    assert np.isfinite(root.logits).all()
    for refused in (lambda: session.prefill(T4.tokens(513)), lambda: root.extend([1])):
        with pytest.raises(ValueError, match="513 tokens exceed"):
            refused()
    assert_books(session)


class Pieces:
    """A tokenizer that only knows the bytes of its tokens."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)

    def token_bytes(self, vocab_size: int) -> list[bytes]:
        return self.pieces[:vocab_size]


def expected_stop(text: Sequence[bytes], stops: Sequence[bytes]) -> tuple[int, int]:
    """Tokens until some stop string is in the text, and the bytes to cut; (all, 0) without."""
    whole = b""
    for n, piece in enumerate(text, 1):
        whole += piece
        found = [whole.find(stop) for stop in stops if stop in whole]
        if found:
            return n, len(whole) - min(found)
    return len(text), 0


@pytest.mark.parametrize("seed", range(12))
def test_stop_strings_in_random_pieces(seed: int, make_session: Factory) -> None:
    """An alphabet of two letters: overlaps, near misses and several stop strings everywhere."""
    rng = np.random.default_rng(seed)
    letters = "ab" if seed % 3 else "aéb"
    pieces = ["".join(rng.choice(list(letters), rng.integers(1, 5))).encode() for _ in range(97)]
    pieces[:8] = [b""] * 8  # special tokens have no text
    session = make_session(T4, tokenizer=Pieces(pieces))
    root = session.prefill(T4.tokens(20))
    for _ in range(8):
        stops = [
            "".join(rng.choice(list(letters), rng.integers(2, 12)))
            for _ in range(rng.integers(1, 4))
        ]
        sampling = Sampling(2.0, seed=int(rng.integers(2**32)))
        free = session.generate(root.fork(1), 40, sampling, stop_ids=())[0].tokens
        n, cut = expected_stop([pieces[t] for t in free], [s.encode() for s in stops])
        g = session.generate(root.fork(1), 40, sampling, stop=stops, stop_ids=())[0]
        assert g.tokens.tolist() == free[:n].tolist()
        assert g.finish_reason == ("stop" if cut else "length")
        assert (g.stop in stops) == bool(cut)
        whole = b"".join(pieces[t] for t in g.tokens)
        assert g.text == whole[: len(whole) - cut].decode(errors="ignore")
        streamed = session.stream(root.fork(1), 40, sampling, stop=stops, stop_ids=())
        assert "".join(token.text or "" for token in streamed) == g.text


class Marked(Pieces):
    """The first tokens are special, and spelled like others."""

    def __init__(self, pieces: Sequence[bytes], special: Mapping[int, str]) -> None:
        super().__init__([b"" if i in special else piece for i, piece in enumerate(pieces)])
        self.special_tokens = special


@pytest.mark.parametrize("seed", range(8))
def test_stop_strings_may_spell_special_tokens(seed: int, make_session: Factory) -> None:
    """A stop string ends a branch in the text as it is, and with special tokens spelled out."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("aéb"), rng.integers(1, 4))) for _ in range(97)]
    special = dict(enumerate(words[: 97 * (1 + seed % 3) // 4]))
    tokenizer = Marked([word.encode() for word in words], special)
    session = make_session(T4, tokenizer=tokenizer)
    root = session.prefill(T4.tokens(20))
    for _ in range(8):
        stops = ["".join(rng.choice(list("aéb"), rng.integers(1, 9))) for _ in range(2)]
        stops += [words[int(rng.integers(len(special)))]]
        sampling = Sampling(2.0, seed=int(rng.integers(2**32)))
        free = session.generate(root.fork(1), 40, sampling, stop_ids=())[0].tokens.tolist()
        n, text, stopped = expected_marked(words, special, free, stops)
        g = session.generate(root.fork(1), 40, sampling, stop=stops, stop_ids=())[0]
        assert g.tokens.tolist() == free[:n]
        assert g.finish_reason == ("stop" if stopped else "length")
        assert (g.stop in stops) == stopped
        assert g.text == text
        streamed = session.stream(root.fork(1), 40, sampling, stop=stops, stop_ids=())
        assert "".join(token.text or "" for token in streamed) == text


def expected_marked(
    words: Sequence[str], special: Mapping[int, str], tokens: Sequence[int], stops: Sequence[str]
) -> tuple[int, str, bool]:
    """Tokens until a stop string is in the text or in what spells special tokens, too, the text
    before it, and whether there is one. A letter is (itself, whether it is shown)."""
    spelled: list[tuple[str, bool]] = []
    for n, token in enumerate(tokens, 1):
        spelled += [(letter, token not in special) for letter in words[token]]
        shown = [letter for letter in spelled if letter[1]]
        ends = []
        for letters in (spelled, shown):
            whole = "".join(letter for letter, _ in letters)
            found = [whole.find(stop) for stop in stops if stop in whole]
            if found:
                ends.append("".join(c for c, is_shown in letters[: min(found)] if is_shown))
        if ends:
            return n, min(ends, key=len), True
    return len(tokens), "".join(letter for letter, is_shown in spelled if is_shown), False


def test_a_prompt_never_ends_with_a_stop_string(make_session: Factory) -> None:
    """Only new text counts, even where a stop string would begin in the prompt."""
    session = make_session(T4, tokenizer=Pieces([b"a"] * 97))
    g = session.generate(session.prefill([5, 5, 5]), 8, stop="aaa", stop_ids=())[0]
    assert (len(g.tokens), g.finish_reason, g.text) == (3, "stop", "")


# ---- early stop (CGEE, while generating) ----------------------------------------------------


@pytest.mark.parametrize("stop_top", [0.2, 0.4, 0.6, 0.9])
def test_branches_stop_together_when_one_leads(stop_top: float, make_session: Factory) -> None:
    """All of a call after the first step at which best and lead are large enough."""
    cgee = CGEE(stop_top=stop_top, stop_lead=0.1, min_steps=3)
    plain, session = make_session(SHARP), make_session(SHARP, cgee=cgee)
    prompts = [SHARP.tokens(n, seed=n) for n in (5, 30, 17, 40)]
    free = plain.generate([plain.prefill(p) for p in prompts], 30, stop_ids=())
    running = np.cumsum([g.top_probs for g in free], axis=1) / np.arange(1, 31)
    best, second = np.sort(running, axis=0)[[-1, -2]]
    stops = (best >= stop_top) & ((best - second) / best >= 0.1) & (np.arange(1, 31) >= 3)
    n = int(np.argmax(stops)) + 1 if stops.any() else 30
    branches = [session.prefill(p) for p in prompts]
    bystander = session.prefill(SHARP.tokens(9))
    other = session.submit(bystander, 30, stop_ids=())
    for g, expected in zip(session.generate(branches, 30, stop_ids=()), free, strict=True):
        assert g.tokens.tolist() == expected.tokens[:n].tolist()
        assert g.finish_reason == ("early" if n < 30 else "length")
    while session.n_requests:
        session.step()
    assert bystander.n_tokens == 39  # another call is another group
    session.cancel(other)


# ---- requests -------------------------------------------------------------------------------


def run_all(session: BranchSession) -> dict[int, list[int]]:
    made: dict[int, list[int]] = {}
    steps = 0
    while session.n_requests:
        for token in session.step():
            made.setdefault(token.branch.id, [])
            made[token.branch.id] += [token.token] if token.token >= 0 else []
        assert_books(session)
        steps += 1
        assert steps < 2000
    return made


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("step_tokens", [4, 512])
def test_requests_wait_for_room(
    sampling: Sampling, step_tokens: int, make_session: Factory
) -> None:
    """Six requests of four blocks each under a budget of nine: all come through, in any order."""
    alone, expected = make_session(T4), {}
    session = make_session(T4, kv_bytes=9 * block_bytes(T4), step_tokens=step_tokens)
    branches = []
    for seed in range(6):
        prompt = T4.tokens(30, seed=seed)
        branches.append(session.prefill(prompt))
        branch = alone.prefill(prompt)
        branch.stream = branches[-1].stream
        generation = alone.generate(branch, 20, sampling, stop_ids=())[0]
        expected[branches[-1].id] = generation.tokens.tolist()
    for branch in branches:
        session.submit(branch, 20, sampling, stop_ids=())
    assert run_all(session) == expected
    for branch in branches:
        assert branch.tokens.tolist()[30:] == expected[branch.id]


def test_requests_come_and_go_between_steps(make_session: Factory) -> None:
    alone, session = make_session(T4), make_session(T4)
    branches = [session.prefill(T4.tokens(20 + i, seed=i)) for i in range(4)]
    made: dict[int, list[int]] = {branch.id: [] for branch in branches}
    requests = {}
    for step in range(12):
        if step % 2 == 0 and step // 2 < 4:
            branch = branches[step // 2]
            requests[branch.id] = session.submit(branch, 50, HOT, stop_ids=())
        for token in session.step():
            made[token.branch.id].append(token.token)
        if step == 7:
            session.cancel(requests[branches[1].id])
        assert_books(session)
    for request in requests.values():
        session.cancel(request)
        session.cancel(request)  # twice is fine
    lengths = [len(made[branch.id]) for branch in branches]
    assert lengths == [12, 6, 8, 6]
    for i, branch in enumerate(branches):
        own = alone.prefill(T4.tokens(20 + i, seed=i))
        own.stream = branch.stream
        got = alone.generate(own, lengths[i], HOT, stop_ids=())[0].tokens.tolist()
        assert made[branch.id] == got == branch.tokens.tolist()[20 + i :]


def test_a_branch_has_one_request(make_session: Factory) -> None:
    """A second one, and whatever would change its tokens, is refused meanwhile."""
    session = make_session(T4)
    branch = session.prefill(T4.tokens(20))
    request = session.submit(branch, 4, stop_ids=())
    for refused in (
        lambda: session.submit(branch, 4),
        lambda: session.generate([branch.fork()[0], branch], 4),
        lambda: branch.extend([1]),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            refused()
        assert branch.n_tokens == 20
    twin = branch.fork()[0]
    with pytest.raises(ValueError, match="twice"):
        session.generate([twin, twin], 4)
    assert twin.n_tokens == 20
    assert len(run_all(session)[branch.id]) == 4
    session.cancel(request)
    assert len(session.generate([twin], 4, stop_ids=())[0].tokens) == 4


def test_a_generation_that_cannot_fit_changes_nothing(make_session: Factory) -> None:
    """One branch alone outgrows the budget: the error tells blocks, tokens are undone."""
    session = make_session(T4, kv_bytes=4 * block_bytes(T4))
    branches = [session.prefill(T4.tokens(30, seed=seed)) for seed in range(2)]
    before = [(b.tokens.tolist(), b.confidence, b.score, b.stream) for b in branches]
    with pytest.raises(CapacityError, match=r"\d+ (more )?KV blocks"):
        session.generate(branches, 60, stop_ids=())
    assert before == [(b.tokens.tolist(), b.confidence, b.score, b.stream) for b in branches]
    assert_books(session)
    alone = make_session(T4)
    for seed, g in enumerate(session.generate(branches, 30, stop_ids=())):
        expected = alone.generate(alone.prefill(T4.tokens(30, seed=seed)), 30, stop_ids=())[0]
        assert g.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("name", ["T4", "mistral-window"])
def test_a_stream_is_generate(name: str, make_session: Factory) -> None:
    session = make_session(name)
    root = session.prefill(ALL[name].tokens(20))
    a, b = root.fork(3), root.fork(3)
    generations = session.generate(a, 12, HOT, stop_ids=[4])
    rows: dict[int, list[Any]] = {branch.id: [] for branch in b}
    for token in session.stream(b, 12, HOT, stop_ids=[4]):
        rows[token.branch.id].append(token)
    for g, branch in zip(generations, b, strict=True):
        kept = [token for token in rows[branch.id] if token.token >= 0]
        assert [token.token for token in kept] == g.tokens.tolist()
        assert np.array_equal(np.array([token.logprob for token in kept], np.float32), g.logprobs)
        assert np.array_equal(np.array([token.top_prob for token in kept], np.float32), g.top_probs)
        assert np.array_equal(np.array([token.entropy for token in kept], np.float32), g.entropies)
        assert rows[branch.id][-1].finish_reason == g.finish_reason
        assert branch.tokens.tolist() == g.branch.tokens.tolist()
