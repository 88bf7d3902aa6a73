"""The OpenAI shape: a body of fields to samples, samples to responses and chunks.

`rksc.clients.OpenAI` calls these in the process, `rksc serve` behind HTTP; both understand the same
fields. A field that would change the result and is not supported is an error that names it; none
is left aside in silence (_fields.py).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.options import Sampling
from ..engine.results import Token
from ..scalars import as_int
from ..text.chat_tokens import encode_chat
from ._engine import Engine, Sample, copies
from ._errors import FieldError, RequestError
from ._fields import Fields, n_bytes, shown
from ._logprobs import Echo, Offsets, chat_logprobs, completion_logprobs, echo_of, entry, listed
from ._record import Record

MAX_SAMPLES = 1024  # of one request
MAX_MESSAGES = 2048
MAX_STOPS, MAX_STOP = 16, 256  # stop strings, and characters of each
MAX_STOP_IDS = 256
MAX_ECHOED = 1 << 21  # tokens and alternatives of prompts that an answer repeats

_SAMPLING = {
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "max_tokens", "stream", "stream_options", "logprobs", "include_stop_str_in_output",
}  # fmt: skip
_CHAT = _SAMPLING | {
    "messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt",
    "continue_final_message", "chat_template_kwargs",
}  # fmt: skip
_COMPLETION = _SAMPLING | {"prompt", "echo", "add_special_tokens"}
REQUEST_FIELDS = _CHAT | _COMPLETION
_STREAM_OPTIONS = {"include_usage", "include_obfuscation"}
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


@dataclass
class Request:
    """A request as read: its samples, n for each prompt, and how the answer shall look. sent:
    the prompts' texts where they came as such."""

    chat: bool
    model: str
    sent: list[str | None]
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

    @property
    def costly(self) -> bool:
        """Whether its answer is much work to write: a prompt is scored, or there are many tokens
        to tell of."""
        n = sum(len(sample.tokens) for sample in self.samples) if self.logprobs else 0
        return (self.echo and self.logprobs) or n * (1 + self.n_alternatives) > 10_000


# ---- reading -------------------------------------------------------------------------------------


def read_model(body: Mapping[str, Any], default: str) -> str:
    """The name that the answer repeats."""
    return Fields(body, set(body)).get("model", str, "a string", "") or default


def read_chat(engine: Engine, body: Mapping[str, Any], model: str) -> Request:
    """The body of /v1/chat/completions."""
    f = Fields(body, _CHAT)
    messages = read_messages(body.get("messages"))
    options = f.get("chat_template_kwargs", dict, "an object", {})
    check_template_variables(options)
    going_on = f.flag("continue_final_message")
    opening = f.flag("add_generation_prompt", not going_on)
    try:
        engine.check_bytes(n_bytes([messages, options]), "messages")
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
    return _request(engine, f, True, model, [(None, prompt)], limit, logprobs, k)


def read_completion(engine: Engine, body: Mapping[str, Any], model: str) -> Request:
    """The body of /v1/completions."""
    f = Fields(body, _COMPLETION)
    prompts = _prompts(f, engine)
    k = f.integer("logprobs", None, 0, 20)
    limit = f.integer("max_tokens", 16, 0, 2**31 - 1)
    request = _request(engine, f, False, model, prompts, limit, k is not None, k or 0)
    request.echo = f.flag("echo")
    told = sum(len(sample.prompt) for sample in request.samples) * (1 + request.n_alternatives)
    if request.echo and told > MAX_ECHOED:
        raise FieldError(
            "echo", f"echo would repeat {told} tokens and alternatives; the limit is {MAX_ECHOED}"
        )
    return request


