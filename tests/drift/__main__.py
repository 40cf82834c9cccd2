"""`make judge WHAT=drift OLD=a.whl NEW=b.whl`: what changed of what concerns us; with `--validate`, the built-in plans of the types that it names."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.sampling import add_share, share_of

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
        "--validate", action="store_true", help="then `validate TYPE auto --tp 2` with the newer release"
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
    if not args.validate:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        verdicts = [_is_right(name, args.new, Path(folder)) for name in share_of(drift.model_types, args)]
        return int(not all(verdicts))


def _is_right(name: str, release: Path, folder: Path) -> bool:
    """Run `validate` of a type, with the release in front of what is installed. A type without a built-in plan has no verdict."""
    if not any(folder.iterdir()):
        with zipfile.ZipFile(release) as opened:
            opened.extractall(folder)
    first = os.pathsep.join(filter(None, (str(folder), os.getcwd(), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "shardplan", "validate", name, "auto", "--tp", "2", "--no-derive"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": first}, capture_output=True, text=True)
    said = "right" if done.returncode == 0 else (done.stdout.strip() or done.stderr.strip()).splitlines()[0]
    print(f"{name}: {said}", flush=True)
    return done.returncode == 0 or "error[SP5" in said


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
