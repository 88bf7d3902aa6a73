"""Fields of OpenAI's and vLLM's APIs that rksc does not act on: at values that ask for nothing
every client takes them, at others every client refuses them by name. And one rule of seeds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from support.asking import ASK, LONG
from support.letters import Letters
from support.sessions import open_session

from rksc.clients import LLM, OpenAI, SamplingParams
from rksc.clients._fields import ASIDE, NEUTRAL, check_settings, read_seed
from rksc.clients._wire import _CHAT, _COMPLETION, Request, read_chat, read_completion


def names(text: str) -> set[str]:
    return set(text.split())


# vLLM's settings (SamplingParams and the body of its server), as of December 2026.
VLLM_SAMPLING = names("""
    n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_start
    prompt_logprob_token_ids logprob_token_ids flat_logprobs detokenize skip_special_tokens
    spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone
    structured_outputs logit_bias allowed_token_ids extra_args bad_words skip_reading_prefix_cache
    thinking_token_budget repetition_detection routed_experts_prompt_start trace_decode_token_ids
    watermarking
""")
VLLM_BEFORE = names("""
    best_of use_beam_search length_penalty early_stopping logits_processors guided_decoding
    truncate_prompt_tokens
""")
VLLM_BODY = names("""
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message
    add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs
    mm_processor_kwargs structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_prompt_text return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection stream_interval thinking_token_budget include_reasoning reasoning_effort
    prompt_embeds response_format guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern
