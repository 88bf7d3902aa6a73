"""Block books: references, the exact-prefix index, reclaiming (csrc/kv/kv.c)."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support import native
from support.native import RK_ESTATE, RK_EVALUE, RK_OK, Error


class Counts(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_int32),
        ("used", ctypes.c_int32),
        ("free", ctypes.c_int32),
        ("cached", ctypes.c_int32),
        ("shared", ctypes.c_int32),
        ("peak_used", ctypes.c_int32),
        ("reclaimed", ctypes.c_int64),
    ]


def ints(values: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * max(len(values), 1))(*values)


class Books:
    """rk_kv with Python's types; every call is followed by rk_kv_check."""

    def __init__(self, n_blocks: int, block_tokens: int = 2, hash_bits: int = 64) -> None:
        self.lib = native.load("kv/kv.c")
        self.lib.rk_kv_count.restype = Counts
        self.lib.rk_kv_writable.restype = ctypes.c_bool
        self.n_blocks, self.block_tokens = n_blocks, block_tokens
        self.kv = ctypes.c_void_p()
        self.error = Error()
        self.status = self.lib.rk_kv_create(
            ctypes.byref(self.kv), n_blocks, block_tokens, hash_bits, ctypes.byref(self.error)
        )

    def close(self) -> None:
        self.lib.rk_kv_free(self.kv)

    def check(self, refs: Sequence[int] | None = None) -> None:
        held = None if refs is None else ints(refs)
        status = self.lib.rk_kv_check(self.kv, held, ctypes.byref(self.error))
        assert status == RK_OK, self.error.text
        counts = self.count()
        assert counts.used + counts.free == counts.total == self.n_blocks
        assert counts.cached <= counts.free

    def count(self) -> Counts:
        counts = self.lib.rk_kv_count(self.kv)
        assert isinstance(counts, Counts)
        return counts

    def alloc(self) -> int:
        block = int(self.lib.rk_kv_alloc(self.kv))
        self.check()
        return block

    def ref(self, *blocks: int) -> None:
        for block in blocks:
            self.lib.rk_kv_ref(self.kv, block)
        self.check()

    def release(self, blocks: Sequence[int]) -> None:
        """As a branch does: from the last to the first."""
        for block in reversed(blocks):
            self.lib.rk_kv_unref(self.kv, block)
            self.check()

    def refs(self, block: int) -> int:
        return int(self.lib.rk_kv_refs(self.kv, block))

    def writable(self, block: int, holders: int = 1) -> bool:
        return bool(self.lib.rk_kv_writable(self.kv, block, holders))

    def publish(self, before: int, block: int, tokens: Sequence[int]) -> int:
        assert len(tokens) == self.block_tokens
        equal = int(self.lib.rk_kv_publish(self.kv, before, block, ints(tokens)))
        self.check()
        return equal

    def withdraw(self, block: int) -> None:
        self.lib.rk_kv_withdraw(self.kv, block)
        self.check()

    def mark(self, block: int, mark: bool) -> bool:
        return bool(self.lib.rk_kv_mark(self.kv, block, mark) & 1)

    def match(self, tokens: Sequence[int], max_blocks: int = 1 << 20) -> list[int]:
        room = min(max_blocks, len(tokens) // self.block_tokens)
        out = (ctypes.c_int32 * max(room, 1))()
        n = self.lib.rk_kv_match(self.kv, ints(tokens), len(tokens), out, max_blocks)
        self.check()
        return list(out[:n])

    def found(self, tokens: Sequence[int]) -> list[int]:
        """What match finds, without keeping it."""
        blocks = self.match(tokens)
        self.release(blocks)
        return blocks

    def forget(self) -> None:
        self.lib.rk_kv_forget(self.kv)
        self.check()

    def branch(self, tokens: Sequence[int]) -> list[int]:
        """Fresh blocks for whole blocks of tokens, all published."""
        size = self.block_tokens
        blocks: list[int] = []
        for start in range(0, len(tokens), size):
            block = self.alloc()
            self.publish(blocks[-1] if blocks else -1, block, tokens[start : start + size])
            blocks.append(block)
        return blocks


@pytest.fixture(params=[64, 0], ids=["hash64", "hash0"])
def books(request: pytest.FixtureRequest) -> Iterator[Books]:
    """Eight blocks of two tokens; once with real hashes, once all equal."""
    kv = Books(8, 2, request.param)
    assert kv.status == RK_OK
    yield kv
    kv.close()


# ---- references ----------------------------------------------------------------


def test_counts_of_forks_on_a_block_border() -> None:
    """Prefix of 10 blocks, 16 forks: 10 used; one token each: 26; all closed: 0."""
    kv = Books(40, 4)
    root = kv.branch(range(40))
    for _ in range(16):
        kv.ref(*root)
    assert (kv.count().used, kv.count().shared) == (10, 10)
    tails = [kv.alloc() for _ in range(16)]
    assert (kv.count().used, kv.count().shared, kv.count().free) == (26, 10, 14)
    kv.check([17] * 10 + [1] * 16 + [0] * 14)
    for tail in tails:
        kv.release([*root, tail])
    assert (kv.count().used, kv.count().shared) == (10, 0)
    kv.release(root)
    counts = kv.count()
    assert (counts.used, counts.free, counts.cached, counts.peak_used) == (0, 40, 10, 26)
    kv.close()


def test_counts_of_forks_inside_a_block() -> None:
    """Prefix of 9 blocks and one token: 9 shared and 17 private tails."""
    kv = Books(40, 4)
    root = kv.branch(range(36))
    tail = kv.alloc()
    children = []
    for _ in range(16):
        kv.ref(*root, tail)
        copy = kv.alloc()  # copy-on-write of the tail
        kv.release([tail])
        children.append([*root, copy])
    assert (kv.count().used, kv.count().shared) == (26, 9)
    for child in children:
        kv.release(child)
    kv.release([*root, tail])
    assert (kv.count().used, kv.count().shared) == (0, 0)
    kv.close()


def test_last_block_is_handed_out_and_then_none(books: Books) -> None:
    blocks = [books.alloc() for _ in range(8)]
    assert sorted(blocks) == list(range(8))
    assert books.alloc() == -1
    assert (books.count().used, books.count().free) == (8, 0)
    books.release([blocks[3]])
    assert books.alloc() == blocks[3]


def test_freed_blocks_before_untouched_ones_last_freed_first(books: Books) -> None:
    a, b, c = books.alloc(), books.alloc(), books.alloc()
    books.release([a])
    books.release([c])
    assert [books.alloc(), books.alloc()] == [c, a]
    assert books.alloc() not in (a, b, c)


def test_untouched_blocks_before_cached_ones(books: Books) -> None:
    cached = books.branch([1, 2, 3, 4])
    books.release(cached)
    others = [books.alloc() for _ in range(6)]
    assert not set(others) & set(cached)
    assert (books.count().cached, books.count().reclaimed) == (2, 0)
    assert books.alloc() == cached[1]
    assert (books.count().cached, books.count().reclaimed) == (1, 1)


def test_a_new_block_is_not_known_by_its_past(books: Books) -> None:
    """A reclaimed block must not carry its old history to its new owner."""
    old = books.branch([1, 2])
    books.release(old)
    blocks = [books.alloc() for _ in range(8)]
    assert old[0] in blocks
    books.release(blocks)
    assert books.found([1, 2]) == []
    # Nor may a successor hang on it.
    first, second = books.alloc(), books.alloc()
    books.publish(first, second, [3, 4])
    books.release([first, second])
    assert books.count().cached == 0


# ---- the index -----------------------------------------------------------------


def test_match_takes_whole_blocks_and_references(books: Books) -> None:
    blocks = books.branch([1, 2, 3, 4, 5, 6])
    assert books.match([1, 2, 3, 4, 5]) == blocks[:2]
    assert [books.refs(b) for b in blocks] == [2, 2, 1]
    assert books.match([1, 2, 3, 4, 5, 6, 7, 8], max_blocks=1) == blocks[:1]
    assert books.match([1]) == books.match([]) == []
    assert books.match([1, 2], max_blocks=0) == []
    assert [books.refs(b) for b in blocks] == [3, 2, 1]
    assert books.count().shared == 2


def test_match_revives_cached_blocks(books: Books) -> None:
    blocks = books.branch([1, 2, 3, 4])
    books.release(blocks)
    assert (books.count().used, books.count().cached) == (0, 2)
    assert books.match([1, 2, 3, 4]) == blocks
    assert (books.count().used, books.count().cached) == (2, 0)
    assert books.count().shared == 0


def test_equal_second_block_under_another_first(books: Books) -> None:
    a = books.branch([1, 2, 5, 6])
    assert books.found([3, 4, 5, 6]) == []
    b = books.branch([3, 4])
    assert books.found([3, 4, 5, 6]) == b
    c = books.branch([7, 8, 5, 6])
    assert books.found([7, 8, 5, 6]) == c
    assert books.found([1, 2, 5, 6]) == a
    assert books.found([5, 6]) == []


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ([1, 23], [12, 3]),
        ([1, 2], [2, 1]),
        ([0, 0], [0, 1]),
        ([0, 1], [1, 0]),
        ([256, 1], [1, 256]),
    ],
)
def test_tokens_decide_not_their_digits_or_order(
    books: Books, stored: list[int], asked: list[int]
) -> None:
    blocks = books.branch(stored)
    assert books.found(asked) == []
    assert books.found(stored) == blocks


