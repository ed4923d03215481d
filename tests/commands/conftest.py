"""Fixtures of all tests that run commands in this process: those of tests/train."""

from tests.train.conftest import _short_probe, _signals, _switches

__all__ = ["_short_probe", "_signals", "_switches"]
