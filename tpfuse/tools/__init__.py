"""Tools that check kernels: comparisons with references, the compile gate, and the tuner."""
