"""The tensor-parallel plan of a transformers model as ParallelStyle objects, for torch's `parallelize_module`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from shardplan.runtime.parallel.single_style import OwnStyle
from shardplan.styles import canonical_style

# Torch assumes split inputs for a layer split by input features, and returns split outputs for one split by output features.
TORCH: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    "replicated_with_grad_allreduce": lambda: OwnStyle("replicated_with_grad_allreduce"),
}


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """A new style object for a style name of transformers or shardplan: torch's own style where torch has one.

    Raises:
        ValueError: there is no such style, or torch's `parallelize_module` cannot apply what it means.
        TypeError: not a text.
    """
    if not isinstance(style, str):
        raise TypeError(f"a style is named by text, not by {type(style).__name__}")
    name = canonical_style(style)
    if name in TORCH:
        return TORCH[name]()
    known = ", ".join(TORCH)
    if name is None:
        raise ValueError(f"there is no parallel style {style!r}: the styles are {known}")
    raise ValueError(
        f"torch has no parallel style for {style!r}, only for {known}: apply the plan with shardplan.apply_plan"
    )


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """transformers' own plan for the model, for `parallelize_module`: the entries of the class, of the instance and of the
    models inside it, under their names. The embedding is split over the vocabulary, and the head returns split logits as
    a DTensor.

    Args:
        model: a transformers model.

    Raises:
        ValueError: the model has no plan, or torch's styles cannot do what it needs; `shardplan.apply_plan(model, mesh, "hf")` applies it.
    """
    names: dict[str, str] = {}
    for prefix, plan in (("", type(model)), *model.named_modules()):
        own = getattr(plan, "_tp_plan", None)
        start = f"{prefix}." if prefix else ""
        names |= {start + key: style for key, style in own.items()} if isinstance(own, dict) else {}
    if not names:
        raise ValueError(
            f"transformers has no tensor-parallel plan for {type(model).__name__}: `shardplan init` writes one of ours"
        )
    embedding, head = (_name_of(model, f"get_{which}_embeddings") for which in ("input", "output"))
    if embedding is not None:
        names.setdefault(embedding, "embedding_rowwise")
    styles: dict[str, ParallelStyle] = {}
    for name, style in names.items():
        if name == head and canonical_style(style) == "colwise_gather_output":
            styles[name] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            continue
        try:
            styles[name] = translate_to_torch_parallel_style(style)
        except ValueError as error:
            raise ValueError(f'{name}: {error} (`shardplan.apply_plan(model, mesh, "hf")`)') from None
    return styles


def _name_of(model: nn.Module, getter: str) -> str | None:
    """The name of the module that a getter of transformers returns."""
    wanted = getattr(model, getter, lambda: None)()
    return next((name for name, module in model.named_modules() if wanted is not None and module is wanted), None)
