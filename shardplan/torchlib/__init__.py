"""The parts of torch that are used below its public functions: every private name, modes, and readers of modules."""
