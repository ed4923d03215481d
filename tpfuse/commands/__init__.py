"""Commands of `tpfuse` that read what training has written, or plan what it will do; `tpfuse.cli` calls them."""
