"""Making a plan for a model."""
