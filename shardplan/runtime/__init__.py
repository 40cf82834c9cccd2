"""What runs with torch.distributed: the moves, torch's ParallelStyle, the phases of applying a program, and what a training loop calls."""
