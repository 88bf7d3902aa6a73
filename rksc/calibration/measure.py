"""The raw measurements that experiments share. Each is made once; sweeps replay them.

wordings       a question's other wordings: hidden states compared after every layer
continuations  what sharing does to what follows: answers, winners, divergence
answers        a problem answered several times, verified in full, seen through every lens
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .._core import Branch
from ..engine.logits import log_softmax
from ..engine.options import ASKS, Sampling
from ..engine.session import BranchSession
from ..reasoning.prompts import Wordings
from .replay import select
from .runner import Bench, Result
from .tasks import Problem

POOLS: tuple[Literal["mean", "last"], ...] = ("mean", "last")
SUFFIX = "Let us think step by step."


def sampling(seed: int) -> Sampling:
    """How all answers are drawn."""
    return Sampling(temperature=0.7, top_p=0.95, seed=seed)


Vectors = NDArray[np.float64]

# ---- hidden states of wordings -----------------------------------------------------------------


def wordings(
    bench: Bench, root: str, others: Sequence[str], centre: Sequence[str], instruction: str
) -> Result:
    """Cosines (layers,) of each other wording with the root, pooled in four ways.

    centre: questions whose mean hidden state is subtracted. Also the suffix probe's cosines,
    which depend on the root alone, and tokens: of each wording, and in common at its beginning.
    """
    session, words = bench.session, Wordings(bench.session, instruction)
    middles = centres(bench, words, centre)
    base = words.problem(root)
    planted = session.prefill(base)
    last = planted.hidden
    child = planted.fork([words.suffix(SUFFIX)])[0]
    suffix = cosines(child.hidden, last, None)
    child.drop()
    rows, means = [], {}
    for text in others:
        tokens = words.problem(text)
        begin, own_end, root_end = difference(tokens, base)
        own = session.prefill(tokens)
        seen, own_last = session._prompt_means(tokens, begin, own_end), own.hidden
        own.drop()
        if (begin, root_end) not in means:
            means[begin, root_end] = session._prompt_means(base, begin, root_end)
        expected = means[begin, root_end]
        rows.append({
            "mean": cosines(seen, expected, middles["mean"]),
            "mean uncentred": cosines(seen, expected, None),
            "last": cosines(own_last, last, middles["last"]),
            "last uncentred": cosines(own_last, last, None),
            "tokens": len(tokens),
            "common": common(tokens, base),
        })  # fmt: skip
    planted.drop()
    return {"tokens": len(base), "suffix": suffix, "others": rows}


def centres(
    bench: Bench, words: Wordings, questions: Sequence[str]
) -> dict[str, NDArray[np.float32]]:
    """ASKS' centres by pool, float32 (layers, width), of these questions as prompts."""
    key = ("centres", words.instruction, words.system, tuple(questions))
    if key not in bench.memory:
        prompts = [words.problem(question) for question in questions]
        bench.memory[key] = {pool: words.session.layer_means(prompts, pool) for pool in POOLS}
    made: dict[str, NDArray[np.float32]] = bench.memory[key]
    return made


def cosines(a: Any, b: Any, centre: NDArray[np.float32] | None) -> list[float]:
    """Cosine of each layer's vectors, rounded to 7 digits; 0 where one has no length."""
    x, y = np.asarray(a, float), np.asarray(b, float)
    if centre is not None:
        x, y = x - centre, y - centre
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    inner = (x * y).sum(axis=1)
    return [round(float(c), 7) for c in np.divide(inner, lengths, np.zeros_like(inner),
                                                  where=lengths > 0)]  # fmt: skip


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def difference(own: Sequence[int], root: Sequence[int]) -> tuple[int, int, int]:
    """begin, end of own, end of root: the tokens that differ, as csrc/engine/probe.c finds them."""
    head, shorter = common(own, root), min(len(own), len(root))
    tail = 0
    while tail < shorter - head and own[-1 - tail] == root[-1 - tail]:
        tail += 1
    if head in (len(own) - tail, len(root) - tail):  # one side would be empty
        if tail:
            tail -= 1
        else:
            head -= 1
    return head, len(own) - tail, len(root) - tail


# ---- what follows ------------------------------------------------------------------------------

POSITIONS = (0, 1, 2, 4, 8, 16, 32)


