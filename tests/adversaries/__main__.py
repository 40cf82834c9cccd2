"""`python -m tests.adversaries [NAME...]`: what `validate` and the reference say of each adversary."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from dataclasses import dataclass

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from tests.sampling import add_share, share_of  # noqa: E402

from .adversary import Adversary  # noqa: E402
from .cases import CASES  # noqa: E402
from .judge import Judgement, judge  # noqa: E402
from .said import Said, as_expected, validate  # noqa: E402


@dataclass(frozen=True)
class Row:
    """An adversary and its two judges.

    Args:
        said: what `validate` says.
        judgement: what the reference says of the plan that is applied, or would be.
        allowed: what `validate` says with `allow_unproven`, of what it calls unproven.
    """

    adversary: Adversary
    said: Said
    judgement: Judgement
    allowed: Said | None = None

    @property
    def confirmed(self) -> bool:
        """The case says of itself what the reference says."""
        verdict = self.adversary.verdict
        if verdict == "raises":
            return self._said_later
        return verdict in ("refused", "unproven") or self.judgement.right == (verdict == "right")

    @property
    def _said_later(self) -> bool:
        return self.adversary.verdict == "raises" and self.judgement.truth in ("raised", "right")

    @property
    def problem(self) -> str:
        """ "" where all agree."""
        if self.said.passed and not self.judgement.right and not self._said_later:
            return "known" if self.adversary.known else "WRONG PASSED"
        if not as_expected(self.adversary, self.said):
            if "RAISED" in self.said.codes:
                return "RAISED"
            wanted = {"right": "RIGHT REFUSED", "raises": "RIGHT REFUSED", "wrong": "WRONG CODE"}.get(
                self.adversary.verdict, "NOT SAID"
            )
            return wanted
        if self.allowed is not None and not self.allowed.passed:
            return "NOT ALLOWED"
        return "" if self.confirmed else "CASE IS NOT WHAT IT SAYS"

    def line(self) -> str:
        said = "passes" if self.said.passed else " ".join(self.said.codes)
        error = f" {self.judgement.error:.0e}" if self.judgement.truth in ("right", "wrong") else ""
        worst = self.judgement.worst if not self.judgement.right else ""
        cells = (
            self.adversary.name,
            self.adversary.verdict,
            said,
            self.judgement.truth + error,
            worst[:60],
            self.problem,
        )
        return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def row_of(adversary: Adversary) -> Row:
    """Ask both."""
    said = validate(adversary)
    unproven = adversary.verdict == "unproven" and not said.passed
    allowed = validate(adversary, allow_unproven=True) if unproven else None
    return Row(adversary, said, judge(adversary, anyway=not said.passed), allowed)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversaries", description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of names; all without")
    add_share(parser)
    parser.add_argument("--validate-only", action="store_true", help="no real processes")
    args = parser.parse_args(argv)
    chosen = share_of((one for one in CASES if not args.names or one.name.startswith(tuple(args.names))), args)
    print("| case | verdict | validate | reference | differs most | problem |\n|---|---|---|---|---|---|", flush=True)
    problems = 0
    chosen.sort(key=lambda one: one.ranks)  # a group of processes is kept as long as its size is asked for
    for one in chosen:
        start = time.monotonic()
        if args.validate_only:
            said = validate(one)
            print(one.name, one.verdict, *said.codes, said.text[:150], f"{said.seconds:.1f}s", flush=True)
            problems += not as_expected(one, said)
            continue
        row = row_of(one)
        problems += row.problem not in ("", "known")
        print(row.line(), flush=True)
        print(f"{one.name}: {time.monotonic() - start:.1f} s; {row.said.text[:200]}", file=sys.stderr, flush=True)
    print(f"\n{len(chosen)} cases, {problems} problems")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
