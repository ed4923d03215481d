"""Benchmarks of tpfuse: each one checks its result first, then reports medians beside a named peer, and keeps a row."""
