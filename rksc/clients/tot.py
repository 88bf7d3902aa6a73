"""rksc under the code of the Tree of Thoughts paper (the `tree-of-thoughts-llm` package).

    client = rksc.clients.tot.connect(rksc.load("model.gguf"))  # then import tot as ever
    from tot.methods.bfs import solve

The package calls `openai.ChatCompletion.create` of 2023, which no current `openai` has. `connect`
puts an object of that shape into `tot.models`; nothing else of the package is touched.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..engine.load import Model
from ..engine.session import BranchSession
from .openai import OpenAI


def gpt_of(model: Model | BranchSession | OpenAI, **options: Any) -> Callable[..., list[str]]:
    """The package's `gpt` on a model; other projects of that family (LATS) take it, too."""
    client = OpenAI(model, **options)

    def gpt(
        prompt: str,
        model: str = "rksc",
        temperature: float = 0.7,
        max_tokens: int = 1000,
        n: int = 1,
        stop: Any = None,
    ) -> list[str]:
        """n answers to one user message."""
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            temperature=temperature,
            max_tokens=max_tokens,
            n=n,
            stop=stop,
        )
        return [choice.message.content for choice in answer.choices]

    return gpt


class OpenAIError(Exception):
    """What the package retries for ever; rksc never raises it."""


def connect(model: Model | BranchSession | OpenAI, **options: Any) -> OpenAI:
    """Put a model under the installed `tot` package; the client, whose session tells the work.

    tot.models.gpt_usage() goes on counting tokens. Call it again for another model.
    """
    client = OpenAI(model, **options)
    shape: Any = ModuleType("openai")
    shape.error = ModuleType("openai.error")
    shape.error.OpenAIError = OpenAIError
    shape.ChatCompletion = client.chat.completions
    if "tot.models" not in sys.modules:
        # Its first lines want the old names; a real openai is back in place afterwards.
        real = sys.modules.get("openai")
        sys.modules["openai"] = shape
        try:
            importlib.import_module("tot.models")
        finally:
            del sys.modules["openai"]
            if real is not None:
                sys.modules["openai"] = real
    sys.modules["tot.models"].openai = shape  # type: ignore[attr-defined]
    return client
