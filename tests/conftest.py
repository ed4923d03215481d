"""What every test wants: deterministic algorithms, under which memory that nobody wrote is NaN.

One thread: the tensors are small, and the ranks of the pools need the other cores.
"""

import torch

torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
