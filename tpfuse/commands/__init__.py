"""Commands of `tpfuse` that prepare tokens, read what training has written, or plan it; `tpfuse.cli` calls them."""
