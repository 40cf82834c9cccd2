"""What shardplan does, shown on this machine in about a minute or two: `make demo`, or `python -m demo`."""
