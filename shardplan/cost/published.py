"""Published training runs in bfloat16, whose efficiency gives a forecast."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardplan.core.fits import Forecast

FILE = Path(__file__).with_name("published.json")
DENSE = 4.0  # a dense model takes 6 operations for a token and a parameter, and its embeddings take none


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A run whose speed was published.

    Args:
        run: the model, the software, and how it was split.
        device: a name in devices.json.
        gpus: their number; None: not published.
        experts: whether a token reads only some of the parameters.
        tokens: per second and device; None where only operations were published.
        mfu: the share of the device's operations. Where tokens were published it is counted as `Fitted.mfu` counts, else as its authors do.
        source: the place that published it.
    """

    run: str
    device: str
    gpus: int | None
    experts: bool
    tokens: float | None
    mfu: float
    source: str


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    return tuple(PublishedRun(**one) for one in json.loads(FILE.read_text("utf-8")))


def forecast_of(device: str, flops_of_a_token: float, parameters: int) -> Forecast | None:
    """What published runs of such models reached on a device; None where there are none.

    Args:
        flops_of_a_token: forward and backward.
        parameters: of the whole model, which a dense model reads for each token.
    """
    experts = flops_of_a_token < DENSE * parameters
    like = [one.mfu for one in published_runs() if one.device == device and one.experts == experts]
    if not like:
        return None
    return Forecast(min(like), max(like), len(like), "models with experts" if experts else "dense models")
