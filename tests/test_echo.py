"""Completions that begin with their prompt: special tokens are written, offsets count in the text,
streamed or not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.asking import LONG
from support.letters import BOS, END, USER, Letters

from rksc import Model, Tokenizer
from rksc.clients import LLM, OpenAI, SamplingParams

CHAT = "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n"
LISTS = ("tokens", "token_logprobs", "text_offset")


@pytest.fixture(scope="module")
def small(smollm2: Model) -> OpenAI:
    return OpenAI(smollm2, dtype="float32", kv_bytes="256MiB")


def whole_and_streamed(client: OpenAI, **ask: Any) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Text and log-probabilities of each choice, as one answer and as the sum of chunks."""
    ask = {"max_tokens": 3, "temperature": 0.8, "seed": 2, "echo": True, "logprobs": 0, **ask}
    choices = client.completions.create(**ask).choices
    yield [(choice.text, {k: choice.logprobs[k] for k in LISTS}) for choice in choices]
    sums: list[tuple[str, dict[str, Any]]] = [("", {k: [] for k in LISTS}) for _ in choices]
    for chunk in client.completions.create(**ask, stream=True):
        (choice,) = chunk.choices
        text, lists = sums[choice.index]
        for name in LISTS if choice.logprobs else ():
            lists[name] += choice.logprobs[name]
        sums[choice.index] = (text + choice.text, lists)
    yield sums


def assert_in_place(text: str, lists: dict[str, Any]) -> None:
    """Each token that is text stands where its offset says, and one begins where the last ends."""
    offsets = lists["text_offset"]
    assert offsets == sorted(offsets)
    for token, begin, end in zip(lists["tokens"], offsets, [*offsets[1:], len(text)], strict=True):
        if end > begin and not token.startswith("bytes:"):
            assert text[begin:].startswith(token)
            assert end - begin in (len(token), len(token) - 1)  # with the first half of the next


