"""torch as an oracle: its sin and cos are exact from the first call on.

oneMKL picks the kernel of a vector function when the function is first called. When two threads of
one large tensor make that first call together, one of them may run a kernel of low accuracy: errors
of 1e-4 in the rotary embedding of a process' first forward pass, and never again
(https://github.com/pytorch/pytorch/issues/188792). A tensor of one element is done by one thread.
"""

import torch

for function in (torch.sin, torch.cos, torch.exp, torch.log, torch.tanh, torch.sqrt):
    for dtype in (torch.float32, torch.float64):
        function(torch.ones(1, dtype=dtype))
