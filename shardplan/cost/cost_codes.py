"""The findings of this room."""

from shardplan.core.diagnostics import Code

NOT_TRACED = Code("SP560")
