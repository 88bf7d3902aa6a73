"""Problems, rewordings and near-duplicates: `data/` of a clone, the user's own folder, or the part
of the data that comes with the package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..answers.final import final_answer, is_answer
from ..reasoning.prompts import INSTRUCTION
from .stats import halves

N_CENTRE = 24  # questions that a centre is made from
SETS = ("gsm8k", "arc_challenge", "mmlu_stem", "gpqa")
LETTER = (
    "Think step by step. Then write the letter of the correct choice on a line that begins "
    "with 'Answer:'."
)


@dataclass(frozen=True)
class Problem:
    """A question with a known answer: a number, or the letter of one of the choices."""

    id: str
    question: str
    answer: str
    choices: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The question, with lettered choices below."""
        lines = [f"{chr(65 + i)}. {choice}" for i, choice in enumerate(self.choices)]
        return "\n".join([self.question, *lines])

    def is_right(self, answer: str) -> bool:
        """Whether an answer that was read is the known one, however its number is written."""
        return is_answer(answer, self.answer)

    @property
    def instruction(self) -> str:
        return LETTER if self.choices else INSTRUCTION

    def read(self, text: str) -> str:
        """The answer that a worked solution gives; "" when there is none."""
        if not self.choices:
            return final_answer(text)
        last = chr(64 + len(self.choices))
        # a small letter counts where it stands alone: "the answer is a gas" names no choice
        said = rf"(?i:answer)\s*(?:(?i:is)|:)?[\s*(]*([A-{last}])\b"
        alone = rf"(?i:answer)\s*:[\s*(]*([a-{last.lower()}])[*).]*[ \t]*$"
        marked = ["".join(m) for m in re.findall(f"{said}|{alone}", text, re.MULTILINE)]
        marked = marked or re.findall(rf"\b([A-{last}])\b", text)
        return str(marked[-1]).upper() if marked else ""


@dataclass(frozen=True)
class Pair:
    """Two wordings. same: one may stand for the other (None: a matter of taste).

    group: the question both belong to; no group may stand in both halves of a split.
    """

    group: str
    kind: str
    root: str
    own: str
    same: bool | None


def find_data(folder: str | Path | None = None) -> Path:
    """The folder with the data: this one, else `data` of the current folder, of one that it is in,
    or of the clone that rksc is imported from, else what the package holds (`missing_data` names
    the rest). FileNotFoundError tells how to get it."""
    here, package = Path.cwd(), Path(__file__).resolve().parents[1]
    around = [above / "data" for above in (here, *here.parents, package.parent, package)]
    for path in around if folder is None else [Path(folder)]:
        if any((path / f"{name}.jsonl").is_file() for name in (*SETS, "rewordings")):
            return path
    where = f"a folder data of {here} or above" if folder is None else str(folder)
    raise FileNotFoundError(f"no data in {where}: {_ELSEWHERE}")


def missing_data(folder: Path) -> str | None:
    """What the package's own data lack and where it is; None for any other folder."""
    if folder != Path(__file__).resolve().parents[1] / "data":
        return None
    return (
        f"{folder} has gsm8k, mmlu_stem and 12 questions with rewordings of rksc's own. "
        f"arc_challenge and the 300 reworded questions of GSM-Plus: {_ELSEWHERE}"
    )


_ELSEWHERE = (
    "some of the data are share-alike and not in the wheel; take data/ of a clone or of the source "
    "archive (pip download --no-deps --no-binary rksc rksc) and pass --data FOLDER"
)


def problem_sets(folder: Path, n: int | None = None, seed: int = 0) -> dict[str, list[Problem]]:
    """n random problems (None: all) of every set that the folder has."""
    return {
        name: _some(list(_problems(folder / f"{name}.jsonl")), n, seed)
        for name in SETS
        if (folder / f"{name}.jsonl").is_file()
    }


def examples(folder: Path, name: str, n: int) -> str:
    """A header of n worked examples of a set ("" where the folder has none)."""
    path = folder / f"{name}_examples.jsonl"
    if not path.is_file():
        return ""
    parts = []
    for row in list(_rows(path))[:n]:
        problem = _problem(row, path)
        steps = str(row.get("solution", "")).replace(f"#### {problem.answer}", "").strip()
        steps = f"{steps}\n" if steps else ""
        parts.append(f"Question: {problem.text}\n{steps}Answer: {problem.answer}")
    return "Solve the problem, as in these examples.\n\n" + "\n\n".join(parts)


_REWORDINGS = "rewordings.jsonl"


def wording_pairs(folder: Path, n: int | None = None, seed: int = 0) -> dict[str, list[Pair]]:
    """Pairs by question (n random ones; None: all) from rewordings and near-duplicates.

    Beside what the files hold: the question with one word turned round (`turned`), a
    rewording with one word turned round, and another question of the same of `halves`.
    """
    path = folder / _REWORDINGS
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; {_ELSEWHERE}")
    rows = {str(row["gsm8k_id"]): row for row in _rows(path)}
    near: dict[str, list[dict[str, Any]]] = {group: [] for group in rows}
    if (folder / "near_duplicates.jsonl").is_file():
        for row in _rows(folder / "near_duplicates.jsonl"):
            near.get(str(row["gsm8k_id"]), []).append(row)
    names = sorted(rows)
    picked = _some(names, n, seed)
    spare = iter(sorted(set(names) - set(picked)))
    unrelated: dict[str, str | None] = {}
    for half in halves(picked, seed):
        ring = [name for name in picked if name in half]
        others = [*ring[1:], ring[0]] if len(ring) > 1 else [next(spare, None)]
        unrelated.update(zip(ring, others, strict=False))
    return {
        group: list(_pairs_of(group, rows[group], near[group], rows.get(unrelated[group] or "")))
        for group in picked
    }


