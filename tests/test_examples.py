"""The examples run as they stand, on the small model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rksc import Model

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example(script: Path, smollm2: Model) -> None:
    done = subprocess.run(
        [sys.executable, str(script), str(smollm2.path)],
        check=False, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) >= 5


def test_the_first_example_is_short() -> None:
    code = (ROOT / "examples" / "quickstart.py").read_text("utf-8").split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
