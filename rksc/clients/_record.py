"""Response objects: dicts whose keys are attributes, too, as clients of either age read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class Record(dict[str, Any]):
    """A dict with its keys as attributes; dicts and lists of dicts inside become Records."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__({name: _wrap(value) for name, value in fields.items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """Plain dicts and lists, as pydantic's method of this name gives them."""
        return {
            name: _plain(value, exclude_none)
            for name, value in self.items()
            if not (exclude_none and value is None)
        }

    def model_dump_json(self, *, indent: int | None = None, exclude_none: bool = False) -> str:
        return json.dumps(self.model_dump(exclude_none=exclude_none), indent=indent)

    to_dict = model_dump

    def to_json(self, *, indent: int | None = 2, exclude_none: bool = False, **_: Any) -> str:
        return self.model_dump_json(indent=indent, exclude_none=exclude_none)


def _wrap(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Record(value)
    if isinstance(value, list):
        return [_wrap(item) for item in value]
    return value


def _plain(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, Record):
        return value.model_dump(exclude_none=exclude_none)
    if isinstance(value, list):
        return [_plain(item, exclude_none) for item in value]
    return value
