"""The OpenAI shape: a body of fields to samples, samples to responses and chunks.

`rksc.clients.OpenAI` calls these in the process, `rksc serve` behind HTTP; both understand the same
fields. A field that would change the result and is not supported is an error that names it; none
is left aside in silence.
"""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..chat import encode_chat
from ..options import Sampling
from ..results import Token
from ..scalars import as_float, as_int
from ..text import check_text
from ._engine import Alternatives, Engine, Sample, copies
from ._errors import FieldError, RequestError
from ._record import Record

MAX_SAMPLES = 1024  # of one request

# Fields that say nothing about the text.
_ASIDE = {
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
}  # fmt: skip
# Fields that are not supported, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
}
_SAMPLING = {
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "max_tokens", "stream", "stream_options", "logprobs", "include_stop_str_in_output",
}  # fmt: skip
_CHAT = _SAMPLING | {
    "messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt",
    "continue_final_message", "chat_template_kwargs",
}  # fmt: skip
_COMPLETION = _SAMPLING | {"prompt", "echo"}
# What a chat template gets from fields of their own.
_RENDERED = {
    "self", "template", "messages", "add_generation_prompt", "continue_final",
    "continue_final_message",
}  # fmt: skip

# Optional keys of openai's objects: None where there is nothing to say, and then `lean` leaves
# them out.
_ANSWER = dict.fromkeys(("service_tier", "system_fingerprint", "usage"))
_MESSAGE = dict.fromkeys(
    ("role", "content", "refusal", "annotations", "audio", "function_call", "tool_calls")
)
_OPTIONAL = {*_ANSWER, *_MESSAGE, "completion_tokens_details", "audio_tokens"}


def not_supported(name: str, value: Any) -> str:
    """What an error says of a setting whose value asks for what is not there."""
    why = ""
    if name.endswith("_penalty") or name == "logit_bias":
        why = ": logits are sampled as the model gives them, by temperature, top_k, top_p and min_p"
    return f"{name}={value!r} is not supported{why}"


class Fields:
    """A body's fields, each checked when it is read. None means that it was not given."""

    def __init__(self, body: Mapping[str, Any], known: set[str]) -> None:
        for name, value in body.items():
            if name in known or name in _ASIDE or value is None or value in _NEUTRAL.get(name, ()):
                continue
            raise FieldError(name, not_supported(name, value))
        self._body = body

    def get(self, name: str, kind: type | tuple[type, ...], expected: str, default: Any) -> Any:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            self.refuse(name, expected)
        return value

    def refuse(self, name: str, expected: str) -> NoReturn:
        raise FieldError(name, f"{name} must be {expected}, got {self._body.get(name)!r}")

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.get(name, (bool, np.bool_), "true or false", default))

    def number(self, name: str, default: float, low: float, high: float) -> float:
        if self._body.get(name) is None:
            return default
        number = as_float(self._body[name])
        if number is None or not low <= number <= high:  # NaN fails
            self.refuse(name, f"a number from {low:g} to {high:g}")
        return number

    def integer(self, name: str, default: int | None, low: int, high: int) -> Any:
        if self._body.get(name) is None:
            return default
        number = as_int(self._body[name])
        if number is None or not low <= number <= high:
            self.refuse(name, f"an integer from {low} to {high}")
        return number

    def strings(self, name: str) -> tuple[str, ...]:
        """One string or several."""
        value = self.get(name, (str, list, tuple), "a string or a list of strings", ())
        found = (value,) if isinstance(value, str) else tuple(value)
        if not all(isinstance(text, str) and text for text in found):
            self.refuse(name, "non-empty strings")
        try:
            for text in found:
                check_text(name, text)
        except ValueError as error:
            raise FieldError(name, str(error)) from None
        return found


@dataclass
class Request:
    """A request as read: its samples, n for each prompt, and how the answer shall look."""

    chat: bool
    model: str
    prompts: list[NDArray[np.int32]]
    n: int
    samples: list[Sample]
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    n_alternatives: int = 0
    echo: bool = False
    keep_stop: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"

    @property
    def kind(self) -> str:
        return "chat.completion" if self.chat else "text_completion"


# ---- reading -------------------------------------------------------------------------------------


