"""The findings of this room, as pages."""

from shardplan.core.diagnostics import Code

DIFFERS = Code("SP420")
UNREACHED = Code("SP421")
RAISES = Code("SP422")
STAGES = Code("SP436")
NO_ROWS = Code("SP438")
