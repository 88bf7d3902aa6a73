"""What long random sessions give, to the bit: a record to compare two versions of the engine by.

    python tests/support/record_bits.py before.json              # before a change
    python tests/support/record_bits.py after.json before.json   # after it; 1 where they differ

For every instruction set, type and small model a random program forks, generates, verifies, scores,
probes, evicts and fails, and each result goes into a running hash with its kind: tokens,
log-probabilities, entropies, confidences, verdicts, statistics, classes of errors. The record holds
the hash after every operation, so that the first one which differs is known.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[up]) for up in (2, 1)]

from rksc import ASKS, CGEE, Branch, BranchSession, Sampling, _core  # noqa: E402
from support.blockrig import random_blocks  # noqa: E402
from support.models import ALL, WIDE, Small  # noqa: E402
from support.sessions import block_bytes, open_session  # noqa: E402

N_OPERATIONS = 150
MODELS = ("T4", "mistral-window", "qwen2-tied-window", "falcon3", "keen", "wide Q4_K")
CGEES = (
    None,
    CGEE(),
    CGEE(lens="answer", theta=0.6, min_layer=1),
    CGEE(lens="full", theta=4.5, min_layer=1),
    CGEE(skip_top=0.2, skip_lead=0.001, stop_top=0.05, stop_lead=0.001, min_steps=2),
)


def model(name: str) -> Small:
    """One of MODELS; the last has matrices of a block type."""
    if name != "wide Q4_K":
        return ALL[name]
    rng = np.random.default_rng(5)

    def blocks(weights: dict[str, Any]) -> None:
        for key, w in weights.items():
            if key.endswith("proj.weight"):
                raw = random_blocks(rng, "Q4_K", *w.shape)
                weights[key] = _core.Tensor(raw.tobytes(), "Q4_K", w.shape)

    return WIDE.changed(name, blocks)


def plain(value: Any) -> bytes:
    """The bits of a result: of arrays their bytes, of all else a text that tells floats apart."""
    if isinstance(value, np.ndarray):
        return repr((value.dtype.str, value.shape)).encode() + value.tobytes()
    if isinstance(value, Branch):
        return repr((value.id, value.parent_id, value.depth)).encode()
    if isinstance(value, (list, tuple)):
        return b"[" + b",".join(map(plain, value)) + b"]"
    if isinstance(value, dict):
        return plain(sorted(value.items()))
    if isinstance(value, (float, np.floating)):
        return float(value).hex().encode()
    if value is None or isinstance(value, (int, str, np.integer)):
        return repr(value).encode()
    if isinstance(value, BaseException):
        return type(value).__name__.encode()
    return type(value).__name__.encode() + plain(vars(value))


class Program:
    """A session and a random walk through its calls."""

    def __init__(self, model: Small, seed: int, **options: Any) -> None:
        self.model, self.random = model, random.Random(seed)
        self.session: BranchSession = open_session(model, **options)
        self.branches: list[Branch] = []
        self.requests: list[int] = []

    def tokens(self, n: int) -> list[int]:
        """n random tokens; few kinds of them, so that prefixes are met again."""
        return self.model.tokens(n, self.random.randrange(3))

    def some(self, most: int) -> list[Branch]:
        """A few of the branches."""
        if not self.branches:
            self.prefill()
        return self.random.sample(self.branches, min(len(self.branches), most))

    def sampling(self) -> Sampling | None:
        temperature = self.random.choice([0.0, 0.7, 1.5])
        return Sampling(
            temperature=temperature, top_p=self.random.choice([1.0, 0.8]), seed=7,
            top_k=self.random.choice([0, 20]), min_p=self.random.choice([0.0, 0.01]),
        )  # fmt: skip

    # ---- operations ------------------------------------------------------------------------

    def prefill(self) -> Any:
        tokens = self.tokens(self.random.choice([1, 9, 33, 70]))
        branch = self.session.prefill(tokens, compute=self.random.random() < 0.7)
        self.branches.append(branch)
        return branch, branch.n_computed

    def fork(self) -> Any:
        parent = self.some(1)[0]
        at = self.random.randint(1, parent.n_tokens)
        tails = [self.tokens(self.random.randint(0, 5)) for _ in range(self.random.randint(1, 4))]
        kids = parent.fork(tails, at=at)
        self.branches += kids
        return kids

    def extend(self) -> Any:
        branch = self.some(1)[0]
        branch.extend(self.tokens(self.random.randint(0, 12)))
        return branch

    def generate(self) -> Any:
        self.session.cgee = self.random.choice(CGEES)
        n = self.random.randint(0, 9)
        stop_ids = self.tokens(self.random.randint(0, 6))
        return self.session.generate(self.some(6), n, self.sampling(), stop_ids=stop_ids)

    def stream(self) -> Any:
        tokens = self.session.stream(self.some(3), 6, self.sampling(), stop_ids=())
        return [next(tokens, None) for _ in range(self.random.randint(0, 30))]

    def submit(self) -> Any:
        branch, group = self.some(1)[0], self.random.choice([None, 1, 2])
        request = self.session.submit(branch, 5, self.sampling(), stop_ids=(), group=group)
        self.requests.append(request)
        return None

    def step(self) -> Any:
        return self.session.step(), self.session.n_requests

    def cancel(self) -> Any:
        if self.requests:
            self.session.cancel(self.requests.pop())
        return None

    def score(self) -> Any:
        texts = [self.tokens(self.random.randint(0, 9)) for _ in range(4)]
        return self.session.score(self.some(1)[0], texts)

    def verify(self) -> Any:
        prompt = self.tokens(self.random.choice([1, 4, 40]))
        yes, no = self.random.sample(range(self.model.vocab), 2)
        cgee = self.random.choice(CGEES)
        return self.session.verify(self.some(6), prompt, yes, no, cgee=cgee)

    def select(self) -> Any:
        return self.session.select(self.some(4))

    def look(self) -> Any:
        branch = self.some(1)[0]
        return branch.logits, branch.hidden, branch.resident

    def logits_at(self) -> Any:
        branch = self.some(1)[0]
        return self.session._logits_at(branch, 0, min(branch.n_tokens, 9))

    def means(self) -> Any:
        return self.session.layer_means([self.tokens(9), self.tokens(12), self.tokens(7)])

    def similar(self) -> Any:
        self.session.asks = ASKS(
            uncentered=True, tau=self.random.choice([-1.0, 0.5, 0.9, 0.999]), guard=None,
            probe=self.random.choice(["prefix", "suffix"]),
            pool=self.random.choice(["mean", "last"]),
            probe_layers=self.random.randint(1, self.session.config.n_layers),
        )  # fmt: skip
        own = self.tokens(9) + self.tokens(5) + self.tokens(9)
        branch = self.session.prefill(own, similar_to=self.some(1)[0], suffix=self.tokens(4))
        self.branches.append(branch)
        return branch, branch.gate

    def drop(self) -> Any:
        for branch in self.some(len(self.branches) // 3):
            branch.drop()
            self.branches.remove(branch)
        return None

    def invalidate(self) -> Any:
        return self.session.invalidate()

    def mistake(self) -> Any:
        """Calls that are refused."""
        session, branch = self.session, self.some(1)[0]
        wrong: list[Callable[[], Any]] = [
            lambda: session.prefill([self.model.vocab]),
            lambda: session.prefill([]),
            lambda: branch.fork(1, at=branch.n_tokens + 1),
            lambda: session.verify([branch], [1], 2, 2),
            lambda: session.generate([branch, branch], 1),
            lambda: session.compute([branch, branch]),
            lambda: session.score(branch, [[-1]]),
            lambda: branch.extend(self.tokens(70) * 40),
        ]
        return self.random.choice(wrong)()

    def run(self, n: int) -> list[str]:
        """The hash after each of n operations."""
        weights = {
            self.prefill: 4, self.fork: 5, self.extend: 3, self.generate: 6, self.stream: 2,
            self.submit: 4, self.step: 6, self.cancel: 1, self.score: 2, self.verify: 4,
            self.select: 1, self.look: 2, self.logits_at: 1, self.means: 1, self.similar: 4,
            self.drop: 1, self.invalidate: 1, self.mistake: 2,
        }  # fmt: skip
        running, hashes = hashlib.sha256(), []
        for operation in self.random.choices(list(weights), list(weights.values()), k=n):
            try:
                result = operation()
            except (ValueError, TypeError, RuntimeError) as error:
                result = error
            self.session.check()
            marks = [[b, b.n_computed, b.score, b.confidence, b.tokens] for b in self.branches]
            running.update(plain([operation.__name__, result, marks, self.session.stats()]))
            hashes.append(
                f"{operation.__name__} {type(result).__name__} {running.hexdigest()[:12]}"
            )
        return hashes


def record_of(key: str, n: int = N_OPERATIONS) -> list[str]:
    """The hashes of one session, named as in the record."""
    isa, dtype, rest = key.split(" ", 2)
    name, n_blocks = rest.rsplit(" ", 1)
    small, seed = model(name), MODELS.index(name)
    program = Program(
        small, seed, isa=isa, dtype=dtype, device="cpu", block_tokens=8,
        step_tokens=32 if seed % 2 else 128,
        kv_bytes=int(n_blocks) * block_bytes(small, 8, dtype),
    )  # fmt: skip
    return program.run(n)


def record(n: int = N_OPERATIONS, names: tuple[str, ...] = MODELS) -> dict[str, list[str]]:
    """{instruction set, type, model, blocks of the pool: hashes}."""
    keys = itertools.product(_core.isas, ("float32", "bfloat16"), names, ("24", "400"))
    return {key: record_of(key, n) for key in map(" ".join, keys)}


def main(target: str, before: str | None = None) -> int:
    """Write the record; compare it with an earlier one."""
    found = record()
    Path(target).write_text(json.dumps(found, indent=0), "utf-8")
    earlier = json.loads(Path(before).read_text("utf-8")) if before else found
    differ = 0
    for key in sorted(set(found) | set(earlier)):
        pairs = list(zip(earlier.get(key, [""]), found.get(key, [""]), strict=False))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            differ += 1
            sys.stdout.write(f"{key}: operation {at}: {pairs[at][0]} is now {pairs[at][1]}\n")
    sys.stdout.write(f"{len(found)} sessions, {differ} differ\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