def read_chat(engine: Engine, body: Mapping[str, Any], model: str) -> Request:
    """The body of /v1/chat/completions."""
    f = Fields(body, _CHAT)
    messages = read_messages(body.get("messages"))
    options = f.get("chat_template_kwargs", dict, "an object", {})
    check_template_variables(options)
    going_on = f.flag("continue_final_message")
    opening = f.flag("add_generation_prompt", not going_on)
    try:
        tokens = encode_chat(
            engine.tokenizer,
            messages,
            add_generation_prompt=opening,
            continue_final=going_on,
            **options,
        )
        prompt = engine.check_prompt(tokens, "messages")
    except RequestError:
        raise
    except ValueError as error:
        raise FieldError("messages", str(error)) from None
    logprobs = f.flag("logprobs")
    k = f.integer("top_logprobs", 0, 0, 20)
    if k and not logprobs:
        raise FieldError("top_logprobs", "top_logprobs needs logprobs=true")
    name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    limit = engine.check_room(len(prompt), f.integer(name, None, 0, 2**31 - 1), name)
    return _request(engine, f, True, model, [prompt], limit, logprobs, k)


def read_completion(engine: Engine, body: Mapping[str, Any], model: str) -> Request:
    """The body of /v1/completions."""
    f = Fields(body, _COMPLETION)
    prompts = _prompts(f, engine)
    k = f.integer("logprobs", None, 0, 20)
    limit = f.integer("max_tokens", 16, 0, 2**31 - 1)
    request = _request(engine, f, False, model, prompts, limit, k is not None, k or 0)
    request.echo = f.flag("echo")
    if request.echo and request.stream:
        raise FieldError("echo", "echo and stream exclude each other")
    return request


def _request(
    engine: Engine,
    f: Fields,
    chat: bool,
    model: str,
    prompts: list[NDArray[np.int32]],
    limit: int | None,
    logprobs: bool,
    n_alternatives: int,
) -> Request:
    n = f.integer("n", 1, 1, MAX_SAMPLES)
    if n * len(prompts) > MAX_SAMPLES:
        raise FieldError("n", f"n={n} for {len(prompts)} prompts: {MAX_SAMPLES} samples at most")
    seed = f.integer("seed", None, -(2**63), 2**64 - 1)
    like = Sample(
        prompts[0],
        limit,
        Sampling(
            temperature=f.number("temperature", 1.0, 0, 100),
            top_p=f.number("top_p", 1.0, 0, 1),
            top_k=max(0, f.integer("top_k", 0, -1, 2**31 - 1)),
            min_p=f.number("min_p", 0.0, 0, 1),
            seed=None if seed is None else seed % 2**64,
        ),
        f.strings("stop"),
        _stop_ids(f, engine),
        n_alternatives=n_alternatives,
    )
    stream = f.flag("stream")
    if stream and n_alternatives:
        name = "top_logprobs" if chat else "logprobs"
        raise FieldError(name, f"{name}: alternatives are computed at the end, not while streaming")
    options = f.get("stream_options", dict, "an object", {})
    return Request(
        chat,
        model,
        prompts,
        n,
        [s for prompt in prompts for s in copies(replace(like, prompt=prompt), n)],
        stream,
        bool(options.get("include_usage")),
        logprobs,
        n_alternatives,
        keep_stop=f.flag("include_stop_str_in_output"),
    )


def _stop_ids(f: Fields, engine: Engine) -> tuple[int, ...]:
    """The model's end tokens (unless they are to be ignored) and those of the request."""
    config = engine.session.config
    given = f.get("stop_token_ids", (list, tuple, np.ndarray), "a list of token ids", ())
    own = [number for number in map(as_int, given) if number is not None]
    if len(own) < len(given) or not all(0 <= i < config.vocab_size for i in own):
        f.refuse("stop_token_ids", "token ids of the vocabulary")
    return (*(() if f.flag("ignore_eos") else config.eos), *own)


def check_template_variables(options: Mapping[Any, Any], taken: Collection[str] = ()) -> None:
    """FieldError: chat_template_kwargs sets what is rendered, or an argument that is taken."""
    for name in options:
        if not isinstance(name, str) or name in _RENDERED or name in taken:
            raise FieldError("chat_template_kwargs", f"chat_template_kwargs cannot set {name!r}")


