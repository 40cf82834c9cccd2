"""What a training loop needs besides the model; usable without a plan."""
