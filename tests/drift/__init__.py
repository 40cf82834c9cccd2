"""What changed between two releases of a package that we build on, read from their wheels; nothing of them is imported."""
