"""The rows of the tasks in this folder: files of data/, from wherever the harness is started.

    lm_eval --model rksc --model_args pretrained=MODEL.gguf,dtype=float32 --tasks examples/lm_eval

A task file that is given by its path is read before the harness looks for its model, and with it
the functions it names are imported. So this module can make the model "rksc" known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

import rksc
import rksc.clients.lm_eval  # registers the model
from rksc.answers.final import is_answer

DATA = Path(__file__).resolve().parents[2] / "data"


def splits(problems: str, lent: int = 0, **unused: Any) -> dict[str, Dataset]:
    """`examples`: those of the problems' file and the last `lent` problems; `test`: the others.

    The harness also passes the model's arguments.
    """
    asked, examples = (
        [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]
        for name in (f"{problems}.jsonl", f"{problems}_examples.jsonl")
    )
    kept = len(asked) - lent
    return {
        "examples": Dataset.from_list(examples + asked[kept:]),
        "test": Dataset.from_list(asked[:kept]),
    }


def graded(doc: dict[str, Any], results: list[str]) -> dict[str, bool]:
    """Whether the last answer that a text states is the known number, 1,000 or $1000.00."""
    return {"exact_match": is_answer(rksc.final_answer(results[0]), doc["answer"])}
