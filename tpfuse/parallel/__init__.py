"""What is done to a whole model: context parallelism, recomputation, initial weights, whole parameters."""
