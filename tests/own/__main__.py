"""What `init` finds of what a hand splits: `python -m tests.own [name ...] [--table FILE.md]`. It exits with 1 where a model is worse than what
is listed for it."""

from __future__ import annotations

import os
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402

from shardplan import Model, init_plan, validate  # noqa: E402
from shardplan.core.diagnostics import Diagnostic, PlanError  # noqa: E402
from tests.sampling import add_share, share_of  # noqa: E402

from .hand import TP, Found, Own, Split, split  # noqa: E402
from .models import MODELS  # noqa: E402

HEAD = """# Models of one's own

Made by `make judge WHAT=own`; do not edit. Small models, each written in another way that public code has, with a plan by hand next to it in
[tests/own](../tests/own), which is proven too. "Split" is the share of the parameters that are stored in parts at tp 2; "through" is the share
without those whose results are gathered at once inside a block. `init` is the same where it splits 95 % of what the hand splits, in both.

{same} of {all} are split as by hand.

| model | by hand: split | through | by `init`: split | through | |
|---|---|---|---|---|---|
"""


def found_of(name: str, one: Own) -> Found:
    """Find out about a model: its plan by hand is proven, and so is what `init` writes."""
    hand = _proven(one, one.by_hand)
    try:
        made = init_plan(_model(one))
    except PlanError as error:
        return Found(name, hand, _words(error.diagnostics[0]), tuple(map(_words, error.diagnostics)))
    return Found(name, hand, _proven(one, made.document), tuple(map(_words, made.diagnostics)))


def _proven(one: Own, document: Mapping[str, object]) -> Split | str:
    report = validate(_model(one), document, {"tp": TP})
    if report.errors or not report.proven:
        return _words(report.errors[0]) if report.errors else "not proven"
    return split(one.made(), document)


def _model(one: Own) -> Model:
    return Model(one.made(), inputs=one.inputs)


def _words(found: Diagnostic) -> str:
    return " ".join(
        (f"{found.code}: {found.message}", *found.notes, f"help: {found.help}" if found.help else "")
    ).strip()


def verdict(found: Found, one: Own) -> str:
    """What is wrong with a model; "" where it is as listed."""
    if isinstance(found.hand, str):
        return f"the plan by hand: {found.hand}"
    if found.same:
        return "it is listed as lacking something, and lacks nothing" if one.lacks else ""
    if not one.lacks:
        return f"init: {found.init}, by hand: {found.hand}; {'; '.join(found.said)}"
    if isinstance(found.init, str) and not found.init.startswith(one.lacks[0]):
        return found.init
    said = [line for line in found.said if all(word in line for word in one.lacks)]
    return "" if said else f"no finding has {', '.join(one.lacks)}: {'; '.join(found.said)}"


def row(found: Found, one: Own) -> str:
    """A line of the table."""
    numbers = [
        "-" if isinstance(split, str) else f"{share:.1%}"
        for split in (found.hand, found.init)
        for share in ((0, 0) if isinstance(split, str) else split)
    ]
    return f"| {found.name} | {' | '.join(numbers)} | {'same' if found.same else one.lacks[0] if one.lacks else ''} |"


def page(rows: list[str], lines: list[str], same: int) -> str:
    """The table as Markdown."""
    return HEAD.format(same=same, all=len(rows)) + "\n".join((*rows, "", *lines)) + "\n"


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="python -m tests.own", description=__doc__)
    parser.add_argument("names", nargs="*", help="of models, without it all")
    parser.add_argument("--table", type=Path, help="write the table; for all models")
    add_share(parser)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, lines, wrong, same = [], [], 0, 0
    chosen = share_of(given.names or MODELS, given)
    for name in chosen:
        one = MODELS[name]
        found = found_of(name, one)
        said = verdict(found, one)
        wrong += bool(said)
        same += found.same
        rows.append(row(found, one))
        lines += [f"- {name}: {line}" for line in found.said]
        print(rows[-1] + (f" {said}" if said else ""), flush=True)
    print(f"{same} of {len(chosen)} by init; {wrong} not as listed")
    if given.table and len(chosen) == len(MODELS):
        given.table.write_text(page(rows, lines, same), "utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
