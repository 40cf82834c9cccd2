"""tests/test_gpu.py, a row for each test: `python -m tests.gpu.device_tests cuda`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .rows import emit

FILE = Path(__file__).parents[1] / "test_gpu.py"


class Rows:
    """Writes each test's outcome when it is known."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            row = {"case": report.nodeid.split("::")[-1], "when": report.when, "seconds": round(report.duration, 1)}
            if report.outcome == "skipped":
                emit(**row, skipped=str(report.longrepr[-1]))
            else:
                why = str(getattr(report.longrepr, "reprcrash", "") or "")[-300:]
                emit(**row, ok=report.outcome == "passed", error=why)


def main() -> None:
    raise SystemExit(pytest.main([str(FILE), "-p", "no:cacheprovider", "--tb=short"], plugins=[Rows()]))


if __name__ == "__main__":
    main()
