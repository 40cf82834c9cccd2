"""What is done after the proof: another model is applied than was validated, or the model is changed once the plan is applied."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .adversary import Adversary, document
from .live import OPTIONS, OwnMlp, llama, tokens
from .meshes import MESHES, on
from .mixtures import PLAN, mixture
from .parts import ATTENTION, MLP, Mlp, MlpBlock, Stack, features
from .training import frozen_norms


class Parted(Mlp):
    """Takes a part of the mean off: the part is a number, a buffer, or what a closure holds."""

    def __init__(self, kind: str, part: float) -> None:
        super().__init__()
        self.kind = kind
        if kind == "number":
            self.part = part
        elif kind == "nested":
            self.options = {"part": [part]}
        elif kind == "buffer":
            self.register_buffer("part", torch.tensor(part))
        elif kind == "unkept_buffer":
            self.register_buffer("part", torch.tensor(part), persistent=False)
        elif kind == "closure":
            self.change = lambda h: _minus(h, part)
        elif kind == "default":
            self.change = _default(part)
        elif kind == "partial":
            self.change = partial(_minus, part=part)
        elif kind == "code":
            self.change = _minus_all if part else _minus_nothing

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if self.kind in ("closure", "default", "partial", "code"):
            return self.down(self.change(h))
        part = self.options["part"][0] if self.kind == "nested" else self.part
        return self.down(_minus(h, part))


def _minus(h: Tensor, part: Any) -> Tensor:
    return h - part * h.mean(-1, keepdim=True) if part else h


def _minus_all(h: Tensor) -> Tensor:
    return h - h.mean(-1, keepdim=True)


def _minus_nothing(h: Tensor) -> Tensor:
    return h


_minus_all.__qualname__ = _minus_nothing.__qualname__ = "change"


def _default(part: float) -> Callable[[Tensor], Tensor]:
    def change(h: Tensor, part: float = part) -> Tensor:
        return h - part * h.mean(-1, keepdim=True) if part else h

    return change


def parted(kind: str, part: float) -> nn.Module:
    return Stack(*(MlpBlock(Parted(kind, part)) for _ in range(2)))


class Several(Stack):
    """One output, or another that is computed from a rank's own features."""

    def __init__(self, both: bool) -> None:
        super().__init__(MlpBlock(), MlpBlock())
        self.both = both

    def forward(self, x: Tensor) -> Any:
        y = self.trunk(x)
        return (y, self.layers[0].mlp.hidden(x).mean(-1)) if self.both else (y,)


def switched_mlp(normalised: bool) -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.mlp = OwnMlp(model.config, False)
        layer.mlp.normalised = normalised
    return model


def hooked_model(mean: bool) -> nn.Module:
    model = Stack(MlpBlock(), MlpBlock())
    if mean:
        model.layers[1].mlp.up.register_forward_hook(lambda module, args, h: h - h.mean(-1, keepdim=True))
    return model


def plain() -> nn.Module:
    return Stack(MlpBlock(), MlpBlock())


# After the plan was applied: each gets the module that a rule splits.
def centre(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    return output - output.mean(-1, keepdim=True)


def hook(module: nn.Module) -> None:
    module.register_forward_hook(centre)


def hook_before(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(0, keepdim=True),))


def hook_backward(module: nn.Module) -> None:
    module.register_full_backward_pre_hook(lambda module, grads: (grads[0] / (1e-3 + grads[0].norm()),))


def own_forward(module: nn.Module) -> None:
    own = module.forward
    module.forward = lambda x: centre(module, (), own(x))


def own_class(module: nn.Module) -> None:
    cls = type(module)

    class Centred(cls):
        def forward(self, x: Tensor) -> Tensor:
            return centre(self, (), super().forward(x))

    module.__class__ = Centred


def weight_hook(module: nn.Module) -> None:
    module.weight.register_hook(unit)


def stack_hook(module: nn.Module) -> None:
    module.up.register_hook(unit)


def accumulated(change: Callable[[Tensor], Tensor], module: nn.Module) -> None:
    """On every parameter, after its gradient was averaged over data-parallel ranks."""

    def hook(parameter: Tensor) -> None:
        parameter.grad = change(parameter.grad)

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def half(grad: Tensor) -> Tensor:
    return grad / 2


def unit(grad: Tensor) -> Tensor:
    return grad / (1e-3 + grad.norm())


def hook_rows(module: nn.Module) -> None:
    """It looks at all rows that a module returns."""
    module.register_forward_hook(lambda module, args, output: output - output.mean(0, keepdim=True))


CHANGES = {
    "hook": hook,
    "hook_before": hook_before,
    "hook_backward": hook_backward,
    "forward": own_forward,
    "class": own_class,
    "weight_hook": weight_hook,
}


def change(how: Callable[[nn.Module], None], name: str, model: nn.Module) -> None:
    modules = dict(model.named_modules())
    if (module := modules.get(name)) is not None:  # a stage may not have it
        how(module)


def replace(model: nn.Module) -> None:
    """A matrix is exchanged for one with the same whole weight times two."""
    for layer in model.layers[1:]:
        generator = torch.Generator().manual_seed(5)
        fresh = nn.Linear(16, 32, bias=False)
        with torch.no_grad():
            fresh.weight.copy_(torch.randn(32, 16, generator=generator) / 4)
        layer.mlp.up = fresh.to(next(model.parameters()).dtype)


def replace_block(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.layers[1] = MlpBlock(Mlp()).to(next(model.parameters()).dtype)


def unfreeze(model: nn.Module) -> None:
    model.requires_grad_(True)


def frozen_llama(part: str) -> nn.Module:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part not in name)
    return model


