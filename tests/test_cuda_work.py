"""From a batch to units of attention work (csrc/cuda/work.c): integers, no device.

Trees of branches are planned by csrc/kv/plan.c and cut; then every (row, key) must be read exactly
once, from the block that holds it. Seeds are the parametrised numbers.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from support import native
from support.native import RK_ENOMEM, RK_OK, Batch, Error
from test_plan import Planner, Span

OUT, NONE = -1, -2
SHARE_KEYS = 256


class Unit(c.Structure):
    """rk_work_unit"""

    _fields_ = [
        *((name, c.c_int32) for name in ("pair_begin", "pair_end", "key_begin", "key_end")),
        *((name, c.c_int32) for name in ("table", "place", "first_position", "last_position")),
    ]


class WorkStruct(c.Structure):
    """rk_work"""

    _fields_ = [
        *((name, c.c_int32) for name in ("n_units", "n_places", "n_tables")),
        *((name, c.c_int32) for name in ("n_partials", "n_rows")),
        ("units", c.POINTER(Unit)),
        *((name, c.POINTER(c.c_int32)) for name in ("places", "rows_first", "tables")),
        ("wide", c.c_bool),
    ]


class Rule(c.Structure):
    """rk_work_rule"""

    _fields_ = [
        *((name, c.c_int32) for name in ("block_tokens", "n_heads", "n_kv_heads")),
        *((name, c.c_int32) for name in ("narrow_pairs", "wide_pairs", "wanted_units")),
        *((name, c.c_int32) for name in ("max_partials", "share_keys")),
    ]


@dataclass
class Work:
    """What came out, copied, beside the facts it was cut from."""

    rule: Rule
    spans: list[Span]
    first_rows: list[int]
    units: list[Unit]
    places: list[int]
    rows_first: list[int]
    tables: list[int]
    n_partials: int
    wide: bool

    @property
    def group(self) -> int:
        return int(self.rule.n_heads // self.rule.n_kv_heads)

    def rows(self, unit: Unit) -> range:
        return range(unit.pair_begin // self.group, (unit.pair_end - 1) // self.group + 1)

    def owners(self) -> list[tuple[Span, int]]:
        """(span, position) of each row."""
        found: dict[int, tuple[Span, int]] = {}
        for span, first in zip(self.spans, self.first_rows, strict=True):
            for j in range(span.n_rows):
                found[first + j] = (span, span.position + j)
        return [found[row] for row in range(len(found))]

    def key_reads(self) -> int:
        """Keys that leave memory, for one KV head."""
        return sum(u.key_end - u.key_begin for u in self.units)


class Worker:
    """plan.c and work.c in one library."""

    def __init__(
        self,
        block_tokens: int = 4,
        heads: tuple[int, int] = (4, 2),
        pairs: tuple[int, int] = (8, 16),
        wanted_units: int = 1,
        max_partials: int = 1 << 20,
        share_keys: int = SHARE_KEYS,
    ) -> None:
        self.lib = native.load("kv/plan.c", "cuda/panels.c", "cuda/work.c")
        self.planner = Planner(block_tokens)
        self.rule = Rule(block_tokens, *heads, *pairs, wanted_units, max_partials, share_keys)
        self.worker, self.error = c.c_void_p(), Error()
        made = self.lib.rk_worker_create(
            c.byref(self.worker), c.byref(self.rule), c.byref(self.error)
        )
        assert made == RK_OK

    def close(self) -> None:
        self.lib.rk_worker_free(self.worker)
        self.planner.close()

    def try_cut(self, spans: list[Span]) -> tuple[int, WorkStruct, list[int], Batch]:
        status, batch, first = self.planner.try_build(spans)
        assert status == RK_OK
        work = WorkStruct()
        status = self.lib.rk_worker_build(
            self.worker, c.byref(batch), c.byref(work), c.byref(self.error)
        )
        return status, work, first, batch

    def cut(self, spans: list[Span]) -> Work:
        status, work, first, _ = self.try_cut(spans)
        assert status == RK_OK, self.error.text
        return Work(
            self.rule,
            spans,
            first,
            [Unit.from_buffer_copy(u) for u in work.units[: work.n_units]],
            work.places[: work.n_places],
            work.rows_first[: work.n_rows + 1],
            work.tables[: work.n_tables],
            work.n_partials,
            work.wide,
        )


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for worker in made:
        worker.close()


def check(work: Work) -> None:
    """Every key that a row may use is read once for each of its heads, from the right block; the
    partials of a row are numbered in the order of their keys."""
    owners = work.owners()
    bt, group = work.rule.block_tokens, work.group
    limit = work.rule.wide_pairs if work.wide else work.rule.narrow_pairs
    read = [np.zeros((group, position + 1), int) for _, position in owners]
    partials: list[dict[int, int]] = [{} for _ in owners]
    outs: list[set[int]] = [set() for _ in owners]
    for i, u in enumerate(work.units):
        assert 0 < u.pair_end - u.pair_begin <= limit
        assert u.key_begin < u.key_end <= u.last_position + 1
        positions = [owners[row][1] for row in work.rows(u)]
        assert (u.first_position, u.last_position) == (min(positions), max(positions))
        for j, row in enumerate(work.rows(u)):
            span, position = owners[row]
            end = min(u.key_end, position + 1)
            if u.key_begin < end:
                blocks = slice(u.key_begin // bt, (end - 1) // bt + 1)
                held = work.tables[u.table + blocks.start : u.table + blocks.stop]
                assert held == list(span.table[blocks])
            first = max(u.pair_begin - row * group, 0)
            read[row][first : u.pair_end - row * group, u.key_begin : end] += 1
            place = work.places[u.place + j]
            assert (place == NONE) == (end <= u.key_begin)
            if place == OUT:
                outs[row].add(u.key_begin)
            elif place != NONE:
                assert partials[row].setdefault(place, u.key_begin) == u.key_begin, i
    assert work.rows_first[0] == 0 and work.rows_first[-1] == work.n_partials
    for row in range(len(owners)):
        assert (read[row] == 1).all(), row
        own = range(work.rows_first[row], work.rows_first[row + 1])
        assert sorted(partials[row]) == list(own), row
        begins = [partials[row][place] for place in own]
        assert begins == sorted(begins) and len(outs[row]) == (0 if own else 1)
        assert len(own) != 1


def random_tree(rng: np.random.Generator, bt: int) -> list[Span]:
    """Branches that part from one another at any depth, some with rows in common blocks."""
    n_blocks = 0
    tables: list[list[int]] = [[]]
    spans = []
    for _ in range(int(rng.integers(1, 40))):
        parent = tables[int(rng.integers(len(tables)))]
        kept = int(rng.integers(len(parent) + 1))
        own = int(rng.integers(1, 20))
        table = [*parent[:kept], *range(n_blocks, n_blocks + own)]
        n_blocks += own
        tables.append(table)
        n_rows = int(rng.choice([1, 1, 1, 2, 7, 40]))
        length = int(rng.integers(1, len(table) * bt + 1))
        n_rows = min(n_rows, length)
        spans.append(Span(length - n_rows, n_rows, table))
        if rng.random() < 0.1:  # an earlier row of the same sequence
            spans.append(Span(int(rng.integers(0, length)), 1, table))
    return spans


@pytest.mark.parametrize("seed", range(60))
def test_every_key_is_read_once(seed: int, workers: list[Worker]) -> None:
    rng = np.random.default_rng(seed)
    bt = int(rng.choice([1, 4, 16]))
    kv = int(rng.choice([1, 2, 3]))
    group = int(rng.choice([1, 3, 4, 20]))
    pairs = [(8, 16), (16, 16), (64, 128)][seed % 3]
    workers.append(
        Worker(
            bt,
            (kv * group, kv),
            pairs,
            int(rng.choice([1, 500])),
            share_keys=int(rng.choice([0, 256, 1 << 30])),
        )
    )
    for _ in range(3):  # what a build leaves does not reach the next
        check(workers[0].cut(random_tree(rng, bt)))


def branches(shared: int, own: list[int], bt: int = 4) -> list[Span]:
    """One row at the end of each branch over `shared` tokens in common blocks."""
    trunk, at, spans = list(range(shared // bt)), shared // bt, []
    for n in own:
        blocks = -(-n // bt)
        spans.append(Span(shared + n - 1, 1, [*trunk, *range(at, at + blocks)]))
        at += blocks
    return spans


@pytest.mark.parametrize("n", [2, 8, 33, 100])
def test_a_long_prefix_is_read_once(n: int, workers: list[Worker]) -> None:
    """For all branches, in however many chunks they stand; a tile holds all their pairs."""
    workers.append(Worker(pairs=(256, 256)))
    work = workers[0].cut(branches(2048, [3 + i % 5 for i in range(n)]))
    check(work)
    assert work.key_reads() == 2048 + sum(3 + i % 5 for i in range(n))
    assert work.n_partials == 2 * n


def test_a_short_prefix_is_read_by_each(workers: list[Worker]) -> None:
    """The flat form: no partial, no merge."""
    workers.append(Worker())
    work = workers[0].cut(branches(16, [3, 4, 5]))
    check(work)
    assert work.n_partials == 0 and len(work.units) == 3


@pytest.mark.parametrize("n, pays_from", [(8, 55), (2, 288)])
def test_what_a_shared_prefix_must_save(n: int, pays_from: int, workers: list[Worker]) -> None:
    """(n - 1) reads of its keys, against 256 and 4 for each of n rows times a group of 4."""
    workers.append(Worker(1, (4, 1), (64, 128)))
    flat, shared = (workers[0].cut(branches(k, [9] * n, 1)) for k in (pays_from - 1, pays_from))
    assert flat.n_partials == 0 and flat.key_reads() == n * (pays_from + 8)
    assert shared.n_partials == 2 * n and shared.key_reads() == pays_from + 9 * n


def test_units_are_wide_where_narrow_ones_do_not_hold_a_panel(workers: list[Worker]) -> None:
    """16 rows of a group of 4 are the 64 pairs of a narrow unit."""
    workers.append(Worker(4, (4, 1), (64, 128)))
    narrow, wide = (workers[0].cut([Span(0, n, list(range(8)))]) for n in (16, 17))
    assert (narrow.wide, len(narrow.units)) == (False, 1)
    assert (wide.wide, len(wide.units)) == (True, 1)


def test_deep_tree_shares_each_level(workers: list[Worker]) -> None:
    """Two halves of eight branches part at 1024, all part at 2048; a short level is dissolved."""
    workers.append(Worker(pairs=(64, 64)))
    trunk = list(range(256))
    halves = [list(range(1000 * h, 1000 * h + 256)) for h in (1, 2)]
    spans = [
        Span(2048 + 8 + 3, 1, [*trunk, *halves[i // 4], 3000 + i // 2, 3500 + i // 2, 4000 + i])
        for i in range(8)
    ]
    work = workers[0].cut(spans)
    check(work)
    # 8 keys shared by two are not worth a partial; the halves' 1024 are.
    assert work.key_reads() == 1024 + 2 * 1024 + 8 * 12
    assert work.n_partials == 3 * 8


def test_a_prompt_is_one_panel(workers: list[Worker]) -> None:
    """Rows of one span, in many chunks, read no key that lies behind them, need no merge."""
    workers.append(Worker(pairs=(64, 128), heads=(4, 4)))
    work = workers[0].cut([Span(100, 300, list(range(100)))])
    check(work)
    assert work.wide and work.n_partials == 0
    assert len(work.tables) == 100
    ends = [u.key_end for u in work.units]
    assert ends == sorted(ends, reverse=True)  # the longest begin first


def test_keys_are_split_until_the_device_is_full(workers: list[Worker]) -> None:
    few, many = Worker(wanted_units=1), Worker(wanted_units=64)
    workers += [few, many]
    spans = branches(4096, [1])
    one, split = few.cut(spans), many.cut(spans)
    check(split)
    assert len(one.units) == 1 and 20 <= len(split.units) <= 33  # two KV heads
    assert all(u.key_begin % 64 == 0 for u in split.units)


def test_partials_fit(workers: list[Worker]) -> None:
    """First splits go, then sharing; the results stay complete."""
    spans = branches(2048, [5] * 20)
    for room in (2000, 40, 39, 0):
        workers.append(Worker(wanted_units=500, max_partials=room))
        work = workers[-1].cut(spans)
        check(work)
        assert work.n_partials <= room
    assert work.n_partials == 0 and work.key_reads() == 20 * 2053


def test_a_batch_that_cannot_fit_is_refused(workers: list[Worker]) -> None:
    """Segments that no plan makes: a row's keys in two panels that have no common tree."""
    workers.append(Worker(max_partials=1))
    tables = [np.array(t, np.int32) for t in ([0, 1], [0, 1], [0, 1])]
    segments = (native.Segment * 3)(
        native.Segment(0, 4, 0, 2, tables[0].ctypes.data),
        native.Segment(0, 4, 2, 3, tables[2].ctypes.data),
        native.Segment(4, 8, 0, 3, tables[0].ctypes.data),
    )
    chunks = (native.Chunk * 1)(native.Chunk(0, 3, 0, 3))
    positions = np.array([7, 7, 7], np.int32)
    batch = Batch(3, None, positions.ctypes.data, None, 1, chunks, 3, segments)
    work, worker = WorkStruct(), workers[0]
    error = Error()
    status = worker.lib.rk_worker_build(
        worker.worker, c.byref(batch), c.byref(work), c.byref(error)
    )
    assert status == RK_ENOMEM and b"partial" in error.text
    check(worker.cut(branches(16, [3])))  # and goes on


def test_large_batches_are_cut_quickly(workers: list[Worker]) -> None:
    """65,536 rows of one prompt: no step of the way is quadratic."""
    workers.append(Worker(16, (8, 2), (64, 128), 500))
    work = workers[0].cut([Span(0, 1 << 16, list(range(1 << 12)))])
    assert work.n_partials == 0 or work.rows_first[-1] == work.n_partials
    assert sum(u.pair_end - u.pair_begin for u in work.units) >= 4 << 16
