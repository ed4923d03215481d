"""What ranks record of their work while they run. `tpfuse.profile` explains it."""
