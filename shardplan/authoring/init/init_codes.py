"""The findings of `init`: what of a model cannot be split."""

from shardplan.core.diagnostics import Code

NOTHING = Code("SP530")
NO_OVERLAY = Code("SP531")
WHOLE = Code("SP532")
NO_EXPERTS_FOUND = Code("SP533")
GATHERED = Code("SP534")
