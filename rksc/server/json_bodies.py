"""Requests and answers as JSON, for `rksc serve`: strict in what it reads, and what it writes is
written piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..clients._engine import Engine
from ..clients._errors import RequestError
from ..clients._fields import check_whole
from ..clients._wire import Request, choices, head, lean, usage

MAX_VALUES = 1 << 17  # texts, lists and objects of a body


def read_json(data: bytes) -> dict[str, Any]:
    """The object that a body holds. RequestError: it is none, or has a field with half a
    character."""
    if _n_values(data) > MAX_VALUES:
        raise RequestError(f"the body has more than {MAX_VALUES} texts, lists and objects")
    try:
        body = json.loads(data.decode("utf-8-sig"), parse_constant=_no_number)
    except RecursionError:
        raise RequestError("the body is nested too deep") from None
    except ValueError as error:
        told = str(error)
        if "integer string conversion" in told:
            told = "a number has too many digits"
        raise RequestError(f"the body is not JSON: {told}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    if b"\\ud" in data.lower():
        check_whole(body)
    return body


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _n_values(data: bytes) -> int:
    """About how many texts, lists and objects are in it: as many as take long to make."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    n_texts = plain.count(b'"') // 2
    if n_texts > MAX_VALUES:
        return n_texts
    outside = plain.split(b'"')[::2]
    return n_texts + sum(part.count(b"[") + part.count(b"{") for part in outside)


def written(engine: Engine, request: Request) -> Iterator[bytes]:
    """The whole answer, once all samples have ended. A large one is never there as objects: each
    choice is one while it is written."""
    yield dumps(head(request, request.kind))[:-1] + b',"choices":['
    for i, choice in enumerate(choices(engine, request)):
        yield (b"," if i else b"") + dumps(choice)
    yield b'],"usage":' + dumps(usage(request)) + b"}"


def dumps(value: Any) -> bytes:
    text = json.dumps(lean(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()
