"""Models and arguments that `apply_plan` does not accept: refused before anything is compiled or touched."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardplan.model.float8 import has_weight_casts

WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel, DataParallel)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
QUANTIZED = (torch.int8, torch.uint8)


def refuse_unfit(model: object) -> nn.Module:
    """The model, as a module.

    Raises:
        TypeError: it is not a module.
        ValueError: it has no forward; it, or a module in it, is compiled or in a data-parallel wrapper, or its weights are
            quantized, or gathered in float8; a dropout probability is not from 0 to 1.
    """
    if not isinstance(model, nn.Module):
        said = f"the word {model!r}" if isinstance(model, str) else f"a {type(model).__name__}"
        raise TypeError(
            f"model must be a torch Module, not {said}: build the model first; `shardplan.validate` accepts names"
        )
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)) and type(model).forward is nn.Module.forward:
        raise ValueError(
            f"the model is a {type(model).__name__}, which has no forward: pass the module that calls its parts"
        )
    for name, module in model.named_modules():
        where = f"the module {name}" if name else "the model"
        if "_orig_mod" in module._modules:
            raise ValueError(
                f"{where} is compiled: unwrap it (`_orig_mod`), and write `compile` in the plan, which compiles after it shards"
            )
        if isinstance(module, WRAPPERS):
            raise ValueError(
                f"{where} is in the wrapper {type(module).__name__}: unwrap it (`.module`), and write `data_parallel` in the "
                "plan, which wraps after it shards"
            )
        if has_weight_casts(module):
            raise ValueError(
                f"{where} has a weight that FSDP2 gathers in float8: convert the model with enable_fsdp_float8_all_gather=False"
            )
        # torch checks only in the constructor, and accepts NaN.
        if isinstance(module, DROPOUTS) and not 0 <= module.p <= 1:
            raise ValueError(f"{where} drops with the probability {module.p}, which must be from 0 to 1")
    _refuse_quantized(model)
    return model


def _refuse_quantized(model: nn.Module) -> None:
    weights = next((f"{name} is {p.dtype}" for name, p in model.named_parameters() if p.dtype in QUANTIZED), None)
    if weights is None and getattr(model, "is_quantized", False) is True:
        weights = "its `is_quantized` is True"
    if weights is not None:
        raise ValueError(
            f"the model's weights are quantized ({weights}): load it in a floating-point dtype, or dequantize it"
        )


def refuse_source(src_data_rank: object, tp: int) -> None:
    """Check the tp rank whose weights count.

    Raises:
        TypeError: it is neither a whole number nor None.
        ValueError: tp has no such rank.
    """
    if src_data_rank is None:
        return
    if not isinstance(src_data_rank, int) or isinstance(src_data_rank, bool):
        raise TypeError(f"src_data_rank must be a rank of tp or None, not {src_data_rank!r}")
    if not 0 <= src_data_rank < tp:
        raise ValueError(f"src_data_rank must be a rank of tp, 0 to {tp - 1}, or None, not {src_data_rank}")


def refuse_scattered(model: nn.Module) -> None:
    """Check that parameters are contiguous, as data-parallel backends that shard them require.

    Raises:
        ValueError: some are not; the message names them.
    """
    scattered = [name for name, parameter in model.named_parameters() if not parameter.is_contiguous()]
    if scattered:
        more = f" and {len(scattered) - 1} more are" if len(scattered) > 1 else " is"
        raise ValueError(
            f"{scattered[0]}{more} not contiguous, which data parallelism cannot shard: "
            "`parameter.data = parameter.data.contiguous()` before apply_plan"
        )
