"""Differentiable operators: forward, backward, and the choice between Triton and torch."""
