"""Transformations of a whole model: context parallelism, recomputation, initial weights, whole parameters."""
