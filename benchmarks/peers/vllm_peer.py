"""vLLM on the CPU with prefix caching; see protocol.py.

Three calls: the prefix alone, the branches, the verifications; each finds the full blocks of the
earlier ones in vLLM's cache. Suffix and decode are one call and reported as decode.
"""

from __future__ import annotations

import os

from protocol import Answer, Laps, Run, Work, limit_onednn, options, serve

if __name__ == "__main__":
    ARGS = options()
    limit_onednn(ARGS.isa)
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{ARGS.threads - 1}",
    )

import torch

if os.environ.get("ONEDNN_MAX_CPU_ISA"):  # read by vLLM's worker too, which imports this file
    torch.cpu._is_amx_tile_supported = lambda: False

import vllm
from vllm import LLM, SamplingParams


def prepare() -> tuple[Run, str]:
    config = vllm.transformers_utils.config.get_config(ARGS.model, trust_remote_code=False)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = 2 if ARGS.dtype == "bfloat16" else 4
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * size
    engine = LLM(
        ARGS.model,
        dtype=ARGS.dtype,
        enable_prefix_caching=True,
        max_num_batched_tokens=4096,
        max_model_len=ARGS.sequence + 1,
        kv_cache_memory_bytes=ARGS.tokens * token_bytes,
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[list[int]], n: int) -> tuple[list[list[int]], int]:
        """n greedy tokens of each prompt, and how many tokens went through the model."""
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(asked, params, use_tqdm=False)
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        computed = sum(len(prompt) + n - 1 for prompt in prompts) - cached
        return [list(output.outputs[0].token_ids) for output in outputs], computed

    def run(work: Work) -> Answer:
        prompts = [work["prefix"] + suffix for suffix in work["suffixes"]]
        laps = Laps()
        _, first = generate([work["prefix"]], 1)
        laps.lap("prefill")
        chosen, second = generate(prompts, work["new"])
        laps.lap("decode")
        texts = [p + c + work["question"] for p, c in zip(prompts, chosen, strict=True)]
        third = generate(texts, 1)[1] if work["question"] else 0
        laps.lap("verify")
        return {"seconds": laps.seconds, "tokens": first + second + third, "chosen": chosen}

    return run, f"vLLM {vllm.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    serve(prepare)
