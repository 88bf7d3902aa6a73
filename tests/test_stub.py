"""rksc/_core.pyi tells the truth: the same names, signatures and attributes as the extension."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
from support.model_files import TINY, random_weights

from rksc import _core
from rksc.model.config import ModelConfig

STUB = ast.parse((Path(_core.__file__).parent / "_core.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
IMPLICIT = {"__doc__", "__module__", "__new__", "__init__"}


def parameters(function: ast.FunctionDef, *, method: bool) -> list[tuple[str, str, Any]]:
    """(name, kind, default) of each, without self."""
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    missing: list[Any] = [inspect.Parameter.empty] * (len(positional) - len(a.defaults))
    defaults = missing + [value(node) for node in a.defaults]
    found = [(x.arg, "POSITIONAL", d) for x, d in zip(positional, defaults, strict=True)]
    keywords = [inspect.Parameter.empty if d is None else value(d) for d in a.kw_defaults]
    found += [(x.arg, "KEYWORD_ONLY", d) for x, d in zip(a.kwonlyargs, keywords, strict=True)]
    return found[1:] if method else found


def value(node: ast.expr) -> Any:
    """A default: a literal, or arithmetic on literals."""
    return eval(compile(ast.Expression(node), "_core.pyi", "eval"), {"__builtins__": {}})


def signature(thing: Any, *, method: bool) -> list[tuple[str, str, Any]]:
    found = [
        (p.name, "KEYWORD_ONLY" if p.kind is p.KEYWORD_ONLY else "POSITIONAL", p.default)
        for p in inspect.signature(thing).parameters.values()
    ]
    return found[1:] if method and found and found[0][0] == "self" else found


@pytest.mark.parametrize("name", CLASSES)
def test_class(name: str) -> None:
    real = getattr(_core, name)
    if issubclass(real, Exception):
        assert real.__bases__ == (RuntimeError,)
        return
    stated: dict[str, ast.stmt] = {}
    for node in CLASSES[name].body:
        if isinstance(node, ast.FunctionDef):
            stated[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            stated[node.target.id] = node
    public = {key for key in vars(real) if not key.startswith("__")}
    assert {key for key in stated if not key.startswith("__")} == public
    for key, node in stated.items():
        if isinstance(node, ast.AnnAssign):
            assert inspect.isdatadescriptor(vars(real)[key]), f"{key} cannot be set"
            continue
        assert isinstance(node, ast.FunctionDef)
        if any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
            assert inspect.isdatadescriptor(vars(real)[key]), key
        else:
            thing = real if key in ("__new__", "__init__") else getattr(real, key)
            assert signature(thing, method=True) == parameters(node, method=True), key


def test_module() -> None:
    stated = set(CLASSES)
    for node in STUB.body:
        if isinstance(node, ast.FunctionDef):
            stated.add(node.name)
            real = getattr(_core, node.name)
            assert signature(real, method=False) == parameters(node, method=False)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            stated.add(node.target.id)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            stated.add(node.targets[0].id)
    assert stated == {key for key in vars(_core) if not key.startswith("__")}


@pytest.mark.parametrize("name", CLASSES)
def test_everything_has_a_docstring(name: str) -> None:
    real = getattr(_core, name)
    assert real.__doc__
    for key, member in vars(real).items():
        if not key.startswith("__"):
            assert member.__doc__, key


def test_properties_are_read_only() -> None:
    session = _core.Session(random_weights(TINY), ModelConfig.of(TINY), kv_bytes=1 << 20)
    objects = {
        "Session": session,
        "Branch": session._prefill([1]),
        "Tensor": _core.Tensor(bytes(4), "F32", (1,)),
    }
    for name, thing in objects.items():
        for item in CLASSES[name].body:
            if isinstance(item, ast.FunctionDef) and item.decorator_list:
                before = repr(getattr(thing, item.name))
                with pytest.raises(AttributeError):
                    setattr(thing, item.name, 1)
                assert repr(getattr(thing, item.name)) == before
