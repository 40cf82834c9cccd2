"""The tensor-parallel plan of a transformers model as ParallelStyle objects, for torch's `parallelize_module`."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from shardplan.core.layout import V
from shardplan.core.tree import full_name
from shardplan.model.model_codes import NO_HF_PLAN
from shardplan.model.model_findings import refuse
from shardplan.runtime.parallel.single_style import OwnStyle
from shardplan.styles import STYLES, Style, canonical_style
from shardplan.styles.style_record import TorchStyle


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """A fresh style object for a style's name, of transformers' or ours: torch's own where it has one.

    Raises:
        ValueError: there is no such style, or torch's `parallelize_module` cannot apply what it means.
        TypeError: no text.
    """
    if not isinstance(style, str):
        raise TypeError(f"a style is named by text, not by {type(style).__name__}")
    name = canonical_style(style)
    found = None if name is None else STYLES.get(name)
    if found is not None and found.torch is not None:
        return _of_torch(found, found.torch)
    known = ", ".join(name for name, record in STYLES.items() if record.torch is not None)
    if name is None:
        raise ValueError(f"there is no parallel style {style!r}: the styles are {known}")
    raise ValueError(
        f"torch has no parallel style for {style!r}, only for {known}: apply the plan with shardplan.apply_plan"
    )


def _of_torch(style: Style, kind: TorchStyle) -> ParallelStyle:
    """Torch's style for ours. Torch takes a split value for granted in front of a split by input features, and hands it on
    behind one by output features."""
    match kind:
        case "ColwiseParallel":
            return ColwiseParallel(output_layouts=Replicate()) if style.gathers_features else ColwiseParallel()
        case "RowwiseParallel":
            return RowwiseParallel() if style.input_sources == (V(-1),) else RowwiseParallel(input_layouts=Replicate())
        case "SequenceParallel":
            return SequenceParallel()
        case "own":
            return OwnStyle(style.name)


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """The model's own plan of transformers for `parallelize_module`: that of its class, of the instance and of the models
    inside it, under their names; with an embedding split over the vocabulary, and a head that returns split logits as a
    DTensor.

    Args:
        model: a transformers model.

    Raises:
        PlanError: it has no plan (SP514).
        ValueError: its plan needs more than torch's styles do; `shardplan.apply_plan(model, mesh, "hf")` applies it.
    """
    names: dict[str, str] = {}
    for prefix, plan in (("", type(model)), *model.named_modules()):
        own = getattr(plan, "_tp_plan", None)
        names |= {full_name(prefix, key): style for key, style in own.items()} if isinstance(own, dict) else {}
    if not names:
        raise refuse(
            NO_HF_PLAN,
            f"transformers has no tensor-parallel plan for {type(model).__name__}",
            help="convert or write one: docs/converting.md",
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
    """The name of the module that a getter of transformers gives."""
    wanted = getattr(model, getter, lambda: None)()
    return next((name for name, module in model.named_modules() if wanted is not None and module is wanted), None)
