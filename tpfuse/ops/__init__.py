"""Differentiable operators, one per file: forward, backward, and the choice of implementation."""
