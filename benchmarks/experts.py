"""What expert parallelism adds to `validate`: `python -m benchmarks.experts [--repeats N]`."""

from __future__ import annotations

import argparse

from .page import table
from .processes import in_turns, row

TYPES = ("qwen3_moe", "mixtral", "deepseek_v3")
MESHES = ((2, 2), (4, 1))  # tp and dp_shard, for ep 4
SECTION = """## Validation with expert parallelism

`python -m benchmarks.experts`: whole processes of `shardplan validate TYPE TYPE`, with the numeric proof, with `--ep 4` over those without it,
in turns, {repeats} times: the median of the ratios, in brackets the middle half of them; and the median seconds of both. With ep
the plan has four variants that are proven, without it two. Other programs may have run at
the same time: the seconds are of the wall clock, and the goal is for processor time.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*", default=TYPES)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    rows = []
    for name in args.types:
        for tp, shards in MESHES:
            words = ["-m", "shardplan", "validate", name, name, "--tp", str(tp), "--dp-shard", str(shards)]
            taken = in_turns({"without": words, "with": [*words, "--ep", "4"]}, args.repeats)
            rows.append(row(f"{name}, tp {tp}", "<= 1.3", taken["with"], taken["without"]))
    print(SECTION.format(repeats=args.repeats))
    print(table(["validate", "goal", "times, wall", "times, processor", "seconds"], rows))


if __name__ == "__main__":
    main()
