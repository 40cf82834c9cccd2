"""`make judge WHAT=drift OLD=a.whl NEW=b.whl`: what changed of what concerns us; with `--validate`, the built-in plans of the types that it names."""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.sampling import add_share, share_of
from tests.versions.environment import ROOT, Environment

from .changes import Drift
from .facts import Facts
from .known import found, table
from .sources import Release


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drift", description=__doc__)
    parser.add_argument("old", type=Path, help="a wheel, a source distribution or a folder")
    parser.add_argument("new", type=Path)
    parser.add_argument("--types", action="store_true", help="print the model types alone")
    parser.add_argument(
        "--validate",
        action="store_true",
        help="then prove the built-in plan of each type that differs, with the newer release",
    )
    parser.add_argument(
        "--known", action="store_true", help="look for what is known of these releases, and print where"
    )
    add_share(parser)
    args = parser.parse_args(argv)
    drift = Drift(Facts(Release(args.old)), Facts(Release(args.new)))
    if args.known:
        rows = found(drift.before.release.name, drift.after.release.name, [*drift.lines()])
        print(table(rows))
        return int(None in rows.values())
    print("\n".join(drift.model_types if args.types else drift.lines()), flush=True)
    types = share_of(drift.model_types, args) if args.validate and drift.model_types else []
    del drift  # its trees take gigabytes
    if not types:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(args.new) as opened:
            opened.extractall(folder)
        environment = Environment(sys.executable, (ROOT, Path(folder)))
        return environment.run("-m", "tests.versions.types", *types).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
