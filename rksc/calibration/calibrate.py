"""Settings from the user's own data, with the error that they make on data not used to find them.

`calibrate` finds ASKS' settings from pairs of wordings, `calibrate_cgee` CGEE's from problems.
Both split by question: one half chooses, the other measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..engine.options import ASKS
from ..reasoning.prompts import INSTRUCTION, Wordings

if TYPE_CHECKING:
    from ..engine.load import Model
    from .fitting import Calibration, CGEECalibration
    from .runner import Lab
    from .tasks import Pair, Problem


def calibrate(
    model: Model | str | Path | Lab,
    pairs: Sequence[Pair | tuple[str, str, bool]],
    max_false_accept: float = 0.01,
    *,
    guards: Sequence[Literal["numbers", "reworded"] | None] = ("numbers", "reworded"),
    instruction: str = INSTRUCTION,
    **options: Any,
) -> Calibration:
    """ASKS' settings for a model from pairs of wordings, and their measured error.

    pairs: (text, other wording, may the one stand for the other) or `rksc.experiments.Pair`s;
    pairs with the same first text belong to one question. Half of the questions choose guard,
    pool, probe layers, alpha and tau: the most accepted rewordings with at most
    max_false_accept of the others accepted, then the fewest layers, then the strictest tau that
    gives up no more than 3 % of those rewordings. The other half measures; `keeps` tells whether
    it is large enough to show the wanted rate. instruction follows each text in the prompt, as
    in `solve`. options: those of `rksc.experiments`.
    """
    from .fitting import as_pair, fit, report, see
    from .measure import centres
    from .runner import Lab
    from .stats import halves
    from .tasks import N_CENTRE

    if not 0 <= max_false_accept <= 1:
        raise ValueError(f"max_false_accept must be in [0, 1], got {max_false_accept!r}")
    lab = Lab.of(model, options)
    made = [as_pair(pair) for pair in pairs]
    first, second = halves([pair.group for pair in made], lab.seed)
    if not second:
        raise ValueError(
            "pairs: at least two different questions are needed: one is held out to measure on"
        )
    roots = {pair.group: pair.root for pair in made}
    centre = [roots[group] for group in sorted(first)][:N_CENTRE]
    seen = see(lab, made, centre, instruction)
    n_layers = lab.bench.model.config.n_layers
    gate = fit([s for s in seen if s.group in first], n_layers, max_false_accept, guards)
    held = [s for s in seen if s.group in second]
    asks = None
    if gate is not None:
        words = Wordings(lab.bench.session, instruction)
        asks = ASKS(
            center=centres(lab.bench, words, centre)[gate.pool],
            **asdict(gate),
        )
    return report(asks, gate, held, max_false_accept)


def calibrate_cgee(
    model: Model | str | Path | Lab,
    problems: Sequence[Problem | tuple[str, str]],
    max_changed: float = 0.01,
    *,
    n_branches: int = 8,
    max_new_tokens: int = 96,
    **options: Any,
) -> CGEECalibration:
    """CGEE's settings for a model from problems, and how often they change the winner.

    problems: (question, answer) or `rksc.experiments.Problem`s. Each is answered n_branches
    times and verified in full; half of the problems choose kappa, level 1 and level 2 so that
    at most max_changed of the winners change, the other half measures; `keeps` tells whether it
    is large enough to show the wanted rate. Level 2 is switched on only where it surely
    (95 % interval) saves more layers than its lens costs on the half that chooses.
    """
    from .fitting import Verified, as_problem, fit_cgee, lens_costs
    from .measure import TOGETHER, answers
    from .runner import Lab

    if not 0 <= max_changed <= 1:
        raise ValueError(f"max_changed must be in [0, 1], got {max_changed!r}")
    lab = Lab.of(model, options)
    rows = [as_problem(problem) for problem in problems]
    if len({row.id for row in rows}) < 2:
        raise ValueError(
            "problems: at least two different ones are needed: one is held out to measure on"
        )
    items = [
        {"problem": asdict(row), "n_branches": n_branches, "max_new_tokens": max_new_tokens,
         "seed": lab.seed}
        for row in rows
    ]  # fmt: skip
    results = lab.measure(answers, items, together=TOGETHER)
    verified = [Verified.of(row.id, result) for row, result in zip(rows, results, strict=True)]
    return fit_cgee(verified, max_changed, lens_costs(lab), lab.seed)
