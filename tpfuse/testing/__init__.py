"""The explorer, a pool of ranks, comparisons and inputs for tests, benchmarks and people who write kernels."""
