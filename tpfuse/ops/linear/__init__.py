"""Tensor-parallel products: three operators, three implementations of each, and the choice of an implementation."""
