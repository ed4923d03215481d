"""tpfuse: tensor-parallel layers whose matrix products and communication are one program."""

from tpfuse import _layout as _layout

__version__ = "0.1.0"
