"""Models of transformers that were changed after they were built: what is handed in must be what is proven."""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .adversary import Adversary


def llama(**settings: Any) -> nn.Module:
    """A small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **settings}))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))


def tokens(seed: int) -> dict[str, Any]:
    ids = torch.randint(4, 64, (2, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def loss_of(output: Any) -> Tensor:
    return output.loss


def _squared(self: nn.Module, x: Tensor) -> Tensor:
    return self.down_proj(torch.relu(self.gate_proj(x)).square() * self.up_proj(x))


def _normalised(self: nn.Module, x: Tensor) -> Tensor:
    h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(h / (1 + h.square().sum(-1, keepdim=True)))


def _weighted(self: nn.Module, x: Tensor) -> Tensor:
    """Reads the whole input next to the matrices: its share of the gradient is a partial sum."""
    h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(h * (1 + x.mean(-1, keepdim=True) * h.detach()))


def patched(function: types.FunctionType) -> nn.Module:
    """What patching tools do: a `forward` on each instance."""
    model = llama()
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(function, layer.mlp)
    return model


def attribute() -> nn.Module:
    """A number on an instance that no configuration has."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.scaling = 1.0
    return model


class OwnMlp(nn.Module):
    """An MLP under the same names."""

    def __init__(self, config: Any, normalised: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn, self.normalised = nn.GELU(), normalised

    def forward(self, x: Tensor) -> Tensor:
        return _normalised(self, x) if self.normalised else _squared(self, x)


def replaced(normalised: bool) -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp = OwnMlp(model.config, normalised)
    return model


def changed_class(normalised: bool) -> nn.Module:
    """`module.__class__ = ...`, as kernels are put in."""
    model = llama()
    for layer in model.model.layers:
        cls = type(layer.mlp)
        layer.mlp.__class__ = type("Fast", (cls,), {"forward": _normalised if normalised else _squared})
    return model


def hooked(normalised: bool) -> nn.Module:
    model = llama()

    def hook(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return output / (1 + output.square().sum(-1, keepdim=True)) if normalised else 2 * output

    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(hook)
    return model


def one_layer_hooked() -> nn.Module:
    """The last layer alone has a hook that is wrong on a slice."""
    model = llama()
    up = model.model.layers[-1].mlp.up_proj
    up.register_forward_hook(lambda module, args, output: output - output.mean(-1, keepdim=True))
    return model


def same_layer() -> nn.Module:
    """One layer object stands in the list twice."""
    model = llama()
    model.model.layers[1] = model.model.layers[0]
    return model


def parameter_hook() -> nn.Module:
    model = llama()
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda grad: grad * 0.5)
    return model


def checkpointed(reentrant: bool) -> nn.Module:
    """transformers' own switch for activation checkpointing."""
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


LIVE = ("SP524",)
OPTIONS: dict[str, Any] = {"loss": loss_of, "own_inputs": True}


def _both(name: str, build, verdict: str, why: str, **options: Any) -> tuple[Adversary, ...]:
    """With the built-in plan, without sequence parallelism and with it."""
    return tuple(
        Adversary(f"{name}{ending}", build, tokens, "llama", verdict, why, sequence_parallel=on, **OPTIONS, **options)
        for ending, on in (("", False), ("_sequence", True))
    )


CASES = (
    *_both("live/plain", llama, "right", "as built"),
    *_both("live/tied", partial(llama, tie_word_embeddings=True), "right", "as built"),
    *_both("live/patched", partial(patched, _squared), "right", "element by element", codes=LIVE),
    *_both("live/patched_normalised", partial(patched, _normalised), "wrong", "a sum over a rank's own features"),
    *_both("live/attribute", attribute, "right", "a number", codes=LIVE),
    *_both("live/replaced", partial(replaced, False), "right", "under the same names", codes=LIVE),
    *_both("live/replaced_normalised", partial(replaced, True), "wrong", "a sum over a rank's own features"),
    *_both("live/changed_class", partial(changed_class, False), "right", "element by element", codes=LIVE),
    *_both("live/changed_class_normalised", partial(changed_class, True), "wrong", "a sum over a rank's own features"),
    *_both("live/hooked", partial(hooked, False), "right", "element by element", codes=LIVE),
    *_both("live/hooked_normalised", partial(hooked, True), "wrong", "a sum over a rank's own features"),
    *_both("live/one_layer_hooked", one_layer_hooked, "wrong", "the mean of a rank's own features"),
    *_both("live/same_layer", same_layer, "right", "split once", codes=LIVE)[:1],
    *_both("live/parameter_hook", parameter_hook, "refused", "lost with the parameter", codes=("SP525",)),
    *_both("live/checkpointed", partial(checkpointed, False), "right", "not re-entrant"),
    Adversary("live/qwen3", qwen3, tokens, "qwen3", "right", "as built", **OPTIONS),
    Adversary(
        "live/qwen3_llama",
        qwen3,
        tokens,
        "llama",
        "wrong",
        "Llama's plan has no rule for the norms of queries and keys",
        **OPTIONS,
    ),
    Adversary(
        "live/weighted",
        partial(patched, _weighted),
        tokens,
        "llama",
        "right",
        "the block input is at the MLP",
        codes=LIVE,
        **OPTIONS,
    ),
)
