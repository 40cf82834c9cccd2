"""transformers' own plan as torch's styles, on real ranks, against the unsharded model."""

from __future__ import annotations

import copy

from processes import on_ranks
from small_models import batch, small_model, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from shardplan.compat import get_hf_tp_shard_plan
from shardplan.runtime.parallel.single_style import OwnStyle


def results(model: nn.Module) -> dict[str, Tensor]:
    """The logits, the loss and every gradient."""
    tokens = batch(1)
    logits = whole(model(input_ids=tokens).logits)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    return {"loss": loss.detach(), "logits": logits.detach(), **gradients}


def errors() -> tuple[dict[str, float], dict[str, float]]:
    """The largest difference over the largest reference value, by name; and the same of the plan without the styles that
    torch lacks."""
    reference = small_model("qwen3", noise=0.1)
    wanted = results(copy.deepcopy(reference))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "tp"))["tp"]
    found = []
    for plan in (get_hf_tp_shard_plan(reference), get_hf_tp_shard_plan(reference)):
        if found:
            plan = {name: style for name, style in plan.items() if not isinstance(style, OwnStyle)}
        model = copy.deepcopy(reference)
        parallelize_module(model, mesh, plan)
        split = [n for n, p in model.named_parameters() if isinstance(p, DTensor) and p.to_local().shape != p.shape]
        assert len(split) == 2 + 2 * 7, split
        sharded = results(model)
        assert sharded.keys() == wanted.keys()
        found.append({n: float((sharded[n] - v).abs().max() / v.abs().max()) for n, v in wanted.items()})
    return found[0], found[1]


def test_qwen3_by_torchs_styles_is_qwen3() -> None:
    for right, without in on_ranks(4, errors):
        assert max(right.values()) < 1e-5, right
        wrong = {name for name, error in without.items() if error > 1e-2}
        assert wrong == {name for name in without if "q_norm" in name or "k_norm" in name}
