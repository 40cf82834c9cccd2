"""Prove the built-in plan of every model type: `python -m tests.zoo [type ...] [--table reports/model-types.md]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from tests.sampling import share_of  # noqa: E402

from . import context  # noqa: E402
from .checkpoints import with_checkpoints  # noqa: E402
from .entry import SIZES, Collectives, Entry, counted_again, has, made_again  # noqa: E402
from .experts import with_experts  # noqa: E402
from .init import by_init as made_by_init  # noqa: E402
from .judged_with import releases  # noqa: E402
from .pipelines import proven, with_pipeline  # noqa: E402
from .table import arguments, fill, read  # noqa: E402

HEAD = """# Model types

Made by `make zoo`; do not edit. Every causal language model type, the built-in plan for it,
and what was proven on a reduced model of its default configuration (where that cannot be built, the nearest that can):
`validate` has no finding, and the loss, the logits and every parameter's gradient on every rank are the unsharded
model's. "size" says that the default configuration does not allow the size, "none" that the plan has no
sequence_parallel section.

- "pp": what crosses a cut between two blocks, where the plan's section pipeline_parallel is proven: nothing else does in the recorded run of
  the reduced model, and its blocks, a stage each, compute the unsharded model's outputs, gradients and buffers, with sequence
  parallelism too. "a tie": a parameter that stands in two stages (`python -m tests.zoo --pipelines`).
- "cp": over the axis cp (`python -m tests.zoo --context`), the modules that need all tokens, by the rules that `auto` derives for the mesh:
  "heads": each rank computes a share of its heads or channels, "whole": all of it. Proven with all ranks of the mesh; otherwise what is said against it.
- "split": the share of the parameters inside the layers of the default configuration that is split over tensor-parallel
  ranks; what is whole is named where it is at least a hundredth of them.
- "collectives": of a step of the reduced model at tp 2, forward + backward, with TP and with TP + SP; "of" the fewest that the
  same split allows (tests/zoo/minimum.py), where an operation runs more often; why is said below the table. More of them
  backward are the minimum too where no choice of what is reduced has no more collectives and no more elements
  (tests/zoo/block_inputs.py, decision 0008).
- "EP": the same proof with the experts distributed, at tp 2 with ep 2, in all variants of the plan; "-" where it distributes
  none (`python -m tests.zoo --experts`). Where the default configuration has one expert, seven or none, it gets eight (tests/zoo/experts.py).
- "init": the same proof for what `shardplan init` writes for the type, without looking at the built-in plan: right with TP
  at the first size, and with SP; "more": it communicates more than the minimum of what it splits (`python -m tests.zoo --init`).
- "checkpoints": how many of the type's published checkpoints (tests/data/published) are proven at tp 2 (`python -m tests.zoo --checkpoints`).

Judged with (reports/model-types.json has it for each cell, and the digest of our code and the plan):

{judged}

{types} types: {tp} right with tensor parallelism and something inside the layers split, {sp} of them with sequence
parallelism too, {wrong} wrong; {experts} right with expert parallelism, {pipelines} in pipeline stages. Of the {init} for which it was run, `init` is right for {init_tp}, with sequence parallelism
for {init_sp}, wrong for {init_wrong}; with TP it communicates at the minimum for {init_least}, {init_fewest} of them with the
fewest collectives.

Over cp {context} of the {context_run} types for which it was run are right, {context_heads} of them with all that mixes tokens by heads. By mesh:
{context_meshes} (with `--unjudged` it goes on with the others).

{checkpoints} published checkpoints of {checkpoint_types} types: {checkpoints_tp} proven with tensor parallelism, {checkpoints_sp} of them with
sequence parallelism too. The others are refused, for the reasons below the table.

