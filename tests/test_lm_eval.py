"""lm-evaluation-harness: edges of its requests on the model `rksc`, and its own models `gguf` and
`local-completions` on rksc serve. tests/test_peers.py runs whole tasks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.letters import BOS, END, Letters
from support.models import T4
from support.reference import log_softmax

from rksc import BranchSession, Model, load
from rksc.clients import OpenAI

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from rksc.clients.lm_eval import RKSC, RequestsError

TEXT = "the abc of 12 things, YES or NO"


class Hook:
    """What --use_cache keeps of the answers as they come."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], Any] = {}

    def add_partial(self, kind: str, request: Any, result: Any) -> None:
        self.kept[kind, repr(request)] = result


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(kind, {}, each, i, metadata=("a_task", 40 + i, 1))  # type: ignore[arg-type]
        for i, each in enumerate(arguments)
    ]


def ask(lm: RKSC, kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    return getattr(lm, kind)(asked(kind, *arguments), disable_tqdm=True)  # type: ignore[no-any-return]


def log_p(tokens: list[int], begin: int) -> float:
    """Of the tokens from `begin` on, given those before, by the float64 definition."""
    logits = T4.reference.forward(tokens).logits
    return float(sum(log_softmax(logits[i - 1])[tokens[i]] for i in range(begin, len(tokens))))


@pytest.fixture
def lm(client: OpenAI) -> RKSC:
    """With a tokenizer that wants a BOS."""
    made = RKSC(client)
    made.cache_hook = Hook()
    return made


# ---- one BOS -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [TEXT, "th", "é漢 abc", "<user>YES</s>", f"<s>{TEXT}"])
def test_rolling_counts_the_bos_once(lm: RKSC, text: str) -> None:
    """log p(text | BOS), also where the text spells the BOS itself."""
    tokens = Letters().encode(text)
    assert tokens[0] == BOS and tokens[1] != BOS
    (found,) = ask(lm, "loglikelihood_rolling", (text,))
    assert found == pytest.approx(log_p(tokens, 1), abs=1e-3)
    # What the harness's hf counts: log p(BOS | BOS), too.
    (doubled,) = ask(RKSC(lm.engine, rolling_as_hf=True), "loglikelihood_rolling", (text,))
    assert doubled == pytest.approx(log_p([BOS, *tokens], 1), abs=1e-3)


def test_rolling_without_a_bos_begins_after_an_end_token(
    make_session: Callable[..., BranchSession],
) -> None:
    session = make_session("T4", tokenizer=Letters(adds_bos=False))
    session.tokenizer.bos_id = None  # type: ignore[union-attr]
    (found,) = ask(RKSC(session), "loglikelihood_rolling", (TEXT,))
    tokens = [END, *Letters().encode(TEXT, bos=False)]
    assert found == pytest.approx(log_p(tokens, 1), abs=1e-3)


def test_rolling_windows_score_each_token_once(lm: RKSC) -> None:
    """Of a text that is longer than the model: the first window begins with the BOS, later ones
    with the tokens before them."""
    lm.max_length = 8
    tokens = Letters().encode(TEXT)
    assert len(tokens) > 20
    expected, at = log_p(tokens[:9], 1), 9
    while at < len(tokens):
        end = min(at + 8, len(tokens))
        expected += log_p(tokens[end - 9 : end], at - (end - 9))
        at = end
    (found,) = ask(lm, "loglikelihood_rolling", (TEXT,))
    assert found == pytest.approx(expected, abs=1e-3)


def test_rolling_of_nothing_is_nothing(lm: RKSC) -> None:
    found = ask(lm, "loglikelihood_rolling", ("",), ("th",))
    assert found[0] == 0.0
    assert found[1] == pytest.approx(log_p([BOS, *Letters().encode("th", bos=False)], 1), abs=1e-3)


# ---- contexts and continuations ------------------------------------------------------------------


@pytest.mark.parametrize(
    "context, continuation, given, scored",
    [
        ("", "abc th", [BOS], "abc th"),
        ("", "<s>abc", [BOS], "abc"),
        ("  ", "abc", [BOS], "  abc"),
        ("<s>", "abc", [BOS], "abc"),
        ("ab ", "c", [BOS, 5 + 4], " c"),
        ("th abc", "\n", None, "\n"),
    ],
)
def test_what_stands_before_a_continuation(
    lm: RKSC, context: str, continuation: str, given: list[int] | None, scored: str
) -> None:
    """An empty context is the BOS, counted once; spaces at its end belong to the continuation."""
    given = Letters().encode(context) if given is None else given
    tokens = [*given, *Letters().encode(scored, bos=False)]
    ((found, greedy),) = ask(lm, "loglikelihood", (context, continuation))
    assert found == pytest.approx(log_p(tokens, len(given)), abs=1e-3)
    logits = T4.reference.forward(tokens).logits[len(given) - 1 : -1]
    assert greedy == (logits.argmax(1).tolist() == tokens[len(given) :])


@pytest.mark.parametrize("context", ["", "  "])
def test_an_empty_context_without_a_bos_is_an_end_token(
    make_session: Callable[..., BranchSession], context: str
) -> None:
    session = make_session("T4", tokenizer=Letters(adds_bos=False))
    session.tokenizer.bos_id = None  # type: ignore[union-attr]
    ((found, _),) = ask(RKSC(session), "loglikelihood", (context, "abc"))
    tokens = [END, *Letters().encode(context + "abc", bos=False)]
    assert found == pytest.approx(log_p(tokens, 1), abs=1e-3)


def test_a_long_context_loses_its_beginning(lm: RKSC) -> None:
    lm.max_length = 10
    context = Letters().encode(TEXT)
    pairs = [(TEXT, "th abc"), (TEXT, "abcdefghij")]
    for (found, _), (_, continuation) in zip(ask(lm, "loglikelihood", *pairs), pairs, strict=True):
        scored = Letters().encode(continuation, bos=False)
        tokens = [*context, *scored][-11:]
        assert found == pytest.approx(log_p(tokens, len(tokens) - len(scored)), abs=1e-3)


BAD = [
    ("a", "b", "no token of its own: 'ab' has no more tokens"),
    ("th YE", "S", "no token of its own: 'th YES' has no more tokens"),
    ("th", "", "the continuation is empty"),
    ("", "", "the continuation is empty"),
    ("", "<s>", "no token of its own"),
    ("th", "\ud800", "lone surrogate"),
    ("th", "c" * 600, "the continuation has 600 tokens, max_length is 511"),
]


@pytest.mark.parametrize("context, continuation, why", BAD)
def test_a_bad_request_is_named_and_no_good_one_is_lost(
    lm: RKSC, caplog: pytest.LogCaptureFixture, context: str, continuation: str, why: str
) -> None:
    """It is told before the others are computed; their answers are in the error and the cache."""
    good = [("th", " abc"), ("", "YES")]
    expected = ask(RKSC(lm.engine), "loglikelihood", *good)
    with (
        caplog.at_level(logging.WARNING, "rksc.clients.lm_eval"),
        pytest.raises(RequestsError, match="1 of 3 requests have no answer") as error,
    ):
        ask(lm, "loglikelihood", good[0], (context, continuation), good[1])
    assert error.value.results == [expected[0], None, expected[1]]
    named = f"loglikelihood request 1 (item 41 of a_task), context {context!r}, continuation "
    for said in (str(error.value), caplog.text):
        assert named in said
        assert why in said
    assert lm.cache_hook.kept == {
        ("loglikelihood", repr(pair)): result for pair, result in zip(good, expected, strict=True)
    }


def test_the_run_after_a_bad_request_asks_for_the_rest_alone(lm: RKSC, tmp_path: Path) -> None:
    """With the harness's own cache of answers."""
    pytest.importorskip("sqlitedict")
    from lm_eval.api.model import CachingLM

    cached, stats = CachingLM(lm, str(tmp_path / "cache.db")), lm.engine.session.stats
    with pytest.raises(RequestsError, match="1 of 3 requests"):
        cached.loglikelihood(asked("loglikelihood", ("th", " abc"), ("a", "b"), ("th", " YES")))
    before = stats().steps
    assert before > 0
    again = cached.loglikelihood(asked("loglikelihood", ("th", " abc"), ("th", " YES")))
    assert stats().steps == before
    assert again == ask(RKSC(lm.engine), "loglikelihood", ("th", " abc"), ("th", " YES"))


def test_a_long_context_is_named_by_its_end(lm: RKSC) -> None:
    with pytest.raises(RequestsError) as error:
        ask(lm, "loglikelihood", (TEXT * 9 + "the last 1", ""))
    assert "context ...'" in str(error.value)
    assert "the last 1'" in str(error.value)
    assert len(str(error.value)) < 500


def test_what_does_not_fit_the_kv_budget_is_a_bad_request(
    make_session: Callable[..., BranchSession],
) -> None:
    """In all three calls, beside good ones with the same context."""
    session = make_session("T4", tokenizer=Letters(), kv_bytes="96KiB")
    lm, stats = RKSC(session), session.stats()
    n = stats.blocks_total * stats.block_tokens
    assert n < lm.max_length
    pairs = [("th", " abc"), ("th", " " + "c" * n), ("d" * n, " abc"), ("th", " YES")]
    with pytest.raises(RequestsError, match="2 of 4 requests") as error:
        ask(lm, "loglikelihood", *pairs)
    alone = ask(RKSC(lm.engine), "loglikelihood", pairs[0], pairs[3])
    assert error.value.results == [alone[0], None, None, alone[1]]
    with pytest.raises(RequestsError, match="1 of 2 requests") as error:
        ask(lm, "loglikelihood_rolling", ("d" * (n + 8),), ("th",))
    assert error.value.results[1] is not None
    settings = {"max_gen_toks": 4}
    with pytest.raises(RequestsError, match=r"(?s)1 of 2 requests.*context.*tokens") as error:
        ask(lm, "generate_until", ("d" * (n - 2), settings), ("th", settings))
    assert len(error.value.results[1]) > 0
    assert session.stats().branches == 0


# ---- generation --------------------------------------------------------------------------------


def test_until_in_every_form(lm: RKSC) -> None:
    """A string, several, none; empty ones stop nothing, the first in the text counts."""
    free = ask(lm, "generate_until", (TEXT, {"max_gen_toks": 30}))[0]
    stop = free[7:9]
    at = free.index(stop)
    for until in (stop, [stop], (stop, "never"), ["", stop], ["</s>", free[at + 3 :][:4], stop]):
        (text,) = ask(lm, "generate_until", (TEXT, {"max_gen_toks": 30, "until": until}))
        assert text == free[:at]
    for nothing in (None, [], "", [""], ["never"]):
        settings = {"max_gen_toks": 30, "until": nothing}
        assert ask(lm, "generate_until", (TEXT, settings)) == [free]


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"until": 3}, "until must be"),
        ({"until": ["a", None]}, "until must be"),
        ({"max_gen_toks": "many"}, "max_gen_toks must be"),
        ({"max_gen_toks": 600}, "max_gen_toks: 600 leave no room in max_length 511"),
        ({"num_beams": 4}, "num_beams=4 is not supported: there is no beam search"),
        ({"temperature": -1}, "temperature must be"),
        ({"seed": 2**64}, "seed must be"),
        ({"colour": "blue"}, "colour='blue' is not supported"),
    ],
)
def test_a_setting_that_cannot_be_kept_is_told_before_anything_is_computed(
    lm: RKSC, settings: dict[str, Any], named: str
) -> None:
    good = {"max_gen_toks": 4}
    with pytest.raises(ValueError, match="generate_until request 1 ") as error:
        ask(lm, "generate_until", ("th", good), ("abc", settings), ("YES", good))
    assert named in str(error.value)
    assert "context 'abc'" in str(error.value)
    assert lm.engine.session.stats().steps == 0
    assert not lm.engine.busy


