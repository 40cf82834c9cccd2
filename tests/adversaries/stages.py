"""Pipelines of models that keep state, read their labels early, or were changed after they were built."""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from .adversary import Adversary
from .live import OwnMlp, llama
from .meshes import MESHES, on, rows
from .parts import WIDTH, MlpBlock, Stack


class Early(LlamaForCausalLM):
    """What it embeds depends on the labels."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **more: Any) -> Any:
        x = self.model.embed_tokens(input_ids)
        if labels is not None:
            x = x * (1 + 0.5 * (labels != -100).to(x.dtype))[..., None]
        return super().forward(inputs_embeds=x, labels=labels, **more)


class Lengths(LlamaForCausalLM):
    """Reads one entry more than there are documents, which here are as many as rows."""

    def forward(self, input_ids: Tensor, cu_seq_lens_q: Tensor | None = None, **more: Any) -> Any:
        x = self.model.embed_tokens(input_ids)
        if cu_seq_lens_q is not None:
            x = x * (1 + cu_seq_lens_q.diff().to(x.dtype).mean() / 10)
        return super().forward(inputs_embeds=x, **more)


def of_class(cls: type) -> nn.Module:
    model = llama()
    return cls(model.config)


def documents(seed: int) -> dict[str, Any]:
    return rows(seed, cu_seq_lens_q=torch.tensor([0, 2, 5, 8]))


class Counted(nn.Module):
    """Counts its calls, and divides by them."""

    def __init__(self, inner: nn.Module, used: bool) -> None:
        super().__init__()
        self.used = used
        self.up_proj, self.gate_proj, self.down_proj = inner.up_proj, inner.gate_proj, inner.down_proj
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.calls.add_(1)
        y = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y / self.calls.clamp(min=1) if self.used else y


class Running(Counted):
    """Keeps the mean of what it gets, and takes it off."""

    def __init__(self, inner: nn.Module, used: bool) -> None:
        super().__init__(inner, used)
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.5)
        return super().forward(x - self.mean)


def with_state(cls: type, used: bool, which: tuple[int, ...] = (0, 1)) -> nn.Module:
    model = llama()
    for number in which:
        model.model.layers[number].mlp = cls(model.model.layers[number].mlp, used)
    return model


def mean_loss(logits: Tensor, labels: Tensor, vocab_size: int, **more: Any) -> Tensor:
    """Whatever number of items is given, the mean over its own tokens."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), labels[:, 1:].flatten())


def with_loss(function: Any) -> nn.Module:
    model = llama()
    model.loss_function = function
    return model


def wrapped(*names: str) -> nn.Module:
    """Instance forwards that call the bound one and change something."""
    model = llama()

    def wrap(module: nn.Module) -> None:
        own = module.forward
        module.forward = lambda *args, **kwargs: own(*args, **kwargs) * 0.5

    for name in names:
        wrap(model.get_submodule(name))
    return model


def wrapped_root() -> nn.Module:
    model = llama()
    own = model.forward

    def forward(self: nn.Module, input_ids: Tensor, **more: Any) -> Any:
        return own(input_ids=input_ids.clamp(max=30), **more)

    model.forward = types.MethodType(forward, model)
    return model


def root_hooked(before: bool) -> nn.Module:
    model = llama()
    if before:

        def clamp(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
            return args, {**kwargs, "input_ids": kwargs["input_ids"].clamp(max=30)}

        model.register_forward_pre_hook(clamp, with_kwargs=True)
    else:

        def halve(module: nn.Module, args: tuple, output: Any) -> Any:
            output.loss = output.loss / 2
            return output

        model.register_forward_hook(halve)
    return model


def every_second() -> nn.Module:
    """A hook that counts in what it captured, and leaves every second call of a layer out."""
    model, state = llama(), {"calls": 0}

    def skip(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        state["calls"] += module.training
        return args[0] if state["calls"] % 2 == 0 else output

    model.model.layers[1].register_forward_hook(skip)
    return model


def kept() -> nn.Module:
    """One hook keeps what the embedding returns, another adds it to what the last layer returns."""
    model, held = llama(), [None]

    def keep(module: nn.Module, args: tuple, output: Tensor) -> None:
        held[0] = output

    model.model.embed_tokens.register_forward_hook(keep)
    model.model.layers[1].register_forward_hook(lambda module, args, output: output + held[0])
    return model


def backward_hooked(name: str) -> nn.Module:
    """Hooks that halve, of a module, of what it returns and of what it gets."""
    model = llama()
    module = model.get_submodule(name)

    def halved(*gradients: Any) -> tuple[Any, ...]:
        return tuple(None if one is None else one * 0.5 for one in gradients)

    def on_output(module: nn.Module, args: Any, output: Any) -> None:
        output.register_hook(lambda gradient: gradient * 0.5)

    module.register_full_backward_hook(lambda module, inputs, outputs: halved(*inputs))
    module.register_full_backward_pre_hook(lambda module, outputs: halved(*outputs))
    module.register_forward_hook(on_output)
    return model


def clamp_embedding(model: nn.Module) -> None:
    """A hook on the table of embeddings, by whichever name a stage has it."""
    for name, parameter in model.named_parameters():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            hook_parameter(parameter, True)


def _clamp(parameter: Tensor) -> None:
    parameter.grad.clamp_(-1e-4, 1e-4)


def hook_parameter(parameter: Tensor, accumulated: bool) -> None:
    """A hook that cuts off what is large in the gradient of a parameter, or in what has been added up of it."""
    if accumulated:
        parameter.register_post_accumulate_grad_hook(_clamp)
    else:
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))