""")
TRANSPORT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


@pytest.fixture(scope="module")
def client() -> OpenAI:
    """One for all: few of these requests are run."""
    return OpenAI(open_session("T4", tokenizer=Letters(chat=True)))


def asking(name: str) -> list[Any]:
    """Values of a field that ask for something: of the kinds that its neutral ones have."""
    found: list[Any] = []
    for value in NEUTRAL[name] or ("",):
        if value is True or value is False:
            found += [not value] if (not value) not in NEUTRAL[name] else ["yes"]
        elif isinstance(value, int):
            found += [value + 0.5, 7, str(value), value == 1]
        elif value == []:
            found += [["x"], {"3": 5}]
        else:
            found += [{"type": "x"}, "other", ["audio"]]
    return found


CASES = [(name, value) for name, values in NEUTRAL.items() for value in (None, *values)]


def asked(request: Request) -> dict[str, Any]:
    """What a request asks of the engine, and how its answer shall look."""
    (sample,) = request.samples
    seen = {k: v for k, v in vars(request).items() if k not in ("id", "created", "samples")}
    return seen | vars(sample) | {"prompt": sample.prompt.tolist()}


@pytest.mark.parametrize("name, value", CASES, ids=[f"{n}={v}" for n, v in CASES])
def test_what_asks_for_nothing_changes_nothing(client: OpenAI, name: str, value: Any) -> None:
    """In chats, completions (and so over HTTP) and SamplingParams."""
    chat: dict[str, Any] = {"messages": ASK, "max_tokens": 2, "seed": 1}
    text: dict[str, Any] = {"prompt": LONG, "max_tokens": 2, "seed": 1}
    for read, body, own in ((read_chat, chat, _CHAT), (read_completion, text, _COMPLETION)):
        if name not in own:  # otherwise it is acted on there
            plain = asked(read(client.engine, body, "m"))
            assert asked(read(client.engine, {**body, name: value}, "m")) == plain
    if name in {setting.name for setting in fields(SamplingParams)}:
        made = SamplingParams(seed=1, **{name: value})
        assert (made.sampling, made.n) == (SamplingParams(seed=1).sampling, 1)
        same = {f.name for f in fields(made)} - {name}
        assert all(getattr(made, f) == getattr(SamplingParams(seed=1), f) for f in same)


def refused(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}=.* is not supported: .") as error:
        call()
    found: Any = error.value
    assert (found.param, found.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_asks_for_something_is_refused_by_name(client: OpenAI, name: str) -> None:
    values = asking(name)
    assert values
    for value in values:
        body = {name: value}
        if name not in _CHAT:
            refused(lambda: client.chat.completions.create(messages=ASK, **body), name)
        if name not in _COMPLETION:
            refused(lambda: client.completions.create(prompt=LONG, extra_body=body), name)
        if name in {s.name for s in fields(SamplingParams)} and name != "prompt_logprobs":
            refused(lambda: SamplingParams(**body), name)
        if name not in inspect.signature(LLM.chat).parameters:
            refused(lambda: LLM(client).chat(ASK, **body), name)
    assert not client.engine.busy


def test_neutral_values_have_kinds() -> None:
    """True is no 1, 0 no False; NumPy's values and empty containers of any type are taken."""
    for settings in (
        {"frequency_penalty": np.float32(0), "repetition_penalty": np.int64(1), "tools": ()},
        {"logit_bias": np.array([]), "bad_words": set(), "detokenize": np.True_, "priority": 0.0},
        {"best_of": 4, "n": 4},
        {"best_of": 1, "n": np.int64(4)},
    ):
        check_settings(settings, {"n"})
    for name, value in (
        ("repetition_penalty", True), ("frequency_penalty", False), ("detokenize", 1),
        ("use_beam_search", 0), ("suffix", []), ("tools", ""), ("frequency_penalty", float("nan")),
        ("best_of", 3), ("repetition_penalty", np.array([1, 1])), ("tools", np.array([1])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}="):
            check_settings({name: value, "n": 4}, {"n"})


def test_the_table_knows_every_field_of_openais_package() -> None:
    openai = pytest.importorskip("openai")
    for create, own in (
        (openai.resources.chat.completions.Completions.create, _CHAT),
        (openai.resources.completions.Completions.create, _COMPLETION),
    ):
        known = own | ASIDE | NEUTRAL.keys() | TRANSPORT
        assert set(inspect.signature(create).parameters) - known == set()


def test_the_table_knows_every_field_of_vllm() -> None:
    ours = {setting.name for setting in fields(SamplingParams)}
    assert (VLLM_SAMPLING | VLLM_BEFORE) - ours == set()
    for own in (_CHAT, _COMPLETION):
        assert (VLLM_SAMPLING | VLLM_BODY) - own - ASIDE - NEUTRAL.keys() == set()


def test_llm_takes_vllms_arguments_that_ask_for_nothing(client: OpenAI) -> None:
    llm, params = LLM(client), SamplingParams(temperature=0, max_tokens=3)
    (plain,) = llm.generate(LONG, params)
    (output,) = llm.generate(
        LONG, params, use_tqdm=True, lora_request=None, priority=[], tokenization_kwargs={},
        mm_processor_kwargs=None,
    )  # fmt: skip
    assert output.outputs == plain.outputs
    (chat,) = llm.chat(ASK, params, tools=None, chat_template_content_format="auto")
    assert chat.outputs == llm.chat(ASK, params)[0].outputs
    with pytest.raises(ValueError, match=r"priority=\[1\] is not supported"):
        llm.generate(LONG, params, priority=[1])
    with pytest.raises(TypeError, match=r"generate\(\) has no option 'temprature'"):
        llm.generate(LONG, params, temprature=0)


def test_stream_options(client: OpenAI) -> None:
    ask: dict[str, Any] = {"prompt": LONG, "max_tokens": 1, "temperature": 0, "stream": True}
    fine: list[dict[str, Any]] = [
        {}, {"include_usage": False}, {"include_usage": None, "include_obfuscation": True},
        {"continuous_usage_stats": False},
    ]  # fmt: skip
    for options in fine:
        chunks = list(client.completions.create(**ask, stream_options=options))
        assert all(chunk.usage is None for chunk in chunks)
    for name, value in (("include_usage", "yes"), ("continuous_usage_stats", True), ("x", 1)):
        with pytest.raises(ValueError, match=rf"^stream_options\.{name}"):
            client.completions.create(**ask, stream_options={name: value})


# ---- seeds -------------------------------------------------------------------------------------


def texts_of(client: OpenAI, seed: Any) -> dict[str, str]:
    """A sampled text of each shape."""
    ask: dict[str, Any] = {"temperature": 1.5, "max_tokens": 12, "seed": seed, "ignore_eos": True}
    llm, params = LLM(client), SamplingParams(**ask)
    return {
        "chat": client.chat.completions.create(messages=ASK, **ask).choices[0].message.content,
        "completion": client.completions.create(prompt=LONG, **ask).choices[0].text,
        "generate": llm.generate(LONG, params)[0].outputs[0].text,
        "LLM.chat": llm.chat(ASK, params)[0].outputs[0].text,
    }


@pytest.mark.parametrize("seed", [None, -1, np.int64(-1)])
def test_a_seed_of_minus_one_is_none(client: OpenAI, seed: Any) -> None:
    first, second = texts_of(client, seed), texts_of(client, seed)
    assert all(first[shape] != second[shape] for shape in first)
    assert read_seed(seed) is None


@pytest.mark.parametrize("seed", [0, 7, -2, 2**64 - 1, -(2**63), np.uint64(2**63)])
def test_any_other_seed_is_that_seed_in_every_client(client: OpenAI, seed: Any) -> None:
    first = texts_of(client, seed)
    assert first == texts_of(client, seed)
    assert first["generate"] == first["completion"]
    assert first["LLM.chat"] == first["chat"]
    assert first != texts_of(client, 1)
    assert texts_of(client, int(seed) % 2**64) == first


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.0, "7", True, [1]])
def test_a_seed_out_of_bounds_is_named(client: OpenAI, seed: Any) -> None:
    for call in (
        lambda: client.completions.create(prompt=LONG, seed=seed),
        lambda: client.chat.completions.create(messages=ASK, seed=seed),
        lambda: SamplingParams(seed=seed),
    ):
        with pytest.raises(ValueError, match="seed must be an integer"):
            call()