PROMPTS: list[Any] = [
    "the abc</s><user>YES 12</s>\n<assistant>",
    "<s><s>th",
    ["<user>", "ab é😀漢é, </s> th", LONG],
    "</s>é",
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_begins_with_the_prompt_that_was_sent(
    client: OpenAI, prompt: Any, n: int
) -> None:
    several = [prompt] if isinstance(prompt, str) else prompt
    whole, streamed = whole_and_streamed(client, prompt=prompt, n=n, ignore_eos=True)
    assert streamed == whole
    for i, (text, lists) in enumerate(whole):
        sent = several[i // n]
        assert text.startswith(sent)
        assert_in_place(text, lists)
        assert len(lists["tokens"]) == len(Letters().encode(sent)) + 3
        assert lists["token_logprobs"][0] is None
        assert None not in lists["token_logprobs"][1:]
        assert lists["text_offset"][-3] == len(sent)
    plain = client.completions.create(prompt=prompt, n=n, max_tokens=3, echo=True, seed=2,
                                      temperature=0.8, ignore_eos=True)  # fmt: skip
    assert [choice.text for choice in plain.choices] == [text for text, _ in whole]
    assert plain.choices[0].logprobs is None


def test_tokens_are_echoed_with_special_ones_spelled_out(client: OpenAI) -> None:
    """A BOS is written where it was sent, and is not where the model's own was added."""
    tokens = [BOS, USER, *Letters().encode("ab th", bos=False), END]
    for sent, shown, first in (
        (tokens, "<s><user>ab th</s>", 3),
        ("<user>ab th</s>", "<user>ab th</s>", 0),
        ("<s><user>ab th</s>", "<s><user>ab th</s>", 3),
    ):
        whole, streamed = whole_and_streamed(client, prompt=sent)
        assert whole == streamed
        ((text, lists),) = whole
        assert text.startswith(shown)
        assert lists["tokens"][:2] == ["<s>", "<user>"]
        assert lists["text_offset"][:2] == [0, first]
    whole, _ = whole_and_streamed(client, prompt="ab th", add_special_tokens=False)
    assert whole[0][1]["tokens"][0] == "ab"


def test_no_new_tokens_leave_the_prompt(client: OpenAI) -> None:
    whole, streamed = whole_and_streamed(client, prompt="<user>abc", max_tokens=0)
    assert whole == streamed
    assert whole[0][0] == "<user>abc"
    assert whole[0][1]["tokens"] == ["<s>", "<user>", "abc"]


@pytest.mark.parametrize("echo", [False, True])
def test_the_token_that_ends_an_answer_is_scored(client: OpenAI, echo: bool) -> None:
    """One more than the prompt's after max_tokens=1, however the model answers: clients that score
    prompts leave out the last."""
    ask: dict[str, Any] = {"prompt": LONG, "max_tokens": 1, "temperature": 0, "echo": echo}
    free = client.completions.create(**ask, logprobs=2, ignore_eos=True).choices[0]
    token = Letters().encode(free.text[len(LONG) * echo :], bos=False)
    assert len(token) == 1
    ended = client.completions.create(**ask, logprobs=2, stop_token_ids=token).choices[0]
    assert ended.finish_reason == "stop"
    assert ended.text == LONG * echo
    assert ended.logprobs == free.logprobs
    assert ended.logprobs.text_offset[-1] == len(ended.text)
    usage = client.completions.create(**ask, stop_token_ids=token).usage
    assert usage.completion_tokens == 0
    whole, streamed = whole_and_streamed(client, **ask, stop_token_ids=token)
    assert whole == streamed
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": LONG}], max_tokens=1, temperature=0, logprobs=True,
        top_logprobs=2, stop_token_ids=list(range(97)),
    )  # fmt: skip
    assert chat.choices[0].logprobs.content == []  # of the message's tokens alone


def test_special_tokens_in_a_new_text_are_spelled_in_the_lists(small: OpenAI) -> None:
    """They add nothing to the text; the next token begins where they do."""
    ask: dict[str, Any] = {"prompt": CHAT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    choice = small.completions.create(**ask, logprobs=1, echo=True).choices[0]
    lists = choice.logprobs
    at = len(small.engine.encode(CHAT))
    end = at + lists.tokens[at:].index("<|im_end|>")
    assert lists.text_offset[end] == lists.text_offset[end + 1]
    assert "<|" not in choice.text[len(CHAT) :]
    assert_in_place(choice.text, lists)
    (output,) = LLM(small).generate(
        CHAT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    )
    rows = zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True)
    assert "<|im_end|>" in [row[token].decoded_token for token, row in rows]


# ---- tokenizers that change a text ---------------------------------------------------------------


@pytest.fixture(scope="module")
def changed(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    """SmolLM2's tokenizer with changes to its tokenizer.json."""

    def make(**changes: Any) -> Tokenizer:
        folder = tmp_path_factory.mktemp("tokenizer")
        assert smollm2.tokenizer is not None
        table = json.loads(smollm2.tokenizer._pipeline.to_str())
        for token in table["added_tokens"]:
            token.update(changes.pop(token["content"], {}))
        (folder / "tokenizer.json").write_text(json.dumps({**table, **changes}))
        return Tokenizer.from_folder(folder)

    return make


def test_offsets_are_of_the_text_that_was_sent(changed: Callable[..., Tokenizer]) -> None:
    """Where a tokenizer composes characters, gives spaces to a special token, or trims."""
    texts = ["Hi cafe\u0301 no\u0308 x", "a<|im_end|> \n b", " lead  and trail  ", "1 2\n\n 3", ""]
    trims = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    for tokenizer in (
        changed(),
        changed(normalizer={"type": "NFC"}),
        changed(**{"<|im_end|>": {"rstrip": True, "lstrip": True}}),
        changed(post_processor={**trims, "use_regex": True}),
    ):
        for text in texts:
            offsets, ids = tokenizer.offsets(text), tokenizer.encode(text, bos=False)
            assert len(offsets) == len(ids)
            assert offsets == sorted(offsets)
            cuts = [*offsets, len(text)] if ids else []
            parts = [text[a:b] for a, b in itertools.pairwise(cuts)]
            assert "".join(parts) == text
            for token, part in zip(ids, parts, strict=True):
                if part in text.split():  # a word by itself
                    assert tokenizer.encode(part, bos=False) == [token]


def test_an_echo_of_a_text_that_the_tokenizer_changes(
    smollm2: Model, changed: Callable[..., Tokenizer]
) -> None:
    """The text is the one that was sent, and what follows begins behind it."""
    session = smollm2.session(kv_bytes="64MiB", tokenizer=changed(normalizer={"type": "NFC"}))
    client, context = OpenAI(session), "Un cafe\u0301 cre\u0300me"
    whole, streamed = whole_and_streamed(client, prompt=context + " noir", max_tokens=1)
    assert whole == streamed
    ((text, lists),) = whole
    assert text.startswith(context + " noir")
    told = zip(lists["text_offset"], lists["tokens"], strict=True)
    found = [token for offset, token in told if offset >= len(context)]
    assert "".join(found[:-1]) == " noir"
