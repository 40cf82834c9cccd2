"""Figures of the documentation, and the programs that measure them; docs/benchmarks.md and benchmarks-checks.md are made by `make bench`."""
