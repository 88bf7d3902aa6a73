"""llama.cpp, by the C interface of llama-cpp-python; see protocol.py.

The prefix is computed once and given to all branches by llama_memory_seq_cp (one unified KV
cache, so no copy); suffixes, decode steps and verifications are one batch each. Tokens go
through the model in the same batches as in rksc: a suffix without its last token, `new` steps,
then the last new token with the question.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp as ll
import numpy as np
from protocol import Answer, Laps, Run, Work, options, serve

CHUNK = 512
QUIET = ll.llama_log_callback(lambda level, text, data: None)  # llama.cpp calls it to the end


class Context:
    """A context, and how many tokens went through it."""

    def __init__(
        self, model: Any, n_tokens: int, n_branches: int, threads: int, flash: bool
    ) -> None:
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_tokens, 2048, CHUNK
        params.n_seq_max, params.kv_unified = n_branches, True
        # "auto" is on, which took three times as long for a decode step of a bf16 file
        params.flash_attn_type = (
            ll.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else ll.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.n_threads = params.n_threads_batch = threads
        self.context = ll.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError("llama.cpp made no context")
        self.n_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
        self.tokens = 0

    def decode(self, rows: Sequence[Sequence[int]], position: int, wanted: bool) -> None:
        """One row of tokens for each branch from 0 on, all starting at `position`; logits of
        each row's last token where they are wanted."""
        n = sum(len(row) for row in rows)
        batch = ll.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        i = 0
        for sequence, row in enumerate(rows):
            for offset, token in enumerate(row):
                batch.token[i], batch.pos[i] = token, position + offset
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = wanted and offset == len(row) - 1
                i += 1
        status = ll.llama_decode(self.context, batch)
        ll.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: {status}")
        ll.llama_synchronize(self.context)
        self.tokens += n

    def greedy(self, n_rows: int) -> list[int]:
        logits = ll.llama_get_logits(self.context)
        rows = np.ctypeslib.as_array(logits, shape=(n_rows, self.n_vocab))
        return [int(token) for token in rows.argmax(1)]


def prepare() -> tuple[Run, str]:
    args = options(("--flash", {"action": "store_true"}))
    ll.llama_log_set(QUIET, ctypes.c_void_p())
    ll.llama_backend_init()
    params = ll.llama_model_default_params()
    if args.isa == "avx512_bf16":
        params.use_extra_bufts = False  # AMX is one of the extra buffer types
    model = ll.llama_model_load_from_file(args.model.encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {args.model}")

    def run(work: Work) -> Answer:
        prefix, suffixes = work["prefix"], work["suffixes"]
        n = len(suffixes)
        made = Context(model, args.tokens, args.branches, args.threads, args.flash)
        memory = ll.llama_get_memory(made.context)
        laps = Laps()
        for at in range(0, len(prefix), CHUNK):
            made.decode([prefix[at : at + CHUNK]], at, wanted=False)
        laps.lap("prefill")
        for branch in range(1, n):
            ll.llama_memory_seq_cp(memory, 0, branch, -1, -1)
        if len(suffixes[0]) > 1:
            made.decode([suffix[:-1] for suffix in suffixes], len(prefix), wanted=False)
        laps.lap("suffix")
        at = len(prefix) + len(suffixes[0]) - 1
        token = [suffix[-1] for suffix in suffixes]
        chosen: list[list[int]] = [[] for _ in suffixes]
        for step in range(work["new"]):
            made.decode([[t] for t in token], at + step, wanted=True)
            token = made.greedy(n)
            for branch in range(n):
                chosen[branch].append(token[branch])
        laps.lap("decode")
        if work["question"]:
            made.decode([[t, *work["question"]] for t in token], at + work["new"], wanted=True)
            made.greedy(n)
        laps.lap("verify")
        ll.llama_free(made.context)
        return {"seconds": laps.seconds, "tokens": made.tokens, "chosen": chosen}

    return run, f"llama-cpp-python {ll.__version__}"


if __name__ == "__main__":
    serve(prepare)