def reworded_problems(
    folder: Path, n: int | None = None, seed: int = 0
) -> tuple[list[tuple[Problem, list[str]]], list[str]]:
    """n problems of the second of `halves` with their rewordings, and the questions of the first
    half that a centre is made from. Nothing where the folder lacks `rewordings.jsonl`."""
    if not (folder / _REWORDINGS).is_file():
        return [], []
    by_group = wording_pairs(folder, None, seed)
    first, second = halves(list(by_group), seed)
    known = wording_answers(folder)
    asked = [
        (Problem(group, pairs[0].root, known.get(group, "")),
         [pair.own for pair in pairs if pair.kind == REWORDING])
        for group, pairs in by_group.items() if group in second
    ]  # fmt: skip
    return asked[:n], [by_group[group][0].root for group in sorted(first)][:N_CENTRE]


def wording_answers(folder: Path) -> dict[str, str]:
    """The answers of the questions of `wording_pairs`, where the file has them."""
    rows = _rows(folder / _REWORDINGS)
    return {str(row["gsm8k_id"]): str(row["answer"]) for row in rows if row.get("answer")}


_KINDS = {
    "numerical substitution": "number changed",
    "digit expansion": "number changed",
    "integer-decimal-fraction conversion": "number changed",
    "critical thinking": "fact removed",
    "reversing operation": "operation reversed",
    "adding operation": "operation added",
    "distraction insertion": "distraction added",
}
REWORDING, TURNED, TURNED_REWORDING = "rewording", "word turned", "word turned in a rewording"
UNRELATED = "unrelated question"
NUMBER_CHANGED, FACT_REMOVED = "number changed", "fact removed"
REVERSED, ADDED = "operation reversed", "operation added"
KINDS = (
    *(REWORDING, NUMBER_CHANGED, FACT_REMOVED, REVERSED, ADDED),
    *(UNRELATED, TURNED, TURNED_REWORDING, "distraction added"),
)


def _pairs_of(
    group: str, row: dict[str, Any], near: list[dict[str, Any]], other: dict[str, Any] | None
) -> Iterator[Pair]:
    root = str(row["question"])
    for field in ("reworded", "third_wording"):
        if row.get(field):
            yield Pair(group, REWORDING, root, str(row[field]), True)
            turned_too = turned(str(row[field]))
            if turned_too is not None:
                yield Pair(group, TURNED_REWORDING, root, turned_too, False)
    for duplicate in near:
        kind = _KINDS[str(duplicate["type"])]
        differs = duplicate.get("answer_differs")
        if kind == "distraction added":
            yield Pair(group, kind, root, str(duplicate["reworded"]), None)
        elif differs:
            yield Pair(group, kind, root, str(duplicate["reworded"]), False)
    changed = turned(root)
    if changed is not None:
        yield Pair(group, TURNED, root, changed, False)
    if other is not None:
        yield Pair(group, UNRELATED, root, str(other["question"]), False)


_OPPOSITES = (
    ("more", "fewer"), ("hours", "minutes"), ("older", "younger"), ("longer", "shorter"),
    ("faster", "slower"), ("taller", "shorter"), ("first", "last"), ("before", "after"),
    ("buys", "sells"), ("bought", "sold"), ("gives", "takes"), ("gave", "took"), ("less", "more"),
    ("days", "weeks"), ("increased", "decreased"), ("heavier", "lighter"),
)  # fmt: skip


def turned(text: str) -> str | None:
    """The text with the first word of a list of opposites turned round; None: it has none."""
    for pair in _OPPOSITES:
        for word, opposite in (pair, pair[::-1]):
            changed, n = re.subn(rf"\b{word}\b", opposite, text, count=1)
            if n:
                return changed
    return None


# ---- files -------------------------------------------------------------------------------------


def _problems(path: Path) -> Iterator[Problem]:
    for row in _rows(path):
        yield _problem(row, path)


def _problem(row: dict[str, Any], path: Path) -> Problem:
    for name in ("question", "answer"):
        if not isinstance(row.get(name), str) or not row[name]:
            raise ValueError(f"{path}: {name} must be a non-empty text in {row!r}")
    choices = tuple(str(choice) for choice in row.get("choices") or ())
    if choices and row["answer"] not in {chr(65 + i) for i in range(len(choices))}:
        raise ValueError(f"{path}: answer must be the letter of a choice in {row!r}")
    return Problem(str(row.get("id", row["question"])), row["question"], row["answer"], choices)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}: line {number}: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}: line {number} is not an object")
            yield row


def _some(rows: Sequence[Any], n: int | None, seed: int) -> list[Any]:
    """n random ones in the order of the draw, so that a smaller n is the beginning of a larger."""
    order = np.random.default_rng(seed).permutation(len(rows))
    return [rows[i] for i in order[:n]]
