"""Built-in plans against the configurations of model types: published checkpoints, and single switches."""
