"""Write the expected text of cases: `python tests/update_cases.py [NAME...]`. Read what it wrote before you
commit it.

A NAME is any part of a case's name (`err/SP301`); without one, all cases are run.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import tests.unbounded  # noqa: F401
from tests.case_tree import cases, run_case, write_expected


def update(names: list[str]) -> int:
    """Returns the number of cases whose exit code is not the expected one."""
    wrong = 0
    for case in cases():
        if names and not any(name in case.name for name in names):
            continue
        code, output = run_case(case)
        if output != case.expected:
            write_expected(case, output)
            print(f"{'wrote' if case.expected is None else 'changed'} {case.path}")
        if code != case.exit_code:
            wrong += 1
            print(f"{case.name}: exit code {code}, expected {case.exit_code}")
    return wrong


if __name__ == "__main__":
    sys.exit(1 if update(sys.argv[1:]) else 0)
