"""Problems and pairs of questions: read, found, divided; the guard of rewordings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.labs import write

from rksc import is_rewording
from rksc.calibration import stats
from rksc.calibration import tasks as task_module
from rksc.calibration.tasks import Problem, find_data, problem_sets, turned, wording_pairs

CHOICE = Problem("m", "Which?", "B", ("x", "y", "z"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is B.", "B"),
        ("A or C? Answer: **b**", "B"),
        ("C is wrong. Answer:\n(a).", "A"),
        ("ANSWER IS C", "C"),
        ("The answer is a gas.", ""),  # an article, no choice
        ("It is B: the answer is a gas.", "B"),
        ("Answer: a gas", ""),
        ("I take A", "A"),
        ("Answer: D", ""),  # there is no D; "D" is no choice
        ("none of it", ""),
        ("", ""),
    ],
)
def test_letters_are_read(text: str, answer: str) -> None:
    assert CHOICE.read(text) == answer


def test_numbers_are_read_and_choices_shown() -> None:
    assert Problem("g", "How many?", "12").read("so 3 * 4 = 12\nAnswer: 12 apples") == "12"
    assert CHOICE.text == "Which?\nA. x\nB. y\nC. z"


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        ("12", "Answer: $12.00", True),
        ("1200", "Answer: 1{,}200 apples", True),
        ("-3", "#### \u22123", True),
        ("50", "The answer is 50%.", True),  # a known answer names no unit
        ("30", "Answer: 12:30", False),
        ("4", "Answer: 3/4", False),
        ("3", "Answer: -3", False),
        ("12", "", False),
    ],
)
def test_numbers_are_right_however_they_are_written(answer: str, said: str, right: bool) -> None:
    row = Problem("g", "How many?", answer)
    assert row.is_right(row.read(said)) is right
    assert CHOICE.is_right(CHOICE.read("Answer: b")) and not CHOICE.is_right("A")


def test_words_turn_round() -> None:
    assert turned("He has 3 more than she.") == "He has 3 fewer than she."
    assert turned("5 minutes more") == "5 minutes fewer"
    assert turned("nothing here") is None


def test_pairs_of_a_question(data: Path) -> None:
    by_group = wording_pairs(data)
    assert sorted(by_group) == [f"q{i}" for i in range(8)]
    kinds = {pair.kind for pair in by_group["q3"]}
    assert kinds == set(task_module.KINDS)
    for group, pairs in by_group.items():
        other = next(p for p in pairs if p.kind == task_module.UNRELATED)
        assert other.own != other.root and all(p.group == group for p in pairs)
        assert [p.same for p in pairs if p.kind == task_module.REWORDING] == [True]
    assert list(wording_pairs(data, 3)) == list(by_group)[:3]


@pytest.mark.parametrize("n", [2, 3, 5, None])
def test_no_half_sees_a_question_of_the_other(data: Path, n: int | None) -> None:
    by_group = wording_pairs(data, n, seed=3)
    first, second = stats.halves(list(by_group), 3)
    roots = {half: {by_group[g][0].root for g in half} for half in map(frozenset, (first, second))}
    (a, others), (b, more) = (
        (texts, {p.own for g in half for p in by_group[g] if p.kind == task_module.UNRELATED})
        for half, texts in roots.items()
    )
    assert not others & b and not more & a and not others & more
    assert len(others) == len(first) and len(more) == len(second)


def test_a_half_of_one_question_may_have_no_unrelated_one(tmp_path: Path) -> None:
    rows = [{"gsm8k_id": f"q{i}", "question": f"How many, {i}?", "reworded": "x"} for i in range(2)]
    write(tmp_path, "rewordings", rows)
    kinds = {pair.kind for of in wording_pairs(tmp_path).values() for pair in of}
    assert kinds == {task_module.REWORDING}


def test_answers_of_reworded_questions(data: Path, tmp_path: Path) -> None:
    assert task_module.wording_answers(data) == {f"q{i}": str(i) for i in range(7)}  # not of q7
    assert len(task_module.wording_answers(find_data())) == 300


def test_data_are_found_from_below(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's kernel works in its own folder."""
    (tmp_path / "data").symlink_to(data)
    (tmp_path / "examples" / "deep").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "examples", tmp_path / "examples" / "deep"):
        monkeypatch.chdir(folder)
        assert find_data() == tmp_path / "data"
    monkeypatch.setattr(task_module, "__file__", str(tmp_path / "a" / "b" / "c" / "tasks.py"))
    monkeypatch.chdir("/")
    with pytest.raises(FileNotFoundError, match="a folder data of / or above"):
        find_data()


