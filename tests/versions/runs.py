"""Twelve runs in real processes, a step each: losses, logits and every gradient are the unsharded model's. `python -m tests.versions.runs`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from shardplan import verify

from .passed import RIGHT, Passed

# Every way in which ranks share a model, on types whose layers differ most.
RUNS: tuple[tuple[str, dict[str, int]], ...] = (
    ("llama", {"tp": 2}),
    ("llama", {"tp": 1, "dp_shard": 2}),
    ("llama", {"pp": 2}),
    ("llama", {"dp_shard": 2, "tp": 2}),
    ("qwen3", {"tp": 2}),
    ("gemma3_text", {"tp": 2}),
    ("gpt_oss", {"tp": 2}),
    ("deepseek_v3", {"tp": 2}),
    ("qwen3_5_text", {"tp": 2}),
    ("mamba2", {"tp": 2}),
    ("mixtral", {"tp": 2}),
    ("mixtral", {"dp_shard": 2, "ep": 2}),
)


def main(argv: Sequence[str]) -> int:
    warnings.filterwarnings("ignore")
    passed, wrong = [Passed(Path(text)) for text in argv], 0  # a file of those that are left out, or none
    for name, sizes in RUNS:
        if any(one.said(f"{name} {sizes}") for one in passed):
            continue
        try:
            report = verify(name, "auto", sizes, processes=True)
            ok, said = report.ok, f"right, {', '.join(report.variants)}" if report.ok else str(report)
        except Exception as error:  # the other runs are still to be seen
            ok, said = False, f"{type(error).__name__}: {error}"
        wrong += not ok
        print(f"{name} {sizes}: {said}", flush=True)
        for one in passed if ok else ():
            one.note(f"{name} {sizes}", RIGHT)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