def continuations(
    bench: Bench,
    root: str,
    others: Sequence[str],
    instruction: str,
    n_branches: int,
    max_new_tokens: int,
    seed: int,
) -> Result:
    """For each other wording: what it says on its own KV, and what it would say on the root's.

    On the root's KV it says what the root says, so the root stands for the shared branch. Each
    wording is answered greedily and by n_branches samples with the same random streams,
    verified in full. "again" is the root once more with other streams: what sampling alone
    changes.
    """
    session, words = bench.session, Wordings(bench.session, instruction)
    prompts = [words.problem(text) for text in (root, *others)]
    planted = [session.prefill(tokens) for tokens in prompts]
    greedy = [branch.fork(1)[0] for branch in planted]
    sampled = []
    for branch, first in [*((b, 0) for b in planted), (planted[0], n_branches)]:
        kids = branch.fork(n_branches)
        for i, kid in enumerate(kids):
            kid.stream = first + i
        sampled.append(kids)
    every = [kid for kids in sampled for kid in kids]
    _continue(session, greedy, every, max_new_tokens, seed)
    yes, no = words.answers(None, None)
    session.verify(every, words.verification(), yes, no, cgee=None)
    texts = [_said(kid) for kid in every]
    said = []
    for i, kids in enumerate(sampled):
        winner = select([kid.score for kid in kids], [kid.confidence for kid in kids])
        said.append({"winner": winner, "text": texts[i * n_branches + winner]})
    for record, branch in zip(said, greedy, strict=False):
        record["greedy"] = _said(branch)
    for record, branch, own in zip(said[1:-1], planted[1:], greedy[1:], strict=True):
        record |= _divergence(branch, planted[0], own.tokens[own.n_prompt :])
    for branch in (*planted, *greedy, *every):
        branch.drop()
    return {"root": said[0], "others": said[1:-1], "again": said[-1]}


def _continue(
    session: BranchSession,
    greedy: Sequence[Branch],
    sampled: Sequence[Branch],
    max_new_tokens: int,
    seed: int,
) -> None:
    """All of them in one batch, which reads the weights once a token."""
    for branches, how in ((greedy, None), (sampled, sampling(seed))):
        for branch in branches:
            session.submit(branch, max_new_tokens, how)
    while session.n_requests:
        session.step()


def _said(branch: Branch) -> str:
    session: Any = branch.session
    return str(session.decode(branch.tokens[branch.n_prompt :]))


def _divergence(own: Branch, root: Branch, tokens: NDArray[np.int32]) -> dict[str, Any]:
    """KL(own || root) in nats and agreement of the most likely token, teacher-forced along
    own's greedy continuation, at POSITIONS."""
    at = [n for n in POSITIONS if n <= len(tokens)]
    p, q = (log_softmax(_logits_along(b, tokens[: at[-1]])[at]) for b in (own, root))
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    agree = p.argmax(axis=1) == q.argmax(axis=1)
    return {"kl": [round(float(k), 6) for k in kl], "agree": [int(same) for same in agree]}


