"""The number of its tries alone ends a search for helps, which a slow machine would end early: so each prints the same. Import it before the search."""

import sys

from shardplan.core.search_bounds import BOUNDS

assert "shardplan.compiler.layout.layout_check" not in sys.modules, "it has read its bound when it was imported"
for bound in ("repair_seconds", "help_seconds"):
    object.__setattr__(BOUNDS, bound, 600.0)
