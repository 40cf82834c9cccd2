"""The numbers that rules declare exist in the model, and tp divides them."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.expressions import count_of
from shardplan.core.plan import Rule
from shardplan.styles.divided_numbers import attribute
from shardplan.styles.packed_lengths import packed_parts

from .check_words import by_rule, sizes
from .facts import Facts

PARTS = Code(
    code="SP304",
    title="packed parts that do not add up to the dimension",
    text="""`packed` tells how several matrices are stored as one: the number of equal parts, or the length of each
part in the order in which the parts are stored, as expressions over the numbers of the configuration. The lengths
must add up to the whole dimension; otherwise a rank's shard would mix q with k.""",
    bad="""# shardplan validate phi-3-mini-4k.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.layers.*.self_attn:
    style: input_with_grad_allreduce
    divide: [config.num_attention_heads, num_key_value_heads]
  model.layers.*.self_attn.qkv_proj:
    style: packed_colwise
    packed: [hidden_size, num_key_value_heads, num_key_value_heads]
  model.layers.*.self_attn.o_proj: rowwise
""",
    good="""# shardplan validate phi-3-mini-4k.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.layers.*.self_attn:
    style: input_with_grad_allreduce
    divide: [config.num_attention_heads, num_key_value_heads]
  model.layers.*.self_attn.qkv_proj:
    style: packed_colwise
    packed:
      - hidden_size
      - num_key_value_heads * (hidden_size // num_attention_heads)
      - num_key_value_heads * (hidden_size // num_attention_heads)
  model.layers.*.self_attn.o_proj: rowwise
""",
)

DIVIDES = Code(
    code="SP305",
    title="tp does not divide a number that the plan declares",
    text="""`divides` names a number of the configuration (or an expression over such numbers) that tp must divide. It
is for numbers that the shapes do not show, such as the number of groups of a state-space model. The number must
exist.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 4
version: "1"
name: mine
tensor_parallel:
  model.layers.*.self_attn.{q,k,v}_proj: {style: colwise, divides: num_groups}
  model.layers.*.self_attn.o_proj: rowwise
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 4
version: "1"
name: mine
tensor_parallel:
  model.layers.*.self_attn.{q,k,v}_proj: {style: colwise, divides: num_key_value_heads}
  model.layers.*.self_attn.o_proj: rowwise
""",
)

DIVIDE = Code(
    code="SP306",
    title="an attribute that cannot be divided by tp",
    text="""`divide` lists numbers of the module instance, or of its configuration (`config.num_attention_heads`).
Each is divided by tp, because the model's code reshapes with it. Each must exist on every module that the rule
matches, and tp must divide it.""",
    bad="""# shardplan validate gpt2-no-dropout.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  transformer.h.*.attn: {style: input_with_grad_allreduce, divide: [split_size, n_heads]}
  transformer.h.*.attn.c_attn: {style: packed_colwise, packed: 3, divide: [nf]}
  transformer.h.*.attn.c_proj: rowwise
""",
    good="""# shardplan validate gpt2-no-dropout.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  transformer.h.*.attn: {style: input_with_grad_allreduce, divide: [split_size, num_heads]}
  transformer.h.*.attn.c_attn: {style: packed_colwise, packed: 3, divide: [nf]}
  transformer.h.*.attn.c_proj: rowwise
""",
)

NUMBER = Code(
    code="SP308",
    title="a style that needs a number that the configuration does not have",
    text="""`mla_kv_a_proj` reads the configuration's `qk_rope_head_dim`: the number of trailing output features (the
rotary part) that every rank's heads read.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.layers.*.self_attn.k_proj: mla_kv_a_proj
  model.layers.*.mlp.{gate,up}_proj: colwise
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

CODES = (PARTS, DIVIDES, DIVIDE, NUMBER)

DECLARED = ("declared", "attribute")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each rule and reason."""
    yield from by_rule(_problems(facts), _words)
    if facts.tp is not None:
        yield from _indivisible(facts, facts.tp)


def _problems(facts: Facts) -> Iterator[tuple[Code, str, Rule, str]]:
    """(code, reason, rule, module or parameter) of everything that does not exist or does not add up."""
    resolved = facts.resolved
    for stored in facts.splits:
        parts = packed_parts(stored.rule, stored.size, resolved.tree.numbers) if stored.placement.packed else ()
        if isinstance(parts, str):
            yield from ((PARTS, parts, stored.rule, name) for name in stored.assigned)
    for assignment in resolved.assignments.values():
        rule, style = assignment.rule, facts.style(assignment)
        for expression in rule.divides:
            value: int | str | None = count_of(expression, resolved.tree.numbers)
            if isinstance(value, str):
                yield DIVIDES, value, rule, assignment.name
        for path in rule.divide:
            value = attribute(resolved, assignment, path)
            if isinstance(value, str):
                yield DIVIDE, value, rule, assignment.name
        if style.features.tail is not None and not isinstance(resolved.tree.numbers.get(style.features.tail), int):
            yield NUMBER, f"the configuration has no number {style.features.tail}", rule, assignment.name


def _words(code: Code, rule: Rule) -> tuple[str, str]:
    """What is wrong, and the help."""
    return {
        PARTS.code: (
            "`packed` does not fit",
            "give the length of each part, in the order in which the parts are stored",
        ),
        DIVIDES.code: ("`divides` has no value", "name a number of the model's configuration"),
        DIVIDE.code: (
            "`divide` does not fit",
            "name a number that the module's instance or its config has",
        ),
        NUMBER.code: (f"`{rule.style}` needs a number", "use this style only for models that have this number"),
    }[code.code]


def _indivisible(facts: Facts, tp: int) -> Iterator[Diagnostic]:
    # What is reported with the splits.
    seen = {r.count for r in facts.requirements if r.kind not in DECLARED and not r.allows(tp)}
    for requirement in facts.requirements:
        if requirement.kind in DECLARED and not requirement.allows(tp) and requirement.count not in seen:
            code, field = (DIVIDES, "divides") if requirement.kind == "declared" else (DIVIDE, "divide")
            yield Diagnostic(
                code=code.code,
                severity=Severity.ERROR,
                message=f"{requirement.what} is {requirement.count}, which tp={tp} does not divide",
                primary=Label(requirement.rule.location, f"declares `{field}`"),
                help=sizes(facts.allowed),
                modules=requirement.modules,
            )
