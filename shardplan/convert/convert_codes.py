"""The findings about plans of other projects: entries without a counterpart in our plans."""

from shardplan.core.diagnostics import Code

NO_FORM = Code("SP540")
NO_STYLE = Code("SP541")
NO_LAYOUTS = Code("SP542")
NO_GLOB = Code("SP543")
NEEDS_MODEL = Code("SP544")
LEFT_OUT = Code("SP545")
IMPLIED = Code("SP546")
NO_IMPORT = Code("SP547")
TWO = Code("SP548")
