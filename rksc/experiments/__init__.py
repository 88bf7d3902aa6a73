"""Experiments: what the method brings on a model, and what it costs.

Each is a function that takes a model (or its path) and returns a `Table`, which knows its model,
machine, versions and seed, writes CSV and JSON and plots itself:

    rksc.experiments.prefix_sweep("model.gguf", quick=True).plot("speedup.png")

Options of all: quick, n (problems of each set), data (folder, see data/README.md), out (folder
where measurements are kept, so that a stopped experiment goes on), n_workers, ray, seed, progress,
engine (options of the sessions). Or a `Lab` with these, shared by several.
"""

from __future__ import annotations

from collections.abc import Callable

from ..calibration.runner import Lab
from ..calibration.stats import Rate
from ..calibration.tasks import Pair, Problem, problem_sets, wording_pairs
from .accuracy import accuracy
from .cgee import cgee
from .decomposition import decomposition
from .eviction import eviction
from .prefix_sweep import prefix_sweep
from .report import report
from .rewording import rewording
from .table import Column, Finding, Table
from .tau_alpha_sweep import tau_alpha_sweep

EXPERIMENTS: dict[str, Callable[..., Table]] = {
    "decomposition": decomposition,
    "prefix_sweep": prefix_sweep,
    "tau_alpha_sweep": tau_alpha_sweep,
    "rewording": rewording,
    "cgee": cgee,
    "eviction": eviction,
    "accuracy": accuracy,
}

__all__ = [
    "EXPERIMENTS",
    "Column",
    "Finding",
    "Lab",
    "Pair",
    "Problem",
    "Rate",
    "Table",
    "accuracy",
    "cgee",
    "decomposition",
    "eviction",
    "prefix_sweep",
    "problem_sets",
    "report",
    "rewording",
    "tau_alpha_sweep",
    "wording_pairs",
]
