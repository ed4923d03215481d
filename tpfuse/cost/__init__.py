"""The model of cost: how long a training step takes and how much memory a rank needs, by arithmetic alone.

Nothing here runs or allocates anything. `sizes` describes a model, `layout` how ranks share it, `hardware` GPUs and
their links, and `program` the software that trains. `work` counts the operations of a layer, `products`, `collectives`
and `overlap` turn operations into seconds, `bubble` plays pipelines, and `step` puts a whole step together. `memory`
counts bytes: `activations`, `in_flight` and `states` are its parts. `reliability` says what failures and stragglers
cost. Times are seconds, sizes are bytes, and rates are bytes or operations per second.
"""
