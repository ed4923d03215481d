"""Device meshes, collectives and (later) symmetric memory: what moves bytes between ranks."""
