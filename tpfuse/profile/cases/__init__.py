"""Each operator's cases: what `tpfuse verify` compares with the reference, and what is compiled ahead of time."""
