"""Where measurements are made: one model, a folder that remembers, and somebody who works.

A measurement is a function of a module's top, `measure(bench, **settings) -> plain values`, or,
where several are made at once, `measure(bench, [settings, ...]) -> [plain values, ...]`. Each
result is one line of a JSON-lines file, keyed by a hash of version, model, engine, function and
settings, where it is timed also of processor and threads; what is there already is not measured
again, so that an experiment which was stopped goes on.
Results come in the order of the items, whoever measured them: this process, others (`n_workers`),
or other machines (`ray`).
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from ..engine.defaults import best_dtype
from ..engine.load import Model, load, locate
from ..engine.session import BranchSession
from ..reasoning.progress import Progress, Shown
from ..scalars import as_int
from ..version import __version__
from .tasks import find_data

Result = dict[str, Any]
Measure = Callable[..., Any]
_SAMPLE = 1 << 20  # bytes of a file's beginning and end that tell it from others
_PART = 1 << 12  # values of a tensor, likewise
_QUIET = 0.7  # of the threads' processors at least, when nobody else wants them


class Bench:
    """One worker's model and session, made when they are first wanted.

    memory: for what measurements of this worker have in common.
    """

    def __init__(self, model: Model | str | Path, engine: dict[str, Any]) -> None:
        self._model = model
        self.engine = engine
        self.memory: dict[Any, Any] = {}

    @cached_property
    def model(self) -> Model:
        return self._model if isinstance(self._model, Model) else load(self._model)

    def serves(self, model: Model | str | Path, engine: dict[str, Any]) -> bool:
        """It was made from these."""
        return (self._model, self.engine) == (model, engine)

    def open(self, **options: Any) -> BranchSession:
        """A session of its own, verified in full, without ASKS."""
        return self.model.session(**{"cgee": None, **self.engine, **options})

    @cached_property
    def session(self) -> BranchSession:
        """The session that measurements without a clock share."""
        return self.open()


class Spent(NamedTuple):
    """What a measurement took when it was made: seconds on the wall, and of all processors, which
    is less where others had the machine. timed: it measured times. kept: an earlier run made it."""

    seconds: float
    cpu: float
    timed: bool
    kept: bool


@dataclass(frozen=True)
class Lab:
    """Settings of a run. quick: small sets and short answers. n: problems or questions of each
    set (None: what quick or the data say). out: folder of tables and of `raw/` (None: nothing is
    kept).

    n_workers processes measure what needs no clock; timed measurements run one at a time in
    this process. ray: over the cluster that `ray.init()` finds (extra [ray]). engine: options
    of the sessions. progress: None shows a bar on a terminal; "lines" elsewhere a line for each
    measurement.
    """

    model: Model | str | Path
    quick: bool = False
    n: int | None = None
    data: str | Path | None = None
    out: str | Path | None = None
    n_workers: int = 1
    ray: bool = False
    seed: int = 0
    progress: Shown = None
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n_workers, n = as_int(self.n_workers), as_int(self.n)
        if n_workers is None or n_workers < 1:
            raise ValueError(f"n_workers must be an int >= 1, got {self.n_workers!r}")
        if self.n is not None and (n is None or n < 2):
            raise ValueError(f"n must be None or an int >= 2, got {self.n!r}")
        if not isinstance(self.model, Model):
            object.__setattr__(self, "model", locate(self.model))
        object.__setattr__(self, "n_workers", n_workers)
        object.__setattr__(self, "n", n)
        if (self.n_workers > 1 or self.ray) and self._path is None:
            raise ValueError(
                "n_workers, ray: workers load the model from its path, and this model has none"
            )
        object.__setattr__(self, "engine", {"dtype": best_dtype(), **self.engine})

    @classmethod
    def of(cls, model: Lab | Model | str | Path, options: dict[str, Any]) -> Lab:
        """A lab as it is, or one for a model with these options."""
        if isinstance(model, Lab):
            if options:
                raise ValueError(f"the lab already has its {', '.join(options)}")
            return model
        return cls(model, **options)

    @property
    def _path(self) -> Path | None:
        return self.model.path if isinstance(self.model, Model) else Path(self.model)

    @cached_property
    def bench(self) -> Bench:
        return Bench(self.model, self.engine)

    def size(self, quick: int, full: int | None) -> int | None:
        """How many problems of a set to take; None: all."""
        return self.n if self.n is not None else quick if self.quick else full

    @cached_property
    def folder(self) -> Path:
        """Where the data are."""
        return find_data(self.data)

    def measure(
        self,
        function: Measure,
        items: Sequence[dict[str, Any]],
        timed: bool = False,
        together: int | None = None,
    ) -> list[Result]:
        """The function's result for each item (its settings), in order. together: so many items
        are given to the function at once, which must not change their results."""
        keys = [self._key(function, item, timed) for item in items]
        log = None if self.out is None else Log(Path(self.out) / "raw", function.__name__)
        known = {} if log is None else log.read()
        missing = {k: item for k, item in zip(keys, items, strict=True) if k not in known}
        with Progress(self.progress) as bar:
            bar.phase(function.__name__.replace("_", " "), len(missing), unit="item")
            for done in self._work(Work.of(function, missing, together), timed):
                for key, record in done.items():
                    known[key] = record
                    if log is not None:
                        log.append({"key": key, **record})
                bar.advance(len(done))
        for key in keys:
            record = known[key]
            spent = Spent(record["seconds"], record["cpu"], timed, key not in missing)
            self.spent.setdefault(key, spent)
        return [known[key]["result"] for key in keys]

    @cached_property
    def spent(self) -> dict[str, Spent]:
        """Of every measurement that this lab was asked for, now or in an earlier run, by key."""
        return {}

    def noise(self) -> str | None:
        """In words, that others had the machine while times were measured; None: they had not."""
        timed = [spent for spent in self.spent.values() if spent.timed]
        wall, cpu = sum(s.seconds for s in timed), sum(s.cpu for s in timed)
        threads = self.bench.session.n_threads
        if cpu >= _QUIET * threads * wall:
            return None
        return (
            f"The machine was not quiet: the timed measurements had {cpu / wall:.1f} of {threads} "
            "processors. Tokens are counts and stand; times are rough."
        )

    def kept(self) -> str | None:
        """In words, how many measurements an earlier run had made; None: none."""
        n = sum(spent.kept for spent in self.spent.values())
        if not n:
            return None
        return (
            f"{n} of {len(self.spent)} measurements are those of an earlier run, kept in "
            f"{Path(self.out or '') / 'raw'}; times among them were not taken again. Another "
            "folder (--out) measures all anew."
        )

    def not_on_ray(self) -> str | None:
        """In words, that times were measured here and not over Ray; None: Ray was not asked for,
        or nothing was timed."""
        n = sum(spent.timed for spent in self.spent.values())
        if not (self.ray and n):
            return None
        return f"{n} timed measurements ran on this machine one by one, not over Ray."

    def _work(self, work: list[Work], timed: bool) -> Iterator[dict[str, Result]]:
        if not work:
            return
        if self.ray and not timed:
            # machines differ: all use the instruction set that the keys name
            yield from _by_ray(str(self._path), {**self.engine, "isa": self._isa}, work)
        elif self.n_workers > 1 and not timed:
            yield from _by_processes(self, work)
        else:
            for part in work:
                yield part.run(self.bench)

    def _key(self, function: Measure, item: dict[str, Any], timed: bool) -> str:
        parts = [self._identity, function.__module__, function.__name__, item]
        if timed:
            threads = self.engine.get("n_threads") or _core.default_threads()
            parts.append([processor(), threads])
        text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    @cached_property
    def _identity(self) -> list[Any]:
        """What results depend on beside their settings. The number of threads is not in it: only
        times depend on that."""
        engine = {k: str(v) for k, v in self.engine.items() if k != "n_threads"}
        path = self._path
        stored = _digest_of(self.bench.model) if path is None else _digest(path)
        return [__version__, stored, self._isa, engine]

    @property
    def _isa(self) -> str:
        return self.engine.get("isa") or _core.isas[-1]

    def meta(self, **settings: Any) -> dict[str, Any]:
        """What a reader must know about a table: model, machine, versions, seed."""
        session, c = self.bench.session, self.bench.model.config
        return {
            "model": "in memory" if self._path is None else self._path.name,
            "architecture": f"{c.architecture}, {c.n_layers} layers, width {c.width}",
            "dtype": session.dtype,
            "isa": session.isa,
            "n_threads": session.n_threads,
            "machine": f"{processor()}, {_core.default_threads()} processors",
            "rksc": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "seed": self.seed,
            "quick": self.quick,
            **settings,
        }


# ---- workers -----------------------------------------------------------------------------------

_bench: Bench | None = None  # of a worker process


@dataclass(frozen=True)
class Work:
    """What a worker does in one go: items by key, one unless the function takes several."""

    function: Measure
    items: dict[str, dict[str, Any]]
    together: bool

    @classmethod
    def of(
        cls, function: Measure, items: dict[str, dict[str, Any]], together: int | None
    ) -> list[Work]:
        """All items in portions."""
        keys, n = list(items), together or 1
        portions = [keys[i : i + n] for i in range(0, len(keys), n)]
        return [cls(function, {k: items[k] for k in p}, together is not None) for p in portions]

    def run(self, bench: Bench) -> dict[str, Result]:
        """By key: the result as the file will give it back, and its share of what all took in
        seconds on the wall, and of all processors."""
        start, busy = time.perf_counter(), time.process_time()
        items = list(self.items.values())
        made = self.function(bench, items) if self.together else [self.function(bench, **items[0])]
        results = json.loads(json.dumps(made, allow_nan=False))
        n = len(items)
        seconds, cpu = (time.perf_counter() - start) / n, (time.process_time() - busy) / n
        return {
            key: {"seconds": round(seconds, 3), "cpu": round(cpu, 3), "result": result}
            for key, result in zip(self.items, results, strict=True)
        }


def _start(path: str, engine: dict[str, Any]) -> None:
    global _bench  # noqa: PLW0603 (a process of its own)
    _bench = Bench(path, engine)


def _run_here(work: Work) -> dict[str, Result]:
    assert _bench is not None
    return work.run(_bench)


def _run_there(path: str, engine: dict[str, Any], work: Work) -> dict[str, Result]:
    """A task of Ray. Its processes are kept between tasks, and with them the model."""
    if _bench is None or not _bench.serves(path, engine):
        _start(path, engine)
    return _run_here(work)


def _by_processes(lab: Lab, work: list[Work]) -> Iterator[dict[str, Result]]:
    n = min(lab.n_workers, len(work))
    threads = max(1, _core.default_threads() // n)
    engine = {**lab.engine, "n_threads": lab.engine.get("n_threads") or threads}
    # a forked child could not use an inherited session: each process starts anew
    with ProcessPoolExecutor(
        n, multiprocessing.get_context("spawn"), _start, (str(lab._path), engine)
    ) as pool:
        futures = [pool.submit(_run_here, part) for part in work]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _by_ray(path: str, engine: dict[str, Any], work: list[Work]) -> Iterator[dict[str, Result]]:
    try:
        import ray
    except ImportError:
        raise ImportError("ray=True needs Ray: pip install 'rksc[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)

    remote = ray.remote(_run_there)
    waiting = [remote.remote(path, engine, part) for part in work]
    while waiting:
        done, waiting = ray.wait(waiting)
        for reference in done:
            yield ray.get(reference)


# ---- what is remembered ------------------------------------------------------------------------


class Log:
    """A JSON-lines file that is only ever appended to. A line that a crash cut off is dropped."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.jsonl"

    def read(self) -> dict[str, Result]:
        """Records by key. ValueError names a broken line that is not the last."""
        if not self.path.exists():
            return {}
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with self.path.open("rb+") as file:
                file.truncate(whole)
        found = {}
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
            try:
                record = json.loads(line)
                found[record["key"]] = {name: record[name] for name in ("seconds", "cpu", "result")}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}: line {number} is broken: {error!r}") from None
        return found

    def append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with self.path.open("ab") as file:
            file.write(line.encode())


def _digest(path: Path) -> str:
    """Tells model files apart without reading all of them: sizes, beginnings, ends."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as data:
            digest.update(data.read(_SAMPLE))
            data.seek(max(0, size - _SAMPLE))
            digest.update(data.read())
    return digest.hexdigest()[:16]


def _digest_of(model: Model) -> str:
    """The same for a model that is in memory alone."""
    digest = hashlib.sha256(repr(model.config).encode())
    for name, tensor in sorted(model.weights.items()):
        values = np.ascontiguousarray(tensor.numpy()).reshape(-1)
        digest.update(f"{name} {tensor.type} {tensor.shape}\n".encode())
        digest.update(values[:_PART].tobytes())
        digest.update(values[-_PART:].tobytes())
    return digest.hexdigest()[:16]


def processor() -> str:
    """The name of this machine's processor."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()
