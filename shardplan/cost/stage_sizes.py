"""How many blocks each pipeline stage has: as the plan says, or so that the slowest stage takes the least time."""

from __future__ import annotations

from shardplan.compiler.pipeline_cut import even_sizes
from shardplan.core.balance import BlockCosts, balanced
from shardplan.core.diagnostics import PlanError
from shardplan.core.plan import ResolvedPlan
from shardplan.core.schedules import Schedule
from shardplan.model.found import FoundModel
from shardplan.model.model_findings import reason, refuse

from .cost_codes import NOT_TRACED
from .depth import cut, repeated
from .fake_rank import without_memory
from .meter import Log, Meter
from .part_costs import part_costs
from .running_module import Places
from .step_inputs import inputs_of
from .traced_parts import FIRST, LAST, PartNames, Parts
from .traced_step import run_step

SEQ_LEN = 4096  # where nobody says how long sequences are: attention is a small share of a block's products there


def stage_sizes(
    found: FoundModel,
    resolved: ResolvedPlan,
    pp: int,
    schedule: Schedule,
    stages_per_rank: int | None = None,
    seq_len: int | None = None,
) -> tuple[int, ...]:
    """How many blocks each stage has, by the plan's section `pipeline_parallel`. Equal on all ranks, and on every mesh with as many
    stages. No process group is needed, and one may exist.

    Args:
        resolved: a compiled plan's, on a mesh with pp above 1.
        seq_len: tokens of a sequence; None: 4,096.

    Raises:
        ValueError: fewer blocks than stages; `sizes` of the section that are not one for each stage, or not all blocks.
        PlanError: SP560: the model cannot be run without values, and `balance: cost` needs that.
    """
    section, count = resolved.pipeline_parallel, stages_per_rank or schedule.stages_per_rank
    assert section is not None
    blocks, stages = len(resolved.pp_blocks), pp * count
    if section.sizes is not None:
        if len(section.sizes) != stages or sum(section.sizes) != blocks:
            raise ValueError(
                f"pipeline_parallel.sizes has {len(section.sizes)} numbers with the sum {sum(section.sizes)}, but {stages} stages "
                f"(pp {pp}, {schedule.name}) divide {blocks} blocks"
            )
        return section.sizes
    if section.balance == "layers" or blocks < stages:
        return even_sizes(blocks, stages)
    return balanced(block_costs(found, resolved, seq_len or SEQ_LEN), pp, count)


def block_costs(found: FoundModel, resolved: ResolvedPlan, seq_len: int) -> BlockCosts:
    """What one sequence costs in each block of the unsharded model, forward and backward, by a run without memory of as many
    layers as differ; what is computed again for checkpointing counts.

    Raises:
        PlanError: SP560.
    """
    section = resolved.activation_checkpointing
    depths = repeated(found, section.every if section is not None else 1)
    model = found.build("meta").train()
    cut(model, depths, depths.traced[-1])
    names = PartNames.of(resolved).within({name for name, _ in model.named_modules()})
    again = tuple(f"{name}." for name in resolved.ac_modules) if section is not None and section.mode == "full" else ()
    places, parts = Places(), Parts(names)
    meter = Meter(places, {}, (), parts)
    with without_memory(), meter.running(), places.following(model):
        model.to_empty(device="cpu")
        meter.mark([*model.parameters(), *model.buffers()], "parameters")
        try:
            run_step(model, inputs_of(found, model, 1, seq_len), None, meter)
        except PlanError:
            raise
        except Exception as error:  # whatever the modelling code raises on tensors without values
            raise refuse(
                NOT_TRACED,
                f"{found.name} cannot be run without values, which `balance: cost` does to learn what each block costs",
                help="write `balance: layers`, or how many blocks each stage has: `sizes: [...]`",
                notes=(reason(error),),
            ) from error
        costs = part_costs(meter.log, {}, {})

    recomputed = _recomputed(meter.log, parts, again)

    def of(part: str) -> int:
        return (costs[part].flops if part in costs else 0) + recomputed.get(part, 0)

    return BlockCosts(tuple(of(depths.like(name)) for name in resolved.pp_blocks), of(FIRST), of(LAST))


def _recomputed(log: Log, parts: Parts, again: tuple[str, ...]) -> dict[str, int]:
    """By part, the operations of the forward that checkpointing repeats."""
    found: dict[str, int] = {}
    for ((phase, module), _), operations in log.flops.items():
        if phase == "forward" and f"{module}.".startswith(again) and again:
            part = parts.of(module)
            if part is not None:
                found[part] = found.get(part, 0) + operations
    return found
