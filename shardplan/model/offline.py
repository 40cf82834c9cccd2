"""Calling transformers without network and without its log messages on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import huggingface_hub.constants
import transformers


@contextmanager
def offline() -> Iterator[None]:
    """Within this context, huggingface_hub refuses every request (as under HF_HUB_OFFLINE=1) and transformers logs errors
    only.

    Building a model from a configuration requests nothing, unless the configuration names a pretrained
    backbone or a kernel; then the refused request is reported.
    """
    constants, logging = huggingface_hub.constants, transformers.logging
    was_offline, verbosity = constants.HF_HUB_OFFLINE, logging.get_verbosity()
    constants.HF_HUB_OFFLINE = True
    logging.set_verbosity_error()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline
        logging.set_verbosity(verbosity)
