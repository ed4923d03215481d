"""Pipeline parallelism: the layers of a model are cut into stages, and micro-batches pass from rank to rank."""
