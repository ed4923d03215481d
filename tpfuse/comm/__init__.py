"""Device meshes, shards and symmetric memory: what moves bytes between ranks, and the deadline of every wait."""