def read_messages(messages: Any, field: str = "messages") -> list[dict[str, Any]]:
    """Messages, the contents of each as one text; FieldError names what is wrong."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise FieldError(field, f"{field} must be a list with at least one message")
    return [_message(field, i, message) for i, message in enumerate(messages)]


def _message(field: str, i: int, message: Any) -> dict[str, Any]:
    where = f"{field}[{i}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise FieldError(field, f"{where} must be an object with a role and a content")
    if message.get("tool_calls") or message.get("function_call"):
        raise FieldError(field, f"{where}: calls of tools are not supported")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise FieldError(field, f"{where}.content: only text is supported")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise FieldError(field, f"{where}.content must be text, got {content!r}")
    return {**message, "content": content}


def _prompts(f: Fields, engine: Engine) -> list[NDArray[np.int32]]:
    """A text, tokens, or a list of either."""
    given = f.get("prompt", (str, list, tuple, np.ndarray), "text or tokens", ())
    if not len(given):
        raise FieldError("prompt", "prompt must be text or tokens, or a list of them")
    several = not isinstance(given, str) and as_int(given[0]) is None
    prompts = []
    for i, prompt in enumerate(given if several else [given]):
        where = f"prompt[{i}]" if several else "prompt"
        if not isinstance(prompt, (str, list, tuple, np.ndarray)):
            raise FieldError("prompt", f"{where} must be text or tokens, got {prompt!r}")
        try:
            tokens = engine.encode(prompt, where) if isinstance(prompt, str) else prompt
            prompts.append(engine.check_prompt(tokens, where))
        except RequestError:
            raise
        except ValueError as error:
            raise FieldError("prompt", str(error)) from None
    return prompts


# ---- writing -------------------------------------------------------------------------------------


def response(engine: Engine, request: Request) -> Record:
    """The whole answer, once all samples have ended."""
    choices = []
    before = _Prompt()
    for i, sample in enumerate(request.samples):
        choice: dict[str, Any] = {"index": i}
        text = _text(request, sample)
        if request.chat:
            choice["message"] = _MESSAGE | {"role": "assistant", "content": text}
            choice["logprobs"] = _chat_logprobs(engine, sample) if request.logprobs else None
        else:
            if request.echo and i % request.n == 0:
                before = _prompt(engine, request, sample)
            choice["text"] = before.text + text
            choice["logprobs"] = None
            if request.logprobs:
                choice["logprobs"] = _completion_logprobs(engine, request, sample, before)
        choice["finish_reason"] = _finish(sample)
        choices.append(choice)
    return Record(_head(request, request.kind) | {"choices": choices, "usage": usage(request)})


def usage(request: Request) -> dict[str, Any]:
    """Tokens: a prompt counts once, however many samples it has; cached ones are those whose
    KV was there when its first sample began."""
    firsts = request.samples[:: request.n]
    prompt = sum(len(sample.prompt) for sample in firsts)
    completion = sum(len(sample.tokens) for sample in request.samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(s.cached_tokens for s in firsts), "audio_tokens": None,
        },
        "completion_tokens_details": None,
    }  # fmt: skip


def lean(value: Any) -> Any:
    """An answer or chunk as JSON has it: without the optional keys that are None."""
    if isinstance(value, Mapping):
        return {k: lean(v) for k, v in value.items() if v is not None or k not in _OPTIONAL}
    return [lean(item) for item in value] if isinstance(value, list) else value


def _head(request: Request, kind: str) -> dict[str, Any]:
    own = {"id": request.id, "object": kind, "created": request.created, "model": request.model}
    return own | _ANSWER


def _text(request: Request, sample: Sample) -> str:
    return sample.text + _kept_stop(request, sample.finish_reason, sample.stopped_by)


def _kept_stop(request: Request, finish: str | None, stop: str | int | None) -> str:
    return stop if request.keep_stop and finish == "stop" and isinstance(stop, str) else ""


def _finish(sample: Sample) -> str:
    return "length" if sample.finish_reason == "length" else "stop"


class Chunks:
    """The chunks of a streamed answer; one object for each answer."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._request = engine, request
        self._index = {sample: i for i, sample in enumerate(request.samples)}
        self._offsets = {sample: _Offsets(engine) for sample in request.samples}
        self._kind = "chat.completion.chunk" if request.chat else "text_completion"

    def opening(self) -> Iterator[Record]:
        """What comes before any token: whose turn it is."""
        if self._request.chat:
            for i in self._index.values():
                yield self._chunk(i, "", role="assistant")

    def of(self, sample: Sample, token: Token) -> Iterator[Record]:
        """What a token adds: nothing where its text waits for the next one's."""
        i, request = self._index[sample], self._request
        text = (token.text or "") + _kept_stop(request, token.finish_reason, token.stop)
        scored = request.logprobs and token.token >= 0
        if text or scored:
            yield self._chunk(i, text, self._logprobs(sample, token) if scored else None)
        if token.finish_reason is not None:
            yield self._chunk(i, "", finish=_finish(sample))

    def closing(self) -> Iterator[Record]:
        if self._request.stream_usage:
            head = _head(self._request, self._kind)
            yield Record(head | {"choices": [], "usage": usage(self._request)})

    def _chunk(
        self,
        i: int,
        text: str,
        logprobs: Any = None,
        finish: str | None = None,
        role: str | None = None,
    ) -> Record:
        news = {} if finish else {"content": text}
        choice: dict[str, Any] = {"index": i}
        if self._request.chat:
            choice["delta"] = _MESSAGE | news | {"role": role}
        else:
            choice["text"] = text
        choice |= {"logprobs": logprobs, "finish_reason": finish}
        return Record(_head(self._request, self._kind) | {"choices": [choice]})

    def _logprobs(self, sample: Sample, token: Token) -> dict[str, Any]:
        if self._request.chat:
            return {"content": [_entry(self._engine, token.token, token.logprob)], "refusal": None}
        return {
            "tokens": [_spelling(self._engine, token.token)], "token_logprobs": [token.logprob],
            "top_logprobs": None, "text_offset": [self._offsets[sample].feed(token.token)],
        }  # fmt: skip


