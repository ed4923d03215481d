"""What every test wants: deterministic algorithms, under which memory that nobody wrote is NaN."""

import torch

torch.use_deterministic_algorithms(True)
