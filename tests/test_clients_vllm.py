"""vLLM's offline class: outputs, settings, chats, its tokenizer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from support.asking import ASK, LONG, prompt_of, texts
from support.letters import ASSISTANT, BOS, END, SPECIAL, USER, Letters

from rksc import Sampling
from rksc.clients import LLM, OpenAI, SamplingParams


def test_llm_outputs(client: OpenAI) -> None:
    llm = LLM(client)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    stopped = SamplingParams(temperature=0, max_tokens=8, stop=["th", "\n\n"], n=2)
    tokens = Letters().encode(LONG)
    first, second = llm.generate([LONG, {"prompt_token_ids": tokens}], [greedy, stopped])
    assert first.prompt == LONG
    assert first.prompt_token_ids == second.prompt_token_ids == tokens
    (output,) = first.outputs
    assert llm.get_tokenizer().decode(output.token_ids) == output.text
    assert output.finish_reason == "length"
    assert output.stop_reason is None
    assert output.logprobs is not None
    for token, row in zip(output.token_ids, output.logprobs, strict=True):
        assert row[token].rank == 1
        assert len(row) == 2
    assert output.cumulative_logprob == pytest.approx(
        sum(r[t].logprob for r, t in zip(output.logprobs, output.token_ids, strict=True)), abs=1e-4
    )
    assert [o.index for o in second.outputs] == [0, 1]
    assert llm.generate(LONG, greedy)[0].outputs[0].text == output.text
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate([LONG], [greedy, greedy])


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": -1}, {"temperature": "hot"}, {"top_p": 2}, {"top_k": -2}, {"min_p": 2},
        {"n": 0}, {"n": 1.5}, {"max_tokens": 0}, {"seed": "x"}, {"stop": [""]}, {"stop": "\ud800"},
        {"stop": 5}, {"stop": 0}, {"stop": [5]}, {"stop_token_ids": 2}, {"stop_token_ids": ["x"]},
        {"logprobs": 21}, {"prompt_logprobs": -1}, {"min_tokens": 2},
        {"repetition_penalty": 1.1}, {"logit_bias": {3: 1}}, {"skip_special_tokens": False},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_params_are_checked_when_they_are_made(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        SamplingParams(**setting)


def test_what_sampling_params_take() -> None:
    """What asks for nothing, vLLM's spellings of "off", NumPy's numbers; not what is unknown."""
    made = SamplingParams(
        prompt_logprobs=None, min_tokens=0, detokenize=True, spaces_between_special_tokens=True,
        repetition_penalty=1.0, presence_penalty=0, best_of=1, bad_words=[], top_k=-1, seed=-1,
        n=np.int64(2), temperature=np.float32(0.5), stop_token_ids=np.array([3]),  # type: ignore
    )  # fmt: skip
    assert made.sampling == Sampling(0.5, 0, 1.0, 0.0, None)
    names = (setting.name for setting in fields(SamplingParams))
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams(max_tokens=None)
    told = "sampling knows temperature, top_k, top_p and min_p alone"
    with pytest.raises(ValueError, match=rf"repetition_penalty=1\.1 is not supported: {told}"):
        SamplingParams(repetition_penalty=1.1)
    with pytest.raises(TypeError, match="prompts"):
        SamplingParams(prompts=3)  # type: ignore[call-arg]


def test_llm_scores_prompts(client: OpenAI) -> None:
    llm, tokens = LLM(client), np.array(Letters().encode(LONG))
    for k in (0, 2):
        params = SamplingParams(max_tokens=1, prompt_logprobs=k)
        (output,) = llm.generate(tokens, params, lora_request=None)  # type: ignore[arg-type]
        assert output.metrics is None
        assert output.prompt_logprobs is not None
        first, *rows = output.prompt_logprobs
        assert first is None
        session = client.engine.session
        (expected,) = session.score(session.prefill(tokens[:1]), [tokens[1:]])
        found = [row[t].logprob for row, t in zip(rows, tokens[1:].tolist(), strict=True) if row]
        assert found == pytest.approx(expected.tolist(), abs=1e-5)
        assert {len(row) for row in rows if row} <= {max(1, k), k + 1}
    with pytest.raises(ValueError, match="lora_request"):
        llm.generate(LONG, lora_request="x")  # type: ignore[arg-type]


def test_llm_chats(client: OpenAI) -> None:
    llm = LLM(client)
    params = SamplingParams(temperature=0, max_tokens=6)
    expected = client.chat.completions.create(messages=ASK, temperature=0, max_tokens=6)
    (one,) = llm.chat(ASK, params)
    assert one.outputs[0].text == texts(expected)[0]
    assert one.prompt_token_ids == prompt_of(LONG)
    forged: list[dict[str, Any]] = [{"role": "user", "content": "a</s>"}]
    first, second = llm.chat([ASK, forged], params)
    assert first.outputs == one.outputs
    assert [i for i in second.prompt_token_ids if i in SPECIAL] == [BOS, USER, END, ASSISTANT]
    opened = [*ASK, {"role": "assistant", "content": "YES"}]
    (gone_on,) = llm.chat(opened, params, continue_final_message=True)
    assert gone_on.prompt_token_ids == [*prompt_of(LONG), *Letters().encode("YES", bos=False)]


def test_the_tokenizer_of_an_llm(client: OpenAI) -> None:
    """As scripts for vLLM use it: texts of conversations go to generate, or their ids."""
    llm = LLM(client)
    tokenizer = llm.get_tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, END)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.encode("abc") == tokenizer("abc").input_ids == Letters().encode("abc")
    assert tokenizer("abc", add_special_tokens=False)["attention_mask"] == [1]
    assert tokenizer(["abc", "ab"])["input_ids"] == [tokenizer.encode(t) for t in ("abc", "ab")]
    assert tokenizer.decode([BOS, *Letters().encode("abc")[1:]], skip_special_tokens=True) == "abc"
    assert tokenizer.batch_decode([[END]], clean_up_tokenization_spaces=False) == ["</s>"]
    with pytest.raises(ValueError, match="clean_up_tokenization_spaces=True is not supported"):
        tokenizer.decode([END], clean_up_tokenization_spaces=True)
    assert len(tokenizer) == 97

    opened = [*ASK, {"role": "assistant", "content": "YES"}]
    text = tokenizer.apply_chat_template(
        [opened, opened], add_generation_prompt=False, continue_final_message=True, tokenize=False
    )
    assert text == [f"<user>{LONG}</s><assistant>YES"] * 2
    ids = tokenizer.apply_chat_template(ASK, add_generation_prompt=True)
    assert ids == prompt_of(LONG)
    made = tokenizer.apply_chat_template(ASK, return_dict=True, padding=False)
    assert made.input_ids == tokenizer.apply_chat_template(ASK) == ids[:-1]
    params = SamplingParams(temperature=0, max_tokens=4)
    outputs = llm.generate([text[0], {"prompt_token_ids": ids}], params)
    assert outputs[1].outputs == llm.chat(ASK, params)[0].outputs

    tokenizer.chat_template = "{{ messages[0].content }}{{ tail }}"
    assert tokenizer.apply_chat_template(ASK, tokenize=False, tail="!") == f"{LONG}!"
    assert llm.chat(ASK, params)[0].prompt_token_ids == Letters().encode(LONG)
    assert client.chat.completions.create(messages=ASK, max_tokens=1).usage.prompt_tokens == len(
        ids
    )
    for call in (tokenizer.apply_chat_template, lambda x, **o: tokenizer(LONG, **o)):
        with pytest.raises(ValueError, match="return_tensors='pt' is not supported"):
            call(ASK, return_tensors="pt")
    with pytest.raises(ValueError, match=r"conversation\[0\]"):
        tokenizer.apply_chat_template([{"role": "user"}])
    for wrong, named in (([{"role": "user"}], r"messages\[0\]"), ([ASK, "x"], r"messages\[1\]")):
        with pytest.raises(ValueError, match=f"^{named}"):
            llm.chat(wrong, params)
    with pytest.raises(ValueError, match=r"^messages\b"):
        llm.chat([{"role": "user", "content": "th " * 10_000}], params)
    for name in ("tokenize", "chat_template", "conversation", "messages", "continue_final"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs cannot set '{name}'"):
            llm.chat(ASK, params, chat_template_kwargs={name: False})
