"""Configuration, data, training loop, checkpoints and metrics."""
