"""The OpenAI shape over HTTP and in the process: the same errors (status, type, param and code as
OpenAI's), the same echo, the same fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.asking import ASK
from support.letters import Letters

from rksc import CapacityError
from rksc.clients import LLM, OpenAI, SamplingParams

pytest.importorskip("starlette")

from support.asgi import ask

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def refusal(client: OpenAI, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The error object of a request, which server and client in the process have alike."""
    create = client.chat.completions.create if path == CHAT else client.completions.create
    with pytest.raises(ValueError) as refused:
        create(**body)
    error: Any = refused.value
    status, answer = ask(client.engine, path, body)
    assert status == error.status_code
    assert answer["error"] == error.body
    assert error.body == {k: getattr(error, k) for k in ("message", "type", "param", "code")}
    assert str(error) == error.message
    assert not client.engine.busy
    return error.body  # type: ignore[no-any-return]


def n_tokens(body: dict[str, Any]) -> int:
    """Of the last prompt."""
    if "messages" in body:
        text = Letters(chat=True).chat(body["messages"], add_generation_prompt=True)
        return len(Letters().encode(text))
    prompt = body["prompt"]
    text = prompt[-1] if isinstance(prompt[0], str) and isinstance(prompt, list) else prompt
    return len(Letters().encode(text) if isinstance(text, str) else text)


TOO_LONG: list[tuple[str, str, dict[str, Any]]] = [
    ("messages", CHAT, {"messages": [{"role": "user", "content": "th " * 600}]}),
    ("messages", CHAT, {"messages": ASK * 40, "stream": True, "max_tokens": 1}),
    ("prompt", COMPLETION, {"prompt": "abc " * 600}),
    ("prompt", COMPLETION, {"prompt": ["th", "th " * 600], "echo": True}),
    ("prompt", COMPLETION, {"prompt": [5] * 512}),
]


@pytest.mark.parametrize("field, path, body", TOO_LONG)
def test_a_full_context_has_openais_code(
    client: OpenAI, field: str, path: str, body: dict[str, Any]
) -> None:
    """Programs shorten a chat at this code, or at these words and the number after them."""
    error = refusal(client, path, body)
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert "maximum context length is 512 tokens" in error["message"]
    assert f" {n_tokens(body)} tokens are too many" in error["message"]


def test_one_token_less_than_the_context_is_answered(client: OpenAI) -> None:
    answer = client.completions.create(prompt=[5] * 511, max_tokens=9, temperature=0)
    assert answer.usage.total_tokens == 512


def test_a_full_kv_budget_is_a_full_context(make_client: Callable[..., OpenAI]) -> None:
    """By the prompt alone, and by the prompt with the new tokens that are asked for."""
    client = make_client(kv_bytes="96KiB")
    stats = client.engine.session.stats()
    budget = stats.blocks_total * stats.block_tokens
    assert budget < 400
    for field, path, body in (
        ("prompt", COMPLETION, {"prompt": [5] * (budget + 1), "max_tokens": 0}),
        ("max_tokens", COMPLETION, {"prompt": [5] * budget, "max_tokens": 1}),
        ("max_tokens", CHAT, {"messages": ASK, "max_tokens": budget}),
        ("max_completion_tokens", CHAT, {"messages": ASK, "max_completion_tokens": budget}),
    ):
        error = refusal(client, path, body)
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert f"maximum context length is {budget} tokens" in error["message"]
    with pytest.raises(CapacityError, match="maximum context length") as refused:
        LLM(client).generate([[5, 6], [5] * (budget + 1)], SamplingParams(max_tokens=1))
    assert refused.value.param == "prompts"  # type: ignore[attr-defined]
    assert "prompts[1]" in str(refused.value)


def test_an_unknown_model_is_a_404(client: OpenAI) -> None:
    with pytest.raises(ValueError, match="gpt-4") as refused:
        client.models.retrieve("gpt-4")
    error: Any = refused.value
    status, answer = ask(client.engine, "/v1/models/gpt-4", method="GET")
    assert status == error.status_code == 404
    assert answer["error"] == error.body
    assert (error.param, error.code) == ("model", "model_not_found")