def test_settings_that_ask_for_nothing(lm: RKSC) -> None:
    plain = ask(lm, "generate_until", (TEXT, {"max_gen_toks": 8}))
    for settings in (
        {"max_new_tokens": 8, "num_beams": 1, "repetition_penalty": 1.0, "length_penalty": 1.0},
        {"max_tokens": 8, "do_sample": False, "temperature": 0.7, "top_k": -1, "top_p": None},
        {"max_gen_toks": 8, "max_tokens": 3, "early_stopping": False, "min_new_tokens": 0},
        {"max_completion_tokens": np.int64(8), "do_sample": None, "temperature": None},
    ):
        assert ask(lm, "generate_until", (TEXT, settings)) == plain


def test_an_empty_context_may_be_gone_on_with(make_session: Callable[..., BranchSession]) -> None:
    settings = {"max_gen_toks": 5}
    for bos in (BOS, None):
        session = make_session("T4", tokenizer=Letters(adds_bos=bos is not None))
        session.tokenizer.bos_id = bos  # type: ignore[union-attr]
        given = END if bos is None else bos
        (text,) = ask(RKSC(session), "generate_until", ("", settings))
        (expected,) = session.generate([session.prefill([given])], 5)
        assert text == expected.text


def test_a_bad_context_loses_no_text(lm: RKSC) -> None:
    settings = {"max_gen_toks": 5}
    expected = ask(RKSC(lm.engine), "generate_until", ("th", settings), ("YES", settings))
    with pytest.raises(RequestsError, match=r"generate_until request 1 .*lone surrogate") as error:
        ask(lm, "generate_until", ("th", settings), ("a\ud800", settings), ("YES", settings))
    assert error.value.results == [expected[0], None, expected[1]]
    assert sorted(lm.cache_hook.kept.values()) == sorted(expected)


