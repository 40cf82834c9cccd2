"""Run the parts: `python -m tests.gpu [PART ...] --minutes 8 --out FOLDER`."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from .running import ROOT, Results, run_parts
from .table import PARTS

PACKAGES = ("torch", "transformers", "pydantic", "pydantic-core", "numpy", "triton", "pytest")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Asking for a device leaves it alone, so that processes may be forked after it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
PROBE = "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description="; ".join(f"{part.name}: {part.about}" for part in PARTS)
    )
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(names)} (all, in this order)")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts (8)")
    parser.add_argument("--out", type=Path, required=True, help="a folder for results.jsonl, summary.md and log.txt")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="without it, cuda where torch finds one")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels that the parts need and this Python lacks")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(names):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: the parts are {', '.join(names)}")
    chosen = [part for part in PARTS if not args.parts or part.name in args.parts]
    try:
        results = Results(args.out)
    except FileExistsError:
        parser.error(f"{args.out} has results: name another folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what runs is killed then
    with tempfile.TemporaryDirectory() as site:
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        if args.wheels is not None:
            install(args.wheels, site)
            path.insert(1, site)
            sys.path.insert(0, site)
        environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}
        device = args.device or probed(environment)
        results.add(run=described(device, args.minutes))
        results.summarize(chosen)
        fine = run_parts(chosen, results, device, 60 * args.minutes, environment)
    results.close()
    print((args.out / "summary.md").read_text("utf-8"))
    raise SystemExit(0 if fine else 1)


def install(wheels: Path, site: str) -> None:
    """Unpack the wheels into a folder of their own: what Python has stays as it is."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise SystemExit(f"{wheels} has no wheels: CONTRIBUTING says how to get some")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site, *files]
    subprocess.run(pip, check=True)


def probed(environment: dict[str, str]) -> str:
    """The device that torch finds, asked in a process that may fail."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        command = [sys.executable, "-c", PROBE]
        found = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
        if found.returncode == 0:
            return found.stdout.split()[-1]
        print(found.stderr, file=sys.stderr)
    raise SystemExit("torch does not say whether there is a CUDA device: name --device")


def described(device: str, minutes: float) -> dict[str, str]:
    """What is run, with what, where."""
    return {
        "command": shlex.join([sys.executable, "-m", "tests.gpu", *sys.argv[1:]]),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "minutes": str(minutes),
        "commit": output_of("git", "rev-parse", "HEAD"),
        "card": output_of("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "machine": f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores",
        "Python": platform.python_version(),
        **{name: version_of(name) for name in PACKAGES},
    }


def output_of(*command: str) -> str:
    try:
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known ({type(error).__name__})"
    return ran.stdout.strip() or "not known"


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