@pytest.mark.parametrize(
    "status, code, request_of",
    [
        (404, "unknown_url", {"path": "/v1/nothing", "body": {}}),
        (405, "method_not_supported", {"path": CHAT, "method": "GET"}),
        (415, "unsupported_content_type", {"path": CHAT, "body": b"{}", "content-type": "a/b"}),
        (400, None, {"path": COMPLETION, "body": b"{no json"}),
        (400, None, {"path": CHAT, "body": [1]}),
    ],
)
def test_what_is_no_request_at_all(
    client: OpenAI, status: int, code: str | None, request_of: dict[str, Any]
) -> None:
    found, answer = ask(client.engine, **request_of)
    error = answer["error"]
    assert (found, error["code"], error["param"]) == (status, code, None)
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    "code, field, change",
    [
        ("missing_required_parameter", "messages", {"messages": None}),
        ("empty_array", "messages", {"messages": []}),
        ("invalid_type", "messages", {"messages": "hi"}),
        ("invalid_type", "temperature", {"temperature": "hot"}),
        ("decimal_above_max_value", "top_p", {"top_p": 1.5}),
        ("decimal_below_min_value", "temperature", {"temperature": -1}),
        ("integer_below_min_value", "n", {"n": 0}),
        ("integer_above_max_value", "top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("invalid_type", "n", {"n": 2.5}),
        ("invalid_type", "stop", {"stop": 3}),
        ("invalid_value", "stop", {"stop": [""]}),
        ("invalid_value", "seed", {"seed": 2**64}),
        ("unsupported_parameter", "logit_bias", {"logit_bias": {"3": 5}}),
        ("unsupported_parameter", "min_tokens", {"min_tokens": 2}),
        ("unknown_parameter", "colour", {"colour": "blue"}),
        ("unsupported_parameter", "stream_options",
         {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
    ],
)  # fmt: skip
def test_a_wrong_field_has_openais_code(
    client: OpenAI, code: str, field: str, change: dict[str, Any]
) -> None:
    error = refusal(client, CHAT, {"messages": ASK, "max_tokens": 2, **change})
    assert (error["code"], error["param"]) == (code, field)
    assert field in error["message"]


def test_a_missing_prompt_has_openais_code(client: OpenAI) -> None:
    for code, prompt in (("missing_required_parameter", None), ("invalid_value", [])):
        assert refusal(client, COMPLETION, {"prompt": prompt})["code"] == code


@pytest.mark.parametrize("name", ["\ud800", "x" * 10**6, "\x00"])
def test_an_error_can_be_sent_whatever_it_is_about(client: OpenAI, name: str) -> None:
    for body in ({name: 1}, {"seed": name}, {"suffix": name}, {"stop": [name, 3]}):
        error = refusal(client, COMPLETION, {"prompt": "abc", **body})
        assert len(error["message"]) < 2100 and len(error["param"]) < 110
        error["message"].encode()


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_pool_is_told_alike(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """No room for a step, after the request was taken."""

    def full() -> None:
        raise CapacityError("no room for the next token")

    monkeypatch.setattr(client.engine.session, "step", full)
    body: dict[str, Any] = {"prompt": "abc", "max_tokens": 2, "stream": stream}
    with pytest.raises(CapacityError, match="no room") as refused:
        list(client.completions.create(**body))
    error: Any = refused.value
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    status, answer = ask(client.engine, COMPLETION, body)
    assert status == (200 if stream else error.status_code)
    assert (answer[-1] if stream else answer)["error"] == error.body


# ---- answers -----------------------------------------------------------------------------------


def test_an_echo_over_http_is_the_clients(client: OpenAI) -> None:
    body: dict[str, Any] = {
        "prompt": ["<user>ab</s>", "<s>th \u00e9"], "n": 2, "max_tokens": 3, "temperature": 0.9,
        "seed": 4, "echo": True, "logprobs": 0, "ignore_eos": True,
    }  # fmt: skip
    expected = client.completions.create(**body).model_dump()["choices"]
    status, answer = ask(client.engine, COMPLETION, body)
    assert (status, answer["choices"]) == (200, expected)
    status, chunks = ask(client.engine, COMPLETION, {**body, "stream": True})
    assert status == 200
    for choice in expected:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            told = [value for part in mine if part["logprobs"] for value in part["logprobs"][name]]
            assert told == choice["logprobs"][name]


def test_fields_that_ask_for_nothing_over_http(client: OpenAI) -> None:
    body: dict[str, Any] = {"messages": ASK, "max_tokens": 3, "temperature": 0}
    neutral = {
        "min_tokens": 0, "skip_special_tokens": True, "bad_words": [], "logit_bias": {},
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "seed": -1,
        "top_k": -1, "repetition_penalty": 1.0, "stream_options": None, "priority": 0,
        "store": False, "metadata": None, "service_tier": "auto", "parallel_tool_calls": True,
        "use_beam_search": False, "truncate_prompt_tokens": None, "guided_json": None,
        "reasoning_effort": None, "max_completion_tokens": None, "suffix": None, "colour": None,
    }  # fmt: skip
    status, answer = ask(client.engine, CHAT, {**body, **neutral})
    plain = client.chat.completions.create(**body).choices[0].message.content
    assert (status, answer["choices"][0]["message"]["content"]) == (200, plain)