def _logits_along(branch: Branch, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Of what follows the branch, and it with each more of the tokens: (1 + tokens, vocabulary)."""
    child = branch.fork([tokens])[0]
    logits = child.session._logits_at(child, branch.n_tokens - 1, child.n_tokens)
    child.drop()
    return logits


# ---- answers and their verification ------------------------------------------------------------

LENSES = ("answer norm", "answer", "full norm", "full")
TOGETHER = 4  # problems whose branches are continued in one batch


def answers(bench: Bench, items: Sequence[dict[str, Any]]) -> list[Result]:
    """For each problem a greedy answer and n_branches sampled ones; each sample verified in full
    and seen through the lenses after every layer of its verification.

    items: {"problem": a `Problem`'s fields, "n_branches", "max_new_tokens", "seed"}; with "others"
    the branches ask in turn with the problem's text and with these, and with "centre" the default
    gate of this centre and guard="reworded" decides who shares. Of each, lists over branches:
    answer, right, confidence, score, mass, approximate; "lenses": entropies in nats and scores,
    (branches, layers), of each of LENSES.
    """
    session, asked = bench.session, []
    for item in items:
        row = Problem(**{**item["problem"], "choices": tuple(item["problem"]["choices"])})
        words = Wordings(session, row.instruction)
        planted = [session.prefill(words.problem(row.text))]
        if "centre" in item:
            middle = centres(bench, words, item["centre"])["mean"]
            session.asks = ASKS(center=middle, guard="reworded")
        for text in item.get("others", ()):
            planted.append(session.prefill(words.problem(text), similar_to=planted[0]))
        session.asks = None
        first = planted[0].fork(1)[0]
        kids = [planted[i % len(planted)].fork(1)[0] for i in range(item["n_branches"])]
        for i, kid in enumerate(kids):
            kid.stream = i
            session.submit(kid, item["max_new_tokens"], sampling(item["seed"]))
        session.submit(first, item["max_new_tokens"])
        asked.append((row, words, planted, first, kids))
    while session.n_requests:
        session.step()
    results = []
    for row, words, planted, first, kids in asked:
        results.append(_judged(bench, row, words, first, kids))
        for branch in (*planted, first, *kids):
            branch.drop()
    return results


def _judged(
    bench: Bench, row: Problem, words: Wordings, first: Branch, kids: Sequence[Branch]
) -> Result:
    yes, no = words.answers(None, None)
    question = words.verification()
    verdicts = bench.session.verify(kids, question, yes, no, cgee=None)
    read = [row.read(_said(kid)) for kid in kids]
    greedy = row.read(_said(first))
    return {
        "answer": read,
        "right": [row.is_right(answer) for answer in read],
        "tokens": [kid.n_tokens - kid.n_prompt for kid in kids],
        "confidence": [kid.confidence for kid in kids],
        "score": [verdict.score for verdict in verdicts],
        "mass": [verdict.mass for verdict in verdicts],
        "approximate": [kid.approximate for kid in kids],
        "greedy answer": greedy,
        "greedy right": row.is_right(greedy),
        "question tokens": len(question),
        "lenses": _see(bench, kids, question, yes, no),
    }


def _see(
    bench: Bench, kids: Sequence[Branch], question: Sequence[int], yes: int, no: int
) -> dict[str, dict[str, list[list[float]]]]:
    children = [kid.fork([question])[0] for kid in kids]
    bench.session.compute(children)
    hidden = np.stack([child.hidden for child in children])  # (branches, layers, width)
    for child in children:
        child.drop()
    norm, head = _head(bench)
    squares = (hidden.astype(np.float64) ** 2).mean(axis=2, keepdims=True)
    scale = 1.0 / np.sqrt(squares + bench.session.config.norm_eps)
    seen: dict[str, dict[str, list[list[float]]]] = {}
    for suffix, x in ((" norm", (hidden * scale * norm).astype(np.float32)), ("", hidden)):
        lead = (x @ (head[yes] - head[no])).astype(np.float64)
        score = 1.0 / (1.0 + np.exp(-np.clip(lead, -500, 500)))
        vocabulary = entropy(x.reshape(-1, x.shape[2]) @ head.T).reshape(score.shape)
        for lens, h in (("answer", binary_entropy(score)), ("full", vocabulary)):
            seen[lens + suffix] = {
                "entropies": np.round(h, 6).tolist(), "scores": np.round(score, 9).tolist()
            }  # fmt: skip
    return {name: seen[name] for name in LENSES}


def entropy(logits: NDArray[np.float32]) -> Vectors:
    """Of each row's distribution, in nats: log Z - sum e^x x / Z, x below the largest logit. Rows
    stay in float32, which a vocabulary's width of float64 would take four times as long for."""
    x = logits - logits.max(axis=1, keepdims=True)
    e = np.exp(x)
    z = e.sum(axis=1, dtype=np.float64)
    return np.asarray(np.log(z) - np.multiply(e, x, out=e).sum(axis=1, dtype=np.float64) / z)


def binary_entropy(p: Vectors) -> Vectors:
    """Of (p, 1 - p), in nats; 0 at both ends."""
    q = 1.0 - p
    terms = [np.where(v > 0, -v * np.log(np.where(v > 0, v, 1.0)), 0.0) for v in (p, q)]
    return np.asarray(terms[0] + terms[1])


def _head(bench: Bench) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The final norm's weight (width,) and the head (vocabulary, width), in float32."""
    if "head" not in bench.memory:
        weights = bench.model.weights
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        bench.memory["head"] = (weights["model.norm.weight"].numpy(), head.numpy())
    made: tuple[NDArray[np.float32], NDArray[np.float32]] = bench.memory["head"]
    return made


def n_layers_of(result: Result) -> int:
    """Layers of the model that an `answers` record was made with."""
    return len(result["lenses"][LENSES[0]]["scores"][0])


def mean_of(values: Sequence[float]) -> float:
    """The mean; NaN without values."""
    return float(np.mean(values)) if len(values) else math.nan
