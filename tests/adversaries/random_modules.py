"""Small random modules with random plans, judged by `validate` and by the reference:
`python -m tests.adversaries.random_modules [--examples N] [--seed N]`.

A module is a residual stream through blocks of several kinds, with shared parameters, gates, blocks that run in every
other batch alone, and one output or more. Its plan is right by construction, or rules of it were changed at random:
then the reference alone knows what it is.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import hypothesis.strategies as st  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from tests.sampling import add_share  # noqa: E402

from .adversary import Adversary, document  # noqa: E402
from .judge import Judgement, judge  # noqa: E402
from .parts import BLOCK_INPUT, HIDDEN, PARTIAL, WIDTH, Attention, linear  # noqa: E402
from .said import Said, validate  # noqa: E402

KINDS = ("mlp", "glu", "attention", "normed", "gated", "factor", "two")
WAYS = ("plain", "block_input", "summed", "gathered", "whole")
STYLES = (
    None,
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_rep",
    "replicate",
    PARTIAL,
    BLOCK_INPUT,
    "output_with_grad_allreduce",
    "all_reduce",
    "rowwise_seq",
    "gather_seq_input",
    "replicate_seq",
    "sequence_parallel",
)


@dataclass(frozen=True)
class BlockSpec:
    """A block.

    Args:
        kind: what its core computes.
        way: how its right plan splits the core.
        post: the norm follows the sum.
        scaled: the core's result times a trained vector.
        flagged: the core runs in every other batch.
        tied: the first matrix is that of the block before, where that is of the same kind and split in the same way.
    """

    kind: str
    way: str
    post: bool
    scaled: bool
    flagged: bool
    tied: bool


@dataclass(frozen=True)
class Edit:
    """A change of the plan: the style (None: no rule) of one of its rules, or of a module that has none.

    Args:
        place: which, counted over all rules and modules.
    """

    place: int
    style: str | None


@dataclass(frozen=True)
class Spec:
    """A module and a plan.

    Args:
        outputs: "one", "tuple" or "dict" with a second output in front.
        head: "none", "whole" or "gathered".
    """

    blocks: tuple[BlockSpec, ...]
    outputs: str
    head: str
    sequence_parallel: bool
    edits: tuple[Edit, ...] = ()


class Core(nn.Module):
    """What stands between a block's norm and its sum."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("attention", "normed"):
            self.attention = Attention(groups=2, norm=kind == "normed")
            return
        self.up = linear(WIDTH, 2 * HIDDEN if kind == "glu" else HIDDEN, bias=kind == "mlp")
        self.down = linear(HIDDEN, WIDTH)
        if kind == "gated":
            self.gate = linear(WIDTH, 1)
        if kind == "factor":
            self.factor = nn.Parameter(torch.ones(()))
        if kind == "two":
            self.other = linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.kind in ("attention", "normed"):
            return self.attention(x)
        h = self.up(x)
        if self.kind == "glu":
            gate, h = h.chunk(2, -1)
            return self.down(F.silu(gate) * h)
        h = F.gelu(h)
        if self.kind == "gated":
            h = h * torch.sigmoid(self.gate(x))
        if self.kind == "factor":
            h = h * self.factor
        if self.kind == "two":
            h = h * self.other(y)
        return self.down(h)


class RandomBlock(nn.Module):
    """A norm, a core, and the sum with the residual stream."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.spec, self.norm, self.core = spec, nn.LayerNorm(WIDTH), Core(spec.kind)
        if spec.scaled:
            self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, y: Tensor, flag: bool) -> Tensor:
        if self.spec.flagged and not flag:
            return x
        h = self.core(x if self.spec.post else self.norm(x), y)
        if self.spec.scaled:
            h = h * self.scale
        return self.norm(x + h) if self.spec.post else x + h


class RandomModule(nn.Module):
    """Blocks, a norm and heads."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, self.layers = spec, nn.ModuleList(RandomBlock(block) for block in spec.blocks)
        for number in tied(spec):
            self.layers[number].core.up.weight = self.layers[number - 1].core.up.weight
        self.norm, self.head = nn.LayerNorm(WIDTH), linear(WIDTH, 8) if spec.head != "none" else nn.Identity()
        self.side = linear(WIDTH, 4) if spec.outputs != "one" else None

    def forward(self, x: Tensor, y: Tensor, flag: bool) -> Any:
        for layer in self.layers:
            x = layer(x, y, flag)
        x = self.norm(x)
        if self.side is None:
            return self.head(x)
        return (
            (self.head(x), self.side(x))
            if self.spec.outputs == "tuple"
            else {"side": self.side(x), "sample": self.head(x)}
        )


