"""Chats as text, by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from .decoding import check_text
from .template import ChatTemplate, render_template

Message = Mapping[str, Any]

_MARK = "\N{END OF TEXT}rksc-continue\N{END OF TEXT}"
_MAX_DEPTH = 100  # lists and dicts in each other
_REASONING = ("reasoning_content", "thinking", "reasoning")  # one field, three names of it


def render(
    template: str | ChatTemplate,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    **variables: Any,
) -> str:
    """The text that `template` makes of `messages` ({"role": ..., "content": ...}).

    With `continue_final` the text ends where the last message's content ends, so that a
    model goes on with it. The template gets what transformers would give it, and has limits of
    time and memory (template.py). Any thread may call this. ValueError tells what a template does
    not accept, or what is wrong with it.
    """
    turns = [_with_reasoning(turn) for turn in plain_turns(messages)]
    if continue_final:
        add_generation_prompt = False
        if not isinstance(turns[-1].get("content"), str):
            raise ValueError("the last message to continue must have a content")
        turns[-1]["content"] += f"{_MARK} "
    given = {name: plain_data(name, value) for name, value in variables.items()}
    for name in ("tools", "documents"):
        _check_dicts(name, given.get(name))
    given |= {"messages": turns, "add_generation_prompt": bool(add_generation_prompt)}
    if not isinstance(template, ChatTemplate):
        template = ChatTemplate(template)
    text = render_template(template, given)
    if not continue_final:
        return text
    before, mark, after = text.rpartition(_MARK)
    if not mark:
        raise ValueError("chat template: the last message's content does not appear as it is")
    return before if after.startswith(" ") else before.rstrip()  # the template trims


def plain_turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain data, without fields that are None."""
    if not isinstance(messages, Sequence) or not messages or isinstance(messages, str):
        raise ValueError("messages must be a list with at least one message")
    turns = []
    for i, message in enumerate(messages):
        turn = plain_data(f"messages[{i}]", message)
        if not isinstance(turn, dict) or "role" not in turn:
            raise ValueError(f"messages[{i}] must be a dict with role and content")
        turns.append({key: value for key, value in turn.items() if value is not None})
    return turns


def _check_dicts(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list of dicts, not {type(value).__name__}")
    for i, each in enumerate(value):
        if not isinstance(each, dict):
            hint = ": a JSON schema" if name == "tools" else ""
            raise ValueError(f"{name}[{i}] must be a dict{hint}, not {each!r:.80}")


def _with_reasoning(turn: dict[str, Any]) -> dict[str, Any]:
    """Its reasoning under the names that templates read, whichever it came under."""
    reasoning = next((turn[name] for name in _REASONING if name in turn), None)
    if reasoning is None:
        return turn
    return {"thinking": reasoning} | turn | {"reasoning_content": reasoning}


def plain_data(where: str, value: Any) -> Any:
    """A value as dicts, lists, tuples, texts and numbers, which is all that a template may see;
    anything else is the name of its type: <Image>. ValueError: half a character, or too deep."""
    try:
        return _plain(where, value, _MAX_DEPTH)
    except RecursionError:
        raise ValueError(f"{where} is nested too deep") from None


def _plain(where: str, value: Any, depth: int) -> Any:
    def inner(part: str, each: Any) -> Any:
        return _plain(f"{where}{part}", each, depth - 1)

    if depth == 0:
        raise RecursionError
    if isinstance(value, str):
        check_text(where, value)
        return str.__str__(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic):
        return inner("", value.item())
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {inner(": a key", key): inner(f".{key}", each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        items = [inner(f"[{i}]", each) for i, each in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: inner(f".{field.name}", getattr(value, field.name))
            for field in fields(value)
        }
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic's
        return inner("", dump())
    return f"<{type(value).__name__}>"
