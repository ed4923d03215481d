"""What `tpfuse profile` does: it runs profilers, and explains the traces that the ranks of a run have written."""
