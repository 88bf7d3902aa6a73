"""Modules of version 0.1 under their old names, for one version more.

They import as they did. A name that is taken from one comes from where it is now, with a
DeprecationWarning that says where that is.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
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
    """An old module. _new: the modules that have its contents."""

    _new: tuple[ModuleType, ...]

    def __getattr__(self, name: str) -> Any:
        for new in () if name.startswith("_") else self._new:
            if hasattr(new, name):
                warnings.warn(
                    f"{self.__name__}.{name} is {new.__name__}.{name} now, and goes from its old "
                    "place with version 0.3",
                    DeprecationWarning,
                    stacklevel=2,
                )
                return getattr(new, name)
        raise AttributeError(f"module {self.__name__!r} has no {name!r}; {self.__doc__}")


class _Old(MetaPathFinder, Loader):
    """Finds the old modules of a package, and makes them."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, old = fullname.partition(".")
        known = package == self._package and old in MOVED
        return spec_from_loader(fullname, self) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Moved(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert isinstance(module, _Moved)
        places = MOVED[module.__name__.partition(".")[2]]
        module._new = tuple(importlib.import_module(f"{self._package}.{p}") for p in places)
        module.__doc__ = f"Now in {' and '.join(new.__name__ for new in module._new)}."
        names = {name for new in module._new for name in vars(new) if not name.startswith("_")}
        module.__all__ = sorted(names)  # type: ignore[attr-defined]


def keep(package: ModuleType) -> None:
    """Let the old modules of `package` be found. Those that share their names with a function of
    the package are imported at once, and the function is put back: later imports leave it."""
    sys.meta_path.append(_Old(package.__name__))
    for old in MOVED:
        function = getattr(package, old, None)
        if function is not None:
            importlib.import_module(f"{package.__name__}.{old}")
            setattr(package, old, function)
