"""What every built-in plan communicates at real dimensions, against the least: `python -m benchmarks.plans [type ...]`.

A plan is applied to a model of its type's default dimensions, with the layers that the reduced model has (each kind once), and a
training step is traced on tensors without memory, as `shardplan estimate` does: every collective of the tp axis, with its
real size. It sends a number of elements for each token and one for each step; a third shape shows that it sends nothing
else. The least is derived from the unsharded run of the reduced model and the model's dimensions, by code that does not
read the program (tests/zoo/least.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

from shardplan import compile_plan
from shardplan.compiler.bind import bind
from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.lower.program import Program
from shardplan.core.diagnostics import PlanError
from shardplan.core.estimates import Question, TrainingStep
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile, overlays_of
from shardplan.cost.traced_step import step_ledger
from shardplan.language import parse_plan
from shardplan.model import find_any
from shardplan.model.config_numbers import text_config
from shardplan.model.found import FoundModel
from shardplan.model.reduced.fields import role
from shardplan.model.reduced.layers import Kept
from shardplan.model.reduced.shrink import SHRINK
from tests.model_settings import find, without_dropout
from tests.zoo.block_inputs import Size, TooManyChoices
from tests.zoo.least import least

from .page import table

REPORTS = Path(__file__).parents[1] / "reports"
DATA = REPORTS / "communication.json"
TPS = (2, 4)
SHAPES = ((1, 128), (4, 128), (3, 64))  # batch, sequence; the last one checks the first two
ITEM = 4  # float32
DEPTH = ("layers", "first_layers", "last_layers", "layer_indices")  # fields of a configuration that speak of layers
VARIANTS = {"tp": False, "sp": True}
TEXT = """## Communication of every built-in plan

`python -m benchmarks.plans`: what a training step sends on the tp axis at the dimensions of the type's default configuration, tp
2 and 4, each kind of layer once, logits whole, for one type of each built-in plan that is proven there ({count} of {all}): elements for each
token, over the least that the same split allows ([communication.json](communication.json);
an all-gather or a reduce-scatter of a value is half an all-reduce of it). What is
sent grows with the tokens and with nothing else, unless said below: {shapes} (batch x tokens) lie on one line.

With the least: {least}. The others, for the reasons that are said below the table of
[model types](model-types.md); with the sequence split most of them gather the hidden state once more, where the gradients of
whole matrices would be summed otherwise (fewer elements for each step) or code needs the whole sequence:
"""


UNKNOWN = (
    "what is found as the least is more than what is sent (no parameter tells the sizes of packed states, for one), so "
    "the least is not known"
)


class NotLinear(Exception):
    """A step's sends are not a number for each token plus one for each step."""


def cut(found: FoundModel, layers: Sequence[int]) -> FoundModel:
    """The model with those layers alone, in its own dimensions."""
    config = without_dropout(found.config)
    config.architectures = [type(found.meta).__name__]
    text = text_config(config)
    kept = Kept(text.num_hidden_layers, tuple(layers))
    for name, value in list(vars(text).items()):
        what = role(name)
        if what in DEPTH and value is not None:
            setattr(text, name, SHRINK[what](value, SimpleNamespace(kept=kept), name))
        elif isinstance(value, (list, tuple)) and len(value) == kept.count and isinstance(value[0], (str, int, float)):
            setattr(text, name, kept.of(value))
    return find_any(config)


def of_type(name: str, plan: PlanFile, variants: Sequence[str]) -> dict[str, Any]:
    """What a plan sends for a model type and the least: variant -> tp -> elements of an all-reduce, for each token and for
    each step.

    Raises:
        PlanError: no step of the model can be traced without values.
        NotLinear: what is sent grows with something else too.
        TooManyChoices: of places to reduce gradients at.
    """
    found = find(name)
    layouts = ModelLayouts(found, TPS[0])
    layouts.check(plan, help=False)  # which gives the reduced model as many heads as the plan needs
    short, recorded = cut(found, layouts.reduced_model.layers), layouts.recorded_models[0]
    made: dict[str, Any] = {word: {} for word in variants}
    for word in variants:
        resolved, _ = bind(plan, recorded.tree, MeshSizes(tp=TPS[0]), overlays_of(VARIANTS[word]))
        for tp in TPS:
            program = compile_plan(short.build("meta"), {"tp": tp}, plan.name, sequence_parallel=VARIANTS[word])
            made[word][tp] = {"sent": sent(short, program, tp), "least": least(resolved, recorded, found.tree, tp)}
    return made


