"""Triton device code and its launchers, imported as `tpfuse.kernels`: plain tensors in, tensors out."""
