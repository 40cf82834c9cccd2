"""Find plans for the causal language model types that no built-in plan is for: `python tools/collect_plans.py FOLDER [type ...]`.

Each plan is written into FOLDER as it is found; types whose plans say the same share one. What is found is moved into
plans/ by hand, after `python -m tests.zoo` has proven it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterable
from functools import partial
from multiprocessing import get_context
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def find_plan(model_type: str, folder: Path) -> str:
    """Write a type's plan; returns what is to be said of it."""
    import torch

    from shardplan.authoring.init.derive import derive
    from shardplan.authoring.init.new import written
    from shardplan.core.diagnostics import PlanError
    from tests.model_settings import find

    torch.set_num_threads(1)
    try:
        found = find(model_type)
        derived = derive(found, sequence_parallel=True)
    except PlanError as error:
        return f"{model_type}: {error.diagnostics[0].message}"
    except Exception as error:  # of the model's own code
        return f"{model_type}: {type(error).__name__}: {error}"
    if not derived.draft.tensor_parallel:
        return f"{model_type}: nothing can be split"
    made = written(found, derived, model_type.replace("-", "_"))
    (folder / f"{model_type}.yaml").write_text(made.text, "utf-8")
    (folder / f"{model_type}.json").write_text(json.dumps(made.document), "utf-8")
    whole = "; ".join(d.message for d in made.diagnostics)
    return f"{model_type}: found{', without overlay' if derived.no_overlay else ''}{f'; {whole}' if whole else ''}"


def groups(folder: Path) -> list[list[str]]:
    """Types whose plans say the same."""
    alike: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.json")):
        said = json.loads(file.read_text("utf-8"))
        rest = {key: value for key, value in said.items() if key not in ("name", "models", "description")}
        alike.setdefault(json.dumps(rest), []).append(file.stem)
    return sorted(alike.values())


def main(argv: Iterable[str]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(prog="python tools/collect_plans.py")
    parser.add_argument("folder", type=Path)
    parser.add_argument("types", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args(list(argv))
    args.folder.mkdir(parents=True, exist_ok=True)
    with get_context("spawn").Pool(args.jobs, maxtasksperchild=8) as pool:
        for line in pool.imap_unordered(partial(find_plan, folder=args.folder), args.types):
            print(line, flush=True)
    for types in groups(args.folder):
        print(" ".join(types))


if __name__ == "__main__":
    main(sys.argv[1:])
