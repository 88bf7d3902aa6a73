"""Write docs/api.md from the docstrings of rksc/ and rksc/_core.pyi, without importing them.

python docs/make_api.py          writes it
python docs/make_api.py --check  exits 1 when it is not up to date (a step of `make lint`)
"""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "api.md"

# Chapters and the names in them; every public name of the package must be in one.
CHAPTERS: dict[str, tuple[str, ...]] = {
    "Models": ("load", "Model", "ModelConfig", "Tokenizer", "Tensor"),
    "Sessions and branches": ("BranchSession", "Branch", "DeviceArray", "CapacityError"),
    "Settings": ("Sampling", "ASKS", "CGEE", "RSBCM"),
    "Results": ("Generation", "Token", "Verdict", "Gate", "Stats"),
    "Solving": (
        *("solve", "search", "Approach", "Solution", "Node", "Phase"),
        *("final_answer", "same_answer"),
    ),
    "The guards on wordings": ("numbers", "same_numbers", "is_rewording"),
    "Calibration": ("calibrate", "calibrate_cgee"),
}

Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Source:
    """A module and the definitions at its top."""

    name: str
    tree: ast.Module

    def find(self, name: str) -> Definition | None:
        for node in self.tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                return node
        return None


def read(path: Path) -> Source:
    return Source(path.stem, ast.parse(path.read_text("utf-8")))


def exported(package: Source) -> dict[str, str]:
    """Public name -> module, from the imports and __all__ of rksc/__init__.py."""
    where: dict[str, str] = {}
    names: list[str] = []
    for node in ast.walk(package.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            where |= {alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
    return {name: where[name] for name in names}


def signature(node: ast.FunctionDef) -> str:
    """`name(arguments) -> result`, one argument a line where it is long."""
    arguments = node.args
    shown = [a for a in (*arguments.posonlyargs, *arguments.args) if a.arg not in ("self", "cls")]
    defaults = [None] * (len(shown) - len(arguments.defaults)) + list(arguments.defaults)
    parts = [_argument(a, d) for a, d in zip(shown, defaults[-len(shown) :] or [], strict=True)]
    if arguments.vararg:
        parts.append("*" + _argument(arguments.vararg, None))
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [
        _argument(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg and ast.unparse(arguments.kwarg.annotation or node) != "NoReturn":
        parts.append("**" + _argument(arguments.kwarg, None))
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({', '.join(parts)}){result}"
    if len(line) <= 96:
        return line
    return f"{node.name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation:
        text += f": {ast.unparse(argument.annotation)}"
    if default is not None:
        text += f"{' = ' if argument.annotation else '='}{ast.unparse(default)}"
    return text


def text_of(node: Definition) -> str:
    doc = ast.get_docstring(node)
    return inspect.cleandoc(doc).strip() if doc else ""


def paragraphs(doc: str) -> list[str]:
    """A docstring's lines and what parts them from the next."""
    return [*doc.splitlines(), ""] if doc else []


def decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(d) for d in node.decorator_list}


def fields(node: ast.ClassDef) -> Iterator[str]:
    """Attributes with their types, defaults and the strings that follow them."""
    for i, item in enumerate(node.body):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        if item.target.id.startswith("_"):
            continue
        default = "" if item.value is None else f" = {ast.unparse(item.value)}"
        following = node.body[i + 1] if i + 1 < len(node.body) else None
        note = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            note = " " + " ".join(str(following.value.value).split())
        yield f"- `{item.target.id}: {ast.unparse(item.annotation)}{default}`{note}"


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    for item in node.body:
        if not isinstance(item, ast.FunctionDef) or item.name.startswith("_"):
            continue
        if not any(d.endswith((".setter", ".deleter")) for d in decorators(item)):
            yield item


def constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name in ("__init__", "__new__"):
            return item
    return None


def write_function(node: ast.FunctionDef, level: str, prefix: str = "") -> Iterator[str]:
    yield f"{level} `{prefix}{node.name}`"
    yield ""
    if "property" in decorators(node):
        result = ast.unparse(node.returns) if node.returns else "Any"
        yield f"Property, `{result}`."
        yield ""
    else:
        yield "```python"
        yield signature(node)
        yield "```"
        yield ""
    yield from paragraphs(text_of(node))


def write_class(node: ast.ClassDef, inherited: ast.ClassDef | None) -> Iterator[str]:
    yield f"### `{node.name}`"
    yield ""
    made = constructor(node)
    if made is not None:
        yield "```python"
        yield signature(made).replace(made.name, node.name, 1).removesuffix(" -> None")
        yield "```"
        yield ""
    yield from paragraphs(text_of(node))
    listed = list(fields(node))
    if inherited is not None:
        listed += list(fields(inherited))
    if listed:
        yield from listed
        yield ""
    for method in methods(node):
        yield from write_function(method, "####", f"{node.name}.")
    own = {method.name for method in methods(node)}
    for method in methods(inherited) if inherited is not None else ():
        if method.name not in own:
            yield from write_function(method, "####", f"{node.name}.")


def base_of(node: ast.ClassDef, sources: Mapping[str, Source]) -> ast.ClassDef | None:
    """The class of this package that it inherits from."""
    names = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    for source in sources.values():
        for name in names:
            found = source.find(name)
            if isinstance(found, ast.ClassDef):
                return found
    return None


def render() -> str:
    package = ROOT / "rksc"
    sources = {
        ".".join(p.relative_to(package).with_suffix("").parts): read(p)
        for p in sorted(package.rglob("*.py"))
    }
    sources["_core"] = read(ROOT / "rksc" / "_core.pyi")
    names = exported(sources["__init__"])
    chaptered = [name for chapter in CHAPTERS.values() for name in chapter]
    if sorted(chaptered) != sorted(names):
        difference = set(chaptered) ^ set(names)
        raise SystemExit(f"docs/make_api.py: CHAPTERS and rksc.__all__ differ: {difference}")
    lines = [
        "# API reference",
        "",
        "Written by `python docs/make_api.py` from the docstrings: edit those, not this file.",
        "Everything is in the package `rksc`. Tokens may be any sequence of ints or an integer",
        "array; where a session has a tokenizer, text may stand in their place.",
        "",
    ]
    for chapter, members in CHAPTERS.items():
        lines += [f"## {chapter}", ""]
        for name in members:
            node = sources[names[name]].find(name)
            if node is None:
                raise SystemExit(f"docs/make_api.py: {name} is not defined in {names[name]}")
            if isinstance(node, ast.FunctionDef):
                lines += list(write_function(node, "###"))
            else:
                lines += list(write_class(node, base_of(node, sources)))
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    text = render()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, "utf-8")
        return 0
    old = TARGET.read_text("utf-8") if TARGET.exists() else ""
    if old == text:
        return 0
    difference = difflib.unified_diff(
        old.splitlines(), text.splitlines(), "api.md", "now", "", "", 1
    )
    print("docs/api.md is not up to date: python docs/make_api.py", *difference, sep="\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
