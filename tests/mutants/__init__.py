"""Mutants of the run-time: one place of it changed by a rule. `validate` must refuse a plan that uses the place."""
