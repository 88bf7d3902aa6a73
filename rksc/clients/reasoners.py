"""rksc as a `LanguageModel` of llm-reasoners (the `reasoners` package, installed by the user)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reasoners import GenerateOutput, LanguageModel

from ..engine.load import Model
from ..engine.options import Sampling
from ..engine.session import BranchSession
from ..scalars import as_int
from ._engine import Engine, Sample, copies
from ._fields import check_settings, read_seed
from .openai import OpenAI, engine_of

# Arguments of the package's other models that say nothing about the text.
_ASIDE = {"rate_limit_per_min", "retry"}


class RKSC(LanguageModel):  # type: ignore[misc]  # reasoners is untyped
    """llm-reasoners' calls on a rksc engine. model: as for `rksc.clients.OpenAI`.

    max_new_tokens: where a call gives neither that nor max_length. Prompts that a search repeats
    or grows are found in the cache; contents after one prefix are scored in one batch.
    """

    def __init__(
        self, model: Model | BranchSession | OpenAI, max_new_tokens: int = 256, **options: Any
    ) -> None:
        super().__init__()
        self.engine: Engine = engine_of("RKSC", model, options)
        self.max_new_tokens = max_new_tokens

    def generate(
        self,
        inputs: str | Sequence[str],
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 1.0,
        num_return_sequences: int = 1,
        eos_token_id: str | int | Sequence[str | int] | None = None,
        hide_input: bool = True,
        output_log_probs: bool = False,
        stopping_criteria: Any = None,
        seed: int | None = None,
        **others: Any,
    ) -> Any:
        """GenerateOutput(text, log_prob): for each input num_return_sequences texts; log_prob:
        float32 (new tokens,) each. Strings in eos_token_id end a text (and are left out),
        ids too. ValueError names another argument that would change the text."""
        check_settings(others, _ASIDE)
        if stopping_criteria is not None:
            raise ValueError(
                "stopping_criteria is not supported; eos_token_id takes the strings to stop at"
            )
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        ends: list[Any] = []
        if isinstance(eos_token_id, str) or as_int(eos_token_id) is not None:
            ends = [eos_token_id]
        elif eos_token_id is not None:
            ends = list(eos_token_id)  # type: ignore[arg-type]
        end_ids = [number for number in map(as_int, ends) if number is not None]
        drawn = temperature if do_sample else 0.0
        sampling = Sampling(drawn, top_k or 0, top_p, seed=read_seed(seed))
        samples: list[Sample] = []
        for i, text in enumerate(texts):
            field = f"inputs[{i}]"
            prompt = self.engine.check_prompt(self.engine.encode(text, field), field)
            limit = max_new_tokens
            if limit is None and max_length is not None:
                limit = max(0, max_length - len(prompt))
            like = Sample(
                prompt,
                self.max_new_tokens if limit is None else limit,
                sampling,
                tuple(end for end in ends if isinstance(end, str)),
                (*self.engine.session.config.eos, *end_ids),
            )
            samples += copies(like, num_return_sequences)
        self.engine.run(samples)
        found = [sample.text for sample in samples]
        if not hide_input:
            found = [texts[i // num_return_sequences] + text for i, text in enumerate(found)]
        logprobs = [np.array(sample.logprobs, np.float32) for sample in samples]
        return GenerateOutput(found, logprobs if output_log_probs else None)

    def get_next_token_logits(
        self,
        prompt: str | Sequence[str],
        candidates: Sequence[str] | Sequence[Sequence[str]],
        postprocess: str | None = None,
        **others: Any,
    ) -> list[NDArray[np.float32]]:
        """For each prompt the logits of its candidates, each of which must be one token."""
        check_settings(others, _ASIDE)
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        rows: list[Any] = list(candidates)
        if rows and isinstance(rows[0], str):
            rows = [rows] * len(prompts)
        found = []
        for text, row in zip(prompts, rows, strict=True):
            ids = [self.engine.session.token_id(candidate, "candidates") for candidate in row]
            branch = self.engine.session.prefill(self.engine.encode(text))
            try:
                found.append(_postprocessed(branch.logits, postprocess)[ids])
            finally:
                branch.drop()
        return found

    def get_loglikelihood(
        self, prefix: str, contents: Sequence[str], **others: Any
    ) -> NDArray[np.float32]:
        """float32 (contents,): log-probability of what follows the prefix in each content."""
        check_settings(others, _ASIDE)
        first = self.engine.encode(prefix, "prefix")
        pairs = []
        for i, content in enumerate(contents):
            whole = self.engine.encode(content, f"contents[{i}]")
            if not np.array_equal(whole[: len(first)], first):
                raise ValueError(f"contents[{i}] does not begin with the prefix's tokens")
            pairs.append((first, whole[len(first) :]))
        scores = self.engine.score(pairs)
        return np.array([logprobs.sum() for logprobs, _ in scores], np.float32)


def _postprocessed(logits: NDArray[np.float32], how: str | None) -> NDArray[np.float32]:
    if how is None:
        return logits
    shifted = logits - logits.max()
    total = np.exp(shifted).sum()
    if how == "softmax":
        return np.asarray(np.exp(shifted) / total, np.float32)
    if how == "log_softmax":
        return np.asarray(shifted - np.log(total), np.float32)
    raise ValueError(f'postprocess must be "softmax", "log_softmax" or None, got {how!r}')
