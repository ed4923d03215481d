"""The recording of what ranks do while they run. `tpfuse.profile` explains it."""