def sent(found: FoundModel, program: Program, tp: int) -> Size:
    """What a step sends on the tp axis."""
    amounts = []
    for batch, length in SHAPES:
        asked = Question(found.name, "", False, TrainingStep(length, batch, "fp32", "none"))
        ledger = step_ledger(found, program, asked)
        whole = sum(n for (axis, _), n in ledger.bytes.items() if axis == "tp")
        amounts.append(whole / ITEM / (2 * (tp - 1) / tp))
    (few, many, _), (small, large, third) = [batch * length for batch, length in SHAPES], amounts
    token = (large - small) / (many - few)
    step = small - token * few
    if third != token * SHAPES[2][0] * SHAPES[2][1] + step:
        raise NotLinear("what is sent grows with more than the number of tokens")
    return Size(round(token, 3), round(step))


def rows() -> Iterator[tuple[str, str, list[str]]]:
    """A type that each built-in plan is proven for, that of its name or the first: type, plan, variants."""
    seen: dict[str, tuple[str, str, list[str]]] = {}
    for entry in json.loads((REPORTS / "model-types.json").read_text("utf-8")):
        right = [word for word in VARIANTS if all(entry["verdicts"].get(f"{word}{tp}") == "right" for tp in TPS)]
        if right and entry["split"] > 0 and (entry["plan"] not in seen or entry["name"] == entry["plan"]):
            seen[entry["plan"]] = (entry["name"], entry["plan"], right)
    return iter(seen.values())


def _row(given: tuple[str, str, list[str]]) -> tuple[str, dict[str, Any]]:
    torch.set_num_threads(1)
    name, plan, variants = given
    try:
        made = of_type(name, parse_plan(plan).plan, variants)
        below = any(o["sent"].token < o["least"].token for one in made.values() for o in one.values())
        return name, {"plan": plan, **({"reason": UNKNOWN} if below else made)}
    except PlanError as error:  # its code wants the values of tensors
        return name, {"plan": plan, "reason": error.diagnostics[0].message}
    except (NotLinear, TooManyChoices) as error:
        return name, {"plan": plan, "reason": str(error)}


def is_least(sizes: Mapping[str, Any]) -> bool:
    return all(Size(*one["sent"]) <= Size(*one["least"]) for one in sizes.values())


def shown(sizes: Mapping[str, Any]) -> str:
    """The ratio at the size of tp with the most."""
    (token, step), (fewest, after) = max(
        ((o["sent"], o["least"]) for o in sizes.values()), key=lambda o: o[0][0] / o[1][0]
    )
    return f"{token / fewest:.4f}" + (f", and {step - after:,} elements" if step > after else "")


def page(found: Mapping[str, Any], every: int) -> str:
    """The section.

    Args:
        every: the number of plans.
    """
    good = {word: [o[word] for o in found.values() if word in o] for word in VARIANTS}
    said = (f"{sum(map(is_least, o))} of {len(o)} with {word.upper()}" for word, o in good.items())
    shapes = ", ".join(f"{batch} x {length:,}" for batch, length in SHAPES)
    more = {n: o for n, o in sorted(found.items()) if not all(is_least(o[w]) for w in VARIANTS if w in o)}
    cells = ((n, o["plan"], *(shown(o[w]) if w in o else "" for w in VARIANTS)) for n, o in more.items())
    failed = "".join(f"\nNot counted: {name}: {o['reason']}." for name, o in sorted(found.items()) if "reason" in o)
    head = TEXT.format(count=len(found), all=every, shapes=shapes, least=" and ".join(said))
    return f"{head}\n{table(('type', 'plan', 'TP', 'SP'), cells)}\n{failed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", help="model types (one of each built-in plan)")
    parser.add_argument("--missing", action="store_true", help="only those that the data has not yet")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    found = json.loads(DATA.read_text("utf-8")) if args.types or args.missing else {}
    every = list(rows())
    chosen = [row for row in every if not args.types or row[0] in args.types]
    chosen = [row for row in chosen if not args.missing or row[0] not in found]
    with get_context("spawn").Pool(args.jobs, maxtasksperchild=8) as pool:
        for name, one in tqdm(pool.imap_unordered(_row, chosen), total=len(chosen), file=sys.stderr):
            found[name] = one
            lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(found.items())]
            DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    print(page(found, len(every)))


if __name__ == "__main__":
    main()
