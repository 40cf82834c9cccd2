"""Commands answer alike on every machine: the bound of time on the search for changes is lifted, that of tries stays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch


@contextmanager
def without_the_bound_of_time() -> Iterator[None]:
    from shardplan.compiler.layout import model
    from shardplan.compiler.layout.layout_check import Search

    with patch.object(model, "Search", partial(Search, seconds=math.inf)):
        yield
