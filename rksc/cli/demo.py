"""The first minute: a small model, a grade-school problem, eight answers over one prompt.

The same work is then done without sharing (every branch prefills its own whole prompt, every
verification reads problem and answer again), in a session without a prefix index.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..answers.final import final_answer, is_answer
from ..data import Problem, examples, worked
from ..engine.defaults import best_dtype, find_model
from ..engine.load import Model, load
from ..engine.options import Sampling
from ..experiments.workload import PHASES, Outcome, Work, alone, kv_bytes
from ..reasoning.prompts import VERIFY, Wordings
from ..reasoning.render import clip, tree, wants_colour
from ..reasoning.solve import Solution, solve

SYSTEM = "You solve grade-school problems step by step, as in these examples.\n\n"
INSTRUCTION = "End with a line 'Answer: <number>'."
BRANCHES = 8
NUMBER = 7
SEED = 1
NEW_TOKENS = 96


def run(
    path: Path | None,
    problem: Problem,
    *,
    branches: int = BRANCHES,
    max_new_tokens: int = NEW_TOKENS,
    seed: int = SEED,
    engine: Mapping[str, Any] | None = None,
    write: Callable[[str], None] = print,
) -> bool:
    """Run the demo; whether both ways gave the same tokens and scores. engine: options of the
    sessions (dtype, n_threads, isa)."""
    model = load(find_model() if path is None else path)
    options = {"dtype": best_dtype(), **(engine or {})}
    session = model.session(**options)
    write(describe(model, session.dtype, session.isa, session.n_threads))
    sampling = Sampling(temperature=0.6, top_p=0.95, seed=seed)
    system = SYSTEM + worked(examples())
    solution = solve(
        session, problem.question, branches, max_new_tokens=max_new_tokens, sampling=sampling,
        instruction=INSTRUCTION, system=system,
    )  # fmt: skip
    width = shutil.get_terminal_size((100, 24)).columns
    write("")
    write(tree(solution, width, colour=wants_colour(sys.stdout)))
    write(judge(solution, problem.answer))
    write("")
    for line in savings(solution):
        write(clip(line, width))

    words = Wordings(session, INSTRUCTION, system, VERIFY)
    kids = solution.nodes[1:]
    yes, no = words.answers(None, None)
    prompt = words.problem(problem.question)
    work = Work(
        prefix=prompt,
        suffixes=[()] * branches,
        question=words.verification(),
        yes=yes,
        no=no,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
    )
    size = 2 * branches * (len(prompt) + max_new_tokens + len(work.question))
    bare = model.session(share=False, kv_bytes=kv_bytes(model.config, size), cgee=None, **options)
    verified = [i for i, node in enumerate(kids) if node.score is not None]
    outcome = alone(bare, work, [node.branch.stream for node in kids], verified)
    write("")
    for line in comparison(solution, outcome):
        write(clip(line, width))
    return same(solution, outcome)


def describe(model: Model, dtype: str, isa: str, n_threads: int) -> str:
    """One line on what runs."""
    c = model.config
    name = "model" if model.path is None else model.path.name
    return (
        f"{name}: {c.architecture}, {c.n_layers} layers of width {c.width}, "
        f"{dtype} on {isa}, {n_threads} threads"
    )


def judge(solution: Solution, gold: str) -> str:
    """The chosen answer against the right one. What was cut off before its end has none."""
    kids = [node for node in solution.nodes[1:] if node.finish_reason != "length"]
    right = [node for node in kids if is_answer(final_answer(solution.text(node)), gold)]
    verdict = "the chosen answer is right" if solution.best in right else "the choice is wrong"
    if solution.best not in kids:
        verdict = "the chosen branch was cut off before its answer"
    return (
        f"gold    {gold}   {verdict}; {len(right)} of {len(solution.nodes) - 1} are right. "
        "So small a model gets few such problems right."
    )


def savings(solution: Solution) -> list[str]:
    """What was shared and what was spared, from the session's books."""
    stats, kids = solution.stats, solution.nodes[1:]
    verdicts = [node.verdict for node in kids if node.verdict is not None]
    spared = [v for v in verdicts if v.outcome != "verified"]
    run = sum(v.layers for v in verdicts)
    saved = sum(v.n_layers - v.layers for v in verdicts)
    return [
        f"shared     {stats.blocks_shared} of {stats.blocks_used} KV blocks in use serve several "
        f"branches ({stats.block_tokens} tokens each)",
        f"saved      {stats.tokens_forked + stats.tokens_reused:,} tokens of prompt not computed "
        "again by the branches",
        f"verified   {len(verdicts) - len(spared)} of {len(verdicts)} branches"
        + (f" ({', '.join(sorted({v.outcome for v in spared}))})" if spared else "")
        + f"; {run} branch-layers run, {saved} saved",
    ]


def same(solution: Solution, outcome: Outcome) -> bool:
    """Did both ways choose the same tokens and give the same scores, to the bit?"""
    kids = solution.nodes[1:]
    tokens = [node.tokens.tolist() for node in kids]
    scores = [node.score for node in kids if node.score is not None]
    return tokens == [
        generation.tokens.tolist() for generation in outcome.generations
    ] and scores == [verdict.score for verdict in outcome.verdicts]


def comparison(solution: Solution, outcome: Outcome) -> list[str]:
    """Seconds and tokens of both ways, side by side."""
    rows = {"prefill": "prefill", "decode": "generate", "verify": "verify"}
    ours = {phase.name: phase for phase in solution.phases}
    theirs = outcome.clock.phases
    lines = [
        f"{'':10}{'shared':>22}{'without sharing':>26}",
        f"{'':10}{'seconds':>10}{'tokens':>12}{'seconds':>14}{'tokens':>12}",
    ]
    total = [0.0, 0, 0.0, 0]
    for name in PHASES:
        if name not in rows:
            continue
        mine, other = ours[rows[name]], theirs[name]
        tokens = mine.tokens_computed + mine.tokens_recomputed
        values = [mine.seconds, tokens, other.seconds, other.tokens]
        total = [a + b for a, b in zip(total, values, strict=True)]
        lines.append(_row(rows[name], values))
    lines.append(_row("total", total))
    lines.append("tokens: all that went through the model, those computed again among them")
    verdict = "the same tokens and scores, bit for bit" if same(solution, outcome) else "DIFFERENT"
    lines.append("")
    lines.append(f"{total[2] / total[0]:.1f} times as fast with sharing; both ways gave {verdict}")
    return lines


def _row(name: str, values: list[float]) -> str:
    a, b, c, d = values
    return f"{name:10}{a:>10.2f}{int(b):>12,}{c:>14.2f}{int(d):>12,}"
