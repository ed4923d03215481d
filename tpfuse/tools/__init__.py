"""What kernels compute and take: comparisons with references, the compile gate, and the tuner."""
