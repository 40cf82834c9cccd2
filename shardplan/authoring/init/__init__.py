"""Deriving a plan for a model."""