def _request(
    engine: Engine,
    f: Fields,
    chat: bool,
    model: str,
    prompts: list[_Prompt],
    limit: int | None,
    logprobs: bool,
    n_alternatives: int,
) -> Request:
    n = f.integer("n", 1, 1, MAX_SAMPLES)
    if n * len(prompts) > MAX_SAMPLES:
        raise FieldError(
            "n", f"n={n} for {len(prompts)} prompts: the limit is {MAX_SAMPLES} samples"
        )
    like = Sample(
        prompts[0][1],
        limit,
        Sampling(
            temperature=f.number("temperature", 1.0, 0, 100),
            top_p=f.number("top_p", 1.0, 0, 1),
            top_k=max(0, f.integer("top_k", 0, -1, 2**31 - 1)),
            min_p=f.number("min_p", 0.0, 0, 1),
            seed=f.seed(),
        ),
        f.strings("stop", MAX_STOPS, MAX_STOP),
        _stop_ids(f, engine),
        n_alternatives=n_alternatives,
    )
    stream = f.flag("stream")
    if stream and n_alternatives:
        name = "top_logprobs" if chat else "logprobs"
        raise FieldError(
            name, f"{name}: alternatives are computed at the end and cannot be streamed"
        )
    return Request(
        chat,
        model,
        [text for text, _ in prompts],
        n,
        [s for _, prompt in prompts for s in copies(replace(like, prompt=prompt), n)],
        stream,
        _stream_usage(f),
        logprobs,
        n_alternatives,
        keep_stop=f.flag("include_stop_str_in_output"),
    )


def _stream_usage(f: Fields) -> bool:
    options = f.get("stream_options", dict, "an object", {})
    try:
        return Fields(options, _STREAM_OPTIONS).flag("include_usage")
    except FieldError as error:
        raise FieldError("stream_options", f"stream_options.{error.message}", error.code) from None


def _stop_ids(f: Fields, engine: Engine) -> tuple[int, ...]:
    """The model's end tokens (unless they are to be ignored) and those of the request."""
    config = engine.session.config
    own = f.token_ids("stop_token_ids", config.vocab_size, MAX_STOP_IDS)
    return (*(() if f.flag("ignore_eos") else config.eos), *own)


def check_template_variables(options: Mapping[Any, Any], taken: Collection[str] = ()) -> None:
    """FieldError: chat_template_kwargs sets what is rendered, or an argument that is taken."""
    for name in options:
        if not isinstance(name, str) or name in _RENDERED or name in taken:
            raise FieldError("chat_template_kwargs", f"chat_template_kwargs cannot set {name!r}")


def read_messages(messages: Any, field: str = "messages") -> list[dict[str, Any]]:
    """Messages, the contents of each as one text; FieldError names what is wrong."""
    if not isinstance(messages, (list, tuple)) or not messages:
        code = "missing_required_parameter" if messages is None else "invalid_type"
        code = "empty_array" if isinstance(messages, (list, tuple)) else code
        raise FieldError(field, f"{field} must be a list with at least one message", code)
    if len(messages) > MAX_MESSAGES:
        said = f"{field}: {len(messages)} messages, at most {MAX_MESSAGES}"
        raise FieldError(field, said, "array_above_max_length")
    return [_message(field, i, message) for i, message in enumerate(messages)]


def _message(field: str, i: int, message: Any) -> dict[str, Any]:
    where = f"{field}[{i}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise FieldError(field, f"{where} must be an object with a role and a content")
    if message.get("tool_calls") or message.get("function_call"):
        raise FieldError(field, f"{where}: tool calls are not supported")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise FieldError(field, f"{where}.content: only text is supported")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise FieldError(field, f"{where}.content must be text, got {shown(content)}")
    return {**message, "content": content}


_Prompt = tuple[str | None, NDArray[np.int32]]  # as a text where it came as one, and as tokens


