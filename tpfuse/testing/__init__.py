"""The explorer, pools of ranks, comparisons and inputs, for tests, benchmarks and authors of kernels."""
