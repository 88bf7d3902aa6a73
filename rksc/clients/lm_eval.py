"""rksc as a model of lm-evaluation-harness (the `lm_eval` package, extra `[lm-eval]`).

    rksc lm-eval --model rksc --model_args pretrained=model.gguf --tasks arc_challenge

`rksc lm-eval` is the harness's own command with this model registered: up to 0.4.13 it looks for
no models but its own, later versions find this one by its entry point. Its bare `lm_eval` command
knows the model, too, with a task file whose functions import this module (examples/lm_eval). A
program imports it and calls `lm_eval.simple_evaluate(model="rksc", model_args=...)`.

A multiple choice is one context and k continuations: the context is computed once, what it
has in common with the few-shot header of all others is in the cache, and the continuations are
scored in one batch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401  # the registry looks for it only while it is empty
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from ..load import load
from ..options import Sampling
from ..results import Token
from ._engine import Engine, Sample
from .openai import engine_of

_ENGINE_OPTIONS = {"max_rows", "dtype", "kv_bytes", "n_threads", "isa", "block_tokens",
                   "step_tokens"}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "repetition_penalty": (1.0,), "num_return_sequences": (1,),
    "early_stopping": (False,), "min_new_tokens": (0,),
}  # fmt: skip


@register_model("rksc")
class RKSC(TemplateLM):  # type: ignore[misc]  # lm_eval is not looked into
    """The harness's requests on a rksc engine.

    pretrained: a folder or .gguf file, or a `rksc.Model`, session or client. max_length: tokens of
    context and continuation (default and at most: one less than the model's positions, all of
    which `hf` fills); longer contexts lose their beginning. max_gen_toks: new tokens unless a task
    says otherwise. add_bos_token: None puts a BOS where the model wants one. batch_size: samples
    that run at once; 1, which the harness fills in, and "auto" leave that to max_rows (64), and no
    result depends on it. seed: of tasks that sample; a request that comes again (`repeats`) draws
    anew. device is not looked at, because the harness fills in one of its own. Other arguments
    are the session's.
    """

    def __init__(
        self,
        pretrained: Any,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        seed: int = 1234,
        **options: Any,
    ) -> None:
        super().__init__()
        unknown = set(options) - _ENGINE_OPTIONS
        if unknown:
            raise ValueError(f"{sorted(unknown)[0]}: not an argument of the rksc model")
        if isinstance(pretrained, (str, Path)):
            pretrained = load(pretrained)
        rows = max_batch_size or _rows(batch_size)
        if rows > 1:
            options.setdefault("max_rows", rows)
        self.engine: Engine = engine_of(pretrained, **options)
        self.tokenizer = self.engine.tokenizer
        positions = self.engine.session.config.max_positions - 1
        self.max_length = min(max_length or positions, positions)
        self.max_gen_toks = max_gen_toks
        self.add_bos_token = add_bos_token
        self.seed = seed

    # ---- tokens ------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's EOS, as in the harness's own models, or else the model's first."""
        ends = self.engine.session.config.eos
        own = self.tokenizer.eos_id
        if own is None and not ends:
            raise ValueError("the model has no end token: its files name no eos_token")
        return ends[0] if own is None else own

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        bos = self.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unused: Any
    ) -> list[int]:
        bos = self.add_bos_token if add_special_tokens is None else add_special_tokens
        return self.tokenizer.encode(string, bos=bos)

    def tok_decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    @property
    def tokenizer_name(self) -> str:
        return self.engine.name

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.chat(
            chat_history, add_generation_prompt, continue_final=not add_generation_prompt
        )

    # ---- requests ----------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **unused: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [self._cut(context, continuation) for _, context, continuation in requests]
        results: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="loglikelihood") as bar:
            for i, (logprobs, tops) in self.engine.scores(pairs):
                greedy = bool(np.array_equal(tops, pairs[i][1]))
                results[i] = float(logprobs.sum(dtype=np.float64)), greedy
                bar.update()
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
        return [results[i] for i in range(len(pairs))]

    def _cut(
        self, context: Sequence[int], continuation: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """The last tokens of both that fit: max_length of input, whose last token only gives."""
        whole = [*context, *continuation][-(self.max_length + 1) :]
        kept = min(len(continuation), len(whole) - 1)
        return whole[:-kept], whole[-kept:]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        results = []
        for request in tqdm(requests, disable=disable_tqdm, desc="loglikelihood_rolling"):
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            scores = self._loglikelihood_tokens(pairs, disable_tqdm=True)
            results.append(sum(score for score, _ in scores))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), results[-1])
        return results

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        seen: Counter[str] = Counter()
        asked: dict[Sample, Any] = {}
        for request in requests:
            sample = self._sample(*request.args)
            sample.index = seen[repr(request.args)]
            seen[repr(request.args)] += 1
            asked[sample] = request.args
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until") as bar:

            def note(sample: Sample, token: Token | None) -> None:
                if token is not None and sample.ended:
                    bar.update()
                    self.cache_hook.add_partial("generate_until", asked[sample], sample.text)

            for sample in asked:
                sample.on_token = note
            self.engine.run(list(asked))
        return [sample.text for sample in asked]

    def _sample(self, context: str, settings: dict[str, Any]) -> Sample:
        """A request's settings as transformers names them."""
        s = dict(settings)
        until = s.pop("until", None) or []
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        limits = [limit for limit in (s.pop(name, None) for name in names) if limit is not None]
        n_new = int(limits[0]) if limits else self.max_gen_toks
        temperature = float(s.pop("temperature", 0.0) or 0.0)
        if not s.pop("do_sample", temperature > 0):
            temperature = 0.0
        sampling = Sampling(
            temperature,
            int(s.pop("top_k", 0)),
            float(s.pop("top_p", 1.0)),
            float(s.pop("min_p", 0.0)),
            s.pop("seed", self.seed),
        )
        for name, value in s.items():
            if value is not None and value not in _NEUTRAL.get(name, ()):
                raise ValueError(f"{name}={value!r} is not supported by the rksc model")
        ends = self.engine.session.config.eos
        eos = {self.tokenizer.decode([token], special=True) for token in ends}
        stop = (until,) if isinstance(until, str) else tuple(until)
        stop = tuple(text for text in stop if text and text not in eos)
        room = self.max_length - n_new
        if room < 1:
            raise ValueError(f"max_gen_toks: {n_new} leave no room in max_length {self.max_length}")
        prompt = np.array(self.tok_encode(context)[-room:], np.int32)
        return Sample(prompt, n_new, sampling, stop)


def _rows(batch_size: int | str | None) -> int:
    """The harness's batch size, from its command line a str; 1 where it leaves the choice."""
    if batch_size is None or str(batch_size).startswith("auto"):
        return 1
    try:
        return int(batch_size)
    except ValueError:
        raise ValueError(f'batch_size must be an int or "auto", got {batch_size!r}') from None


def main(arguments: Sequence[str]) -> None:
    """The harness's command, with the model "rksc" known to it."""
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
