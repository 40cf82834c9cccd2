"""Moves of values between layouts, and torch's ParallelStyle classes that carry out a program at a module."""
