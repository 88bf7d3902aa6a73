"""Chats as tokens: only the chat template writes special tokens, never what a message spells."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from .chat import Message, plain_data, plain_turns
from .tokenizer import Tokenizer


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
        if isinstance(value, dict):
            for key in value:
                if isinstance(key, str) and forges(key, own):
                    raise ValueError(f"{where}: the key {key!r} spells a special token")
            return {key: guarded(f"{where}.{key}", each, own) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [guarded(f"{where}[{i}]", each, own) for i, each in enumerate(value)]
        if not isinstance(value, str) or not forges(value, own):
            return value
        text = value.strip() or value
        fenced[text] = where
        return value.replace(text, f"{fence}{text}{fence}")  # templates may strip, too

    turns = []
    for i, turn in enumerate(plain_turns(messages)):
        role = turn["role"]
        if isinstance(role, str) and forges(role, False):
            raise ValueError(f"messages[{i}].role spells a special token: {role!r}")
        own = role in ("assistant", "system", "developer")
        turns.append(guarded(f"messages[{i}]", turn, own))
    for name in {"documents", "tools"} & options.keys():
        options[name] = guarded(name, plain_data(name, options[name]))
    text = tokenizer.chat(turns, **options)
    parts = text.split(fence)
    contents = set(parts[1::2])
    for content, where in fenced.items():
        if content not in contents or len(parts) % 2 == 0 or len(contents) > len(fenced):
            raise ValueError(
                f"{where} spells special tokens, and the chat template would change it"
            )
    ids = tokenizer.encode(parts[0])
    for i, part in enumerate(parts[1:]):
        ids += tokenizer.encode(
            part, bos=False, special=i % 2 == 1, start=tokenizer.begins_after(ids)
        )
    return ids


def spells_special(tokenizer: Tokenizer, text: str) -> bool:
    """Whether some of the text would become special tokens, or marks of the chat template."""
    return tokenizer.encode(text, bos=False) != tokenizer.encode(text, bos=False, special=False)
