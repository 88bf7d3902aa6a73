"""What a release says of itself agrees: version, changelog, citation, what is announced."""

from __future__ import annotations

import re
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
