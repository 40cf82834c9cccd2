"""Built-in plans in the words of transformers, a sample of them run in its own code."""
