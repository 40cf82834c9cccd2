"""The configurations of `fit` as a plot: memory against speed. Needs matplotlib, the extra `plot`."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from shardplan.core.fits import Fit
from shardplan.core.user_files import write_whole

from .estimate_text import mesh_text

GIB = 2**30


def plot_fit(fit: Fit, file: str) -> None:
    """Write a plot; the ending of the file's name (.png, .svg, .pdf) gives its form.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: an ending that matplotlib does not know.
        OSError: the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Keep texts as texts, and the same ids in every run.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "shardplan", "font.size": 9}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        first = fit.rows[0].estimate
        assert first.device is not None
        for one in (row.estimate for row in fit.rows):
            at = (one.memory.total / GIB, one.tokens_per_second or 0.0)
            axes.plot(*at, "o", color="tab:blue")
            axes.annotate(mesh_text(one.sizes), at, xytext=(4, 4), textcoords="offset points", fontsize=7, rotation=45)
        axes.axvline(first.device.memory / GIB, color="tab:red", linestyle="--", label=f"memory of {first.device.name}")
        axes.set_xscale("log")
        axes.set_xlabel("peak memory of a rank (GiB)")
        axes.set_ylabel("at most this many tokens/s a device")
        axes.set_ylim(bottom=0)
        axes.margins(0.15)
        axes.set_title(f"{first.asked.model} on {fit.gpus:,} devices: bounds, not promises")
        axes.legend(loc="lower left")
        form = Path(file).suffix.removeprefix(".").lower()
        drawn = BytesIO()
        figure.savefig(drawn, format=form or "png", metadata={"Date": None} if form == "svg" else None)
    write_whole(file, drawn.getvalue())
