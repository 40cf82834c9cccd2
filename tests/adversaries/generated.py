"""Models made by a seed out of idioms, on every axis and pair of axes: `python -m tests.adversaries.generated [--count N] [--seed S]`.

A seed draws a mesh, blocks (dense ones, mixtures), what each computes between its matrices, how its router looks at tokens,
what it keeps in buffers, the call, what happens after the plan is applied, and the plan: a right one, or one with another
rule. Whether that is right depends on the mesh, and the reference alone knows it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from tests.sampling import add_share  # noqa: E402
from tools.combinations import RIGHT_AND_REFUSED  # noqa: E402

from .adversary import Adversary  # noqa: E402
from .afterwards import change, hook, hook_before, own_forward  # noqa: E402
from .judge import Judgement, judge  # noqa: E402
from .meshes import MESHES  # noqa: E402
from .mixtures import INSIDE, LOOKING, Mixture  # noqa: E402
from .parts import BLOCK_INPUT, HIDDEN, LAST_NORM, PARTIAL, WIDTH, Stack, linear  # noqa: E402
from .said import Said, validate  # noqa: E402
from .stages import pairs, squared  # noqa: E402
from .training import momentum  # noqa: E402

STATES = ("", "", "counter", "running", "batch")
STYLES = (None, "colwise", "rowwise", "replicate", PARTIAL, BLOCK_INPUT, "sequence_parallel", "token_wise")
AFTER = {"hook": hook, "hook_before": hook_before, "forward": own_forward}


@dataclass(frozen=True)
class BlockSpec:
    """A block.

    Args:
        kind: "dense" or "mixture".
        inside: what is done between the matrices, a word of `INSIDE`.
        router: of a mixture.
        state: what the block keeps: "counter": its calls, which it divides by; "running": a mean of its inputs, which it takes off;
            "batch": nothing, it takes off the mean of its batch.
    """

    kind: str
    inside: str
    router: str
    state: str


@dataclass(frozen=True)
class Spec:
    """A model and how it is trained.

    Args:
        early: the labels are read before the first block.
        edit: (which rule, the style in its place), or None.
        after: what is done to a matrix after the plan was applied, or "".
    """

    mesh: str
    blocks: tuple[BlockSpec, ...]
    sequence_parallel: bool
    early: bool
    edit: tuple[int, str | None] | None
    after: str
    max_norm: float | None
    momentum: bool


class Dense(nn.Module):
    """Two matrices, and something between them."""

    def __init__(self, inside: str) -> None:
        super().__init__()
        self.up, self.down, self.inside = linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH), inside

    def forward(self, x: Tensor) -> Tensor:
        return self.down(INSIDE[self.inside](F.gelu(self.up(x))))


class Block(nn.Module):
    """A norm, a core and what is kept."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.state, self.norm = spec.state, nn.LayerNorm(WIDTH)
        self.core = Dense(spec.inside) if spec.kind == "dense" else Mixture(spec.inside, spec.router)
        if spec.state:
            self.register_buffer("kept", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.state in ("counter", "running"):
            with torch.no_grad():
                self.kept.add_(1) if self.state == "counter" else self.kept.lerp_(y.mean((0, 1)), 0.5)
        if self.state == "counter":
            return x + self.core(y) / self.kept[0].clone()  # the next micro-batch writes it
        return x + self.core(y - (y.mean((0, 1)) if self.state == "batch" else self.kept if self.state else 0))


class Model(Stack):
    def __init__(self, spec: Spec) -> None:
        super().__init__(*map(Block, spec.blocks))
        self.early = spec.early

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.trunk(x if labels is None or not self.early else x + 0.1 * labels)


def drawn(seed: int, number: int) -> Spec:
    """The `number`th of a seed."""
    draw = random.Random(f"{seed} {number}")
    mesh = draw.choice(sorted({*MESHES, "tp"}))
    experts, split = "ep" in mesh, "tp" in mesh
    words = ["plain", *INSIDE]

    def block(place: int) -> BlockSpec:
        kind = "mixture" if experts and (place == 0 or draw.random() < 0.4) else "dense"
        inside = draw.choice(words) if draw.random() < 0.5 else "plain"
        router = draw.choice(LOOKING) if draw.random() < 0.4 else "plain"
        return BlockSpec(kind, inside, router, draw.choice(STATES) if draw.random() < 0.6 else "")

    return Spec(
        mesh,
        tuple(block(place) for place in range(2)),
        split and draw.random() < 0.4,
        draw.random() < 0.2,
        (draw.randrange(20), draw.choice(STYLES)) if draw.random() < 0.25 else None,
        draw.choice(sorted(AFTER)) if draw.random() < 0.12 else "",
        0.1 if draw.random() < 0.3 else None,
        draw.random() < 0.3,
    )


def plan_of(spec: Spec) -> dict[str, Any]:
    """The right plan, or that with its edit."""
    tensor: dict[str, Any] = {}
    sequence: dict[str, Any] = {"layers.0": "split_seq_input", "layers.*.norm": "sequence_parallel", **LAST_NORM}
    experts: dict[str, Any] = {}
    of_slices: dict[str, Any] = {}
    for number, block in enumerate(spec.blocks):
        core = f"layers.{number}.core"
        if block.kind == "dense":
            tensor |= {core: BLOCK_INPUT, f"{core}.up": "colwise", f"{core}.down": "rowwise"}
            sequence |= {core: "gather_seq_input", f"{core}.down": "rowwise_seq"}
        else:
            experts |= {f"{core}.experts": "ep_dispatch", f"{core}.router.gate": "token_wise"}
            sequence[core], of_slices[core] = "replicate_seq", "none"
    sections = [tensor, *([sequence] if spec.sequence_parallel else []), *([experts] if "ep" in spec.mesh else [])]
    if spec.edit is not None:
        place, style = spec.edit
        places = [(section, name) for section in sections for name in section]
        section, name = places[place % len(places)]
        section[name] = style or "none"
    return {
        "version": "1",
        "name": "generated",
        "tensor_parallel": tensor,
        "sequence_parallel": sequence,
        "expert_parallel": {**experts, "sequence_parallel": of_slices} if experts else {},
        "data_parallel": {"backend": "fsdp2", "units": ["layers.*"]},
        "pipeline_parallel": {"layers": "layers.*"},
    }


def adversary_of(spec: Spec) -> Adversary:
    """What both judges are asked."""
    kind = spec.blocks[-1].kind
    more: dict[str, Any] = {"optimizer": momentum} if spec.momentum else {}
    if spec.mesh.startswith("pp"):
        more["stage_loss"] = squared
    if spec.after:
        matrix = "layers.1.core.up" if kind == "dense" else "layers.1.core.router.gate"
        more["after"] = partial(change, AFTER[spec.after], matrix)
    return Adversary(
        "generated",
        partial(Model, spec),
        pairs,
        plan_of(spec),
        "raises" if spec.after else "right",
        "the reference knows",
        mesh=MESHES.get(spec.mesh, {"tp": 2}),
        sequence_parallel=spec.sequence_parallel,
        max_norm=spec.max_norm,
        **more,
    )


@dataclass(frozen=True)
class Outcome:
    """What both said.

    Args:
        judgement: None where it was not asked: only the structure of the plan is wrong.
        other_variant: whether the plan without its expert-parallel section, which `validate` looks at too, is refused and wrong.
    """

    number: int
    spec: Spec
    said: Said
    judgement: Judgement | None
    other_variant: bool = False

    @property
    def problem(self) -> str:
        """ "" where both agree."""
        if "RAISED" in self.said.codes:
            return "RAISED"
        if self.judgement is None:
            return "" if self.spec.edit else "RIGHT REFUSED"
        if self.said.passed:
            fine = self.judgement.right or (self.spec.after and self.judgement.truth == "raised")
            return "" if fine else "WRONG PASSED"
        # What is done afterwards says nothing about the plan.
        designed = bool(self.spec.after) or self.other_variant or set(self.said.codes) <= RIGHT_AND_REFUSED.keys()
        return "RIGHT REFUSED" if self.judgement.right and not designed else ""

    def __str__(self) -> str:
        truth = "not asked" if self.judgement is None else self.judgement
        return f"{self.problem or 'agree'}: {self.number}: {self.spec}\n  {self.said}\n  {truth}"


def outcome_of(seed: int, number: int) -> Outcome:
    """Ask both."""
    spec = drawn(seed, number)
    adversary = adversary_of(spec)
    said = validate(adversary)
    structure = not said.passed and all(code < "SP4" for code in said.codes)
    judgement = None if structure else judge(adversary, anyway=not said.passed)
    right_refused = judgement is not None and judgement.right and not said.passed
    return Outcome(number, spec, said, judgement, right_refused and _wrong_without_experts(adversary))


def _wrong_without_experts(adversary: Adversary) -> bool:
    if not {"ep", "tp"} <= adversary.mesh.keys():
        return False
    without = replace(adversary, mesh={"tp": adversary.mesh["tp"]})
    return not validate(without).passed and not judge(without, anyway=True).right


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversaries.generated", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", type=int, nargs="*", help="these numbers of the seed")
    add_share(parser)
    args = parser.parse_args(argv)
    numbers = args.only if args.only is not None else range(-(-args.count // args.share))
    counts: dict[tuple[str, ...], int] = {}
    problems = 0
    for number in sorted(numbers, key=lambda one: adversary_of(drawn(args.seed, one)).ranks):
        outcome = outcome_of(args.seed, number)
        truth = "structure" if outcome.judgement is None else outcome.judgement.truth
        key = (outcome.spec.mesh, truth, "passed" if outcome.said.passed else "refused")
        counts[key] = counts.get(key, 0) + 1
        problems += bool(outcome.problem)
        if outcome.problem or args.only is not None:
            print(outcome, flush=True)
    print("| mesh | reference | validate | count |\n|---|---|---|---|")
    for key, count in sorted(counts.items()):
        print("| " + " | ".join((*key, str(count))) + " |")
    print(f"\n{sum(counts.values())} models, {problems} problems")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
