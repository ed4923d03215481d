"""Triton device code and its launchers, imported as `tpfuse.kernels`: launchers take and return plain tensors."""
