"""The fields of a request: what is refused by name, what asks for nothing, spellings of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.asking import ASK, LONG
from support.letters import Letters

from rksc import BranchSession
from rksc.clients import LLM, OpenAI

Make = Callable[..., BranchSession]


BAD: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": [{"content": "x"}]}),
    ("messages", {"messages": [{"role": "user", "content": 3}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("messages", {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}),
    ("n", {"n": 0}),
    ("n", {"n": 2.5}),
    ("n", {"n": 10**6}),
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 1.5}),
    ("min_p", {"min_p": True}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_completion_tokens", {"max_completion_tokens": "many"}),
    ("seed", {"seed": "x"}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": 3}),
    ("stop", {"stop": "\ud800"}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"add_generation_prompt": False}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"template": "x"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {3: 1}}),
    ("stop_token_ids", {"stop_token_ids": [97]}),
    ("logprobs", {"logprobs": 2}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 1, "stream": True}),
    ("stream", {"stream": "yes"}),
    ("logit_bias", {"logit_bias": {"3": 1}}),
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("reasoning_effort", {"reasoning_effort": "low"}),
    ("extra_body", {"extra_body": 3}),
    ("guided_json", {"extra_body": {"guided_json": {}}}),
]


@pytest.mark.parametrize("field, change", BAD, ids=[f"{i}-{f}" for i, (f, _) in enumerate(BAD)])
def test_a_refusal_names_the_field(client: OpenAI, field: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=field) as refused:
        client.chat.completions.create(**{"messages": ASK, "max_tokens": 2, **change})
    assert getattr(refused.value, "field", None) == field
    assert not client.engine.busy


def test_fields_that_ask_for_nothing_are_fine(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=ASK, max_tokens=1, n=None, stop=None, logit_bias={}, tools=[], user="me",
        presence_penalty=0, response_format={"type": "text"}, timeout=3, tool_choice="none",
    )  # fmt: skip
    assert answer.usage.completion_tokens == 1


def test_numbers_may_be_numpys(client: OpenAI) -> None:
    """Scalars of its types, where a script takes them from an array, and arrays of tokens."""
    tokens = np.array([Letters().encode(LONG)] * 2)
    plain: dict[str, Any] = {
        "n": 2, "max_tokens": 5, "temperature": 0.5, "top_p": 0.75, "top_k": 9, "seed": 3,
        "stop_token_ids": [40, 41], "ignore_eos": True,
    }  # fmt: skip
    numpys: dict[str, Any] = {
        "n": np.int64(2), "max_tokens": np.int32(5), "temperature": np.float32(0.5),
        "top_p": np.float16(0.75), "top_k": np.uint8(9), "seed": np.uint64(3),
        "stop_token_ids": np.array([40, 41]), "ignore_eos": np.True_,
    }  # fmt: skip
    expected = [c.text for c in client.completions.create(prompt=[LONG, LONG], **plain).choices]
    for prompt in (tokens, list(tokens), [list(row) for row in tokens]):
        answer = client.completions.create(prompt=prompt, **numpys)
        assert [c.text for c in answer.choices] == expected
    single = client.completions.create(prompt=list(tokens[0]), **numpys)
    assert [c.text for c in single.choices] == expected[:2]
    for bad in ({"n": np.float64(2)}, {"n": np.array([1, 2])}, {"temperature": np.inf},
                {"max_tokens": np.True_}, {"stop_token_ids": np.array([97])}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(bad))):
            client.completions.create(prompt=LONG, **bad)


def test_arguments_that_openai_left_out(client: OpenAI) -> None:
    openai = pytest.importorskip("openai")
    answer = client.chat.completions.create(
        messages=ASK, max_tokens=2, stop=openai.NOT_GIVEN, temperature=openai.omit,
        tools=openai.omit, extra_body=openai.NOT_GIVEN,
    )  # fmt: skip
    assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize("prompt", [None, "", [], [[]], [3.5], [[1, 97]], [{"a": 1}]])
def test_bad_prompts(client: OpenAI, prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        client.completions.create(prompt=prompt)


@pytest.mark.parametrize(
    "prompt, named", [("a\ud800", "prompt:"), (["a", "\ud800"], r"prompt\[1\]:")]
)
def test_half_a_character_is_named_by_its_field(client: OpenAI, prompt: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} .* lone surrogate"):
        client.completions.create(prompt=prompt)
    with pytest.raises(ValueError, match=r"^prompts\[0\]: .* lone surrogate"):
        LLM(client).generate("\ud800")
    with pytest.raises(ValueError, match=r"^messages\[0\].content: .* lone surrogate"):
        client.chat.completions.create(messages=[{"role": "user", "content": "\ud800"}])


def test_prompts_are_texts_or_tokens(client: OpenAI) -> None:
    tokens = Letters().encode(LONG)
    answers = [
        client.completions.create(prompt=p, max_tokens=5, temperature=0).choices[-1].text
        for p in (LONG, tokens, ["abc", LONG], [[5], tokens])
    ]
    assert len(set(answers)) == 1


def test_a_model_without_a_tokenizer_is_refused(make_session: Make) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        OpenAI(make_session("T4"))
    with pytest.raises(TypeError, match="model"):
        OpenAI("a path")  # type: ignore[arg-type]