def test_a_sample_that_fails_loses_no_text(lm: RKSC, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends it, on its way."""
    submit, settings = lm.engine.session.submit, {"max_gen_toks": 5}
    expected = ask(RKSC(lm.engine), "generate_until", ("th", settings), ("YES", settings))

    def failing(branch: Any, *rest: Any) -> Any:
        if branch.tokens.tolist() == Letters().encode("abc"):
            raise RuntimeError("not this one")
        return submit(branch, *rest)

    monkeypatch.setattr(lm.engine.session, "submit", failing)
    with pytest.raises(RequestsError, match=r"request 1 .*not this one") as error:
        ask(lm, "generate_until", ("th", settings), ("abc", settings), ("YES", settings))
    assert error.value.results == [expected[0], None, expected[1]]


@pytest.mark.parametrize("seed", [-1, None])
def test_a_fresh_seed(lm: RKSC, seed: int | None) -> None:
    """-1 and None draw afresh, by the model's argument and by a task's setting; others repeat."""
    draw = {"max_gen_toks": 12, "do_sample": True, "temperature": 1.5}
    fresh = RKSC(lm.engine, seed=seed)
    for model, settings in ((fresh, draw), (lm, {**draw, "seed": seed})):
        assert ask(model, "generate_until", (TEXT, settings)) != ask(
            model, "generate_until", (TEXT, settings)
        )
    for model, settings in ((lm, draw), (fresh, {**draw, "seed": -2})):
        assert ask(model, "generate_until", (TEXT, settings)) == ask(
            model, "generate_until", (TEXT, settings)
        )


# ---- beside the harness's own hf -----------------------------------------------------------------


def test_edges_are_those_of_hf(smollm2: Model, tmp_path: Path) -> None:
    """A folder whose tokenizer adds a BOS: empty contexts, spaces, rolling with the BOS twice."""
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from lm_eval.models.huggingface import HFLM
    from support import model_files

    config = {**model_files.TINY, "vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2}
    model_files.write_hf(tmp_path, model_files.random_weights(config), config)
    assert smollm2.tokenizer is not None
    table = json.loads(smollm2.tokenizer._pipeline.to_str())
    mark, first, second = (
        {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    )
    known = {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
    table["post_processor"] = {
        "type": "TemplateProcessing", "single": [mark, first], "pair": [first, second],
        "special_tokens": {"<|im_start|>": known},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
    )
    # Its logits_cache gives ("Hello", " there") the value after "" where both are asked (0.4.13).
    options = {"dtype": torch.float32, "device": "cpu", "logits_cache": False}
    hf = HFLM(str(tmp_path), batch_size=1, **options)
    ours = RKSC(load(tmp_path), dtype="float32", kv_bytes="64MiB")
    pairs = [
        ("", "Hello there"), ("", "<|im_start|>Hello"), (" ", "Hello"), ("Hello ", "there"),
        ("Hello", " there"), ("<|im_start|>Hello", " there"), ("<|im_start|>", "Hello"),
        ("a b c d " * 100, "e f"),
    ]  # fmt: skip
    for (found, greedy), (expected, other) in zip(
        ask(ours, "loglikelihood", *pairs), ask(hf, "loglikelihood", *pairs), strict=True
    ):
        assert found == pytest.approx(expected, abs=5e-3)
        assert greedy == other
    texts = [("The quick brown fox jumps over the lazy dog.",), ("<|im_start|>Hi",)]
    twice = ask(RKSC(ours.engine, rolling_as_hf=True), "loglikelihood_rolling", *texts)
    assert twice == pytest.approx(ask(hf, "loglikelihood_rolling", *texts), abs=5e-3)
    once = [score for score, _ in ask(hf, "loglikelihood", *(("", text) for (text,) in texts))]
    assert ask(ours, "loglikelihood_rolling", *texts) == pytest.approx(once, abs=5e-3)


# ---- the harness's clients of a server -----------------------------------------------------------

SCORED = [
    ("Question: What is 2 + 2?\nAnswer:", " 4"),
    ("<|im_start|>user\nIs ice cold?<|im_end|>\n<|im_start|>assistant", "\nYes, it is."),
    ("<|im_start|>user\nSay OK.<|im_end|>\n<|im_start|>assistant\nOK", "<|im_end|>"),
    ("\u65e5\u672c\u8a9e\u306e", "\u30c6\u30ad\u30b9\u30c8\U0001f600 a"),
    ("The capital of France is", " Paris"),
]


@pytest.fixture(scope="module")
def small(smollm2: Model) -> OpenAI:
    return OpenAI(smollm2, dtype="float32", kv_bytes="256MiB")


@pytest.fixture
def served() -> Iterator[Callable[..., str]]:
    """served(engine) -> the address of a server, until the test ends."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    from support.serving import Server

    servers: list[Server] = []

    def serve(engine: Any) -> str:
        servers.append(Server(engine))
        return f"http://127.0.0.1:{servers[-1].port}"

    yield serve
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def requests(smollm2: Model) -> list[Any]:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(SCORED)]


