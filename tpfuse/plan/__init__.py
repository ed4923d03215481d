"""The model of cost: how long a training step takes and how much memory a rank needs, by arithmetic alone.

Nothing here runs or allocates anything, but for `command`, which is `tpfuse plan`. `sizes` describes a model, the
layout of its ranks and the program that trains it; `hardware` describes GPUs and their links. `work` counts the
operations of a layer, `communication` turns messages into seconds, `bubble` simulates pipelines, and `time` puts a
whole step together. `memory` counts bytes: `activations`, `in_flight` and `states` are its parts. `reliability` says
what failures and stragglers cost. Times are seconds, sizes are bytes, and rates are bytes or operations per second.
"""
