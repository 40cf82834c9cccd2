"""`python -m tests.mutants --count 40 --seed 7`: mutants of the run-time, each refused by `validate` for a plan that uses the line.
`--tests`: of all code of the rooms weights, runtime and cli, each killed by a fast test."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from tests.sampling import add_share  # noqa: E402

from .asked import preload, reached, reaching, verdict  # noqa: E402
from .by_tests import Tests, copied  # noqa: E402
from .equal import reason  # noqa: E402
from .plans import CASES, Case  # noqa: E402
from .sites import Site, by_stratum, sites  # noqa: E402

MOST_ASKED = 5  # plans for a mutant that has a reason to pass


@dataclass(frozen=True)
class Row:
    """A mutant and what was said of it.

    Args:
        asked: the last plan that was asked: the one that is refused, where one is; the test that fails.
        verdict: "refused", "raised", "passes", "hangs"; "unreached" where no plan uses it. Of tests: "killed", "passes".
    """

    site: Site
    asked: Case | str | None
    verdict: str
    said: str

    @property
    def problem(self) -> str:
        return "HOLE" if self.verdict == "passes" and not self.said else "HANGS" if self.verdict == "hangs" else ""

    def line(self) -> str:
        site = self.site
        where = f"{site.path.removeprefix('shardplan/')}:{site.lines[0]}"
        cells = (
            where,
            site.operator,
            f"{site.before} -> {site.after}",
            self.asked,
            self.verdict,
            self.said[:70],
            self.problem,
        )
        return "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def drawn(seed: int, found: Sequence[Site]) -> Iterator[Site]:
    """All sites, in an order that begins with one of each operator in each part of the run-time."""
    draw = random.Random(seed)
    strata = [draw.sample(these, len(these)) for these in by_stratum(list(found)).values()]
    draw.shuffle(strata)
    while strata:
        for one in strata:
            yield one.pop()
        strata = [one for one in strata if one]


def judged(site: Site, lines: Mapping[Case, Mapping[str, frozenset[int]]]) -> Row:
    """Ask for the plans that use a site, until one is refused: for all of them, if it has no reason to pass."""
    row, why = Row(site, None, "unreached", ""), reason(site)
    using = reaching(site, lines)
    first = using[:: -(-len(using) // MOST_ASKED) or 1]
    for case in first if why else dict.fromkeys((*first, *using)):
        result, said = verdict(site, case)
        if result == "same":  # what has the name of a group is none, or has one rank
            continue
        row = Row(site, case, result, said or why)
        if result != "passes":
            break
    return row


def judge(count: int, seed: int, cases: Sequence[Case], only: str = "") -> Iterator[Row]:
    """So many mutants that a plan uses, and those that none does, drawn before."""
    preload(cases)
    lines = {case: reached(case) for case in cases}
    for site in drawn(seed, _sites("moves", only)):
        row = judged(site, lines)
        yield row
        count -= row.verdict != "unreached"
        if not count:
            return


def tested(count: int, seed: int, only: str, files: int | None) -> Iterator[Row]:
    """So many mutants of all code, and the fast test that kills each; of so many files of tests at most."""
    preload([])
    found = [*islice(drawn(seed, _sites("code", only)), count)]
    with copied() as copy:
        tests = Tests(copy, found)
        for site in found:
            failed = tests.verdict(site, files)
            yield Row(site, failed, "killed" if failed else "passes", "" if failed else reason(site))


def _sites(rules: str, only: str) -> list[Site]:
    return [site for site in sites(rules) if only in f"{site.path}:{site.lines[0]} {site.operator}"]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=40, help="how many mutants (that a plan uses) (40)")
    parser.add_argument(
        "--tests", action="store_true", help="mutants of all code of three rooms, killed by the fast tests"
    )
    parser.add_argument(
        "--files", type=int, metavar="N", help="with --tests, ask the N nearest files of tests alone (all)"
    )
    add_share(parser)
    parser.add_argument("--models", nargs="+", help="plans of these model types alone (all)")
    parser.add_argument("--only", default="", help="a part of 'FILE:LINE OPERATOR'")
    args = parser.parse_args(argv)
    print("| place | operator | change | plan | verdict | said | problem |\n|---|---|---|---|---|---|---|", flush=True)
    start, verdicts, problems = time.monotonic(), Counter[str](), 0
    cases = [case for case in CASES if args.models is None or case.model in args.models]
    count = -(-args.count // args.share)
    for row in (
        tested(count, args.seed, args.only, args.files) if args.tests else judge(count, args.seed, cases, args.only)
    ):
        verdicts[row.verdict] += 1
        problems += bool(row.problem)
        if row.verdict != "unreached":
            print(row.line(), flush=True)
    told = ", ".join(f"{number} {name}" for name, number in verdicts.most_common())
    print(f"\n{told} (drawn again); {problems} problems; {time.monotonic() - start:.0f} s")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
