"""From a model to a plan."""
