"""shardplan: a compiler for sharding plans."""
