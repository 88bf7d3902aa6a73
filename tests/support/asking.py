"""What tests of clients ask the small models, and how they read the answers."""

from __future__ import annotations

from typing import Any

from support.letters import Letters

LONG = "the abc of 12 things, " * 4
ASK: list[dict[str, Any]] = [{"role": "user", "content": LONG}]
ANSWER: dict[str, Any] = {
    "messages": ASK, "temperature": 0.9, "seed": 4, "n": 3, "max_tokens": 12, "ignore_eos": True,
}  # fmt: skip


def texts(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


def prompt_of(content: str) -> list[int]:
    return Letters().encode(f"<user>{content}</s><assistant>")
