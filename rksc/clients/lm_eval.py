"""rksc as a model of lm-evaluation-harness (the `lm_eval` package, extra `[lm-eval]`).

    rksc lm-eval --model rksc --model_args pretrained=model.gguf --tasks arc_challenge

`rksc lm-eval` is the harness's own command with this model registered: up to 0.4.13 it looks for
no models but its own, later versions find this one by its entry point. Its bare `lm_eval` command
knows the model, too, with a task file whose functions import this module (examples/lm_eval). A
program imports it and calls `lm_eval.simple_evaluate(model="rksc", model_args=...)`.

A multiple choice is one context and k continuations: the context is computed once, what it
has in common with the few-shot header of all others is in the cache, and the continuations are
scored in one batch.

A request that has no answer (a continuation without a token of its own, say) is named by an error
after all others have been answered: RequestsError.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401  # the registry looks for it only while it is empty
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from .._core import CapacityError
from ..engine.arguments import nearest
from ..engine.load import load
from ..engine.options import Sampling
from ..engine.results import Token
from ._engine import Engine, Sample
from ._errors import ContextLengthError, FieldError
from ._fields import Fields, read_seed, shown
from .openai import engine_of

_ENGINE_OPTIONS = {"max_rows", "dtype", "kv_bytes", "n_threads", "isa", "block_tokens",
                   "step_tokens"}  # fmt: skip
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SETTINGS = {"until", "temperature", "do_sample", "top_k", "top_p", "min_p", "seed", *_LIMITS}

Pair = tuple[list[int], list[int]]
"""Tokens of a context and of what goes on after it; neither is empty."""


class RequestsError(ValueError):
    """Requests without an answer, each named with the reason. results: the answers of all, in
    order, None for those; the harness keeps them, too, if it runs with --use_cache."""

    def __init__(self, message: str, results: list[Any]) -> None:
        super().__init__(message)
        self.results = results


class _Answers:
    """The results of one call, as they come."""

    def __init__(self, kind: str, requests: Sequence[Any]) -> None:
        self._kind, self._requests = kind, requests
        self.results: list[Any] = [None] * len(requests)
        self._failed: dict[int, str] = {}

    def name(self, i: int) -> str:
        """A request by its place, its task's item, and the end of its text."""
        request = self._requests[i]
        item = f" (item {request.doc_id} of {request.task_name})" if request.task_name else ""
        text, *rest = request.args
        parts = f"text {_end(text)}" if not rest else f"context {_end(text)}"
        if rest and isinstance(rest[0], str):
            parts += f", continuation {_end(rest[0])}"
        return f"{self._kind} request {i}{item}, {parts}"

    def fail(self, i: int, error: Exception) -> None:
        """Told at once, because the others may take hours."""
        self._failed[i] = f"{self.name(i)}: {error}"
        logging.getLogger(__name__).warning("%s", self._failed[i])

    def done(self) -> list[Any]:
        """All results; RequestsError if some have failed."""
        if self._failed:
            first = [self._failed[i] for i in sorted(self._failed)[:5]]
            raise RequestsError(
                f"{len(self._failed)} of {len(self.results)} requests have no answer; those of the "
                "others are in this error's results, and in the cache of --use_cache. The first:\n"
                + "\n".join(first),
                self.results,
            )
        return self.results


