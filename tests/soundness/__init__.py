"""Edits of right plans, each judged by `validate` and by the numeric proof: `python -m tests.soundness`."""
