"""An object in the shape of the `openai` package's client, in this process.

client = rksc.clients.OpenAI(rksc.load("model.gguf"))
answer = client.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], n=8)
print(answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from .._core import CapacityError
from ..engine.arguments import check_options
from ..engine.load import Model
from ..engine.session import SESSION_OPTIONS, BranchSession
from ._engine import Engine
from ._errors import FieldError, error_of
from ._fields import NEUTRAL, check_whole, shown
from ._record import Record
from ._wire import REQUEST_FIELDS, Chunks, Request, read_chat, read_completion, read_model, response

# What the openai package takes for its transport; there is none here.
_TRANSPORT = {"timeout", "extra_headers", "extra_query"}
_CONNECTION = {
    "api_key", "base_url", "default_headers", "default_query", "http_client", "max_retries",
    "organization", "project", "set_default_headers", "set_default_query", "timeout",
}  # fmt: skip
# What people give a client, and where it belongs.
_ELSEWHERE = {
    **dict.fromkeys(NEUTRAL, "it is a setting of a request"),
    **dict.fromkeys(REQUEST_FIELDS, "it is a setting of a request"),
    **dict.fromkeys(_CONNECTION, "there is no connection, the model runs in this process"),
}

Read = Callable[[Engine, Mapping[str, Any], str], Request]


def _left_out(value: Any) -> bool:
    """Whether it is what the openai package puts where an argument is not given."""
    kind = type(value)
    return kind.__module__.partition(".")[0] == "openai" and kind.__name__ in ("NotGiven", "Omit")


class Stream:
    """A streamed answer: iterate over its chunks; close it (or leave `with`) to cancel."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._chunks = self._run(engine, request)

    @staticmethod
    def _run(engine: Engine, request: Request) -> Iterator[Record]:
        chunks = Chunks(engine, request)
        try:
            yield from chunks.opening()
            for sample, token in engine.stream(request.samples):
                yield from chunks.of(sample, token)
            yield from chunks.closing()
        except CapacityError as error:
            raise error_of(error) from error

    def __iter__(self) -> Iterator[Record]:
        return self._chunks

    def __next__(self) -> Record:
        return next(self._chunks)

    def close(self) -> None:
        self._chunks.close()  # type: ignore[attr-defined]  # a generator

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Completions:
    """`create` of one kind of completions."""

    def __init__(self, engine: Engine, name: str, read: Read) -> None:
        self._engine, self._name, self._read = engine, name, read

    def create(self, **fields: Any) -> Any:
        """Fields as in OpenAI's API (docs/clients.md lists them); a response, or with
        stream=True a `Stream` of chunks. ValueError names a field that is wrong or not supported,
        and has the attributes of openai's exceptions (param, code ...). Fields of other servers
        may stand in extra_body, as the openai package wants it, or beside the others."""
        fields = {name: value for name, value in fields.items() if not _left_out(value)}
        extra = fields.pop("extra_body", None)
        if extra is not None and not isinstance(extra, Mapping):
            said = f"extra_body must be a dict, got {shown(extra)}"
            raise FieldError("extra_body", said, "invalid_type")
        body = {k: v for k, v in fields.items() if k not in _TRANSPORT} | dict(extra or {})
        check_whole(body)
        request = self._read(self._engine, body, read_model(body, self._name))
        if request.stream:
            return Stream(self._engine, request)
        try:
            self._engine.run(request.samples)
            return response(self._engine, request)
        except CapacityError as error:
            raise error_of(error) from error


class _Chat:
    def __init__(self, completions: Completions) -> None:
        self.completions = completions


class _Page(Record):
    """A list whose iteration gives its items, as that of openai's pages does."""

    def __iter__(self) -> Iterator[Record]:  # type: ignore[override]  # not the keys
        return iter(self["data"])


class _Models:
    def __init__(self, name: str) -> None:
        self._name = name

    def list(self) -> _Page:
        """The one model there is."""
        return _Page({"object": "list", "data": [model_card(self._name)]})

    def retrieve(self, model: str) -> Record:
        """Its card; ValueError for a name that `list` does not have."""
        if model != self._name:
            raise no_model(model, self._name)
        return Record(model_card(self._name))


class OpenAI:
    """`chat.completions.create`, `completions.create` and `models` on a model.

    model: a `rksc.Model` (its session takes `options`), a `rksc.BranchSession` that nobody else
    submits to, or another client, whose queue is shared. Calls from several threads are batched
    together. Prompts share what they begin with, within a call and across calls.
    """

    def __init__(self, model: Model | BranchSession | OpenAI, **options: Any) -> None:
        self.engine = engine_of("OpenAI", model, options)
        self.name = self.engine.name
        self.chat = _Chat(Completions(self.engine, self.name, read_chat))
        self.completions = Completions(self.engine, self.name, read_completion)
        self.models = _Models(self.name)

    def with_options(self, **options: Any) -> OpenAI:
        """This client: options of a connection say nothing where there is none."""
        check_options("with_options()", options, sorted(_CONNECTION))
        return self

    copy = with_options

    def close(self) -> None:
        """Nothing: the session lives as long as something refers to it."""

    def __enter__(self) -> OpenAI:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def engine_of(call: str, model: Any, options: Mapping[str, Any]) -> Engine:
    """The engine of a client or an engine itself; a new one for a model or a session. call: whose
    options they are, for messages."""
    check_options(f"{call}()", options, ("max_rows", *SESSION_OPTIONS), _ELSEWHERE)
    found = model if isinstance(model, Engine) else getattr(model, "engine", None)
    if isinstance(found, Engine):
        if options:
            raise ValueError(f"{next(iter(options))}: this client already has its options")
        return found
    return Engine(model, **options)


def model_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rksc"}


def no_model(name: str, known: str) -> FieldError:
    said = f"model {name!r} does not exist; this server has {known!r}"
    return FieldError("model", said, "model_not_found", 404)