def test_block_zero_is_an_ordinary_predecessor(books: Books) -> None:
    """Block 0 as `before` and 'nothing before' are different histories."""
    blocks = books.branch([1, 2, 1, 2])
    assert blocks[0] == 0
    assert books.found([1, 2]) == blocks[:1]
    assert books.found([1, 2, 1, 2]) == blocks
    assert books.found([1, 2, 1, 2, 1, 2]) == blocks


def test_nothing_is_published_after_an_unpublished_block(books: Books) -> None:
    """A branch on another wording's KV never reaches the index through its tail."""
    private, tail = books.alloc(), books.alloc()
    books.publish(private, tail, [3, 4])
    assert books.found([3, 4]) == []
    books.release([private, tail])
    assert books.count().cached == 0


def test_publishing_twice_changes_nothing(books: Books) -> None:
    blocks = books.branch([1, 2])
    books.publish(-1, blocks[0], [1, 2])
    books.publish(-1, blocks[0], [8, 9])
    assert books.found([8, 9]) == []
    assert books.found([1, 2]) == blocks


def test_twin_of_a_used_block_has_its_identity_but_no_entry(books: Books) -> None:
    first = books.branch([1, 2])
    twin = books.branch([1, 2, 3, 4])
    assert books.found([1, 2, 3, 4]) == [first[0], twin[1]]
    books.release(twin)
    assert books.count().cached == 1  # [3, 4]; the twin itself is plainly free
    assert books.found([1, 2, 3, 4]) == [first[0], twin[1]]


