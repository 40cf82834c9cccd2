"""What the package uses of torch besides its public functions: every private name, modes, and readers of modules."""
