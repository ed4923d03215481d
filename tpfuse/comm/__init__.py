"""Communication between ranks: device meshes, shards, symmetric memory, collectives, and a deadline for every wait."""
