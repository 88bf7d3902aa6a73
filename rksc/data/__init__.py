"""A few grade-school problems for the demo and the examples; README.md says whose they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Problem:
    """A GSM8K row. answer is the final number, solution the worked steps."""

    id: str
    question: str
    answer: str
    solution: str


def problems() -> list[Problem]:
    """40 short problems of the test split."""
    return _read("gsm8k_test_40.jsonl")


def examples() -> list[Problem]:
    """4 problems of the training split, to show a model how solutions look."""
    return _read("gsm8k_train_4.jsonl")


def worked(rows: list[Problem]) -> str:
    """Problems with their solutions as text: a few-shot header."""
    parts = []
    for row in rows:
        steps = row.solution.replace(f"#### {row.answer}", f"Answer: {row.answer}")
        parts.append(f"Question: {row.question}\n{steps}")
    return "\n\n".join(parts)


def _read(name: str) -> list[Problem]:
    text = files(__package__).joinpath(name).read_text("utf-8")
    return [Problem(**json.loads(line)) for line in text.splitlines()]