def test_publish_names_the_equal_block_in_use(books: Books) -> None:
    first = books.alloc()
    assert books.publish(-1, first, [1, 2]) == first
    second = books.alloc()
    assert books.publish(-1, second, [1, 2]) == first
    books.release([second])
    books.release([first])  # cached: the next one takes its place
    third = books.alloc()
    assert books.publish(-1, third, [1, 2]) == third


def test_withdrawn_block_is_private_again(books: Books) -> None:
    blocks = books.branch([1, 2, 3, 4])
    books.withdraw(blocks[1])
    assert books.writable(blocks[1]) and not books.writable(blocks[0])
    assert books.found([1, 2, 3, 4]) == blocks[:1]
    assert books.publish(blocks[0], blocks[1], [5, 6]) == blocks[1]
    assert books.found([1, 2, 5, 6]) == blocks
    books.withdraw(blocks[0])
    assert books.found([1, 2, 5, 6]) == []
    books.release(blocks)
    assert books.count().cached == 1  # the second, which nobody finds, until it is reclaimed


def test_marks_count_blocks_once(books: Books) -> None:
    blocks = [books.alloc(), books.alloc()]
    assert [books.mark(b, True) for b in (*blocks, *blocks)] == [True, True, False, False]
    assert [books.mark(b, False) for b in (*blocks, *blocks)] == [True, True, False, False]