@register_model("rksc")
class RKSC(TemplateLM):  # type: ignore[misc]  # lm_eval is not looked into
    """The harness's requests on a rksc engine.

    pretrained: a folder or .gguf file, or a `rksc.Model`, session or client. max_length: tokens of
    context and continuation (default and at most: one less than the model's positions, all of
    which `hf` fills); longer contexts lose their beginning. max_gen_toks: new tokens unless a task
    says otherwise. add_bos_token: None puts a BOS where the model wants one. rolling_as_hf: a BOS
    that the model wants is counted twice by loglikelihood_rolling, as `hf` does it, log p(BOS text
    | BOS) instead of log p(text | BOS). batch_size: samples that run at once; 1, which the harness
    fills in, and "auto" leave that to max_rows (64), and no result depends on it. seed: of tasks
    that sample (-1: a fresh one); a request that comes again (`repeats`) draws anew. device is not
    looked at, because the harness fills in one of its own. Other arguments are the session's.
    """

    def __init__(
        self,
        pretrained: Any,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        rolling_as_hf: bool = False,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        seed: int | None = 1234,
        **options: Any,
    ) -> None:
        super().__init__()
        unknown = set(options) - _ENGINE_OPTIONS
        if unknown:
            name = sorted(unknown)[0]
            meant = nearest(name, _ENGINE_OPTIONS)
            raise ValueError(f"{name}: not an argument of the rksc model{meant}")
        if isinstance(pretrained, (str, Path)):
            pretrained = load(pretrained)
        rows = max_batch_size or _rows(batch_size)
        if rows > 1:
            options.setdefault("max_rows", rows)
        self.engine: Engine = engine_of("RKSC", pretrained, options)
        self.tokenizer = self.engine.tokenizer
        positions = self.engine.session.config.max_positions - 1
        self.max_length = min(max_length or positions, positions)
        self.max_gen_toks = max_gen_toks
        self.add_bos_token = add_bos_token
        self.rolling_as_hf = rolling_as_hf
        self.seed = read_seed(seed)

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
        tokens: list[int] = self.engine.encode(string, "text", bos).tolist()
        return tokens

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

    # ---- log-likelihoods ---------------------------------------------------------------------

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log p(continuation | context), is it what greedy decoding gives) of each request."""
        answers, pairs = _Answers("loglikelihood", requests), {}
        for i, request in enumerate(requests):
            try:
                pairs[i] = self._pair(*request.args)
            except ValueError as error:
                answers.fail(i, error)

        with tqdm(total=len(pairs), disable=disable_tqdm, desc="loglikelihood") as bar:
            for i, result in self._scores(pairs):
                bar.update()
                if isinstance(result, Exception):
                    answers.fail(i, result)
                    continue
                answers.results[i] = result
                self.cache_hook.add_partial("loglikelihood", requests[i].args, result)
        return answers.done()

    def _pair(self, context: str, continuation: str) -> Pair:
        """As the harness splits a text, whose spaces at the end of a context belong to the
        continuation; ValueError where that leaves nothing to score."""
        if not continuation:
            raise ValueError("the continuation is empty: there is nothing to score")
        if context:
            given, scored = super()._encode_pair(context, continuation)
        else:
            given, scored = [], self.tok_encode(continuation, add_special_tokens=False)
        if not given:  # the context was empty, or spaces alone
            given = [self.prefix_token_id]
            scored = scored[1:] if scored[:1] == given else scored
        if not scored:
            raise ValueError(
                f"the continuation has no token of its own: {_end(context + continuation)} has no "
                "more tokens than the context alone"
            )
        self._check_length(scored)
        return self._cut(given, scored)

    def _check_length(self, scored: Sequence[int]) -> None:
        if len(scored) > self.max_length:
            raise ValueError(
                f"the continuation has {len(scored)} tokens, max_length is {self.max_length}"
            )

    def _cut(self, context: Sequence[int], continuation: Sequence[int]) -> Pair:
        """The context without the beginning that does not fit: max_length of input, whose last
        token only gives."""
        room = self.max_length + 1 - len(continuation)
        return list(context[-room:]), list(continuation)

    def _scores(
        self, pairs: Mapping[int, Pair]
    ) -> Iterator[tuple[int, tuple[float, bool] | Exception]]:
        """Of each pair by its number, as they are done: the sum of log-probabilities and whether
        all tokens are the most likely ones, or its error."""
        numbers = list(pairs)
        for at, found in self.engine.scores(list(pairs.values())):
            i = numbers[at]
            if isinstance(found, Exception):
                yield i, found
            else:
                logprobs, tops = found
                greedy = bool(np.array_equal(tops, pairs[i][1]))
                yield i, (float(logprobs.sum(dtype=np.float64)), greedy)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **unused: Any
    ) -> list[tuple[float, bool]]:
        """For code of the harness that brings tokens; `loglikelihood` does not need it."""
        for _, _, scored in requests:
            self._check_length(scored)
        pairs = {i: self._cut(*pair) for i, (_, *pair) in enumerate(requests)}
        results = dict(self._scores(pairs))
        for result in results.values():
            if isinstance(result, Exception):
                raise result
        return [results[i] for i in range(len(requests))]  # type: ignore[misc]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """log p(text | BOS) of each text; long ones in windows of max_length."""
        answers = _Answers("loglikelihood_rolling", requests)
        for i, request in enumerate(
            tqdm(requests, disable=disable_tqdm, desc="loglikelihood_rolling")
        ):
            try:
                windows = self._windows(*request.args)
                scores = self._loglikelihood_tokens([(None, *window) for window in windows])
            except (ValueError, CapacityError) as error:
                answers.fail(i, error)
                continue
            answers.results[i] = sum((score for score, _ in scores), 0.0)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers.results[i])
        return answers.done()

    def _windows(self, text: str) -> list[Pair]:
        """Each token once, after as many before it as fit; the first after the prefix token."""
        tokens = self.tok_encode(text, add_special_tokens=None if self.rolling_as_hf else False)
        prefix = self.prefix_token_id
        if not self.rolling_as_hf and tokens[:1] == [prefix]:
            tokens = tokens[1:]  # the text spells it
        windows = get_rolling_token_windows(tokens, prefix, self.max_length, context_len=1)
        return [make_disjoint_window(window) for window in windows]

    # ---- generation --------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What greedy decoding, or sampling, gives after each context, up to a stop string.
        ValueError at once, before anything is computed, for settings that cannot be kept."""
        answers = _Answers("generate_until", requests)
        seen: Counter[str] = Counter()
        asked: dict[Sample, int] = {}
        for i, request in enumerate(requests):
            try:
                sample = self._sample(*request.args)
            except ContextLengthError as error:
                answers.fail(i, error)
                continue
            except FieldError as error:
                raise ValueError(f"{answers.name(i)}: {error}") from None
            except ValueError as error:
                answers.fail(i, error)
                continue
            sample.index = seen[repr(request.args)]
            seen[repr(request.args)] += 1
            asked[sample] = i
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until") as bar:

            def note(sample: Sample, token: Token | None) -> None:
                if token is not None and sample.ended:
                    bar.update()
                    answers.results[asked[sample]] = sample.text
                    request = requests[asked[sample]].args
                    self.cache_hook.add_partial("generate_until", request, sample.text)

            for sample in asked:
                sample.on_token = note
            self.engine.run(list(asked), whichever_fail=True)
        for sample, i in asked.items():
            if sample.error is not None:
                answers.fail(i, sample.error)
        return answers.done()

    def _sample(self, context: str, settings: dict[str, Any]) -> Sample:
        """A request with its settings as transformers names them; FieldError names one that is
        wrong or not supported."""
        f = Fields(settings, _SETTINGS)
        until = settings.get("until")
        texts = [until] if isinstance(until, str) else until
        if isinstance(texts, (list, tuple)):  # an empty one stops nothing
            texts = [text for text in texts if text != ""]
        stop = Fields({"until": texts}, {"until"}).strings("until")
        limits = [f.integer(name, None, 0, 2**31 - 1) for name in _LIMITS]
        n_new = next((limit for limit in limits if limit is not None), self.max_gen_toks)
        temperature = f.number("temperature", 0.0, 0, 100)
        if not f.flag("do_sample", temperature > 0):
            temperature = 0.0
        sampling = Sampling(
            temperature,
            max(0, f.integer("top_k", 0, -1, 2**31 - 1)),
            f.number("top_p", 1.0, 0, 1),
            f.number("min_p", 0.0, 0, 1),
            f.seed() if "seed" in settings else self.seed,
        )
        room = self.max_length - n_new
        if room < 1:
            said = f"max_gen_toks: {n_new} leave no room in max_length {self.max_length}"
            raise FieldError("max_gen_toks", said)
        tokens = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        prompt = self.engine.check_prompt(tokens, "context")
        self.engine.check_room(len(prompt), n_new, "max_gen_toks")
        return Sample(prompt, n_new, sampling, stop)


def _end(text: object) -> str:
    """A text as an error shows it: few-shot headers are alike, so its end."""
    if not isinstance(text, str):
        return shown(text)
    return repr(text) if len(text) <= 60 else "..." + repr(text[-60:])


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