"""

MORE = """
More communication than the minimum: results of matrices whose heads no size divides (Falcon 7B's 71) or that are too few to
be split (BitNet's), and other code between the matrices that needs all of their result are gathered and split again; a block
with two norms, or several mixes, of the same value (GPT-NeoX, RWKV) has a block input after each,
where one before them would be as few collectives or fewer, of fewer elements; experts and shared experts that are moved one by
one (AXK1 with SP) have a block input each. In latent attention the gradient is reduced after the small latent matrices, not before: three reductions
for the queries, the keys and the rotary part, of fewer elements than one of the hidden size, which is the minimum too. Where they are
together wider than the hidden state, or a gate reads that too (Youtu, HY-V4), one in front is the minimum. Moshi returns its last hidden
state and the logits: a loss may read either, so its gradient is reduced before the two meet. GPT-BigCode has one key-value head, with which
all ranks compute: they gather its rows forward, reduce-scatter their gradient, which is counted as needed, and gather them once more backward,
not to keep them, which is not. So it is with B and C of state space layers that have fewer groups than ranks (Bamba, Falcon-H1, Granite
hybrid, Zamba 2).
"""

BY_HAND = """
## What `init` leaves to a plan by hand

Types for which the built-in plan has sequence parallelism where `init` finds none, or communicates at the minimum where its plan does not, with the first
thing that `init` says about them.
"""

WHY = """
## What stands in the way

Types without a plan, those of whose layers less than 99 % are split, those without sequence parallelism, and those that run more collectives than the minimum, each with
the line of transformers {version} that stands in the way (tests/data/reasons.json, which tests/test_zoo.py compares with the code). A row with as many
collectives as the minimum or fewer, but more of one operation, is not among them: a sum that an embedding's norm needs whole is an all-reduce where the
minimum has a reduce-scatter.

"""
PARTS = {
    "verdicts": "TP and SP",
    "experts": "EP",
    "pipelines": "pp",
    **{f"context {context.name_of(mesh)}": context.name_of(mesh) for mesh in context.MESHES},
    "init": "init",
    "checkpoints": "checkpoints",
}
REASONS = Path(__file__).parents[1] / "data" / "reasons.json"
LEAST_SPLIT = 0.99
SAID = {"plan": "no plan", "sequence": "no sequence parallelism", "right": "not right with images"}


def reasons(file: Path = REASONS) -> dict[str, list[tuple[str, str, int, str, str]]]:
    """Type -> (what lacks: "plan", "split", "sequence" or "communication", of image-text types "right" too; module of transformers, line, its
    code, why). A module without a name: no line forbids it."""
    return {name: [tuple(one) for one in found] for name, found in json.loads(file.read_text("utf-8")).items()}


def lacks(e: Entry) -> set[str]:
    """What a type has less of than others, or, of communication, more; that no built-in plan is proven for it."""
    if not e.verdicts:
        return {"plan"}
    short = {
        "split": e.split < LEAST_SPLIT,
        "sequence": not e.has("sp"),
        "communication": any(e.more(word) and (word == "tp" or has_more(e, word)) for word in e.collectives),
    }
    return {what for what, is_short in short.items() if is_short}


def has_more(e: Entry, word: str) -> bool:
    """Whether a variant runs more collectives than the minimum in either direction, whichever they are."""
    least = e.minimum[word]
    return any(sum(found.values()) > sum(least[when].values()) for when, found in e.collectives[word].items())


def why(types: Collection[str], file: Path = REASONS) -> list[str]:
    """A line for each reason of these types."""
    return [
        f"- {name}, {SAID.get(what, what)}: "
        + (f"modeling_{module}.py:{line}: `{code}`: {text}." if module else f"{text}.")
        for name, found in sorted(reasons(file).items())
        for what, module, line, code, text in found
        if name in types
    ]


def page(found: Sequence[Entry]) -> str:
    """The table as Markdown."""
    planned = [e for e in found if e.verdicts]
    columns = [f"{word}{tp}" for word in ("tp", "sp") for tp in SIZES]
    titles = [f"{'TP' if column[0] == 't' else 'SP'} {column[2:]}" for column in columns]
    head = ["model type", "plan", *titles, "EP", "pp", "cp", "split", "collectives", "init", "checkpoints"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for e in planned:
        said = [e.verdicts[column].replace("|", "\\|") for column in columns]
        cells = [
            e.name,
            f"[{e.plan}](../plans/{e.plan}.yaml)",
            *said,
            (e.experts or "-").replace("|", "\\|"),
            (e.pipeline[:160] or "-").replace("|", "\\|"),
            context.cell(e),
            share(e),
            communication(e),
            by_init(e),
            published(e),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    by_hand = [f"- {e.name}: {' '.join(e.init_why[0].split())[:400]}" for e in planned if e.init_why]
    lines += [MORE, BY_HAND.strip(), "", *by_hand, ""]
    lines += [
        WHY.format(version=transformers.__version__).strip(),
        "",
        *why({e.name for e in found}),
        "",
        "## Refused checkpoints",
        "",
    ]
    known = {name: text for e in planned for name, text in e.checkpoints.items()}
    lines += [f"- {name}: {text}" for name, text in known.items() if not is_proven(text)]
    lines += ["", "## Without a plan", ""]
    lines += [f"- {e.name}: {' '.join(e.reason.split())[:300]}" for e in found if not e.verdicts]
    good = [e for e in planned if e.has("tp") and e.split > 0]
    return (
        HEAD.format(
            judged=releases(planned, PARTS),
            types=len(found),
            tp=len(good),
            sp=sum(e.has("sp") for e in good),
            wrong=sum(any(not right(text) for text in e.verdicts.values()) for e in planned),
            experts=sum(e.experts == "right" for e in found),
            pipelines=sum(proven(e.pipeline) for e in found),
            context=sum(map(context.proven, found)),
            context_run=sum(bool(e.context) for e in found),
            context_meshes="; ".join(context.counted(found)),
            context_heads=sum(context.proven(e) and set(e.mixers.values()) == {"heads"} for e in found),
            init=sum(bool(e.init) for e in found),
            init_tp=sum(has(e.init, "tp") for e in found),
            init_sp=sum(has(e.init, "tp") and has(e.init, "sp") for e in found),
            init_least=sum(has(e.init, "tp") and "tp" not in e.init_more for e in found),
            init_fewest=sum(has(e.init, "tp") and "tp" not in e.init_more and not e.choices for e in found),
            checkpoints=len(known),
            checkpoint_types=sum(bool(e.checkpoints) for e in planned),
            checkpoints_tp=sum(map(is_proven, known.values())),
            checkpoints_sp=sum(text == "TP, SP" for text in known.values()),
            init_wrong=sum(any(not right(text) for text in e.init.values()) for e in found),
        )
        + "\n".join(lines)
        + "\n"
    )


def share(e: Entry) -> str:
    """What is split and what is not."""
    whole = ", ".join(f"`{part.split('*.', 1)[-1]}` {n:.0%}" for part, n in e.whole.items())
    return f"{e.split:.1%}" + (f"; whole: {whole}" if whole else "")


def communication(e: Entry) -> str:
    """The collectives of each variant, and the minimum where it is less."""
    return "; ".join(f"{word.upper()} {total(found)}" + _less(e, word) for word, found in e.collectives.items())


def _less(e: Entry, word: str) -> str:
    if not e.more(word):
        return ""
    if word == "tp" and e.choices:
        count, token, _ = e.reduced
        n, least, _ = next(better for better in e.choices if better[0] <= count and better[1] <= token)
        return f" of {total({**e.minimum[word], 'backward': {'all_reduce': int(n)}})} ({least / token:.0%} of the elements)"
    tried = "" if word != "tp" or not e.untried else f" ({e.untried}: whether another choice is better is not known)"
    return f" of {total(e.minimum[word])}{tried}"


def total(found: Collectives) -> str:
    return " + ".join(str(sum(counts.values())) for counts in found.values())


def by_init(e: Entry) -> str:
    """The verdict on what `init` writes."""
    if not e.init:
        return "not run"
    if not all(right(text) for text in e.init.values()):
        return next(text for text in e.init.values() if not right(text)).replace("|", "\\|")
    words = [word.upper() + " (more)" * (word in e.init_more) for word in ("tp", "sp") if has(e.init, word)]
    return ", ".join(words) or "none"


def published(e: Entry) -> str:
    """How many of the type's published checkpoints are proven."""
    return f"{sum(map(is_proven, e.checkpoints.values()))} of {len(e.checkpoints)}" if e.checkpoints else ""


def is_proven(text: str) -> bool:
    """Whether what is said of a checkpoint says that it is proven."""
    return text in ("TP", "TP, SP")


def right(text: str) -> bool:
    """Whether a verdict is no complaint."""
    return text in ("right", "none") or text.startswith(("size ", "none: "))


def main(argv: list[str]) -> int:
    parser = arguments("python -m tests.zoo")
    parser.add_argument("--init", action="store_true", help="what `shardplan init` writes, not the built-in plans")
    parser.add_argument("--count", action="store_true", help="count again what the plans communicate; prove nothing")
    parser.add_argument("--checkpoints", action="store_true", help="the published checkpoints; prove nothing else")
    parser.add_argument(
        "--pipelines", action="store_true", help="the plans cut into pipeline stages; prove nothing else"
    )
    parser.add_argument("--experts", action="store_true", help="the plans with experts distributed; prove nothing else")
    parser.add_argument(
        "--context", action="store_true", help="the plans on the axis cp, a mesh after the other; prove nothing else"
    )
    parser.add_argument("--unjudged", action="store_true", help="with --context: only what the table lacks")
    args = parser.parse_args(argv)
    known = read(args.table)
    names = args.types or share_of(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), args)
    rows = [known.get(name, Entry(name)) for name in names]
    ways: dict[str, tuple[Callable[[Entry], Entry], Callable[[Entry], object]]] = {
        "count": (counted_again, lambda e: (e.reduced, bool(e.collectives) and e.more("tp"))),
        "init": (made_by_init, lambda e: (e.init, e.init_more)),
        "checkpoints": (with_checkpoints, lambda e: e.checkpoints),
        "pipelines": (with_pipeline, lambda e: e.pipeline),
        "experts": (with_experts, lambda e: e.experts),
    }
    if args.context:
        return _over_cp(names, args)
    part = next((name for name in ways if getattr(args, name)), "verdicts")
    make, said = ways.get(part, (made_again, _said))
    found, same = fill(rows, make, page, said, part, **vars(args))
    verdicts = (one.init if args.init else one.verdicts for one in found)
    return int(not same or any(not right(text) for texts in verdicts for text in texts.values()))


def _over_cp(names: Sequence[str], args: argparse.Namespace) -> int:
    """Every mesh, over all types. Some types are refused, which is no failure."""
    found = {name: Entry(name) for name in names}
    all_same = True
    for mesh in context.MESHES:
        found |= {name: e for name, e in read(args.table).items() if name in found}
        of = context.name_of(mesh)
        rows = [e for e in found.values() if not args.unjudged or (e.plan is not None and of not in e.context)]
        make = partial(context.with_context, mesh=mesh)
        made, same = fill(rows, make, page, lambda e, of=of: (of, e.context.get(of)), f"context {of}", **vars(args))
        found |= {e.name: e for e in made}
        all_same &= same
    return int(not all_same)


def _said(e: Entry) -> object:
    return e.verdicts or e.reason


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
