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

import rksc.clients.lm_eval  # noqa: F401  # registers the model

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
