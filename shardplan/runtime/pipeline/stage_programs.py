"""The program of one stage: the whole model's program, restricted to the stage's modules and parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardplan.compiler.lower.program import Program
from shardplan.core.module_program import ModuleProgram
from shardplan.core.stages import PipelineCut
from shardplan.core.tree import ancestors, full_name


def program_of_stage(program: Program, cut: PipelineCut, stage: int) -> Program:
    """The program of a stage. Modules that run in every stage are in all programs."""
    absent = cut.absent_from(stage)
    roots = frozenset(absent)

    def has(name: str) -> bool:
        return name not in roots and not any(name.startswith(f"{root}.") for root in absent)

    def own(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if has(name))

    every = program.resolved.tree.parameters
    around, around_own = ({above for name in names for above in ancestors(name)} for names in (every, own(every)))
    elsewhere = around - around_own  # modules all of whose parameters are in other stages

    def restricted(module: ModuleProgram) -> ModuleProgram:
        """Drop parameters of other stages: code around the blocks runs in each stage, and reads them as zeros there. These have the
        shapes of the unsharded model, so that code which reads no others counts as in that."""
        own = tuple(p for p in module.parameters if has(full_name(module.name, p.name)))
        read = tuple((at, p) for at, p in module.also_reads if has(full_name(full_name(module.name, at), p.name)))
        module = replace(module, parameters=own, also_reads=read)
        return replace(module, divide=(), settings=()) if module.name in elsewhere else module

    whole = program.resolved
    resolved = replace(
        whole,
        dp_units=own(whole.dp_units),
        dp_parts=own(whole.dp_parts),
        dp_experts=own(whole.dp_experts),
        dp_ignored=frozenset(own(whole.dp_ignored)),
        ac_modules=own(whole.ac_modules),
        compile_modules=own(whole.compile_modules),
    )
    variants = {
        overlays: _linked({name: restricted(module) for name, module in modules.items() if has(name)})
        for overlays, modules in program.variants.items()
    }
    return Program(resolved, variants)


def _linked(modules: dict[str, ModuleProgram]) -> dict[str, ModuleProgram]:
    """Drop the scope of an embedding whose partial sum ends in another stage."""
    if any(module.link == "block_input" for module in modules.values()):
        return modules
    return {name: replace(module, link=None) if module.link == "scope" else module for name, module in modules.items()}
