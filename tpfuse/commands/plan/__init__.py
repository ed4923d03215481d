"""`tpfuse plan`: which layout trains a model fastest, by the model of cost in `tpfuse.plan`."""
