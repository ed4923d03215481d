"""Configuration, data, training loop, checkpoints, metrics and the command line."""