def tied(spec: Spec) -> list[int]:
    """The blocks that have the first matrix of the one before."""
    pairs = enumerate(zip(spec.blocks, spec.blocks[1:], strict=False), start=1)
    return [
        n
        for n, (a, b) in pairs
        if b.tied and a.kind == b.kind and a.way == b.way and "att" not in b.kind and b.kind != "normed"
    ]


def batch(number: int) -> dict[str, Any]:
    """Two streams, and the flag in every other batch."""
    generator = torch.Generator().manual_seed(number)
    x, y = (torch.randn(2, 8, WIDTH, generator=generator) for _ in range(2))
    return {"x": x, "y": y, "flag": number % 2 == 0}


def rules_of(spec: Spec) -> tuple[dict[str, Any], dict[str, Any]]:
    """The right rules, and those of the overlay."""
    tensor: dict[str, Any] = {}
    sequence: dict[str, Any] = {
        "layers.0": "split_seq_input",
        "norm": {"style": "sequence_parallel", "output": "gather"},
    }
    for number, block in enumerate(spec.blocks):
        core = f"layers.{number}.core"
        tensor |= {f"{core}{name}": rule for name, rule in _core_rules(block).items()}
        sequence |= {f"{core}{name}": rule for name, rule in _core_overlay(block).items()}
        sequence[f"layers.{number}.norm"] = "sequence_parallel"
        if block.scaled:
            sequence[f"layers.{number}.scale"] = PARTIAL
    if spec.head == "gathered":
        tensor["head"] = "colwise_gather_output"
    return tensor, sequence


def _way(block: BlockSpec) -> str:
    """The way that the kind allows."""
    if block.kind in ("attention", "normed"):
        return {"summed": "plain", "gathered": "whole"}.get(block.way, block.way)
    if block.kind == "glu":
        return {"gathered": "whole"}.get(block.way, block.way)
    return "block_input" if block.kind == "gated" and block.way == "plain" else block.way


def _core_rules(block: BlockSpec) -> dict[str, Any]:
    way = _way(block)
    if way == "whole":
        return {}
    if way == "gathered":
        rules = {".up": "colwise_gather_output", ".down": "rowwise_rep"}
        return rules | ({".other": "colwise_gather_output"} if block.kind == "two" else {})
    rules: dict[str, Any] = {} if way == "plain" else {"": BLOCK_INPUT}
    if block.kind in ("attention", "normed"):
        rules |= {f".attention.{name}": "colwise" for name in "qkv"} | {".attention.o": "rowwise"}
        return rules | ({f".attention.{name}_norm": PARTIAL for name in "qk"} if block.kind == "normed" else {})
    rules |= {".up": "packed_colwise" if block.kind == "glu" else "colwise", ".down": "rowwise"}
    rules |= {"gated": {".gate": PARTIAL}, "factor": {".factor": PARTIAL}, "two": {".other": "colwise"}}.get(
        block.kind, {}
    )
    if way == "summed":
        del rules[".down"]
        rules |= {"": {"style": BLOCK_INPUT, "output": "all_reduce"}, ".down.weight": "rowwise"}
    return rules


def _core_overlay(block: BlockSpec) -> dict[str, Any]:
    way = _way(block)
    if way in ("whole", "gathered"):
        return {"": "replicate_seq"}
    if way == "summed":
        return {"": {"style": "gather_seq_input", "output": "reduce_scatter"}}
    return {"": "gather_seq_input", ".attention.o" if block.kind in ("attention", "normed") else ".down": "rowwise_seq"}


def plan_of(spec: Spec) -> dict[str, Any]:
    """The plan, with its edits."""
    tensor, sequence = rules_of(spec)
    names = [name for name, _ in RandomModule(spec).named_modules() if name and not name.endswith(("layers",))]
    for edit in spec.edits:
        sections = (tensor, sequence) if spec.sequence_parallel else (tensor,)
        places = [(section, name) for section in sections for name in section] + [
            (sections[-1], name) for name in names
        ]
        section, name = places[edit.place % len(places)]
        if edit.style is None and section is tensor:
            section.pop(name, None)
        else:
            section[name] = edit.style or "none"
    if not tensor:
        tensor["norm"] = "replicate"
    return document(tensor, sequence if spec.sequence_parallel else None)