def test_the_package_has_what_it_may_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Outside of a clone: two sets, and questions of our own for the gate; the rest is named."""
    package = Path(task_module.__file__).parents[1]
    monkeypatch.setattr(
        task_module, "__file__", str(tmp_path / "rksc" / "experiments" / "tasks.py")
    )
    (tmp_path / "rksc").mkdir()
    (tmp_path / "rksc" / "data").symlink_to(package / "data")
    monkeypatch.chdir("/")
    folder = find_data()
    assert folder == tmp_path / "rksc" / "data"
    sizes = {name: len(rows) for name, rows in problem_sets(folder).items()}
    assert sizes == {"gsm8k": 200, "mmlu_stem": 200}
    assert task_module.examples(folder, "gsm8k", 8).count("Question:") == 8
    by_group = wording_pairs(folder)
    assert len(by_group) == 12
    for pairs in by_group.values():
        assert {p.kind for p in pairs} >= {
            task_module.REWORDING, task_module.NUMBER_CHANGED, task_module.FACT_REMOVED,
            task_module.REVERSED, task_module.ADDED, task_module.UNRELATED,
        }  # fmt: skip
        assert all(is_rewording(p.own, p.root) for p in pairs if p.kind == task_module.REWORDING)
    said = task_module.missing_data(folder)
    assert said is not None and "arc_challenge" in said and "--data FOLDER" in said
    assert task_module.missing_data(tmp_path) is None


def test_data_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--data"):
        find_data(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"rewordings\.jsonl"):
        wording_pairs(tmp_path)
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "?", "answer": "1"}\nnot json\n')
    with pytest.raises(ValueError, match=r"gsm8k\.jsonl: line 2"):
        problem_sets(tmp_path)
    write(tmp_path, "gsm8k", [{"question": "?", "answer": 1}])
    with pytest.raises(ValueError, match="answer must be a non-empty text"):
        problem_sets(tmp_path)
    write(tmp_path, "gsm8k", [{"question": "?", "answer": "C", "choices": ["a", "b"]}])
    with pytest.raises(ValueError, match="letter of a choice"):
        problem_sets(tmp_path)


def test_the_committed_data_are_whole() -> None:
    folder = find_data()
    sizes = {name: len(problems) for name, problems in problem_sets(folder).items()}
    assert sizes == {"gsm8k": 200, "arc_challenge": 200, "mmlu_stem": 200}
    pairs = wording_pairs(folder)
    assert len(pairs) == 300
    true = [p for of in pairs.values() for p in of if p.kind == task_module.REWORDING]
    copies = [p for of in pairs.values() for p in of if p.kind == task_module.TURNED]
    assert np.mean([is_rewording(p.own, p.root) for p in true]) > 0.8
    assert np.mean([is_rewording(p.own, p.root) for p in copies]) < 0.02


STEM = "Tom has 3 red apples and 4 green ones in his basket. How many more does he need for 10?"


@pytest.mark.parametrize(
    ("other", "passes"),
    [
        ("A basket of Tom's holds 3 apples that are red, 4 that are green. 10 are wanted: what is "
         "missing?", True),
        (STEM.replace("more", "fewer"), False),  # one word turned round
        (STEM.replace("4", "5"), False),  # a number
        (STEM + " He then drops all of them.", False),  # an operation added
        (STEM.replace(" in his basket", ""), False),  # a fact removed
        (STEM, False),
    ],
)  # fmt: skip
def test_a_rewording_is_no_near_copy(other: str, passes: bool) -> None:
    header = "Solve it.\nQuestion: one\nAnswer: two\n"
    assert is_rewording(STEM, other) is passes
    assert is_rewording(other, STEM) is passes
    # equal lines around the question do not count
    assert is_rewording(f"{header}{STEM}\nThink.", f"{header}{other}\nThink.") is passes