def tied_hooked(accumulated: bool) -> nn.Module:
    model = llama(tie_word_embeddings=True)
    hook_parameter(model.model.embed_tokens.weight, accumulated)
    return model


class Dropping(OwnMlp):
    """In training every third token is left out."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        keep = torch.arange(x.shape[1]) % 3 != 2
        return y * keep[:, None] if self.training else y


def dropping() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp = Dropping(model.config, False)
    return model


class Own(Stack):
    """A model without a loss of its own."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.trunk(x)


def own() -> nn.Module:
    return Own(MlpBlock(), MlpBlock())


def pairs(seed: int) -> dict[str, Tensor]:
    x, labels = torch.randn(2, 4, 8, WIDTH, generator=torch.Generator().manual_seed(seed)).unbind()
    return {"x": x, "labels": labels}


def squared(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - labels).square().sum()


def own_hooked(accumulated: bool) -> nn.Module:
    model = own()
    hook_parameter(model.layers[1].mlp.up.weight, accumulated)
    return model


OWN_PLAN = {
    "version": "1",
    "name": "own",
    "tensor_parallel": {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"},
    "data_parallel": {"backend": "fsdp2", "units": ["layers.*"]},
    "pipeline_parallel": {"layers": "layers.*"},
}
WITHOUT_DATA = {name: one for name, one in OWN_PLAN.items() if name != "data_parallel"}  # parameters stay the same ones
ONE_BY_ONE = "as the unsharded model on the same micro-batches"
# Live models with code of their own: what cannot be carried over to the reduced model is said so by name.
LIVE = {"codes": ("SP524",)}
BUILDS = {
    "labels_early": partial(of_class, Early),
    "counter": partial(with_state, Counted, False),
    "counter_used": partial(with_state, Counted, True),
    "counter_first": partial(with_state, Counted, True, (0,)),
    "counter_last": partial(with_state, Counted, True, (1,)),
    "running": partial(with_state, Running, False),
    "mean_loss": partial(with_loss, mean_loss),
    "wrapped": partial(wrapped, "model.layers.0.mlp", "model.layers.1.self_attn.o_proj"),
    "wrapped_root": wrapped_root,
    "hooked_before": partial(root_hooked, True),
    "hooked_after": partial(root_hooked, False),
    "dropping": dropping,
    "every_second": every_second,
    "backward_hook_at_the_end": partial(backward_hooked, "model.layers.0"),
    "backward_hook_at_the_beginning": partial(backward_hooked, "model.layers.1"),
    "backward_hook_inside": partial(backward_hooked, "model.layers.0.mlp"),
}
TWO = ("pp_dp", "pp_tp")
CASES = (
    *(on("pp", "llama", build, f"stage_{name}", "right", ONE_BY_ONE, **LIVE) for name, build in BUILDS.items()),
    *(
        on(mesh, "llama", BUILDS[name], f"stage_{name}", "right", ONE_BY_ONE, **LIVE)
        for name, mesh in (
            ("labels_early", "pp_tp"),
            ("counter_used", "pp_dp"),
            ("running", "pp_tp"),
            ("mean_loss", "pp_dp"),
            ("wrapped_root", "pp_dp"),
            ("dropping", "pp_tp"),
            ("backward_hook_at_the_end", "pp_dp"),
            ("backward_hook_at_the_end", "pp_tp"),
        )
    ),
    *(
        on(
            "pp",
            "llama",
            partial(tied_hooked, accumulated),
            f"stage_tied_hook{'_accumulated' * accumulated}",
            "refused",
            "each copy of a tie has a part of the gradient",
        )
        for accumulated in (False, True)
    ),
    on(
        "pp",
        "llama",
        partial(llama, tie_word_embeddings=True),
        "stage_tied_hook_later",
        "raises",
        "each copy of a tie has a part of the gradient",
        after=clamp_embedding,
    ),
    on(
        "pp",
        {
            "version": "1",
            "name": "mine",
            "extends": "llama",
            "pipeline_parallel": {"layers": "model.layers.*", "carry": ["model.embed_tokens"]},
        },
        kept,
        "stage_kept",
        "right",
        "what is kept is carried",
        **LIVE,
    ),
    on("pp", "llama", kept, "stage_kept_without_carry", "wrong", "the last stage has nothing of it", codes=("SP431",)),
    on(
        "pp",
        "llama",
        partial(of_class, Lengths),
        "stage_lengths",
        "right",
        "lengths are no rows",
        inputs=documents,
        **LIVE,
    ),
    on(
        "pp",
        "llama",
        partial(with_state, Counted, True),
        "stage_counter_gpipe",
        "right",
        ONE_BY_ONE,
        schedule="gpipe",
        **LIVE,
    ),
    on(
        "pp",
        "llama",
        partial(llama, num_hidden_layers=4),
        "stage_interleaved",
        "right",
        ONE_BY_ONE,
        schedule="interleaved",
    ),
    *(
        on(
            "dp_tp",
            "llama",
            every_second,
            f"every_second{'_sequence' * both}",
            "right",
            "each run counts for itself",
            sequence_parallel=both,
        )
        for both in (False, True)
    ),
    *(
        Adversary(
            f"stage_own_loss/{mesh}", own, pairs, OWN_PLAN, "right", ONE_BY_ONE, mesh=MESHES[mesh], stage_loss=squared
        )
        for mesh in ("pp", *TWO)
    ),
    *(
        Adversary(
            f"stage_parameter_hook{'_accumulated' * accumulated}/pp",
            partial(own_hooked, accumulated),
            pairs,
            WITHOUT_DATA,
            "right",
            ONE_BY_ONE,
            mesh=MESHES["pp"],
            stage_loss=squared,
        )
        for accumulated in (False, True)
    ),
)