def adversary_of(spec: Spec) -> Adversary:
    """What both judges are asked."""
    verdict = "right" if not spec.edits else "wrong"
    return Adversary(
        "random",
        partial(RandomModule, spec),
        batch,
        plan_of(spec),
        verdict,
        "right by construction, or edited",
        sequence_parallel=spec.sequence_parallel,
        seeds=(0, 1, 2),
    )


@dataclass(frozen=True)
class Outcome:
    """What was said of a random module.

    Args:
        judgement: None where it was not asked: only the structure of the plan is wrong.
    """

    spec: Spec
    said: Said
    judgement: Judgement | None

    @property
    def problem(self) -> str:
        if "RAISED" in self.said.codes:
            return "raised"
        if self.judgement is None:
            return "" if self.spec.edits else "right refused"
        if self.said.passed:
            return "" if self.judgement.right else "wrong passed"
        return "right refused" if self.judgement.right and not _unreached(self) else ""

    def __str__(self) -> str:
        return f"{self.problem}: {self.spec}\n  {plan_of(self.spec)}\n  {self.said}\n  {self.judgement}"


def _unreached(outcome: Outcome) -> bool:
    """Only what no batch of `validate` runs is objected to."""
    return set(outcome.said.codes) == {"SP421"} and any(block.flagged for block in outcome.spec.blocks)


def outcome_of(spec: Spec) -> Outcome:
    """Ask both."""
    adversary = adversary_of(spec)
    said = validate(adversary)
    structure = not said.passed and all(code < "SP4" for code in said.codes)
    return Outcome(spec, said, None if structure else judge(adversary, anyway=not said.passed))


BLOCKS = st.builds(
    BlockSpec,
    kind=st.sampled_from(KINDS),
    way=st.sampled_from(WAYS),
    post=st.booleans(),
    scaled=st.booleans(),
    flagged=st.sampled_from((False, False, True)),
    tied=st.booleans(),
)
EDITS = st.builds(Edit, place=st.integers(0, 60), style=st.sampled_from(STYLES))


def specs(most_edits: int) -> st.SearchStrategy[Spec]:
    """Modules with plans. Up to that many rules of a plan were changed; with 0, all plans are right."""
    return st.builds(
        Spec,
        blocks=st.lists(BLOCKS, min_size=1, max_size=3).map(tuple),
        outputs=st.sampled_from(("one", "tuple", "dict")),
        head=st.sampled_from(("none", "whole", "gathered")),
        sequence_parallel=st.booleans(),
        edits=st.lists(EDITS, min_size=min(most_edits, 1), max_size=most_edits).map(tuple),
    )


def run(strategy: st.SearchStrategy[Spec], examples: int, number: int | None, see: Callable[[Outcome], None]) -> None:
    """Ask both judges of that many modules; None: of the same ones each time."""

    @settings(
        max_examples=examples,
        derandomize=number is None,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def each(spec: Spec) -> None:
        see(outcome_of(spec))

    (each if number is None else seed(number)(each))()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversaries.random_modules", description=__doc__)
    parser.add_argument("--examples", type=int, default=100, help="of right plans, and as many of edited ones")
    add_share(parser)
    args = parser.parse_args(argv)
    problems, counts = [], {}

    def see(outcome: Outcome) -> None:
        truth = "structure" if outcome.judgement is None else outcome.judgement.truth
        key = ("edited" if outcome.spec.edits else "right plan", truth, "passed" if outcome.said.passed else "refused")
        counts[key] = counts.get(key, 0) + 1
        if outcome.problem:
            problems.append(outcome)
            print(outcome, flush=True)

    for most_edits in (0, 2):
        run(specs(most_edits), -(-args.examples // args.share), args.seed, see)
    print("| plan | reference | validate | count |\n|---|---|---|---|")
    for key, count in sorted(counts.items()):
        print("| " + " | ".join((*key, str(count))) + " |")
    print(f"\n{len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