@pytest.fixture(scope="module")
def expected(small: OpenAI, requests: list[Any]) -> list[Any]:
    from rksc.clients.lm_eval import RKSC

    return RKSC(small).loglikelihood(requests, disable_tqdm=True)


def test_the_harness_model_gguf_reads_a_server(
    small: OpenAI, requests: list[Any], expected: list[Any], served: Callable[..., str]
) -> None:
    """It finds the continuation by offsets and leaves out the last token. Its is_greedy looks at
    that one, too, which greedy decoding has chosen."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.gguf import GGUFLM

    model = GGUFLM(served(small.engine))
    found = model.loglikelihood(requests, disable_tqdm=True)
    assert found == [(pytest.approx(score), greedy) for score, greedy in expected]


@pytest.mark.parametrize("tokenized", [False, True])
def test_the_harness_model_local_completions_reads_a_server(
    small: OpenAI, requests: list[Any], expected: list[Any], served: Callable[..., str],
    tokenized: bool, tmp_path: Path,
) -> None:  # fmt: skip
    """It finds the continuation by counting tokens of a tokenizer of its own, and sends these."""
    pytest.importorskip("tenacity")
    pytest.importorskip("transformers")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    small.engine.tokenizer._pipeline.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    model = LocalCompletionsAPI(
        served(small.engine) + "/v1/completions", tokenizer_backend="huggingface", model="any",
        tokenizer=str(tmp_path), tokenized_requests=tokenized, max_retries=1,
    )  # fmt: skip
    found = model.loglikelihood(requests, disable_tqdm=True)
    assert found == [(pytest.approx(score), greedy) for score, greedy in expected]
