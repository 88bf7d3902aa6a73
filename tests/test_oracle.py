"""The engine against the float64 definition, for every architecture and instruction set.

float32: max|d| <= 1e-4 max|value|, as the specification promises for logits. bf16: 2e-2.
Greedy tokens are compared where the definition's best two logits differ by more than 1e-3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Factory
from numpy.typing import NDArray
from support.models import ARCHITECTURES, GROWING, NO_KEYS, SHARP, T1, T4, WIDE, Small, make
from support.reference import log_softmax, softmax

MODELS = (T1, *ARCHITECTURES, GROWING, NO_KEYS, SHARP, WIDE)
names = [m.name for m in MODELS]


def assert_close(got: NDArray[Any], expected: NDArray[Any], tolerance: float = 1e-4) -> None:
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("model", MODELS, ids=names)
def test_logits_and_hidden(model: Small, isa: str, make_session: Factory) -> None:
    """Of a whole text and of its beginnings, down to one token."""
    tokens = model.tokens(100)
    expected = model.reference.forward(tokens)
    session = make_session(model, isa=isa)
    branch = session.prefill(tokens)
    for n in (100, 99, 64, 17, 16, 15, 2, 1):
        beginning = branch if n == 100 else branch.fork(at=n)[0]
        assert_close(beginning.logits, expected.logits[n - 1])
        for layer, hidden in enumerate(beginning.hidden):
            assert_close(hidden, expected.hidden[layer, n - 1])


@pytest.mark.parametrize("model", MODELS, ids=names)
def test_score(model: Small, isa: str, make_session: Factory) -> None:
    """Log-probabilities of continuations of unequal lengths in one batch."""
    tokens = model.tokens(21)
    continuations = [model.tokens(n, seed=n) for n in (1, 40, 7)]
    session = make_session(model, isa=isa)
    branch = session.prefill(tokens)
    scores = session.score(branch, continuations)
    for got, continuation in zip(scores, continuations, strict=True):
        expected = model.reference.score(tokens, continuation)
        logits = np.abs(model.reference.forward(tokens + continuation).logits).max()
        assert got.shape == expected.shape
        assert np.abs(got - expected).max() <= 2e-4 * logits
    assert list(branch.tokens) == tokens


@pytest.mark.parametrize("model", MODELS, ids=names)
def test_bf16(model: Small, isa: str, make_session: Factory) -> None:
    """Teacher-forced on the rounded weights: tokens are given, logits compared."""
    tokens = model.tokens(100)
    expected = model.rounded.reference.forward(tokens).logits
    session = make_session(model, isa=isa, dtype="bfloat16")
    branch = session.prefill(tokens)
    for n in (100, 50, 1):
        beginning = branch.fork(at=n)[0]
        assert_close(beginning.logits, expected[n - 1], 2e-2)


LONG = (
    make("long", 40, num_hidden_layers=2, max_position_embeddings=2048),
    make(
        "long-window", 41, num_hidden_layers=2, max_position_embeddings=2048, sliding_window=300,
        model_type="mistral", architectures=["MistralForCausalLM"],
    ),
)  # fmt: skip


@pytest.mark.parametrize("model", LONG, ids=[m.name for m in LONG])
def test_several_tiles_of_keys(model: Small, isa: str, make_session: Factory) -> None:
    """Attention cuts keys at multiples of 256: lengths on both sides of the cuts."""
    tokens = model.tokens(1030)
    expected = model.reference.forward(tokens)
    session = make_session(model, isa=isa)
    branch = session.prefill(tokens)
    for n in (1030, 1025, 1024, 1023, 601, 513, 512, 301, 300, 257, 256, 255):
        assert_close(branch.fork(at=n)[0].logits, expected.logits[n - 1])


@pytest.mark.parametrize("model", MODELS, ids=names)
def test_greedy_generation(model: Small, make_session: Factory) -> None:
    """Tokens and the raw distribution's numbers at each step."""
    tokens, n = model.tokens(30), 24
    session = make_session(model)
    branch = session.prefill(tokens)
    generation = session.generate(branch, n, stop_ids=())[0]
    assert len(generation.tokens) == n
    assert generation.finish_reason == "length"
    whole = [*tokens, *map(int, generation.tokens)]
    assert list(branch.tokens) == whole
    rows = model.reference.forward(whole[:-1]).logits[len(tokens) - 1 :]
    gaps = np.diff(np.sort(rows)[:, -2:])[:, 0]
    sure = gaps > 1e-3
    assert sure.sum() >= n // 2
    assert np.array_equal(rows.argmax(1)[sure], generation.tokens[sure])
    p, logp = softmax(rows), log_softmax(rows)
    tolerance = 2e-4 * np.abs(rows).max()
    assert np.abs(generation.top_probs - p.max(1)).max() <= tolerance
    assert np.abs(generation.logprobs - logp[np.arange(n), generation.tokens]).max() <= tolerance
    assert np.abs(generation.entropies + (p * logp).sum(1)).max() <= 10 * tolerance
    assert generation.confidence == pytest.approx(generation.top_probs.mean(), rel=1e-5)
    assert branch.confidence == generation.confidence


@pytest.mark.parametrize("model", [T4, SHARP], ids=["T4", "sharp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verdict(model: Small, isa: str, dtype: str, make_session: Factory) -> None:
    """score, mass and the two logits are those of softmax over the whole vocabulary."""
    prompt, yes, no = model.tokens(12, seed=7), 5, 60
    session = make_session(model, isa=isa, dtype=dtype)
    branches = [session.prefill(model.tokens(n, seed=n)) for n in (3, 16, 50)]
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    for branch, verdict in zip(
        branches, session.verify(branches, prompt, yes, no, cgee=None), strict=True
    ):
        logits = model.reference.logits([*branch.tokens, *prompt])
        score, mass = model.reference.answer([*branch.tokens, *prompt], yes, no)
        scale = np.abs(logits).max()
        assert verdict.outcome == "verified"
        assert verdict.layers == verdict.n_layers == model.model_config.n_layers
        assert verdict.score == pytest.approx(score, abs=tolerance * scale)
        assert verdict.mass == pytest.approx(mass, abs=2 * tolerance * scale)
        assert verdict.yes_logit == pytest.approx(logits[yes], abs=tolerance * scale)
        assert verdict.no_logit == pytest.approx(logits[no], abs=tolerance * scale)
        assert branch.score == verdict.score


@pytest.mark.parametrize("model", [T1, T4, GROWING], ids=["T1", "T4", "growing"])
def test_layer_means(model: Small, make_session: Factory) -> None:
    """The mean over the positions in which the prompts differ; all prompts count alike."""
    begin, end = model.tokens(5, seed=1), model.tokens(4, seed=2)
    middles = [[i, *model.tokens(n, seed=n), 9 - i] for i, n in enumerate((3, 20, 300))]
    session = make_session(model)
    means = session.layer_means([begin + middle + end for middle in middles])
    last = session.layer_means([begin + middle + end for middle in middles], pool="last")
    expected, expected_last = [], []
    for middle in middles:
        hidden = model.reference.forward(begin + middle + end).hidden
        expected.append(hidden[:, 5 : 5 + len(middle)].mean(axis=1))
        expected_last.append(hidden[:, -1])
    for got, rows in ((means, expected), (last, expected_last)):
        for layer in range(model.model_config.n_layers):
            assert_close(got[layer], np.mean(rows, axis=0)[layer])
