"""Checkpoints: files that are complete or absent, readers that trust no file, and ranks that agree on the outcome."""
