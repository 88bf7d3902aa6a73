"""One prompt, four continuations, the prompt computed once. python quickstart.py [MODEL]"""

import sys

import rksc
from rksc.demo import find_model

session = rksc.load(sys.argv[1] if len(sys.argv) > 1 else find_model()).session()
root = session.prefill("The three primary colours are")
kids = root.fork(4)
for g in session.generate(kids, 16, rksc.Sampling(temperature=0.8, seed=0)):
    print(f"{g.confidence:.2f} {g.text!r}")
print("blocks that several branches share:", session.stats().blocks_shared)