def _prompts(f: Fields, engine: Engine) -> list[_Prompt]:
    """A text, tokens, or a list of either."""
    given = f.get("prompt", (str, list, tuple, np.ndarray), "text or tokens", None)
    if given is None or not len(given):
        code = "missing_required_parameter" if given is None else "invalid_value"
        raise FieldError("prompt", "prompt must be text or tokens, or a list of them", code)
    bos = None if f.flag("add_special_tokens", True) else False
    several = not isinstance(given, str) and as_int(given[0]) is None
    if several and len(given) > MAX_SAMPLES:
        said = f"prompt: {len(given)} prompts, at most {MAX_SAMPLES}"
        raise FieldError("prompt", said, "array_above_max_length")
    prompts: list[_Prompt] = []
    for i, prompt in enumerate(given if several else [given]):
        where = f"prompt[{i}]" if several else "prompt"
        if not isinstance(prompt, (str, list, tuple, np.ndarray)):
            said = f"{where} must be text or tokens, got {shown(prompt)}"
            raise FieldError("prompt", said, "invalid_type")
        text = prompt if isinstance(prompt, str) else None
        try:
            tokens: Any = prompt if text is None else engine.encode(text, where, bos)
            prompts.append((text, engine.check_prompt(tokens, where)))
        except RequestError:
            raise
        except ValueError as error:
            raise FieldError("prompt", str(error)) from None
    return prompts


# ---- writing -------------------------------------------------------------------------------------


def response(engine: Engine, request: Request) -> Record:
    """The whole answer, once all samples have ended."""
    made = {"choices": list(choices(engine, request)), "usage": usage(request)}
    return Record(head(request, request.kind) | made)


def choices(engine: Engine, request: Request) -> Iterator[dict[str, Any]]:
    """Its choices, one for each sample."""
    before = Echo()
    for i, sample in enumerate(request.samples):
        choice: dict[str, Any] = {"index": i}
        text = _text(request, sample)
        if request.chat:
            choice["message"] = _MESSAGE | {"role": "assistant", "content": text}
            choice["logprobs"] = chat_logprobs(engine, sample) if request.logprobs else None
        else:
            if request.echo and i % request.n == 0:
                before = _echo(engine, request, i)
            choice["text"] = before.text + text
            choice["logprobs"] = None
            if request.logprobs:
                choice["logprobs"] = completion_logprobs(engine, sample, before)
        yield choice | {"finish_reason": _finish(sample)}


def _echo(engine: Engine, request: Request, i: int) -> Echo:
    """What the answer of sample i begins with."""
    k = request.n_alternatives if request.logprobs else None
    return echo_of(engine, request.samples[i].prompt, request.sent[i // request.n], k)


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


def head(request: Request, kind: str) -> dict[str, Any]:
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
        self._offsets: dict[Sample, Offsets] = {}
        self._kind = "chat.completion.chunk" if request.chat else "text_completion"

    def opening(self) -> Iterator[Record]:
        """What comes before any token: whose turn it is, or the prompt that is to be echoed."""
        request, before = self._request, Echo()
        for sample, i in self._index.items():
            if request.chat:
                yield self._chunk(i, "", role="assistant")
            elif request.echo:
                if i % request.n == 0:
                    before = _echo(self._engine, request, i)
                told = (before.tokens, before.logprobs, before.offsets)
                yield self._chunk(
                    i, before.text, listed(self._engine, *told) if request.logprobs else None
                )
            self._offsets[sample] = Offsets(self._engine.token_bytes, len(before.text))

    def of(self, sample: Sample, token: Token) -> Iterator[Record]:
        """What a token adds: nothing where its text waits for the next one's."""
        i, request = self._index[sample], self._request
        text = (token.text or "") + _kept_stop(request, token.finish_reason, token.stop)
        scored = request.logprobs and token.token >= 0
        if text or scored:
            logprobs = self._logprobs(sample, token.token, token.logprob) if scored else None
            yield self._chunk(i, text, logprobs)
        if token.finish_reason is not None:
            last = None
            if request.logprobs and not request.chat and isinstance(token.stop, int):
                last = self._logprobs(sample, token.stop, token.logprob)
            yield self._chunk(i, "", last, finish=_finish(sample))

    def closing(self) -> Iterator[Record]:
        if self._request.stream_usage:
            closing = {"choices": [], "usage": usage(self._request)}
            yield Record(head(self._request, self._kind) | closing)

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
        return Record(head(self._request, self._kind) | {"choices": [choice]})

    def _logprobs(self, sample: Sample, token: int, logprob: float) -> dict[str, Any]:
        if self._request.chat:
            return {"content": [entry(self._engine, token, logprob)], "refusal": None}
        return listed(self._engine, [token], [logprob], [self._offsets[sample].feed(token)])
