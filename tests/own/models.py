"""All models, by name."""

from __future__ import annotations

from .heads import HEADS_OF
from .known import KNOWN
from .mixers import MIXERS
from .pictures import PICTURES

MODELS = {**KNOWN, **HEADS_OF, **MIXERS, **PICTURES}
