"""A lab for tests: a small model with a tokenizer, data of a few lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rksc import Model, Tensor
from rksc.calibration.fitting import Verified
from rksc.calibration.measure import LENSES
from rksc.calibration.replay import Lenses
from rksc.experiments import Column, Finding, Lab, Table
from support.letters import Letters
from support.models import Small


def write(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def a_few_lines(folder: Path) -> Path:
    """A few lines of every file of data."""
    write(folder, "gsm8k", [
        {"id": f"g{i}", "question": f"th {i} abc", "answer": str(i)} for i in range(5)
    ])  # fmt: skip
    write(folder, "mmlu_stem", [
        {"id": f"m{i}", "question": f"e {i}", "answer": "AB"[i % 2], "choices": ["a", "b"]}
        for i in range(4)
    ])  # fmt: skip
    rows = [
        {"gsm8k_id": f"q{i}", "question": f"{i} more th abc {'ab' * i} the",
         "reworded": f"e the {'th' * i} abc fewer {i}", "answer": str(i) if i < 7 else None}
        for i in range(8)
    ]  # fmt: skip
    write(folder, "rewordings", rows)
    kinds = ["numerical substitution", "critical thinking", "reversing operation",
             "adding operation", "distraction insertion"]  # fmt: skip
    write(folder, "near_duplicates", [
        {"gsm8k_id": row["gsm8k_id"], "type": kind, "question": row["question"],
         "reworded": f"{row['question']} {i}", "answer_differs": True}
        for row in rows for i, kind in enumerate(kinds)
    ])  # fmt: skip
    return folder


def as_model(model: Small) -> Model:
    """With a tokenizer, nothing on disk."""
    weights = {
        name: Tensor(np.ascontiguousarray(w), "F32", w.shape) for name, w in model.weights.items()
    }
    return Model(weights, model.model_config, Letters(chat=True))  # type: ignore[arg-type]


def lab_of(model: Any, **options: Any) -> Lab:
    engine = {"dtype": "float32", "kv_bytes": "8MiB", "n_threads": 1}
    return Lab(model, progress=False, engine=engine, **options)


def asked(problem: dict[str, Any]) -> dict[str, Any]:
    return {"problem": problem, "n_branches": 4, "max_new_tokens": 8, "seed": 0}


def verified_problem(i: int, confidence: list[float], scores: list[float]) -> Verified:
    n = len(scores)
    sure = Lenses(np.full((n, 8), 0.01), np.tile(np.array(scores)[:, None], 8))
    lenses = dict.fromkeys(LENSES, sure)
    return Verified(f"p{i}", np.array(confidence), np.array(scores), lenses, 8, 10)


def a_table() -> Table:
    more = Table("cgee", "More", (Column("x"),), [(1,)])
    return Table(
        "cgee", "A title", (Column("name"), Column("time", "s"), Column("ok")),
        [("a|b", 1.23456, True), ("c", None, False)], {"model": "m", "seed": 3},
        [Finding("it works", True)], {"more": more},
    )  # fmt: skip
