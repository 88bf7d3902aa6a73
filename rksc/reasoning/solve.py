"""rksc.solve: several answers from one prompt, a verifier, and the best of them.

prefill -> fork -> generate -> level 1 or verify -> select
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn, TextIO

from .._core import Branch
from ..answers.final import final_answer
from ..engine.arguments import check_named, integer, no_model
from ..engine.load import Model
from ..engine.options import Sampling
from ..engine.session import BranchSession
from ..engine.types import Tokens
from ..text.decoding import check_text
from .progress import Progress
from .prompts import INSTRUCTION, VERIFY, Wordings
from .render import html, tree, wants_colour
from .tree import Node, Phase, Tree

_MOST_BRANCHES = 1 << 20  # of one fork
_COUNTED = (
    "tokens_computed", "tokens_reused", "tokens_forked", "tokens_recomputed", "layers_run",
    "layers_saved", "evictions",
)  # fmt: skip


@dataclass(frozen=True)
class Approach:
    """One way to attack the problem.

    prompt: its own wording of the problem (None: as given); under `session.asks` it may share
    the given wording's KV. suffix: what its answer is made to begin with.
    """

    prompt: str | None = None
    suffix: str = ""


@dataclass(eq=False)
class Solution(Tree):
    """The whole tree of one call. nodes[0] is the prompt; the others are answers or steps.

    answer: what `final_answer` (or the caller's function) reads in the best node's text.
    Prints as a tree; shows as HTML in a notebook. `drop()` releases all KV.
    """

    def __str__(self) -> str:
        return tree(self, width=shutil.get_terminal_size((100, 24)).columns)

    def show(self, file: TextIO | None = None) -> None:
        """Print the tree, in colour on a terminal."""
        file = sys.stdout if file is None else file
        width = shutil.get_terminal_size((100, 24)).columns
        print(tree(self, width=width, colour=wants_colour(file)), file=file)

    def __repr__(self) -> str:
        return (
            f"<rksc.Solution answer={self.answer!r}, best of {len(self.nodes) - 1} branches, "
            f"{self.seconds:.1f} s>"
        )

    def _repr_html_(self) -> str:
        return html(self)


def solve(
    model: Model | BranchSession,
    problem: str,
    approaches: int | Sequence[str | Approach] = 8,
    *,
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    instruction: str = INSTRUCTION,
    system: str | None = None,
    verify_prompt: str = VERIFY,
    yes: int | str | None = None,
    no: int | str | None = None,
    extract: Callable[[str], str] | None = None,
    progress: bool | None = None,
    **unknown: NoReturn,
) -> Solution:
    """Answer a problem several times over one shared prompt and choose the best answer.

    approaches: how many samples; or what each answer is made to begin with; or `Approach`es,
    which may word the problem anew. sampling: None is temperature 0.7 with seed 0.
    instruction follows the problem; verify_prompt is the short question after each answer,
    whose reply is yes or no (ids or single tokens; None looks for "YES" and "NO"). extract:
    from the best text to the answer (None: `final_answer`). progress: None shows a bar on a
    terminal. What is verified, skipped and exited is the session's `cgee`.
    """
    check_named(solve, unknown)
    plans = _as_approaches(approaches)
    session = session_of(model, problem, extract)
    check_room(session, "approaches", len(plans))
    words = Wordings(session, instruction, system, verify_prompt)
    sampling = Sampling(temperature=0.7) if sampling is None else sampling
    session.check_settings(max_new_tokens, sampling, stop)
    answers, question = words.answers(yes, no), words.verification()
    run = Run(session, problem, progress)

    def work() -> Solution:
        with run.phase("prefill"):
            run.plant(words.problem(problem))
            nodes = _branch_out(run, words, plans)
        if any(plan.suffix for plan in plans):
            with run.phase("suffix"):
                session.compute([node.branch for node in nodes])
        with run.phase("generate", len(nodes) * max_new_tokens):
            run.generate(nodes, max_new_tokens, sampling, stop)
        with run.phase("verify"):
            session.verify([node.branch for node in nodes], question, *answers)
        return run.solution(nodes, extract)

    return run.finish(work)


def session_of(
    model: Model | BranchSession, problem: str, extract: Callable[[str], str] | None
) -> BranchSession:
    """The session that solve and search run on, once what they are given is of the right kind."""
    check_text("problem", problem)
    if not problem.strip():
        raise ValueError("problem is empty")
    if extract is not None and not callable(extract):
        raise TypeError(f"extract must be None or a callable, got {extract!r}")
    if isinstance(model, BranchSession):
        return model
    if not callable(getattr(model, "session", None)):
        raise no_model("model", model)
    return model.session()


def check_room(session: BranchSession, field: str, n_branches: int) -> None:
    """Refuse more branches at a time than there are blocks: not even one token each has room."""
    stats = session.stats()
    if n_branches > stats.blocks_total:
        has, needs = (n * stats.block_bytes / 2**20 for n in (stats.blocks_total, n_branches))
        raise ValueError(
            f"{field}: {n_branches} branches at a time need {needs:.2g} MiB of KV for their first "
            f"tokens alone, and kv_bytes (rksc solve: --kv) is {stats.blocks_total} KV blocks, "
            f"{has:.2g} MiB: give more, or ask for fewer branches"
        )


def _as_approaches(approaches: int | Sequence[str | Approach]) -> list[Approach]:
    if hasattr(approaches, "__index__"):
        return [Approach()] * integer("approaches", approaches, 1, _MOST_BRANCHES)
    if not isinstance(approaches, Sequence) or isinstance(approaches, str) or not approaches:
        raise ValueError(f"approaches must be a number or a non-empty list, got {approaches!r}")
    made = [Approach(suffix=a) if isinstance(a, str) else a for a in approaches]
    for plan in made:
        if not isinstance(plan, Approach):
            raise ValueError(f"approaches: {plan!r} is neither a str nor a rksc.Approach")
        check_text("approaches: suffix", plan.suffix)
        if plan.prompt is not None:
            check_text("approaches: prompt", plan.prompt)
    return made


def _branch_out(run: Run, words: Wordings, plans: Sequence[Approach]) -> list[Node]:
    """A node for each approach: forks of the root, or own prompts that may share its KV."""
    root = run.nodes[0].branch
    forked = [words.suffix(plan.suffix) for plan in plans if plan.prompt is None]
    forks = iter(run.fork(root, forked) if forked else [])
    nodes = []
    for i, plan in enumerate(plans):
        if plan.prompt is None:
            branch = next(forks)
        else:
            suffix = words.suffix(plan.suffix) or None
            branch = run.prefill(words.problem(plan.prompt), similar_to=root, suffix=suffix)
            branch.stream = (root.stream + 0x9E3779B97F4A7C15 * (i + 1)) % 2**64
        nodes.append(run.add(branch, run.nodes[0], plan.suffix))
    return nodes


class Run:
    """One call of solve or search: its nodes, and time and work of its phases.

    branches: all that it has made. A branch is among them before anything else can happen.
    """

    def __init__(self, session: BranchSession, problem: str, progress: bool | None) -> None:
        self.session = session
        self.problem = problem
        self.branches: list[Branch] = []
        self.nodes: list[Node] = []
        self.phases: list[Phase] = []
        self._progress = Progress(progress)

    def finish(self, work: Callable[[], Solution]) -> Solution:
        """What the work returns; when it does not, no branch is left."""
        try:
            return work()
        except BaseException:
            self.session._drop(self.branches)
            self._progress.close()
            raise

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[None]:
        """Measure a phase; phases of the same name add up."""
        self._progress.phase(name, total)
        before, start = self.session.stats(), time.perf_counter()
        yield
        seconds, after = time.perf_counter() - start, self.session.stats()
        counts = {n: getattr(after, n) - getattr(before, n) for n in _COUNTED}
        self._add_phase(Phase(name, seconds, **counts))

    def _add_phase(self, phase: Phase) -> None:
        for i, old in enumerate(self.phases):
            if old.name == phase.name:
                names = [f.name for f in fields(Phase) if f.name != "name"]
                sums = {n: getattr(old, n) + getattr(phase, n) for n in names}
                self.phases[i] = replace(old, **sums)
                return
        self.phases.append(phase)

    def plant(self, tokens: Sequence[int]) -> None:
        """The root: the prompt's own KV."""
        self.nodes.append(Node(0, None, self.prefill(tokens), 0))

    def prefill(self, tokens: Sequence[int], **options: Any) -> Branch:
        self.branches.append(self.session.prefill(tokens, **options))
        return self.branches[-1]

    def fork(self, branch: Branch, what: int | Sequence[Tokens]) -> list[Branch]:
        begin = len(self.branches)
        self.branches += branch.fork(what)
        return self.branches[begin:]

    def add(self, branch: Branch, parent: Node, suffix: str = "") -> Node:
        node = Node(len(self.nodes), parent.id, branch, parent.depth + 1, suffix)
        self.nodes.append(node)
        return node

    def generate(
        self,
        nodes: Sequence[Node],
        max_new_tokens: int,
        sampling: Sampling,
        stop: str | Sequence[str],
    ) -> None:
        """Continue all nodes in one batch; with a progress bar where one is shown."""
        advance = self._progress.advance if self._progress.enabled else None
        made = self.session.generate(
            [node.branch for node in nodes], max_new_tokens, sampling, stop, progress=advance
        )
        for node, generation in zip(nodes, made, strict=True):
            node.take(generation)

    def solution(self, leaves: Sequence[Node], extract: Callable[[str], str] | None) -> Solution:
        """Select the best of the leaves and note how everything stands."""
        self._progress.close()
        chosen = self.session.select([leaf.branch for leaf in leaves])
        best = next(leaf for leaf in leaves if leaf.branch is chosen)
        for node in self.nodes:
            node.close()
        solution = Solution(
            self.problem, self.nodes, best, "", self.phases, self.session.stats(),
            self.nodes[0].branch.n_tokens,
        )  # fmt: skip
        for node in solution.path():
            node.kept = True
        solution.answer = (final_answer if extract is None else extract)(solution.text())
        return solution