def test_twin_of_a_cached_block_takes_its_place(books: Books) -> None:
    old = books.branch([1, 2, 3, 4])
    books.release(old)
    new = books.alloc()
    books.publish(-1, new, [1, 2])
    assert (books.count().cached, books.count().reclaimed) == (1, 0)
    assert books.found([1, 2, 3, 4]) == [new, old[1]]
    assert books.alloc() == old[0]


def test_orphans_are_never_found_under_a_new_first_block(books: Books) -> None:
    """Identities are not reused: a successor of a lost block stays lost."""
    kv = Books(2, 2, 0)
    blocks = kv.branch([1, 2, 3, 4])
    kv.release([blocks[0]])
    assert kv.alloc() == blocks[0]  # reclaimed, while its successor is in use
    kv.publish(-1, blocks[0], [1, 2])
    assert kv.match([1, 2, 3, 4]) == [blocks[0]]
    kv.close()


def test_reclaim_takes_leaves_first_and_the_least_recent_branch(books: Books) -> None:
    a = books.branch([1, 1, 2, 2])
    b = books.branch([3, 3, 4, 4])
    c = books.branch([5, 5, 6, 6, 7, 7, 8, 8])
    books.release(a)
    books.release(b)
    books.release(c)
    books.found([1, 1, 2, 2])  # a is now the most recent
    order = [books.alloc() for _ in range(8)]
    assert order == [b[1], b[0], *reversed(c), a[1], a[0]]
    assert books.count().reclaimed == 8


def test_forget(books: Books) -> None:
    cached = books.branch([1, 2])
    used = books.branch([3, 4])
    half = books.alloc()
    books.release(cached)
    books.forget()
    counts = books.count()
    assert (counts.used, counts.cached, counts.free) == (2, 0, 6)
    assert books.found([1, 2]) == books.found([3, 4]) == []
    # Old KV in a block that was half full must not come back as new KV.
    books.publish(-1, half, [5, 6])
    books.publish(used[0], books.alloc(), [7, 8])
    assert books.found([5, 6]) == books.found([3, 4, 7, 8]) == []
    books.release([used[0], half])
    assert books.count().cached == 0
    again = books.branch([1, 2, 3, 4])
    assert books.found([1, 2, 3, 4]) == again


def test_writable_means_private_and_unknown_to_the_index(books: Books) -> None:
    block = books.alloc()
    assert books.writable(block)
    books.ref(block)
    assert not books.writable(block)
    assert books.writable(block, 2)  # both holders write the same
    books.release([block])
    assert books.writable(block)
    books.publish(-1, block, [1, 2])
    assert not books.writable(block)  # though it has one holder
    twin = books.branch([1, 2])[0]
    assert not books.writable(twin)  # its successors rely on its content
    books.forget()
    assert books.writable(block) and books.writable(twin)


# ---- the books -----------------------------------------------------------------


