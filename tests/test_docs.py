"""The documents speak of what is there: links, files, tests, names, and the API reference."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rksc

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def anchors(page: Path) -> set[str]:
    """What a link into a page may name: its headings in small letters, joined by hyphens."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing_links(text: str, folder: Path) -> list[str]:
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        page = folder / name
        if not page.exists() or (anchor and anchor not in anchors(page)):
            missing.append(target)
    return missing


def missing_paths(text: str) -> list[str]:
    """Files of the repository that are named in code spans."""
    pattern = r"`((?:csrc|rksc|tests|benchmarks|examples|docs|\.ci)/[\w./\-]+)`"
    return [path for path in re.findall(pattern, text) if not (ROOT / path).exists()]


def missing_tests(text: str) -> list[str]:
    found = re.findall(r"\b(test_\w+\.py)::(\w+)", text)
    missing = []
    for file, name in found:
        path = ROOT / "tests" / file
        if not path.exists() or not re.search(rf"^def {name}\b", path.read_text("utf-8"), re.M):
            missing.append(f"{file}::{name}")
    return missing


def unquoted_extras(text: str) -> list[str]:
    """Commands that a shell takes for a pattern of file names: pip install name[extra]."""
    return re.findall(r"pip install (?:-\w+ )*[\w.]+\[[\w,-]+\]", text)


@pytest.mark.parametrize("folder", ["rksc", "examples", "benchmarks", "docs", "csrc"])
def test_extras_to_install_are_quoted(folder: str) -> None:
    assert unquoted_extras("try: pip install rksc[hf] or pip install 'rksc[ray]'") == [
        "pip install rksc[hf]"
    ]
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in {".py", ".md", ".c", ".h", ".ipynb", ".pyi"}:
            assert unquoted_extras(path.read_text("utf-8")) == [], path


def _now(rows: re.Match[str]) -> str:
    """The second cells of a table's rows."""
    return re.sub(r"^\|[^|]*\|", "", rows[0], flags=re.MULTILINE)


def missing_names(text: str) -> list[str]:
    """rksc.name in code that the package does not export; modules, loggers and files may stand, and
    what a table of changes names under "before"."""
    head, *tables = text.split("| before | now |\n")
    text = head + "".join(re.sub(r"\A(?:\|.*\n)+", _now, table) for table in tables)
    found = set(re.findall(r"\brksc\.([A-Za-z]\w*)", text))
    modules = {path.stem for path in (ROOT / "rksc").glob("*.py")} | {"_core", "gguf", "h", "c"}
    modules |= {path.parent.name for path in (ROOT / "rksc").glob("*/__init__.py")}
    logger = re.compile(r'getLogger\("rksc\.(\w+)"\)')
    for path in (ROOT / "rksc").rglob("*.py"):
        modules |= set(logger.findall(path.read_text("utf-8")))
    return sorted(name for name in found - modules if not hasattr(rksc, name))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text("utf-8")
    assert missing_links(text, page.parent) == []
    assert missing_paths(text) == []
    assert missing_tests(text) == []
    assert missing_names(text) == []


def test_missing_things_are_found() -> None:
    docs = ROOT / "docs"
    assert missing_links("[a](nowhere.md), [b](api.md), [c](api.md#no-such)", docs) == [
        "nowhere.md", "api.md#no-such",
    ]  # fmt: skip
    assert missing_paths("`csrc/kv/kv.c` and `csrc/nothing.c`") == ["csrc/nothing.c"]
    assert missing_tests("test_docs.py::test_no_such, test_docs.py::test_missing_things_are_found")
    assert missing_names("`rksc.load`, rksc.nothing()") == ["nothing"]
    table = "rksc.a1\n| before | now |\n|---|---|\n| `rksc.a2` | rksc.a3 |\n\n| rksc.a4 | |\n"
    assert missing_names(table) == ["a1", "a3", "a4"]


def test_the_api_reference_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "make_api.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    for name in rksc.__all__:
        assert f"### `{name}`" in text, name


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_in_pages_is_python(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.DOTALL):
        if page.name != "api.md":  # signatures
            ast.parse(block)
