"""Fused layers for existing models: modules are converted in place, by torch's styles or by `tpfuse.parallelize`."""
