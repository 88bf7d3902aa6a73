"""What callers hand over, checked and in the engine's terms; each error names its argument."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from .._core import Branch
from ..scalars import as_int
from .options import CGEE, Sampling

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DTYPES: dict[str, Literal["float32", "bfloat16"]] = {
    "float32": "float32", "float": "float32", "f32": "float32", "fp32": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
}  # fmt: skip


def no_tokenizer(field: str) -> ValueError:
    """The error of a session that takes token ids only and was given text for `field`."""
    return ValueError(
        f"{field}: text needs a tokenizer, and this session has none: pip install 'rksc[hf]' gives "
        "a loaded model its own, lent weights need tokenizer=rksc.load(path).tokenizer; token ids "
        "work without"
    )


def no_model(field: str, value: object) -> TypeError:
    """The error of a call that was given something else for a model or a session."""
    way = f": rksc.load({value!r}) makes one" if isinstance(value, (str, PurePath)) else ""
    return TypeError(f"{field} must be a rksc.Model or a rksc.BranchSession, got {value!r}{way}")


def nearest(name: str, known: Iterable[str]) -> str:
    """What a slip may have meant, for a message: "; did you mean 'n_threads'?", or ""."""
    known = list(known)
    if not 2 <= len(name) <= 64:
        return ""
    close = difflib.get_close_matches(name, known, 1) or [k for k in known if name in k.split("_")]
    return f"; did you mean {close[0]!r}?" if close else ""


def check_options(
    what: str,
    options: Iterable[str],
    known: Sequence[str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """A TypeError names an option that `what` does not have, and what it may have meant.
    elsewhere: names that belong to something else, and what to do with them."""
    for name in options:
        if name not in known:
            meant = f": {elsewhere[name]}" if name in elsewhere else nearest(name, known)
            meant = meant or f": it has {', '.join(known)}"
            raise TypeError(f"{what} has no option {name!r}{meant}")


def check_named(call: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """`check_options` for a function that takes `sampling`, and what it was given beside its own
    arguments."""
    if unknown:
        parameters = inspect.signature(call).parameters.values()
        known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        settings = {f.name: f"pass sampling=rksc.Sampling({f.name}=...)" for f in fields(Sampling)}
        check_options(f"{call.__name__}()", unknown, known, settings)


def parse_bytes(value: int | str) -> int:
    """A number of bytes from 1024 or "2GiB", "512MB" (binary units)."""
    number = as_int(value)
    if number is None:
        text = str(value).strip().lower()
        digits = text.rstrip("kmgtib ")
        unit = text[len(digits) :].strip().removesuffix("b").removesuffix("i")
        try:
            number = int(float(digits) * _UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            raise ValueError(f'kv_bytes must be a number or like "2GiB", got {value!r}') from None
    if number <= 0:
        raise ValueError(f"kv_bytes must be positive, got {value!r}")
    return number


def parse_dtype(value: Any) -> Literal["float32", "bfloat16"] | None:
    """ "float32", "bfloat16", "f32", "bf16", torch.bfloat16, numpy.float32; None: the default."""
    if value is None:
        return None
    name = value if isinstance(value, str) else getattr(value, "__name__", str(value))
    known = _DTYPES.get(name.lower().removeprefix("torch."))
    if known is None:
        raise ValueError(f'dtype must be "float32" or "bfloat16", got {value!r}')
    return known


def integer(field: str, value: Any, least: int = 0, most: int = 2**31 - 1) -> int:
    """An int in [least, most]; a TypeError or ValueError names the field."""
    number = as_int(value)
    if number is None:
        raise TypeError(f"{field} must be an int, got {value!r}")
    if not least <= number <= most:
        raise ValueError(f"{field} must be in {least} .. {most}, got {number}")
    return number


def flag(field: str, value: Any) -> bool:
    """True or False itself: what merely counts as one may be a slip."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{field} must be True or False, got {value!r}")
    return bool(value)


def check_branch(field: str, branch: Any, session: Any) -> None:
    """A TypeError or ValueError names the field when it is no branch of this session."""
    if not isinstance(branch, Branch):
        raise TypeError(f"{field} must be a rksc.Branch, not {type(branch).__name__}")
    if branch.session is not session:
        raise ValueError(f"{field} belongs to another session")


def as_cgee(cgee: Any, n_layers: int) -> CGEE | None:
    """Settings for a model of that many layers."""
    if cgee is not None and not isinstance(cgee, CGEE):
        raise ValueError(
            f"cgee must be rksc.CGEE or None, got {cgee!r} (presets: CGEE(), CGEE.fast(), "
            "CGEE.paper())"
        )
    if cgee is not None and cgee.lens is not None and cgee.min_layer > n_layers:
        raise ValueError(f"cgee.min_layer must be at most {n_layers}, got {cgee.min_layer}")
    return cgee


def distinct(branches: Branch | Sequence[Branch]) -> list[Branch]:
    """`as_list` for a call that changes branches: each at most once."""
    listed = as_list(branches)
    seen: set[int] = set()
    for i, branch in enumerate(listed):
        if not isinstance(branch, Branch):
            raise TypeError(f"branches[{i}] must be a rksc.Branch, not {type(branch).__name__}")
        if id(branch) in seen:
            raise ValueError(f"branches: branch {branch.id} is given twice")
        seen.add(id(branch))
    return listed


def as_list(branches: Branch | Sequence[Branch]) -> list[Branch]:
    if isinstance(branches, Branch):
        return [branches]
    if not isinstance(branches, Iterable):
        raise TypeError(f"branches must be a rksc.Branch or a sequence of them, got {branches!r}")
    return list(branches)
