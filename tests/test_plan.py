"""From spans to a batch: rows, chunks and attention segments (csrc/kv/plan.c)."""

from __future__ import annotations

import ctypes as c
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from support import native
from support.native import RK_CHUNK_ROWS, RK_EVALUE, RK_OK, RK_TILE, Batch, Error


class SpanStruct(c.Structure):
    """rk_span"""

    _fields_ = [
        ("tokens", c.c_void_p),
        ("position", c.c_int32),
        ("n_rows", c.c_int32),
        ("blocks", c.c_void_p),
        ("write", c.c_bool),
    ]


@dataclass
class Span:
    """Rows `position .. position + n_rows` of a branch with this block table."""

    position: int
    n_rows: int
    table: Sequence[int]
    write: bool = True
    tokens: np.ndarray = field(init=False)
    blocks: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = (np.arange(self.n_rows) + 7 * self.position).astype(np.int32)
        self.blocks = np.array(self.table, np.int32)


@dataclass(frozen=True)
class Segment:
    key_begin: int
    key_end: int
    row_begin: int
    row_end: int
    blocks: int  # address


@dataclass
class Plan:
    """A batch, copied out of C, beside the spans it was made from."""

    spans: list[Span]
    block_tokens: int
    first_rows: list[int]
    tokens: list[int]
    positions: list[int]
    slots: list[int]
    chunks: list[tuple[int, int, list[Segment]]]

    def block(self, segment: Segment, key: int) -> int:
        """The block that the segment says holds this key."""
        at = segment.blocks + 4 * (key // self.block_tokens)
        return c.c_int32.from_address(at).value

    def segments(self) -> list[Segment]:
        return [s for _, _, segments in self.chunks for s in segments]


class Planner:
    def __init__(self, block_tokens: int) -> None:
        self.lib = native.load("kv/plan.c")
        self.block_tokens = block_tokens
        self.plan, self.error = c.c_void_p(), Error()
        self.status = self.lib.rk_plan_create(c.byref(self.plan), block_tokens, c.byref(self.error))

    def close(self) -> None:
        self.lib.rk_plan_free(self.plan)

    def structs(self, spans: Sequence[Span]) -> c.Array[SpanStruct]:
        array = (SpanStruct * max(len(spans), 1))()
        for struct, s in zip(array, spans, strict=False):
            struct.tokens, struct.blocks = s.tokens.ctypes.data, s.blocks.ctypes.data
            struct.position, struct.n_rows, struct.write = s.position, s.n_rows, s.write
        return array

    def try_build(self, spans: Sequence[Span]) -> tuple[int, Batch, list[int]]:
        batch, first = Batch(), (c.c_int32 * max(len(spans), 1))()
        status = self.lib.rk_plan_build(
            self.plan, self.structs(spans), len(spans), c.byref(batch), first, c.byref(self.error)
        )
        return status, batch, list(first[: len(spans)])

    def build(self, spans: list[Span]) -> Plan:
        status, batch, first = self.try_build(spans)
        assert status == RK_OK, self.error.text
        n = batch.n_rows
        segments = [
            Segment(s.key_begin, s.key_end, s.row_begin, s.row_end, s.blocks)
            for s in batch.segments[: batch.n_segments]
        ]
        chunks, at = [], 0
        for chunk in batch.chunks[: batch.n_chunks]:
            assert chunk.segment_begin == at
            at = chunk.segment_end
            chunks.append((chunk.row_begin, chunk.row_end, segments[chunk.segment_begin : at]))
        assert at == batch.n_segments
        return Plan(
            spans,
            self.block_tokens,
            first,
            list((c.c_int32 * n).from_address(batch.tokens)),
            list((c.c_int32 * n).from_address(batch.positions)),
            list((c.c_int64 * n).from_address(batch.slots)),
            chunks,
        )


@pytest.fixture
def planner(request: pytest.FixtureRequest) -> Iterator[Planner]:
    made = Planner(getattr(request, "param", 4))
    assert made.status == RK_OK
    yield made
    made.close()


# ---- what must hold for every plan ---------------------------------------------


def check_rows(plan: Plan) -> list[Span]:
    """Rows carry their spans' facts; returns the span of each row."""
    owners: list[Span | None] = [None] * len(plan.tokens)
    for span, first in zip(plan.spans, plan.first_rows, strict=True):
        for j in range(span.n_rows):
            row, p = first + j, span.position + j
            assert owners[row] is None
            owners[row] = span
            assert plan.tokens[row] == span.tokens[j]
            assert plan.positions[row] == p
            size = plan.block_tokens
            slot = span.table[p // size] * size + p % size if span.write else -1
            assert plan.slots[row] == slot
    found = [s for s in owners if s is not None]
    assert len(found) == len(owners)
    return found


def check_segments(plan: Plan, owners: list[Span], shared_once: bool = True) -> None:
    """Each (row, key <= position) once, from the row's own block; order; bounds."""
    row = 0
    for begin, end, segments in plan.chunks:
        assert begin == row and 1 <= end - begin <= RK_CHUNK_ROWS
        row = end
        order = [(s.key_begin // RK_TILE, s.key_begin, s.row_begin) for s in segments]
        assert order == sorted(order) and len(set(order)) == len(order)
        seen = np.zeros((end - begin, 1 + max(plan.positions[begin:end])), np.int32)
        read: Counter[tuple[int, int]] = Counter()
        for s in segments:
            assert 0 <= s.key_begin < s.key_end
            assert s.key_begin // RK_TILE == (s.key_end - 1) // RK_TILE
            assert begin <= s.row_begin < s.row_end <= end
            for edge in (s.row_begin, s.row_end - 1):  # no needless rows
                assert plan.positions[edge] >= s.key_begin
            assert s.key_end <= 1 + max(plan.positions[s.row_begin : s.row_end])
            seen[s.row_begin - begin : s.row_end - begin, s.key_begin : s.key_end] += 1
            for key in range(s.key_begin, s.key_end):
                block = plan.block(s, key)
                read[block, key] += 1
                for r in range(s.row_begin, s.row_end):
                    if key <= plan.positions[r]:
                        assert owners[r].table[key // plan.block_tokens] == block
        for r in range(begin, end):
            assert (seen[r - begin, : plan.positions[r] + 1] == 1).all(), (r, begin, segments)
        if shared_once:
            assert max(read.values()) == 1
        for a in segments:  # nothing is cut in two without a reason
            assert not any(
                b.key_begin == a.key_end
                and (b.row_begin, b.row_end) == (a.row_begin, a.row_end)
                and b.key_begin % RK_TILE
                for b in segments
            )
    assert row == len(plan.tokens)


def check(plan: Plan, shared_once: bool = True) -> Plan:
    check_segments(plan, check_rows(plan), shared_once)
    return plan


# ---- random trees --------------------------------------------------------------


class Forest:
    """Branches as sessions make them: forks share full blocks, tails are copied."""

    def __init__(self, seed: int, block_tokens: int, longest: int) -> None:
        self.random = random.Random(seed)
        self.size, self.longest = block_tokens, longest
        self.free = list(range(4 * longest * 12 // block_tokens + 400))
        self.random.shuffle(self.free)
        self.branches: list[tuple[list[int], int]] = []  # table, tokens
        for _ in range(self.random.randint(1, 3)):
            self.branches.append(self.longer([], 0))
        for _ in range(self.random.randint(0, 12)):
            table, n = self.random.choice(self.branches)
            at = self.random.choice([n, self.random.randint(0, n)])
            self.branches.append(self.longer(table[: at // block_tokens], at))

    def longer(self, shared: list[int], n: int) -> tuple[list[int], int]:
        """Go on from n tokens in private blocks (the half-filled one is a copy)."""
        n += self.random.choice([1, 1, 2, self.random.randint(1, self.longest)])
        table = list(shared)
        while len(table) * self.size < n:
            table.append(self.free.pop())
        return table, n

    def spans(self) -> list[Span]:
        spans = []
        for table, n in self.random.sample(
            self.branches, self.random.randint(1, len(self.branches))
        ):
            rows = min(n, self.random.choice([1, 1, 1, 5, 40, n]))
            reread = self.random.random() < 0.2  # rows whose KV is there
            end = self.random.randint(rows, n) if reread else n
            spans.append(Span(end - rows, rows, table, not reread))
        return spans


@pytest.mark.parametrize("block_tokens", [1, 4, 16, 256])
@pytest.mark.parametrize("seed", range(10))
def test_random_trees(block_tokens: int, seed: int) -> None:
    planner = Planner(block_tokens)
    for i in range(4):  # one plan, reused, as a session does
        longest = [12, 40, 150, 400][(seed + i) % 4]
        forest = Forest(1000 * block_tokens + 10 * seed + i, block_tokens, longest)
        check(planner.build(forest.spans()))
    planner.close()


def test_the_order_of_spans_decides_nothing_but_rows() -> None:
    planner = Planner(4)
    spans = Forest(5, 4, 60).spans()
    plan = check(planner.build(spans))
    again = check(planner.build(spans[::-1]))
    assert Counter(zip(plan.tokens, plan.positions, plan.slots, strict=True)) == Counter(
        zip(again.tokens, again.positions, again.slots, strict=True)
    )
    planner.close()


# ---- shapes that matter --------------------------------------------------------


def fan(block_tokens: int, prefix: int, n: int, rows: int = 1) -> list[Span]:
    """n branches with `rows` private tokens each after a common prefix."""
    shared = list(range(prefix // block_tokens))
    own = -(-rows // block_tokens)
    return [
        Span(prefix, rows, [*shared, *range(10**6 + i * own, 10**6 + (i + 1) * own)])
        for i in range(n)
    ]


def test_decode_of_a_wide_fan_reads_the_prefix_once() -> None:
    """32 branches after 4,096 tokens: 16 shared tiles and 32 private ends."""
    planner = Planner(16)
    plan = check(planner.build(fan(16, 4096, 32)))
    assert len(plan.chunks) == 1
    segments = plan.segments()
    assert [(s.key_begin, s.key_end, s.row_begin, s.row_end) for s in segments[:16]] == [
        (256 * t, 256 * t + 256, 0, 32) for t in range(16)
    ]
    assert [(s.key_begin, s.key_end, s.row_end - s.row_begin) for s in segments[16:]] == [
        (4096, 4097, 1)
    ] * 32
    planner.close()


def test_branches_of_two_prompts_are_brought_together() -> None:
    """Interleaved in the call, side by side in the batch, in the caller's order."""
    planner = Planner(4)
    spans = [Span(8, 1, [10 * (i % 2), 10 * (i % 2) + 1, 100 + i]) for i in range(8)]
    plan = check(planner.build(spans))
    assert plan.first_rows == [0, 4, 1, 5, 2, 6, 3, 7]
    assert [(s.key_begin, s.key_end, s.row_begin, s.row_end) for s in plan.segments()] == [
        *((0, 8, 0, 4), (0, 8, 4, 8)),
        *((8, 9, i, i + 1) for i in range(8)),
    ]
    planner.close()


def test_segments_follow_the_tree() -> None:
    """A root block for four, one more for two pairs, then one more for the first pair."""
    planner = Planner(4)
    spans = [
        Span(12, 1, [0, 1, 2, 10]),
        Span(12, 1, [0, 1, 2, 11]),
        Span(12, 1, [0, 3, 12, 13]),
        Span(8, 1, [0, 3, 14]),
    ]
    plan = check(planner.build(spans))
    assert [(s.key_begin, s.key_end, s.row_begin, s.row_end) for s in plan.segments()] == [
        *((0, 4, 0, 4), (4, 12, 0, 2), (4, 8, 2, 4)),
        *((8, 13, 2, 3), (8, 9, 3, 4), (12, 13, 0, 1), (12, 13, 1, 2)),
    ]
    planner.close()


def test_a_prefill_is_causal_tiles_without_needless_rows() -> None:
    planner = Planner(16)
    plan = check(planner.build([Span(240, 96, range(21))]))
    assert [(b, e) for b, e, _ in plan.chunks] == [(0, 32), (32, 64), (64, 96)]
    assert [
        [(s.key_begin, s.key_end, s.row_begin, s.row_end) for s in segments]
        for _, _, segments in plan.chunks
    ] == [
        [(0, 256, 0, 32), (256, 272, 16, 32)],  # rows at 240 .. 255 have no key there
        [(0, 256, 32, 64), (256, 304, 32, 64)],
        [(0, 256, 64, 96), (256, 336, 64, 96)],
    ]
    planner.close()


def test_suffixes_of_a_fan_share_the_prefix_in_every_chunk() -> None:
    """8 branches of 16 rows: two to a chunk, one read of the prefix for both."""
    planner = Planner(16)
    plan = check(planner.build(fan(16, 1024, 8, rows=16)))
    assert [(e - b, len(s)) for b, e, s in plan.chunks] == [(32, 4 + 2)] * 4
    planner.close()


def test_a_branch_and_its_child_in_the_same_block() -> None:
    """A row that is read again at the parent's end, and a child that goes on."""
    planner = Planner(4)
    parent = Span(5, 1, [0, 1], write=False)
    child = Span(8, 1, [0, 1, 2])
    plan = check(planner.build([child, parent]))
    assert plan.slots == [-1, 8]
    assert [(s.key_begin, s.key_end, s.row_begin, s.row_end) for s in plan.segments()] == [
        (0, 8, 0, 2),
        (8, 9, 1, 2),
    ]
    planner.close()


def test_equal_tables_keep_the_order_of_the_call() -> None:
    planner = Planner(4)
    spans = [Span(p, 1, [5, 6], write=False) for p in (6, 4, 7, 4)]
    plan = check(planner.build(spans))
    assert plan.first_rows == [0, 1, 2, 3]
    assert len(plan.segments()) == 1
    spans = [Span(p, 1, [5 - p % 2, 8 + p % 2], write=False) for p in (6, 7, 4, 5, 6, 7, 4)]
    assert check(planner.build(spans)).first_rows == [3, 0, 4, 1, 5, 2, 6]
    planner.close()


@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 128])
def test_a_table_is_not_looked_at_beyond_its_rows(planner: Planner, n: int) -> None:
    """Rows that are read again need n blocks; what follows differs, or differs later."""
    common = list(range(n))
    for tail in ([9000, 9001], [8000, 9001]), ([7000, 9001], [7000, 8001]):
        spans = [Span(4 * n - 1, 1, common + rest, write=False) for rest in tail]
        plan = check(planner.build(spans))
        assert plan.first_rows == [0, 1]
        assert len(plan.segments()) == (4 * n - 1) // RK_TILE + 1


def test_blocks_that_meet_again_after_parting_stay_correct() -> None:
    """Equal content in two first blocks, one second block: read twice, never wrongly."""
    planner = Planner(4)
    spans = [Span(8, 1, [0, 2, 3]), Span(8, 1, [1, 2, 4])]
    check(planner.build(spans), shared_once=False)
    planner.close()


def test_the_last_rows_of_a_block_and_of_a_tile() -> None:
    planner = Planner(16)
    for last in (14, 15, 16, 254, 255, 256, 511, 512):
        plan = check(planner.build([Span(last, 1, range(last // 16 + 1))]))
        assert len(plan.segments()) == last // RK_TILE + 1
    planner.close()


def test_a_plan_is_reused_for_larger_and_smaller_batches() -> None:
    planner = Planner(16)
    small, large = fan(16, 64, 2), fan(16, 640, 90, rows=3)
    first = check(planner.build(small))
    check(planner.build(large))
    again = check(planner.build(small))
    assert (first.tokens, first.slots, first.chunks) == (again.tokens, again.slots, again.chunks)
    planner.close()


# ---- cost and refusals ---------------------------------------------------------


def test_large_batches_do_not_hang() -> None:
    """Nothing quadratic: each of these takes milliseconds; a minute would be a hang."""
    planner = Planner(1)
    start = time.monotonic()
    status, batch, _ = planner.try_build([Span(32768 - 512, 512, range(32768))])
    assert (status, batch.n_segments) == (RK_OK, 8 * 127 + 8 * 128)
    status, batch, _ = planner.try_build(fan(1, 32768, 256)[::-1])
    assert (status, batch.n_segments) == (RK_OK, 8 * (128 + 32))
    assert time.monotonic() - start < 60
    planner.close()


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ([], b"at least one span"),
        ([Span(3, 1, [0]), Span(0, 0, [0])], b"span 1"),
        ([Span(-1, 1, [0])], b"span 0"),
        ([Span(2**31 - 2, 1, [0])], b"span 0"),
    ],
)
def test_build_refuses(planner: Planner, spans: list[Span], text: bytes) -> None:
    status, _, _ = planner.try_build(spans)
    assert status == planner.error.status == RK_EVALUE
    assert text in planner.error.text
    check(planner.build([Span(0, 3, [9])]))  # and goes on


@pytest.mark.parametrize("block_tokens", [0, -4, 3, 24, 512])
def test_create_refuses(block_tokens: int) -> None:
    planner = Planner(block_tokens)
    assert planner.status == planner.error.status == RK_EVALUE
    assert planner.error.text.startswith(b"block_tokens")
    assert not planner.plan
    planner.close()  # takes NULL
