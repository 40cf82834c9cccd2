"""A model that is padded with zeros to sizes that tp divides is the model before (pages SP301 and SP303)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import shardplan
from shardplan import Model

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
PADDED = SIZES | {"intermediate_size": 92, "num_attention_heads": 12, "num_key_value_heads": 4}  # two groups more


def _model(sizes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).double()


def _widened(name: str, old: Tensor) -> Tensor:
    """The weight with zeros for the new rows or columns."""
    more = 2 if "mlp." in name else 16 if ".k_proj" in name or ".v_proj" in name else 48
    if ".down_proj" in name or ".o_proj" in name:
        return nn.functional.pad(old, (0, more))
    if "_proj" in name:
        return nn.functional.pad(old, (0, 0, 0, more))
    return old


def _step(model: nn.Module) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))
    made = model(input_ids=ids, labels=ids)
    made.loss.backward()
    return made.loss, made.logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_a_pad_of_zeros_is_exact_and_stays_zero() -> None:
    before, after = _model(SIZES), _model(PADDED)
    after.load_state_dict({name: _widened(name, value) for name, value in before.state_dict().items()})
    loss, logits, gradients = _step(before)
    padded_loss, padded_logits, padded = _step(after)
    assert torch.allclose(loss, padded_loss, rtol=1e-12) and torch.allclose(logits, padded_logits, rtol=1e-12)
    assert len(gradients) == len(padded) and sum(g.shape != padded[n].shape for n, g in gradients.items()) == 14
    for name, gradient in gradients.items():
        assert torch.allclose(_widened(name, gradient), padded[name], rtol=1e-10, atol=1e-14), name


def test_the_refusal_says_what_a_pad_costs_and_the_padded_model_fits() -> None:
    found = shardplan.validate(Model("llama", settings=SIZES), "llama", {"tp": 4}).errors
    pads = {one.code: (one.help or "").partition("; or ")[2] for one in found}
    parameters = {n: sum(p.numel() for p in _model(s).parameters()) for n, s in (("old", SIZES), ("new", PADDED))}
    assert set(pads) == {"SP301", "SP303"}
    assert pads["SP303"].startswith("pad it to 92 in the model (")
    assert pads["SP301"].startswith("pad the heads to 12, and those of keys and values to 4, in the model (")
    said = sum(float(text.split("(")[1].split("%")[0]) for text in pads.values())
    assert abs(said - 100 * (parameters["new"] / parameters["old"] - 1)) < 0.2
    assert shardplan.validate(Model("llama", settings=PADDED), "llama", {"tp": 4}).ok


class Scaled(nn.Module):
    """A buffer with 6 places, and matrices of 48 features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)
        self.register_buffer("scale", torch.linspace(1, 2, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.up(x).unflatten(-1, (-1, 8)) * self.scale[:, None]).flatten(-2))


def test_sizes_that_do_not_divide_a_shared_buffer_are_not_printed() -> None:
    model = Model(nn.Sequential(Scaled()), inputs=lambda seed: {"input": torch.randn(2, 4, 16)})
    rules = {"0": {"style": "replicate", "shares": {"scale": {"dim": 0}}}, "0.up": "colwise", "0.down": "rowwise"}
    plan = {"version": "1", "tensor_parallel": rules}
    refused = shardplan.validate(model, plan, {"tp": 4})
    assert [one.code for one in refused.errors] == ["SP313"]
    assert refused.errors[0].help == "use tp 2, 3 or 6: each fits everything that this plan splits"
    assert refused.tp_lines == ("tp: 1, 2, 3, 6 (by size alone; refused at 4)",)
    assert shardplan.validate(model, plan, {"tp": 3}).proven
    assert shardplan.coverage(model, plan).allowed_tp == {"tensor_parallel": (1, 2, 3, 6)}
