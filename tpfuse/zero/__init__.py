"""ZeRO: gradient buckets, sharded parameters and optimizer state, AdamW on shards, offload and compression."""
