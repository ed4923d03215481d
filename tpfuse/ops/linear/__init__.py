"""Tensor-parallel products: three operators, each of which every implementation serves, and the choice of one."""
