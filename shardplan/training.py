"""The former place of what `shardplan` itself has for training loops. To go with the version after 0.1."""

import warnings

from .runtime.training import *  # noqa: F403

warnings.warn("import the names of shardplan.training from shardplan", DeprecationWarning, stacklevel=2)