# ---- log-probabilities ---------------------------------------------------------------------------


class _Offsets:
    """Where the tokens of a text begin in it: the characters that are whole before each one."""

    def __init__(self, engine: Engine, at: int = 0) -> None:
        self._bytes, self._at = engine.token_bytes, at
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> int:
        """The offset of the next token."""
        at = self._at
        self._at += len(self._decoder.decode(self._bytes[token]))
        return at


def _spelling(engine: Engine, token: int) -> str:
    """As OpenAI spells tokens: bytes that are no text have their values. Different tokens differ,
    so that they can be keys."""
    data = engine.token_bytes[token]
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    if not text and token < engine.tokenizer.vocab_size:
        text = engine.tokenizer.decode([token], special=True, start=False)
    return text or f"token_id:{token}"


def _entry(engine: Engine, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": _spelling(engine, token),
        "logprob": float(logprob),
        "bytes": list(engine.token_bytes[token]),
        "top_logprobs": [],
    }


def _chat_logprobs(engine: Engine, sample: Sample) -> dict[str, Any]:
    content = []
    for i, (token, logprob) in enumerate(zip(sample.tokens, sample.logprobs, strict=True)):
        entry = _entry(engine, token, logprob)
        if sample.alternatives:
            ids, values = sample.alternatives[i]
            entry["top_logprobs"] = [
                {k: v for k, v in _entry(engine, int(t), v).items() if k != "top_logprobs"}
                for t, v in zip(ids, values, strict=True)
            ]
        content.append(entry)
    return {"content": content, "refusal": None}


@dataclass
class _Prompt:
    """What an answer with echo begins with: a prompt's text, and what is known of its tokens."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)  # None for the first
    alternatives: list[Alternatives | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


def _prompt(engine: Engine, request: Request, sample: Sample) -> _Prompt:
    tokens = sample.prompt.tolist()
    text = engine.session.decode(tokens)
    if not request.logprobs:
        return _Prompt(text)
    logprobs, others = engine.score_prompt(sample.prompt, request.n_alternatives)
    # The space that SentencePiece models put before a text is not in it.
    own = b"".join(engine.token_bytes[token] for token in tokens).decode(errors="replace")
    offsets = _Offsets(engine, len(text) - len(own))
    begins = [max(0, offsets.feed(token)) for token in tokens]
    return _Prompt(text, tokens, [None, *logprobs], [None, *others], begins)


def _completion_logprobs(
    engine: Engine, request: Request, sample: Sample, before: _Prompt
) -> dict[str, Any]:
    tokens = before.tokens + sample.tokens
    logprobs = before.logprobs + sample.logprobs
    offsets = _Offsets(engine, len(before.text))
    top = None
    if request.n_alternatives:
        rows = zip(tokens, logprobs, [*before.alternatives, *sample.alternatives], strict=True)
        top = [_by_spelling(engine, *row) for row in rows]
    return {
        "tokens": [_spelling(engine, token) for token in tokens],
        "token_logprobs": logprobs,
        "top_logprobs": top,
        "text_offset": before.offsets + [offsets.feed(token) for token in sample.tokens],
    }


def _by_spelling(
    engine: Engine, token: int, logprob: float | None, alternatives: Alternatives | None
) -> dict[str, float | None] | None:
    """The most likely tokens, and the one that came even if it is none of them."""
    if alternatives is None:
        return None
    found: dict[str, float | None] = {}
    for other, value in zip(*alternatives, strict=True):
        found.setdefault(_spelling(engine, int(other)), float(value))
    return found | {_spelling(engine, token): logprob}
