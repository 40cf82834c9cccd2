"""The findings of this room, as pages."""

from shardplan.core.diagnostics import Code

PARTIAL = Code("SP401")
MISFIT = Code("SP402")
SUM = Code("SP403")
SLICES = Code("SP404")
OUTPUT = Code("SP405")
COMPLETE = Code("SP406")
UNTYPED = Code("SP407")
CRASH = Code("SP408")
MEETING = Code("SP409")
OUTSIDE = Code("SP410")
CHUNKS = Code("SP411")
DROPOUT = Code("SP370")
RANDOM = Code("SP371")
UNSUMMED = Code("SP412")
TOKENS = Code("SP413")
