"""One table shard in host memory: what its rows hold and where they begin."""
