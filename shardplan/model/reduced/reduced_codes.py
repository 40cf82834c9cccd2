"""The findings of this room."""

from shardplan.core.diagnostics import Code

NO_REDUCED_MODEL = Code("SP520")
TOO_LARGE = Code("SP521")
NO_INPUTS = Code("SP522")
NOT_RUNNING = Code("SP523")
NOT_CARRIED = Code("SP524")
NOT_REDUCED = Code("SP526")
