"""What is done to a whole model: initial weights, gradient buckets, data parallelism."""
