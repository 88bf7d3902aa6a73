"""rksc.search: a deeper tree. Expand, verify, keep the best, go on.

Branches that were not kept stay in the tree and hold their KV until the budget (RSBCM) takes
it; their siblings go on over the blocks that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from ..engine.arguments import check_named, integer
from ..engine.load import Model
from ..engine.options import Sampling
from ..engine.session import BranchSession, mark
from .prompts import INSTRUCTION, VALUE, Wordings
from .solve import Run, Solution, check_room, session_of
from .tree import Node


def search(
    model: Model | BranchSession,
    problem: str,
    *,
    expand: int = 3,
    depth: int = 3,
    beam: int = 2,
    max_new_tokens: int = 48,
    last_tokens: int | None = None,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = "\n\n",
    instruction: str = INSTRUCTION,
    system: str | None = None,
    verify_prompt: str = VALUE,
    yes: int | str | None = None,
    no: int | str | None = None,
    extract: Callable[[str], str] | None = None,
    progress: bool | None = None,
    **unknown: NoReturn,
) -> Solution:
    """Tree of Thoughts by breadth: `expand` children of each kept node, the best `beam` stay.

    A step ends at `stop`, at max_new_tokens or at the end of the answer; the last of `depth`
    levels writes to the end, at most last_tokens (None: four times max_new_tokens). All steps
    are verified in full: shortcuts of CGEE decide a winner, not a ranking. The best is chosen
    among finished answers and the last level. Other settings as in `rksc.solve`.
    """
    check_named(search, unknown)
    expand, depth, beam = (
        integer(field, value, least=1)
        for field, value in (("expand", expand), ("depth", depth), ("beam", beam))
    )
    session = session_of(model, problem, extract)
    widest = expand * min(beam, expand ** min(depth - 1, 31))
    check_room(session, "expand, beam", widest)
    words = Wordings(session, instruction, system, verify_prompt)
    sampling = Sampling(temperature=0.7) if sampling is None else sampling
    session.check_settings(max_new_tokens, sampling, stop)
    last_tokens = 4 * max_new_tokens if last_tokens is None else last_tokens
    integer("last_tokens", last_tokens)
    answers, question = words.answers(yes, no), words.verification()
    run = Run(session, problem, progress)

    def work() -> Solution:
        with run.phase("prefill"):
            run.plant(words.problem(problem))
        frontier, finished = [run.nodes[0]], list[Node]()
        for level in range(1, depth + 1):
            last = level == depth
            n_tokens = last_tokens if last else max_new_tokens
            children = [
                run.add(branch, node)
                for node in frontier
                for branch in run.fork(node.branch, expand)
            ]
            with run.phase("generate", len(children) * n_tokens):
                run.generate(children, n_tokens, sampling, () if last else stop)
            with run.phase("verify"):
                session.verify([n.branch for n in children], question, *answers, cgee=None)
            ended = [node for node in children if last or node.finish_reason == "eos"]
            finished += ended
            going_on = [node for node in children if node not in ended]
            frontier = sorted(going_on, key=_mark, reverse=True)[:beam]
            for node in frontier:
                node.kept = True
            if not frontier:
                break
        return run.solution(finished, extract)

    return run.finish(work)


def _mark(node: Node) -> float:
    return mark(node.branch.score, node.branch.confidence)
