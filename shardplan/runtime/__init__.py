"""The code that runs with torch.distributed: moves, torch's ParallelStyle, the phases of applying a program, functions for training loops."""
