"""Figures of the documentation, and the programs that measure them; docs/benchmarks.md is made by `make bench`."""
