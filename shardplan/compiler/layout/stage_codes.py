"""The codes of pipeline cuts that do not fit what the model's code does."""

from __future__ import annotations

from shardplan.core.diagnostics import Code

CROSSING = Code("SP431")
NOWHERE = Code("SP432")
ORDER = Code("SP433")
APART = Code("SP435")
UNNAMED = Code("SP434")
