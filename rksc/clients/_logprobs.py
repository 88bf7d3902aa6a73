"""Log-probabilities in OpenAI's shapes: how tokens are spelled, and where each begins in a text.

A completion's lists tell of all tokens of its text: with echo those of the prompt, then the new
ones, then the end token or stop id if one ended it. So there is one more entry than the prompt has
tokens after `max_tokens=1`, however the model answers, which is what clients that score prompts
count on. Offsets count characters of the text. A token that is not written in it (an added BOS, a
special token among the new ones) is spelled out, and begins where the next one begins.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._engine import Alternatives, Engine, Sample


def spelling(engine: Engine, token: int) -> str:
    """As OpenAI spells tokens: bytes that are no text have their values. Different tokens differ,
    so that they can be keys."""
    data = engine.special.get(token) or engine.token_bytes[token]
    try:
        return data.decode() or f"token_id:{token}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


# ---- chats ---------------------------------------------------------------------------------------


def entry(engine: Engine, token: int, logprob: float) -> dict[str, Any]:
    """bytes: what the token adds to the text, nothing if it is special."""
    return {
        "token": spelling(engine, token),
        "logprob": float(logprob),
        "bytes": list(engine.token_bytes[token]),
        "top_logprobs": [],
    }


def chat_logprobs(engine: Engine, sample: Sample) -> dict[str, Any]:
    content = []
    for i, (token, logprob) in enumerate(zip(sample.tokens, sample.logprobs, strict=True)):
        made = entry(engine, token, logprob)
        if sample.alternatives:
            ids, values = sample.alternatives[i]
            made["top_logprobs"] = [
                {k: v for k, v in entry(engine, int(t), v).items() if k != "top_logprobs"}
                for t, v in zip(ids, values, strict=True)
            ]
        content.append(made)
    return {"content": content, "refusal": None}


# ---- completions ---------------------------------------------------------------------------------


class Offsets:
    """Where the tokens of a text begin in it: the characters that are whole before each one."""

    def __init__(self, token_bytes: Sequence[bytes], at: int = 0) -> None:
        self._bytes, self._at = token_bytes, at
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> int:
        """The offset of the next token."""
        at = self._at
        self._at += len(self._decoder.decode(self._bytes[token]))
        return at


@dataclass
class Echo:
    """What an answer with echo begins with: a prompt's text, and what is known of its tokens."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)  # None for the first
    alternatives: list[Alternatives | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


def echo_of(engine: Engine, prompt: NDArray[np.int32], sent: str | None, k: int | None) -> Echo:
    """A prompt as it was sent: its text, or that of its tokens with special ones spelled out. k:
    how many alternatives of each token are wanted, None without log-probabilities."""
    tokens = prompt.tolist()
    text = engine.tokenizer.decode(tokens, special=True) if sent is None else sent
    if k is None:
        return Echo(text)
    if sent is None:
        places = Offsets(engine.tokenizer.parts(tokens, special=True))
        begins = [places.feed(i) for i in range(len(tokens))]
    else:
        begins = engine.tokenizer.offsets(sent)
        begins = [0] * (len(tokens) - len(begins)) + begins  # an added BOS
    logprobs, others = engine.score_prompt(prompt, k)
    return Echo(text, tokens, [None, *logprobs], [None, *others], begins)


def completion_logprobs(engine: Engine, sample: Sample, before: Echo) -> dict[str, Any]:
    tokens, logprobs = sample.scored
    places = Offsets(engine.token_bytes, len(before.text))
    others = [*before.alternatives, *sample.alternatives] if sample.n_alternatives else None
    return listed(
        engine,
        [*before.tokens, *tokens],
        [*before.logprobs, *logprobs],
        [*before.offsets, *(places.feed(token) for token in tokens)],
        others,
    )


def listed(
    engine: Engine,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    offsets: Sequence[int],
    alternatives: Sequence[Alternatives | None] | None = None,
) -> dict[str, Any]:
    """A completion's `logprobs`."""
    top = None
    if alternatives is not None:
        rows = zip(tokens, logprobs, alternatives, strict=True)
        top = [_by_spelling(engine, *row) for row in rows]
    return {
        "tokens": [spelling(engine, token) for token in tokens],
        "token_logprobs": list(logprobs),
        "top_logprobs": top,
        "text_offset": list(offsets),
    }


def _by_spelling(
    engine: Engine, token: int, logprob: float | None, alternatives: Alternatives | None
) -> dict[str, float | None] | None:
    """The most likely tokens, and the one that came even if it is none of them."""
    if alternatives is None:
        return None
    found: dict[str, float | None] = {}
    for other, value in zip(*alternatives, strict=True):
        found.setdefault(spelling(engine, int(other)), float(value))
    return found | {spelling(engine, token): logprob}
