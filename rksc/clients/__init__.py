"""rksc under scripts that people already have: the shapes of other libraries' clients.

    rksc.clients.OpenAI(model)      chat.completions.create, completions.create, in this process
    rksc.clients.LLM(model)         generate(prompts, SamplingParams), as in vLLM
    rksc.clients.tot                the gpt() of tree-of-thoughts-llm
    rksc.clients.reasoners          a LanguageModel of llm-reasoners
    rksc.clients.lm_eval            a model of lm-evaluation-harness
    rksc serve MODEL                OpenAI's HTTP API

All stand on one engine: prompts share what they begin with within a call and across calls, n
samples come from one prefill, equal prompts of a batch are one. docs/clients.md has examples.
"""

from .openai import OpenAI
from .vllm import LLM, SamplingParams

__all__ = ["LLM", "OpenAI", "SamplingParams"]
