"""Our autograd functions and ParallelStyle classes on torch, and every private torch name that we use."""
