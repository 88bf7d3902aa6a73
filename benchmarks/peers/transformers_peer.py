"""transformers: the prefix once, its cache repeated for the branches; see protocol.py.

The same batches as in rksc: a suffix without its last token, `new` steps, then the last new
token with the question.
"""

from __future__ import annotations

from protocol import Answer, Laps, Run, Work, limit_onednn, options, serve

ARGS = options()
limit_onednn(ARGS.isa)

import torch
import transformers


def prepare() -> tuple[Run, str]:
    torch.set_num_threads(ARGS.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        ARGS.model, dtype=getattr(torch, ARGS.dtype)
    ).eval()

    @torch.inference_mode()
    def run(work: Work) -> Answer:
        suffixes = torch.tensor(work["suffixes"])
        n = len(suffixes)
        question = torch.tensor([work["question"]] * n)
        tokens = 0
        laps = Laps()

        def forward(ids: torch.Tensor, cache: object = None) -> transformers.utils.ModelOutput:
            nonlocal tokens
            tokens += ids.numel()
            return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

        cache = forward(torch.tensor([work["prefix"]])).past_key_values
        laps.lap("prefill")
        cache.batch_repeat_interleave(n)
        if suffixes.shape[1] > 1:
            forward(suffixes[:, :-1], cache)
        laps.lap("suffix")
        token, chosen = suffixes[:, -1:], []
        for _ in range(work["new"]):
            token = forward(token, cache).logits[:, -1:].argmax(-1)
            chosen.append(token)
        laps.lap("decode")
        if work["question"]:
            forward(torch.cat([token, question], 1), cache).logits[:, -1].argmax(-1)
        laps.lap("verify")
        return {
            "seconds": laps.seconds, "tokens": tokens,
            "chosen": torch.cat(chosen, 1).tolist(),
        }  # fmt: skip

    return run, f"transformers {transformers.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    serve(prepare)
