"""Modules of version 0.1 under their old names, for one version more.

Each is in `sys.modules` from the start, empty; a name that is taken from it comes from where it is
now, with a DeprecationWarning that says where that is. They are not attributes of `rksc`, where
`solve`, `search`, `load` and `calibrate` are functions.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

_ROOMS = {
    "answers": ("guard",),
    "calibration": ("calibrate",),
    "engine": ("arguments", "load", "options", "results", "session"),
    "formats": ("files", "gguf", "safetensors"),
    "model": ("config", "names", "rope"),
    "reasoning": ("progress", "prompts", "render", "search", "tree"),
    "text": ("ends", "template", "tokenizer"),
}

MOVED = {name: (f"{room}.{name}",) for room, names in _ROOMS.items() for name in names} | {
    "bench": ("experiments.workload",),
    "chat": ("text.chat", "text.chat_tokens"),
    "demo": ("engine.defaults", "cli.demo"),
    "serve": ("server.app",),
    "solve": ("answers.final", "reasoning.solve"),
    **{
        f"experiments.{name}": (f"calibration.{name}",)
        for name in ("fitting", "measure", "replay", "runner", "stats", "tasks")
    },
}
"""{old name: the modules that have its contents now}, both without `rksc.`"""


class _Moved(ModuleType):
    def __init__(self, old: str, new: tuple[str, ...]) -> None:
        super().__init__(old, f"Now in {' and '.join(new)}.")
        self._new = new

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):  # the import system's own
            for new in self._new:
                try:
                    value = getattr(importlib.import_module(new), name)
                except AttributeError:
                    continue
                warnings.warn(
                    f"{self.__name__}.{name} is {new}.{name} now, and goes from its old place "
                    "with version 0.3",
                    DeprecationWarning,
                    stacklevel=2,
                )
                return value
        raise AttributeError(f"module {self.__name__!r} has no {name!r}; {self.__doc__}")


def keep(package: str) -> None:
    """Put the old modules of `package` where an import looks for them."""
    for old, new in MOVED.items():
        name = f"{package}.{old}"
        sys.modules[name] = _Moved(name, tuple(f"{package}.{each}" for each in new))
