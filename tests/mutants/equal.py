"""Parts of the run-time whose mutants change no number of a step."""

from __future__ import annotations

from .sites import Site

# (file, function; "" is all of the file) -> why. What differs between ranks only after a user's mistake is made different by
# tests of their own, which these name.
REASONS = {
    ("same_weights.py", ""): "compares what ranks have loaded, which is the same here",
    ("same_inputs.py", ""): "compares what ranks are fed, which is the same here (test_same_inputs)",
    (
        "tied_copies.py",
        "compare_copies",
    ): "compares what stages have loaded, which is the same here (test_processes_pipeline_steps)",
    ("expert_units.py", "place"): "FSDP2 cuts stacks of experts along another dim: the whole is the same",
    ("agreement.py", ""): "tells ranks that another one failed, and none fails here",
    ("failed_steps.py", ""): "tells ranks that another one failed, and none fails here",
}


def reason(site: Site) -> str:
    """ "" where the proof must see a change."""
    name = site.path.rpartition("/")[2]
    return REASONS.get((name, site.function)) or REASONS.get((name, ""), "")
