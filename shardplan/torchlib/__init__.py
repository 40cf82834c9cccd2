"""What the package takes from torch besides its public functions: every private name, modes, and what reads modules."""
