"""The version of tpfuse."""

__version__ = "0.1.0"