BARE = document({**ATTENTION, **MLP})
SHARDED = {**document(MLP), "data_parallel": {"backend": "fsdp2", "units": ["layers.*"]}}
SAID = "it is said, or right"


def later(name: str, build: Callable[[], nn.Module], after: Any, mesh: str = "", **more: Any) -> Adversary:
    sizes = MESHES[mesh] if mesh else {"tp": 2}
    given = {"plan": SHARDED if mesh else document(MLP), **more}
    return Adversary(
        f"after_{name}/{mesh or 'tp'}", build, features, verdict="raises", why=SAID, mesh=sizes, after=after, **given
    )


def of_experts(name: str, how: Callable[[nn.Module], None], part: str, mesh: str, **more: Any) -> Adversary:
    build = partial(mixture, normed=True)
    after = partial(change, how, f"layers.1.mlp.{part}")
    return later(f"experts_{name}", build, after, mesh, **{"plan": PLAN, **more})


ON_EXPERTS = (
    ("rows", hook_rows, "experts"),
    ("backward", hook_backward, "experts"),
    ("inside", hook_rows, "experts.norm"),
    ("inside_backward", hook_backward, "experts.norm"),
    ("forward_inside", own_forward, "experts.norm"),
    ("class_inside", own_class, "experts.norm"),
    ("gate", hook_rows, "router.gate"),
    ("gate_backward", hook_backward, "router.gate"),
    ("weight", weight_hook, "router.gate"),
    ("weight_inside", weight_hook, "experts.norm"),
    ("stack", stack_hook, "experts"),
    ("half_gate", partial(accumulated, half), "router.gate"),
    ("half_inside", partial(accumulated, half), "experts"),
)
UNSHARDED = {section: rules for section, rules in PLAN.items() if section != "data_parallel"}
# A hook after a gradient's average is not the average of its values: data-parallel ranks have one batch here.
ON_ONE_BATCH = (
    ("unit_gate", partial(accumulated, unit), "router.gate"),
    ("unit_inside", partial(accumulated, unit), "experts"),
)
KINDS = ("number", "nested", "buffer", "unkept_buffer", "closure", "default", "partial", "code")
LAYER = "model.layers.1.mlp.up_proj"
CASES = (
    *(
        Adversary(
            f"other_{kind}/tp",
            partial(parted, kind, 1.0),
            features,
            document(MLP),
            "refused" if "buffer" in kind else "raises",
            "another model was validated, or one whose buffers the reduced model fills by itself",
            validated=partial(parted, kind, 0.0),
        )
        for kind in KINDS
    ),
    *(
        Adversary(
            f"other_{name}/tp",
            partial(build, True),
            features,
            document(MLP),
            "raises",
            SAID,
            validated=partial(build, False),
        )
        for name, build in (("outputs", Several), ("hooks", hooked_model))
    ),
    Adversary(
        "other_live/tp",
        partial(switched_mlp, True),
        tokens,
        "llama",
        "raises",
        "another model was validated",
        validated=partial(switched_mlp, False),
        **{**OPTIONS, "codes": ("SP524",)},
    ),
    Adversary("other_same/tp", plain, features, document(MLP), "right", "the same model", validated=plain),
    later("unfrozen_norms", frozen_norms, unfreeze, plan=BARE),
    *(
        on(
            mesh,
            "llama",
            partial(frozen_llama, part),
            f"after_unfrozen_{part}{'_sequence' * both}",
            "raises",
            SAID,
            after=unfreeze,
            sequence_parallel=both,
        )
        for mesh, part, both in (
            ("dp_tp", "norm", False),
            ("dp_tp", "norm", True),
            ("dp", "mlp", False),
            ("pp", "norm", False),
            ("pp_dp", "layers.1", False),
        )
    ),
    *(later(name, plain, partial(change, how, "layers.1.mlp.up")) for name, how in CHANGES.items()),
    *(
        later(name, plain, partial(change, CHANGES[name], "layers.1.mlp.up"), "dp_tp")
        for name in ("hook", "weight_hook")
    ),
    *(
        later(f"{name}_down", plain, partial(change, CHANGES[name], "layers.0.mlp.down"))
        for name in ("hook", "hook_before")
    ),
    later("hook_whole", plain, partial(change, hook, "layers.1.norm")),
    later("hook_root", plain, hook),
    later("replaced", plain, replace),
    later("replaced_block", plain, replace_block),
    *(
        on(mesh, "llama", llama, f"after_llama_{name}", "raises", SAID, after=partial(change, CHANGES[name], LAYER))
        for mesh in ("pp_tp", "dp_tp")
        for name in ("hook", "forward")
    ),
    *(
        on("pp", "llama", llama, f"after_llama_{name}", "raises", SAID, after=partial(change, CHANGES[name], LAYER))
        for name in ("hook", "class")
    ),
    on("dp", "llama", llama, "after_llama_hook", "raises", SAID, after=partial(change, hook, LAYER)),
    *(of_experts(*one, mesh) for mesh in ("ep", "ep_tp", "ep_over_tp") for one in ON_EXPERTS),
    *(of_experts(*one, "dp_ep") for one in ON_EXPERTS if "inside" in one[0]),
    *(of_experts(*one, "ep_tp") for one in ON_ONE_BATCH),
    *(
        of_experts(f"bare_{name}", how, part, "ep_tp", plan=UNSHARDED)
        for name, how, part in (*ON_EXPERTS, *ON_ONE_BATCH)
    ),
    *(
        of_experts(f"sequence_{name}", how, part, "ep_over_tp", sequence_parallel=True)
        for name, how, part in ON_EXPERTS
        if "gate" in part
    ),
)