def test_check_names_a_wrong_reference_count(books: Books) -> None:
    blocks = books.branch([1, 2, 3, 4])
    books.ref(blocks[1])
    books.check([1, 2, 0, 0, 0, 0, 0, 0])
    for wrong in ([1, 1, 0, 0, 0, 0, 0, 0], [1, 2, 0, 0, 0, 0, 0, 1]):
        status = books.lib.rk_kv_check(books.kv, ints(wrong), ctypes.byref(books.error))
        assert status == books.error.status == RK_ESTATE
        guilty = 1 if wrong[1] == 1 else 7
        assert f"block {guilty} ".encode() in books.error.text


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 2, 64), b"n_blocks"),
        ((-1, 2, 64), b"n_blocks"),
        ((2**31 - 1, 2, 64), b"n_blocks"),
        ((8, 0, 64), b"block_tokens"),
        ((8, 2, -1), b"hash_bits"),
        ((8, 2, 65), b"hash_bits"),
    ],
)
def test_create_refuses(arguments: tuple[int, int, int], name: bytes) -> None:
    kv = Books(*arguments)
    assert kv.status == kv.error.status == RK_EVALUE
    assert kv.error.text.startswith(name)
    assert not kv.kv
    kv.close()  # takes NULL


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_large_pool_costs_nothing_until_used() -> None:
    """Four million blocks are about 450 MB of books; untouched ones stay virtual."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    kv = Books(1 << 22, 16)
    assert kv.status == RK_OK
    block = kv.lib.rk_kv_alloc(kv.kv)
    kv.lib.rk_kv_publish(kv.kv, -1, block, ints(range(16)))
    assert resident() - before < 100 << 20
    kv.close()


# ---- random histories against a model ------------------------------------------


class Model:
    """What kv.h promises, in the plainest words; `history` is the ground truth."""

    ROOT = "root"

    def __init__(self, n_blocks: int, block_tokens: int) -> None:
        self.n_blocks, self.block_tokens = n_blocks, block_tokens
        self.refs = [0] * n_blocks
        self.identity: dict[int, object] = {}
        self.entries: dict[tuple[object, tuple[int, ...]], int] = {}
        self.history: dict[int, tuple[int, ...]] = {}
        self.freed: list[int] = []
        self.cached: list[int] = []
        self.barred: set[int] = set()
        self.n_touched = self.reclaimed = self.peak = 0

    def key_of(self, block: int) -> tuple[object, tuple[int, ...]] | None:
        return next((key for key, owner in self.entries.items() if owner == block), None)

    def ref(self, block: int) -> None:
        if self.refs[block] == 0 and block in self.cached:
            self.cached.remove(block)
        self.refs[block] += 1
        self.peak = max(self.peak, self.used())

    def alloc(self) -> int:
        if self.freed:
            block = self.freed.pop()
        elif self.n_touched < self.n_blocks:
            block = self.n_touched
            self.n_touched += 1
        elif self.cached:
            block = self.cached.pop(0)
            del self.entries[self.key_of(block)]  # type: ignore[arg-type]
            self.reclaimed += 1
        else:
            return -1
        self.clear(block)
        self.ref(block)
        return block

    def clear(self, block: int) -> None:
        self.identity.pop(block, None)
        self.history.pop(block, None)
        self.barred.discard(block)

    def unref(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if self.key_of(block) is not None:
                self.cached.append(block)
            else:
                self.clear(block)
                self.freed.append(block)

    def publish(self, before: int, block: int, tokens: tuple[int, ...]) -> None:
        above = self.ROOT if before < 0 else self.identity.get(before)
        if above is None or block in self.identity or block in self.barred:
            return
        self.history[block] = (self.history[before] if before >= 0 else ()) + tokens
        twin = self.entries.get((above, tokens))
        self.identity[block] = object() if twin is None else self.identity[twin]
        if twin is None or self.refs[twin] == 0:
            self.entries[above, tokens] = block
        if twin is not None and self.refs[twin] == 0:
            self.cached.remove(twin)
            self.clear(twin)
            self.freed.append(twin)

    def match(self, tokens: tuple[int, ...]) -> list[int]:
        above: object = self.ROOT
        blocks: list[int] = []
        for start in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            block = self.entries.get((above, tokens[start : start + self.block_tokens]))
            if block is None:
                break
            self.ref(block)
            blocks.append(block)
            above = self.identity[block]
        return blocks

    def forget(self) -> None:
        self.entries.clear()
        for block in range(self.n_touched):
            if block in self.cached:
                self.clear(block)
                self.freed.append(block)
            elif self.refs[block]:
                self.identity.pop(block, None)
                self.barred.add(block)
        self.cached.clear()

    def used(self) -> int:
        return sum(r > 0 for r in self.refs)


class Run:
    """One random life of a pool: branches come, grow, fork and go."""

    def __init__(self, seed: int, hash_bits: int) -> None:
        self.random = random.Random(seed)
        self.size = self.random.choice([1, 2, 3])
        n_blocks = self.random.choice([1, 5, 12, 30])
        self.books = Books(n_blocks, self.size, hash_bits)
        self.model = Model(n_blocks, self.size)
        self.branches: list[tuple[list[int], list[int]]] = []  # blocks, tokens
        self.full = self.hits = 0

    def tokens(self, n_blocks: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(n_blocks * self.size)]

    def prefill(self) -> None:
        tokens = self.tokens(self.random.randint(1, 4))
        blocks = self.books.match(tokens)
        assert blocks == self.model.match(tuple(tokens))
        for i, block in enumerate(blocks):  # the promise itself: equal histories
            assert self.model.history[block] == tuple(tokens[: (i + 1) * self.size])
        self.hits += len(blocks)
        held = tokens[: len(blocks) * self.size]
        self.branches.append((blocks, held))
        self.grow(self.branches[-1], tokens[len(held) :])

    def grow(self, branch: tuple[list[int], list[int]], tokens: list[int]) -> None:
        blocks, held = branch
        for start in range(0, len(tokens), self.size):
            part = tokens[start : start + self.size]
            block = self.books.alloc()
            assert block == self.model.alloc()
            if block < 0:
                self.full += 1
                return
            before = blocks[-1] if blocks else -1
            if self.random.random() < 0.9:  # now and then a private block
                self.books.publish(before, block, part)
                self.model.publish(before, block, tuple(part))
            blocks.append(block)
            held += part

    def fork(self, branch: tuple[list[int], list[int]]) -> None:
        n = self.random.randint(0, len(branch[0]))
        blocks, held = branch[0][:n], branch[1][: n * self.size]
        for block in blocks:
            self.books.ref(block)
            self.model.ref(block)
        self.branches.append((blocks, held))

    def drop(self, branch: tuple[list[int], list[int]]) -> None:
        self.branches.remove(branch)
        self.books.release(branch[0])
        for block in reversed(branch[0]):
            self.model.unref(block)

    def step(self) -> None:
        what = self.random.random()
        if what < 0.35 or not self.branches:
            self.prefill()
        elif what < 0.5:
            self.grow(self.random.choice(self.branches), self.tokens(1))
        elif what < 0.65:
            self.fork(self.random.choice(self.branches))
        elif what < 0.98:
            self.drop(self.random.choice(self.branches))
        else:
            self.books.forget()
            self.model.forget()
        self.compare()

    def compare(self) -> None:
        held = [0] * self.model.n_blocks
        for blocks, _ in self.branches:
            for block in blocks:
                held[block] += 1
        assert held == self.model.refs
        self.books.check(held)
        counts = self.books.count()
        assert counts.used == self.model.used()
        assert counts.cached == len(self.model.cached)
        assert counts.shared == sum(r > 1 for r in self.model.refs)
        assert (counts.peak_used, counts.reclaimed) == (self.model.peak, self.model.reclaimed)


@pytest.mark.parametrize("hash_bits", [64, 1, 0])
@pytest.mark.parametrize("seed", range(8))
def test_random_histories_agree_with_the_model(seed: int, hash_bits: int) -> None:
    run = Run(seed, hash_bits)
    for _ in range(300):
        run.step()
    assert run.hits > 0
    assert run.full > 0 or run.model.n_blocks == 30
    while run.branches:
        run.drop(run.branches[-1])
    run.compare()
    assert run.books.count().used == 0
    run.books.close()
