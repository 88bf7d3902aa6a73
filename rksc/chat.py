"""Chat templates: jinja2 in its sandbox, with the names that templates expect."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .text import check_text

if TYPE_CHECKING:
    from jinja2 import Template

    from .tokenizer import Tokenizer

Message = Mapping[str, Any]

_MARK = "\N{END OF TEXT}rksc-continue\N{END OF TEXT}"


def render(
    template: str,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    **variables: Any,
) -> str:
    """The text that `template` makes of `messages` ({"role": ..., "content": ...}).

    With `continue_final` the text ends where the last message's content ends, so that a
    model goes on with it. ValueError tells what a template does not accept.
    """
    if not isinstance(messages, Sequence) or not messages or isinstance(messages, str):
        raise ValueError("messages must be a list with at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f"messages[{i}] must be a dict with role and content")
    turns = [dict(message) for message in messages]
    if continue_final:
        add_generation_prompt = False
        if not isinstance(turns[-1].get("content"), str):
            raise ValueError("the last message to continue must have a content")
        turns[-1]["content"] += _MARK
    from jinja2 import TemplateError

    try:
        text = _compile(template).render(
            messages=turns, add_generation_prompt=add_generation_prompt, **variables
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise ValueError(f"chat template: {error}") from error
    if not continue_final:
        return text
    if _MARK not in text:
        raise ValueError("chat template: the last message's content does not appear as it is")
    return text[: text.rindex(_MARK)]


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message], /, **options: Any) -> list[int]:
    """Tokens of a chat as the tokenizer's template renders it, with the BOS that the model wants.
    options: those of `Tokenizer.chat`.

    Only the template writes special tokens: those that the texts of messages, documents and tools
    spell stay text, so that none of them can end its turn or begin another. Tags
    (<think> ... </think>) are tokens in what the assistant and the system say, as the model
    writes them.
    ValueError: a text that spells some is changed or left out by the template, a role or a key
    spells some, or values are nested too deep.
    """
    fence = f"rksc{secrets.token_hex(12)}"  # what no message holds and no template changes
    fenced: dict[str, str] = {}

    def forges(text: str, own: bool) -> bool:
        """Whether it spells special tokens; in one's own words tags do not count."""
        if not spells_special(tokenizer, text):
            return False
        if not own:
            return True
        marks = tokenizer.template_marks()
        pairs = [(mark, mark.replace("<", "</", 1)) for mark in marks if mark.startswith("<")]
        tags = [re.escape(tag) for pair in pairs if pair[1] in marks for tag in pair]
        parts = re.split("|".join(tags), text) if tags else [text]
        return any(spells_special(tokenizer, part) for part in parts)

    def guarded(where: str, value: Any, own: bool = False) -> Any:
        """The value with fences around its texts that spell special tokens."""
        if isinstance(value, Mapping):
            for key in value:
                if isinstance(key, str) and forges(key, own):
                    raise ValueError(f"{where}: the key {key!r} spells a special token")
            return {key: guarded(f"{where}.{key}", each, own) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [guarded(f"{where}[{i}]", each, own) for i, each in enumerate(value)]
        if not isinstance(value, str):
            return value
        check_text(where, value)
        if not forges(value, own):
            return value
        text = value.strip() or value
        fenced[text] = where
        return value.replace(text, f"{fence}{text}{fence}")  # templates may strip, too

    def turn(where: str, message: Message) -> Any:
        role = message.get("role")
        if isinstance(role, str):
            check_text(f"{where}.role", role)
            if forges(role, False):
                raise ValueError(f"{where}.role spells a special token: {role!r}")
        return guarded(where, message, role in ("assistant", "system", "developer"))

    turns: Any = messages
    if isinstance(messages, Sequence) and all(isinstance(m, Mapping) for m in messages):
        turns = [
            _within_reason(turn, f"messages[{i}]", message) for i, message in enumerate(messages)
        ]
    for name in {"documents", "tools"} & options.keys():
        options[name] = _within_reason(guarded, name, options[name])
    text = tokenizer.chat(turns, **options)
    parts = text.split(fence)
    contents = set(parts[1::2])
    for content, where in fenced.items():
        if content not in contents or len(parts) % 2 == 0 or len(contents) > len(fenced):
            raise ValueError(f"{where} spells special tokens and the chat template changes it")
    ids = tokenizer.encode(parts[0])
    for i, part in enumerate(parts[1:]):
        ids += tokenizer.encode(part, bos=False, special=i % 2 == 1, start=False)
    return ids


def _within_reason(guard: Callable[[str, Any], Any], where: str, value: Any) -> Any:
    try:
        return guard(where, value)
    except RecursionError:
        raise ValueError(f"{where} is nested too deep") from None


def spells_special(tokenizer: Tokenizer, text: str) -> bool:
    """Whether some of the text would become special tokens, or marks of the chat template."""
    return tokenizer.encode(text, bos=False) != tokenizer.encode(text, bos=False, special=False)


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ImportError("chat templates need jinja2: pip install rksc[hf]") from None

    class Generation(Extension):
        """{% generation %} marks what an assistant wrote; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012 (the base class's own way)

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return body

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)

    def now(layout: str) -> str:
        return datetime.now().strftime(layout)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now
    return environment.from_string(template)
