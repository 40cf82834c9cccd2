"""tp divides what is split: heads, features, packed parts, declared numbers, attributes. All layers at
once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import gcd

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity

from .check_words import join, sizes
from .facts import Facts
from .requirements import Kind, Requirement

HEADS = Code(
    code="SP301",
    title="tp does not divide the attention heads or the key-value heads",
    text="""Each rank computes whole heads. A `colwise` projection inside a module with a `head_dim` splits
`out_features / head_dim` heads, and a `rowwise` projection reads them; tp must divide that number. Models with
grouped-query attention have fewer key-value heads than attention heads; tp must divide these too, or be a multiple of
them (SP302).""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 3
version: "1"
name: mine
tensor_parallel:
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.self_attn.o_proj: rowwise
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 4
version: "1"
name: mine
tensor_parallel:
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.self_attn.o_proj: rowwise
""",
)

KEY_VALUE = Code(
    code="SP302",
    title="more tp ranks than key-value heads, and no whole number of ranks for each",
    text="""With more ranks than key-value heads, r = tp / heads neighbouring ranks compute with one head, of whose rows
each stores an r-th. The number of heads must divide tp, and r the features of a head (`head_dim`). So it is with the groups of
a state space layer, where the plan declares them (`heads`), and with those of a norm (`groups`).""",
    bad="""# shardplan validate smollm2-135m.json mine.yaml --tp 9
version: "1"
name: mine
tensor_parallel:
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.self_attn.o_proj: rowwise
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 16
version: "1"
name: mine
tensor_parallel:
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.self_attn.o_proj: rowwise
""",
)

FEATURES = Code(
    code="SP303",
    title="tp does not divide the features that a style splits",
    text="""tp must divide each split dimension: the output features of a `colwise` matrix, the input features of a
`rowwise` one (an MLP's intermediate size, an expert's width), and each part of a packed one. torch's own
`parallelize_module` accepts an uneven split; the shapes then differ in the middle of the forward pass.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 3
version: "1"
name: mine
tensor_parallel:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 7
version: "1"
name: mine
tensor_parallel:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
)

NO_SIZE = Code(
    code="SP307",
    title="no tp size above 1 works",
    text="""Without `--tp`, a plan is checked at the smallest size above 1 that divides everything it splits. The
numbers of this plan have no common divisor (or a vocabulary is too small), so the plan can never be used. Split less,
or leave the module with the odd number whole.""",
    bad="""# shardplan validate smollm2-135m.json mine.yaml
version: "1"
name: mine
tensor_parallel:
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.self_attn.o_proj: rowwise
  model.layers.0.mlp.{gate,up}_proj: {style: colwise, divides: num_hidden_layers + 1}
  model.layers.0.mlp.down_proj: rowwise
""",
    good="""# shardplan validate smollm2-135m.json mine.yaml
version: "1"
name: mine
tensor_parallel:
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.self_attn.o_proj: rowwise
  model.layers.0.mlp.{gate,up}_proj: colwise
  model.layers.0.mlp.down_proj: rowwise
""",
)

NOTHING = Code(
    code="SP309",
    title="a tp axis, and nothing split over it",
    text="""The mesh has several tp ranks, but no rule of the plan splits a parameter of this model, so all ranks
compute the same. Either the plan has no `tensor_parallel` section, or all of its rules are optional and match
nothing.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.norm: replicate
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.norm: replicate
  lm_head: colwise_gather_output
""",
)

CODES = (HEADS, KEY_VALUE, FEATURES, NO_SIZE, NOTHING)

MOST_COUNTS = 5  # that a message lists
CODE_OF: dict[Kind, Code] = {"heads": HEADS, "key_value_heads": HEADS, "features": FEATURES}


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each number that does not divide; what the rules declare is `compiler/check/declared.py`'s."""
    tp = facts.tp
    if tp is None:
        yield _no_size(facts)
        return
    if tp > 1 and not facts.splits and not facts.misfits and facts.resolved.sizes.ep == 1:
        yield Diagnostic(
            code=NOTHING.code,
            severity=Severity.WARNING,
            message=f"the plan splits nothing of this model, so all {tp} tp ranks compute the same",
            help="add rules that split parameters, or use these ranks for data parallelism",
        )
    groups: dict[tuple[Kind, str, int], list[Requirement]] = defaultdict(list)
    for requirement in facts.requirements:
        if not requirement.allows(tp) and requirement.kind in CODE_OF:
            groups[requirement.kind, requirement.what, requirement.count].append(requirement)
    for (kind, what, count), requirements in groups.items():
        if count < tp and requirements[0].shares:
            yield _finding(
                KEY_VALUE,
                f"{what} is {count}, and tp={tp} {_unshared(count, requirements[0].shares, tp)}",
                sizes(facts.allowed),
                requirements,
            )
        else:
            yield _finding(
                CODE_OF[kind],
                f"{what} is {count}, which tp={tp} does not divide",
                sizes(facts.allowed),
                requirements,
            )


def _unshared(heads: int, length: int, tp: int) -> str:
    """Why so many ranks cannot share the key-value heads."""
    if tp % heads:
        return "is not a multiple of it"
    return f"would put each head on {tp // heads} ranks, which do not divide its {length // heads} features"


def _finding(code: Code, message: str, help: str, requirements: list[Requirement]) -> Diagnostic:
    # The rule of an output side is the same with and without the overlay: both variants then give one
    # finding.
    first = next((r for r in requirements if r.from_output), requirements[0])
    return Diagnostic(
        code=code.code,
        severity=Severity.ERROR,
        message=message,
        primary=Label(first.rule.location, "splits it"),
        help=help,
        modules=tuple(dict.fromkeys(name for r in requirements for name in r.modules)),
    )


def _no_size(facts: Facts) -> Diagnostic:
    groups: dict[tuple[str, int], list[Requirement]] = defaultdict(list)
    for requirement in facts.requirements:
        if not requirement.shares:
            groups[requirement.what, requirement.count].append(requirement)
    # What alone stands in the way: without it, the other counts have a common divisor.
    alone = [key for key in groups if gcd(*(count for what, count in groups if (what, count) != key)) != 1]
    if len(alone) == 1 and len(groups) > 1:
        counted = facts.resolved.tree.named(name for requirement in groups[alone[0]] for name in requirement.modules)
        help = f"leave {counted} and the block around it whole: {alone[0][0]} has no divisor in common with the rest"
    else:
        help = "split less: leave blocks whole until the numbers of the others have a common divisor"
    counts = [f"{what} {count}" for what, count in groups]
    shown = counts if len(counts) <= MOST_COUNTS else [*counts[:MOST_COUNTS], f"{len(counts) - MOST_COUNTS} more"]
    return Diagnostic(
        code=NO_SIZE.code,
        severity=Severity.ERROR,
        message=f"no tp size above 1 divides everything that this plan splits: {join(shown, 'and')}",
        help=help,
    )
