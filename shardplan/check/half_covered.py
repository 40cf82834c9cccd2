"""What is left whole beside something split: it may be meant, so these are warnings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.plan import Rule
from shardplan.core.tree import ModuleInfo, parent
from shardplan.styles import feature_dim

from .facts import Facts
from .requirements import stays_split
from .words import join, star

SIBLING = Code(
    code="SP350",
    title="a matrix left whole beside split siblings",
    text="""Linear modules of one parent work on the same heads or features. Where some of them are split over tp and
one is not named at all, that one computes on a value of another width, or its gradient is incomplete. If a whole copy
is meant, say so with `replicate`.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.layers.*.mlp.gate_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
)

PARAMETER = Code(
    code="SP351",
    title="a parameter that no rule names, beside split ones",
    text="""A parameter of the module itself (attention sinks, a bias, a stack of expert biases) is whole unless a rule
splits it. Beside parameters that are split it then has another width than they, or a gradient of which each rank
computes a part. If a whole copy is meant, say so with `replicate` or `replicated_with_grad_allreduce`.""",
    bad="""# shardplan validate mixtral-8x7b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.layers.*.mlp.experts: moe_tp_experts
  model.layers.*.mlp.experts.gate_up_proj: packed_colwise
""",
    good="""# shardplan validate mixtral-8x7b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.layers.*.mlp.experts: moe_tp_experts
  model.layers.*.mlp.experts.gate_up_proj: packed_colwise
  model.layers.*.mlp.experts.down_proj: rowwise
""",
)

CODES = (SIBLING, PARAMETER)

MATMUL = ("linear", "conv1d")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each name, list indices aside."""
    tree = facts.resolved.tree
    own: dict[str, Rule] = {}  # modules that own a split parameter, and its rule
    split: dict[str, dict[str, Rule]] = defaultdict(dict)  # by parent: its matrices that are split, and their rules
    for held in facts.splits:
        if stays_split(held):
            for name in held.names:
                owner = parent(name)
                own.setdefault(owner, held.rule)
                if held.module.kind in MATMUL:
                    split[parent(owner)].setdefault(owner, held.rule)
    whole: dict[str, tuple[list[str], dict[str, Rule]]] = {}
    for around, siblings in split.items():
        for name in tree.children[around]:
            if name not in own and tree.modules[name].kind in MATMUL and not facts.claimed(name):
                if not _feeds(facts, tree.modules[name], siblings):
                    whole.setdefault(star(name), ([], siblings))[0].append(name)
    bare: dict[str, tuple[list[str], dict[str, Rule]]] = {}
    for owner in dict.fromkeys((*split, *own)):
        for name in _unclaimed(facts, tree.modules[owner]):
            beside = split.get(owner, {}) | ({owner: own[owner]} if owner in own else {})
            bare.setdefault(star(name), ([], beside))[0].append(name)
    yield from (_finding(SIBLING, names, beside) for names, beside in whole.values())
    yield from (_finding(PARAMETER, names, beside) for names, beside in bare.values())


def _feeds(facts: Facts, module: ModuleInfo, siblings: Iterable[str]) -> bool:
    """Whether the matrix comes before a split one that reads it whole: the first half of a low-rank projection.

    Its output is as wide as a sibling's input and it reads something else than that sibling does; nor does it read
    what a sibling splits.
    """
    out, into = _widths(module)
    split = [
        _widths(facts.resolved.tree.modules[name])
        for name in siblings
        if facts.held[f"{name}.weight"].how.shard == "out"
    ]
    return any(i == out and i != into for _, i in split) and all(o != into for o, _ in split)


def _widths(module: ModuleInfo) -> tuple[int, int]:
    """The output and input features of a matrix."""
    weight = module.parameter("weight")
    assert weight is not None  # a Linear or Conv1D
    dims = [feature_dim(module.kind, "weight", side, 2) for side in ("out", "in")]
    return weight.shape[dims[0] or 0], weight.shape[dims[1] or 0]


def _unclaimed(facts: Facts, module: ModuleInfo) -> Iterator[str]:
    for parameter in module.parameters:
        name = f"{module.name}.{parameter.name}" if module.name else parameter.name
        if name not in facts.held and module.name not in facts.whole:
            yield name


def _finding(code: Code, names: list[str], split: dict[str, Rule]) -> Diagnostic:
    named = star(names[0]) if len(names) > 1 else names[0]
    beside = join([f"`{name.rpartition('.')[2]}`" for name in split], "and")
    return Diagnostic(
        code=code.code,
        severity=Severity.WARNING,
        message=f"{named} is named by no rule and stays whole, while {beside} beside it {_is(split)} split",
        primary=Label(next(iter(split.values())).location, "splits what stands beside it"),
        help=f"add a rule for `{named}`; if a whole copy is meant, `{named}: replicate` says so",
        modules=tuple(names),
    )


def _is(split: dict[str, Rule]) -> str:
    return "is" if len(split) == 1 else "are"
