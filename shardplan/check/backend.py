"""The data-parallel backend is there, and can do what the mesh asks for."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from shardplan.core.diagnostics import Code, Diagnostic, Severity

from .facts import Facts
from .places import field_label

MISSING = Code(
    code="SP551",
    title="a data-parallel backend that is not installed",
    text="""`backend: megatron_fsdp` needs the package of that name, which is not required by this one.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --dp-shard 2
version: "1"
name: mine
data_parallel:
  backend: megatron_fsdp
  units: [model.layers.*]
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --dp-shard 2
version: "1"
name: mine
data_parallel:
  backend: fsdp2
  units: [model.layers.*]
""",
)

REPLICATES = Code(
    code="SP552",
    title="ddp with an axis that splits the model",
    text="""`backend: ddp` keeps the whole model on every rank and averages plain gradients: it cannot shard
(`dp_shard` above 1), and its buckets do not take the DTensor parameters of tensor parallelism. Use `fsdp2`,
which replicates over `dp_replicate` and shards over `dp_shard`.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --dp-shard 2
version: "1"
name: mine
data_parallel:
  backend: ddp
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --dp-replicate 2
version: "1"
name: mine
data_parallel:
  backend: ddp
""",
)

UNSAID = Code(
    code="SP553",
    title="data-parallel ranks without a data_parallel section",
    text="""The mesh has ranks that see other batches (`dp_replicate`, `dp_shard`, `cp`), and the plan does not say how
their gradients come together: they would train apart. Say it in the plan, or apply the plan on the mesh's tp axis alone
(`mesh["tp"]`) and wrap the model yourself.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --dp-shard 2
version: "1"
name: mine
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --dp-shard 2
version: "1"
name: mine
data_parallel:
  units: [model.layers.*]
""",
)

CODES = (MISSING, REPLICATES, UNSAID)

PACKAGES = {"megatron_fsdp": ("megatron_fsdp", "megatron-fsdp")}  # backend -> (module, what pip calls it)


def check(facts: Facts) -> Iterator[Diagnostic]:
    """A data_parallel section that the mesh needs, of a backend that is there and can do what the mesh asks for."""
    section = facts.resolved.data_parallel
    if section is None:
        yield from _unsaid(facts)
        return
    module, package = PACKAGES.get(section.backend, ("", ""))
    if module:
        state = "not installed" if find_spec(module) is None else "installed, but cannot be applied by this version yet"
        yield Diagnostic(
            code=MISSING.code,
            severity=Severity.ERROR,
            message=f"the backend {section.backend} ({package}) is {state}",
            primary=field_label(section, "backend"),
            help="use `backend: fsdp2`",
        )
    sizes = facts.resolved.sizes
    splitting = {axis: size for axis in ("dp_shard", "cp", "tp") if (size := getattr(sizes, axis) or 1) > 1}
    if section.backend == "ddp" and splitting:
        axes = " and ".join(f"{axis}={size}" for axis, size in splitting.items())
        yield Diagnostic(
            code=REPLICATES.code,
            severity=Severity.ERROR,
            message=f"the backend ddp keeps the whole model on every rank, but the mesh has {axes}",
            primary=field_label(section, "backend"),
            help="use `backend: fsdp2`, or a mesh with dp_replicate alone",
        )


def _unsaid(facts: Facts) -> Iterator[Diagnostic]:
    sizes = facts.resolved.sizes
    ranks = {axis: getattr(sizes, axis) for axis in ("dp_replicate", "dp_shard", "cp") if getattr(sizes, axis) > 1}
    if ranks:
        axes = " and ".join(f"{axis}={size}" for axis, size in ranks.items())
        yield Diagnostic(
            code=UNSAID.code,
            severity=Severity.ERROR,
            message=f"the mesh has {axes}, but the plan has no data_parallel section",
            help="add `data_parallel: {backend: fsdp2, units: [...]}`",
        )
