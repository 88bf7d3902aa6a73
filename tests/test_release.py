"""What a release says of itself agrees: version, changelog, citation, what is announced."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import rksc

ROOT = Path(__file__).resolve().parent.parent


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_one_version_everywhere() -> None:
    version = rksc.__version__
    assert re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.M)[0] == version
    assert re.search(rf"^version: {re.escape(version)}$", read("CITATION.cff"), re.M)
    assert re.search(r'^version = \{ attr = "rksc.__version__" \}$', read("pyproject.toml"), re.M)


def test_wheels_are_built_for_every_python_that_is_announced() -> None:
    project = read("pyproject.toml")
    announced = re.findall(r"Python :: (3\.\d+)", project)
    build = re.search(r'^build = "(.*)"$', project, re.M)
    assert build is not None
    assert [f"cp{version.replace('.', '')}-*" for version in announced] == build[1].split()
    oldest = re.search(r'^requires-python = ">=(.*)"$', project, re.M)
    assert oldest is not None
    assert oldest[1] == announced[0]


def test_the_citation_names_the_paper() -> None:
    citation = read("CITATION.cff")
    for fact in ("arXiv:2606.09937", "family-names: Sekar", "year: 2026"):
        assert fact in citation


def test_a_clone_that_is_not_built_says_what_to_do(tmp_path: Path) -> None:
    """There it stands before an installed package."""
    shutil.copytree(ROOT / "rksc", tmp_path / "rksc", ignore=shutil.ignore_patterns("*.so", "data"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", "import rksc"], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: "), done.stderr
    assert "is not built for this Python. In a clone: pip install -e ." in last
    assert "pip install -e '.[hf" in read("README.md")


def test_the_source_archive_has_what_its_wheels_are_tested_with() -> None:
    (script,) = re.findall(r"\{project\}/([\w./]+)", read("pyproject.toml"))
    assert (ROOT / script).is_file()
    assert f"graft {Path(script).parent}\n" in read("MANIFEST.in")
