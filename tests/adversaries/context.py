"""Ranks of cp: what looks at more than one token sees a part of the sequence, with tp, ep and data-parallel ranks of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adversary import Adversary
from .afterwards import CHANGES, SAID, change, unfreeze
from .branches import RARE, asking, larger
from .calls import Looked, ids
from .live import OPTIONS, llama
from .meshes import gpt_oss, mixtral, rows
from .mixtures import LOOKING, OTHERS, TOGETHER, Mixture
from .parts import ATTENTION, HEADS, LENGTH, MLP, WIDTH, Attention, Block, Stack, features, linear
from .sequence import Positions
from .training import adamw

MESHES: dict[str, Mapping[str, int]] = {
    "cp": {"cp": 2},
    "cp4": {"cp": 4},
    "cp_tp": {"cp": 2, "tp": 2},
    "cp_dp": {"dp_shard": 2, "cp": 2},
    "cp_hsdp": {"dp_replicate": 2, "cp": 2},
    "cp_ep": {"cp": 2, "ep": 2},
    "cp_dp_ep": {"dp_shard": 2, "cp": 2, "ep": 4},
    "cp_tp_ep": {"cp": 2, "tp": 2, "ep": 2},
    "cp_pp": {"pp": 2, "cp": 2},
}


class Centred(torch.autograd.Function):
    """The same values; the mean over tokens is taken off the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(1, keepdim=True)


def hooked(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    if x.requires_grad:
        x.register_hook(change)
    return x


def noise(x: Tensor) -> Tensor:
    """The same numbers in each call: those of a slice are those of the first one."""
    return torch.randn(x.shape[1], 1, generator=torch.Generator().manual_seed(0)).to(x)


def convolved(x: Tensor) -> Tensor:
    return F.avg_pool1d(F.pad(x.transpose(1, 2), (2, 0)), 3, 1).transpose(1, 2)


# What is done to the sequence.
TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(1) / 8,
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "detached": lambda x: x / (1 + x.detach().square().mean((0, 1))),
    "norm": lambda x: 3 * F.normalize(x, dim=1),
    "sorted": lambda x: x.sort(1).values,
    "softmax": lambda x: x * x.softmax(1) * 4,
    "first": lambda x: x + x[:, :1],
    "last": lambda x: x + x[:, -1:],
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "convolution": convolved,
    "length": lambda x: x * x.shape[1] / 8,
    "index": lambda x: torch.where((torch.arange(x.shape[1]) < 3)[:, None], x, x / 2),
    "noise": lambda x: x * (1 + noise(x) / 4),
    "branch": lambda x: 2 * x if x.sum() > 0 else x,
    "topk": lambda x: x + x.topk(2, dim=1).values.sum(1, keepdim=True),
    "gradient_centred": lambda x: Centred.apply(x),
    "gradient_norm": lambda x: hooked(x, lambda g: g / (1e-3 + g.norm())),
    "gradient_clipped": lambda x: hooked(x, lambda g: g * (1e-3 / (g.norm() + 1e-9)).clamp(max=1)),
    # Of each token by itself: right.
    "token_norm": lambda x: x / (1 + x.norm(dim=-1, keepdim=True)),
    "token_sorted": lambda x: x.sort(-1).values,
    "gradient_of_tokens": lambda x: hooked(x, lambda g: g / (1e-3 + g.norm(dim=-1, keepdim=True))),
    "gradient_clamped": lambda x: hooked(x, lambda g: g.clamp(-1e-3, 1e-3)),
}
ALONE = ("token_norm", "token_sorted")
LINEAR = tuple(name for name in TOKENS if not name.startswith("gradient_") or name == "gradient_centred")


class Changed(nn.Module):
    """Changes the sequence."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return TOKENS[self.how](x)


class Kept(nn.Module):
    """Keeps something of the tokens from call to call.

    Args:
        what: "mean": a running mean, taken off; "count": how many tokens there were; "last": the last token of the call before, as an
            attribute; "attribute": their mean, as an attribute; "batch_norm": the norm that torch has.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.seen = what, None
        if what == "mean":
            self.register_buffer("mean", torch.zeros(WIDTH))
        if what == "count":
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
        if what == "batch_norm":
            self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "batch_norm":
            return self.norm(x.flatten(0, 1)).view_as(x)
        if self.what == "mean":
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.5)
            return x - self.mean
        if self.what == "count":
            self.count += x.shape[0] * x.shape[1]
            return x
        before, self.seen = self.seen, (x[:, -1:] if self.what == "last" else x.mean(1, keepdim=True)).detach()
        return x if before is None else x + before


class Around(Block):
    """Attention and an MLP; before the second norm the stream is changed, inside of a module of its own."""

    def __init__(self, changed: nn.Module, **parts: nn.Module) -> None:
        super().__init__(**parts)
        self.changed = changed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = self.changed(x)
        return x + self.mlp(self.norm2(x))


class Bare(Block):
    """The same in the block's own code."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = TOKENS[self.how](x)
        return x + self.mlp(self.norm2(x))


def around(how: str) -> nn.Module:
    return Stack(Around(Changed(how)), Around(Changed(how)))


def bare(how: str) -> nn.Module:
    return Stack(Bare(how), Bare(how))


def keeping(what: str) -> nn.Module:
    return Stack(Around(Kept(what)), Around(Kept(what)))


def blocks(**attention: Any) -> nn.Module:
    return Stack(Block(Attention(**attention)), Block(Attention(**attention)))


class Pooled(Stack):
    """A class from one token, or from all."""

    def __init__(self, how: str) -> None:
        super().__init__(Block(), Block())
        self.how, self.head = how, linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        if self.how == "first":
            return self.head(x[:, 0])
        if self.how == "last":
            return self.head(x[:, -1])
        return self.head(x.mean(1) if self.how == "mean" else x.amax(1))


class WithMean(Stack):
    """The mean over the whole input is added to each token of each layer; it has a matrix of its own."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.of_mean = linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.of_mean(x.mean(1, keepdim=True))
        for layer in self.layers:
            x = layer(x) + mean
        return self.norm(x)


class Late(Positions):
    """Learned positions are added after the first layer, to what may be a slice; the layers have attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.norm(self.layers[1](x + self.positions[: x.shape[1]]))


class Watching(Stack):
    """Also returns a number of the values inside."""

    def __init__(self, how: str) -> None:
        super().__init__(Block(), Block())
        self.how = how

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.layers[0](x)
        number = inner.norm() if self.how == "norm" else inner.mean()
        return self.norm(self.layers[1](inner)), number


class Counting(Stack):
    """Computes its own loss, a mean over the tokens that count."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.head = linear(WIDTH, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.trunk(x))
        return F.cross_entropy(logits.flatten(0, 1), labels[:, -logits.shape[1] :].flatten(), ignore_index=-100)


def labelled(seed: int) -> dict[str, Tensor]:
    """Labels; more of them count in the first half."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (2, LENGTH), generator=generator)
    labels[:, 5:] = -100
    labels[0, -1] = 1
    return {**features(seed), "labels": labels}


class Talking(Attention):
    """Heads are mixed after attention, or weighted by their number."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "mixed":
            self.mix = nn.Parameter(torch.randn(HEADS, HEADS) / 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(one(x)) for one in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.how == "mixed":
            y = torch.einsum("bhld,hg->bgld", y, self.mix)
        elif self.how == "weighted":
            y = y * torch.arange(1, y.shape[1] + 1)[:, None, None] / 4
        elif self.how == "centred":
            y = y - y.mean(1, keepdim=True)
        return self.o(y.transpose(1, 2).flatten(-2))


class Reading(Attention):
    """Reads values of its argument besides the projections."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * x.mean() if self.how == "mean" else y + x


class Windowed(Attention):
    """A window by positions, which the mask is made of inside."""

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        mask = (place[:, None] >= place) & (place[:, None] - place < 3)
        q, k, v = (self.heads(one(x)) for one in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(-2))


def with_attention(cls: type[Attention], *args: Any) -> nn.Module:
    return Stack(Block(cls(*args)), Block(cls(*args)))


class Remembering(Attention):
    """Queries and keys are divided by the largest of their norms so far, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, x.norm(dim=-1).max()))
        return super().forward(x) / self.largest


class Handing(Block):
    """Keeps what its MLP computed inside."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        self.held = self.norm2(x)
        return x + self.mlp(self.held)


class Handed(Stack):
    """The second layer gets what the first kept; or the mean of it over tokens."""

    def __init__(self, mean: bool) -> None:
        super().__init__(Handing(), Handing())
        self.mean = mean

    def trunk(self, x: Tensor) -> Tensor:
        first, second = self.layers
        x = first(x)
        return self.norm(second(x + (first.held.mean(1, keepdim=True) if self.mean else first.held)))


def experts(router: str, inside: str = "plain", **options: bool) -> nn.Module:
    return Stack(*(Block(mlp=Mixture(inside, router, **options)) for _ in range(2)))


def hooked_module(hook: Callable[..., Any], name: str, register: str) -> nn.Module:
    model = blocks()
    getattr(model.get_submodule(name), register)(hook)
    return model


def hooked_weight(name: str, register: str = "register_hook") -> nn.Module:
    model = blocks()
    own = (lambda g: g / (1e-3 + g.norm())) if register == "register_hook" else _clip
    getattr(model.get_parameter(name), register)(own)
    return model


def _clip(parameter: Tensor) -> None:
    parameter.grad.div_(1e-3 + parameter.grad.norm())


def centred_tokens(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    return output - output.mean(1, keepdim=True)


def hook_tokens(module: nn.Module) -> None:
    module.register_forward_hook(centred_tokens)


def own_forward_of_tokens(module: nn.Module) -> None:
    own = module.forward
    module.forward = lambda x: centred_tokens(module, (), own(x))


def own_class_of_tokens(module: nn.Module) -> None:
    cls = type(module)

    class Centring(cls):
        def forward(self, x: Tensor) -> Tensor:
            return centred_tokens(self, (), super().forward(x))

    module.__class__ = Centring


def frozen() -> nn.Module:
    """All but the attention of each layer is frozen."""
    model = blocks()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attn" in name)
    return model


def _unit(module: nn.Module, grads: tuple, outer: tuple) -> tuple:
    return tuple(grad if grad is None else grad / (1e-3 + grad.norm()) for grad in grads)


SLICE, INSIDE, OWN = "it sees the tokens of a rank", "it sees all tokens", "of each token by itself"
HOLLOW = "its argument has no values"
SUMMAND = "a gradient of a rank is a summand of the whole one"
ENDS = {"layers.0": "split_seq_input", "norm": "gather_seq_output"}
WHOLE = {**ENDS, "layers.*.attn": "replicate_seq"}
EXCHANGED = {**ENDS, "layers.*.attn": "exchange_heads"}
CHANGED = {"layers.*.changed": "replicate_seq"}
TENSOR = {**ATTENTION, **MLP}
SEQUENCE = {
    "layers.0": "split_seq_input",
    "layers.*.norm{1,2}": "sequence_parallel",
    "layers.*.{attn,mlp}": "gather_seq_input",
    "layers.*.attn.o": "rowwise_seq",
    "layers.*.mlp.down": "rowwise_seq",
    "norm": {"style": "sequence_parallel", "output": "gather"},
}
EXPERTS = {"layers.*.mlp.experts": "ep_dispatch", "layers.*.mlp.router.gate": "token_wise"}


def plan(
    over_cp: Mapping[str, Any], tensor: Mapping[str, Any] = TENSOR, *, split: bool = False, ep: bool = False
) -> dict[str, Any]:
    made: dict[str, Any] = {"version": "1", "name": "adversary", "tensor_parallel": dict(tensor)}
    made["context_parallel"] = dict(over_cp)
    made["data_parallel"] = {"backend": "fsdp2", "units": ["layers.*"]}
    if split:
        made["sequence_parallel"] = SEQUENCE
    if ep:
        made["tensor_parallel"] = ATTENTION
        made["expert_parallel"] = EXPERTS
    return made


def of(
    name: str, mesh: str, build: Any, verdict: Any, why: str, rules: Any = None, inputs: Any = features, **more: Any
) -> Adversary:
    given = plan(WHOLE) if rules is None else rules
    return Adversary(f"over_{name}/{mesh}", build, inputs, given, verdict, why, mesh=MESHES[mesh], **more)


class MeanMlp(nn.Module):
    """Takes off the mean over tokens."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x - x.mean(1, keepdim=True))


def mean_llama() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.post_attention_layernorm = nn.Sequential(layer.post_attention_layernorm, MeanMlp(nn.Identity()))
    return model


def own_loss_llama(kind: str) -> nn.Module:
    """Its loss is another one."""
    model = llama()

    def loss_function(logits: Tensor, labels: Tensor, vocab_size: int, **given: Any) -> Tensor:
        labels = (
            given.get("shift_labels")
            if given.get("shift_labels") is not None
            else F.pad(labels[:, 1:], (0, 1), value=-100)
        )
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
        count = (labels != -100).sum()
        if kind == "rows":
            return (each.view_as(labels).sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()
        return (each.square() if kind == "square" else each).sum() / count

    model.loss_function = loss_function
    return model


def of_transformers(
    name: str, mesh: str, build: Callable[[], nn.Module], verdict: Any, why: str, more: Mapping[str, Any] = {}
) -> Adversary:
    given = {"inputs": rows, "own_tokens": True, **OPTIONS, **more}
    return Adversary(f"over_{name}/{mesh}", build, plan="auto", verdict=verdict, why=why, mesh=MESHES[mesh], **given)


TIED = partial(llama, tie_word_embeddings=True)
MIXTRAL = partial(mixtral, output_router_logits=True)
CALLED = {"own_tokens": False}
PADDED = {side: partial(rows, padded=side) for side in ("left", "right")}
OF_TRANSFORMERS: tuple[Any, ...] = (
    *(("llama", mesh, llama, "right", "as built") for mesh in ("cp", "cp4", "cp_dp", "cp_hsdp", "cp_tp")),
    *(("llama_tied", mesh, TIED, "right", "as built", {"max_norm": 0.1}) for mesh in ("cp", "cp_dp", "cp_tp")),
    ("llama_sequence", "cp_tp", TIED, "right", "as built", {"sequence_parallel": True, "max_norm": 0.1}),
    ("llama_accumulated", "cp_dp", llama, "right", "as built", {"micro_batches": 2, "optimizer": adamw}),
    *(
        (f"llama_{side}", mesh, llama, "right", "rows with padding", {"inputs": PADDED[side]})
        for side, mesh in (("left", "cp_dp"), ("right", "cp_tp"))
    ),
    *(("mixtral", mesh, MIXTRAL, "right", "as built") for mesh in ("cp", "cp_ep", "cp_dp_ep", "cp_tp_ep")),
    ("gpt_oss", "cp_tp", gpt_oss, "right", "as built"),
    ("mean_llama", "cp_dp", mean_llama, "wrong", SLICE),
    *(
        (f"loss_{kind}", mesh, partial(own_loss_llama, kind), "raises", "it is no mean over tokens, or cut as one")
        for kind, mesh in (("rows", "cp_dp"), ("square", "cp"), ("plain", "cp_tp"))
    ),
    *(
        ("llama_uncut", mesh, llama, "raises", "labels are whole, logits a rank's", CALLED)
        for mesh in ("cp_dp", "cp_tp")
    ),
)
OPEN = {name: rule for name, rule in WHOLE.items() if name != "norm"}
IN_TURN = ("cp", "cp_tp", "cp_dp")
ON_EACH = tuple((mesh, name) for mesh in ("cp", "cp_tp") for name in CHANGES)


def in_turn(names: Iterable[str], first: int = 0) -> list[tuple[str, str]]:
    """Each with one of three meshes."""
    return [(IN_TURN[(first + number) % 3], name) for number, name in enumerate(names)]


CASES = (
    *(
        of(f"tokens_{how}", mesh, partial(bare, how), "wrong", SLICE if how in LINEAR else SUMMAND)
        for mesh, how in in_turn(name for name in TOKENS if name not in ALONE)
    ),
    *(
        of(f"tokens_{how}", mesh, partial(bare, how), "right", OWN)
        for mesh, how in (*in_turn(ALONE), ("cp4", ALONE[0]))
    ),
    *(
        of(
            f"inside_{how}",
            mesh,
            partial(around, how),
            "right" if how in LINEAR else "wrong",
            INSIDE if how in LINEAR else SUMMAND,
            plan({**WHOLE, **CHANGED}),
        )
        for mesh, how in in_turn(TOKENS, 1)
    ),
    *(
        of(f"kept_{what}", mesh, partial(keeping, what), "wrong", SLICE)
        for mesh, what in in_turn(("mean", "count", "last", "attribute", "batch_norm"), 2)
    ),
    *(
        of(f"kept_inside_{what}", mesh, partial(keeping, what), "right", INSIDE, plan({**WHOLE, **CHANGED}))
        for mesh, what in in_turn(("mean", "count", "batch_norm"), 2)
    ),
    *(
        of(f"plain_{name}", mesh, partial(blocks, groups=groups), "right", "as built", plan(rules))
        for mesh in ("cp", "cp4", "cp_tp", "cp_dp", "cp_hsdp")
        for name, rules, groups in (("whole", WHOLE, 4), ("exchanged", EXCHANGED, 4), ("shared", EXCHANGED, 2))
        if name != "shared" or mesh not in ("cp4", "cp_tp")
    ),
    *(
        of("plain_shared", mesh, partial(blocks, groups=2), "wrong", "a rank has half of a head", plan(EXCHANGED))
        for mesh in ("cp4", "cp_tp")
    ),
    *(
        of(f"sequence_{name}", "cp_tp", blocks, "right", "as built", plan(rules, split=True), sequence_parallel=True)
        for name, rules in (("whole", WHOLE), ("exchanged", EXCHANGED))
    ),
    *(
        of(
            f"sequence_{how}",
            "cp_tp",
            partial(bare, how),
            "wrong",
            SLICE,
            plan(WHOLE, split=True),
            sequence_parallel=True,
        )
        for how in ("cumsum", "gradient_norm", "index")
    ),
    *(
        of("asks_for_norm", mesh, partial(asking, "norm"), "wrong", SLICE, plan(ENDS, MLP), larger, seeds=RARE)
        for mesh in ("cp", "cp_tp")
    ),
    of("loose", "cp_dp", blocks, "wrong", "attention sees a slice", plan(ENDS)),
    *(
        of(f"pooled_{how}", mesh, partial(Pooled, how), "right", "the sequence is whole again")
        for mesh, how in in_turn(("first", "last", "mean", "max"), 1)
    ),
    *(
        of(f"pooled_open_{how}", mesh, partial(Pooled, how), "wrong", SLICE, plan(OPEN))
        for mesh, how in in_turn(("first", "last", "mean", "max"), 1)
    ),
    *(of("with_mean", mesh, WithMean, "right", "a whole value is added to each token") for mesh in IN_TURN),
    *(of("late_positions", mesh, Late, "wrong", "each rank adds those of the first slice") for mesh in IN_TURN),
    of("positions", "cp_dp", Positions, "right", "they are added in front of the split", plan(ENDS, MLP)),
    *(
        of(f"returned_{how}", mesh, partial(Watching, how), "wrong", SLICE)
        for mesh, how in in_turn(("norm", "mean"), 1)
    ),
    *(of("own_loss", mesh, Counting, "right", "the sequence is whole again", inputs=labelled) for mesh in IN_TURN[1:]),
    *(of("own_loss_open", mesh, Counting, "wrong", SLICE, plan(OPEN), labelled) for mesh in IN_TURN[1:]),
    *(
        of(f"heads_{how}", mesh, partial(with_attention, Talking, how), "wrong", "it sees some heads", plan(EXCHANGED))
        for mesh, how in (("cp", "mixed"), ("cp_dp", "weighted"), ("cp_dp", "centred"))
    ),
    *(
        of(f"heads_whole_{how}", mesh, partial(with_attention, Talking, how), "right", "it sees all heads")
        for mesh, how in (("cp", "mixed"), ("cp_dp", "weighted"), ("cp", "centred"))
    ),
    *(
        of(f"reading_{how}", mesh, partial(with_attention, Reading, how), "wrong", HOLLOW, plan(EXCHANGED))
        for mesh, how in in_turn(("mean", "added"), 2)
    ),
    *(
        of(f"reading_whole_{how}", mesh, partial(with_attention, Reading, how), "right", INSIDE, plan(WHOLE, MLP))
        for mesh, how in in_turn(("mean", "added"), 1)
    ),
    *(
        of("window", mesh, partial(with_attention, Windowed), "right", INSIDE, plan(rules))
        for mesh, rules in (("cp_tp", WHOLE), ("cp_dp", EXCHANGED))
    ),
    of("largest", "cp_dp", partial(with_attention, Remembering), "right", INSIDE),
    of("largest_exchanged", "cp_dp", partial(with_attention, Remembering), "wrong", HOLLOW, plan(EXCHANGED)),
    of("handed", "cp_tp", partial(Handed, False), "right", "both are slices"),
    of("handed_mean", "cp_dp", partial(Handed, True), "wrong", SLICE),
    *(
        of(
            f"router_{kind}",
            mesh,
            partial(experts, kind),
            "wrong",
            "a rank's router sees a slice",
            plan(WHOLE, ep=True),
        )
        for kind, mesh in zip(LOOKING, ("cp_ep", "cp_dp_ep", "cp_ep", "cp_tp_ep", "cp_dp_ep", "cp_ep"), strict=True)
    ),
    *(
        of("experts_plain", mesh, partial(experts, "plain"), "right", OWN, plan(WHOLE, ep=True))
        for mesh in ("cp_ep", "cp_dp_ep", "cp_tp_ep")
    ),
    *(
        of(f"experts_{kind}", mesh, partial(experts, "plain", kind), "wrong", why, plan(WHOLE, ep=True))
        for kind, mesh, why in (
            ("clamped", "cp_ep", SUMMAND),
            ("normalised", "cp_ep", SUMMAND),
            ("rows_normalised", "cp_dp_ep", SUMMAND),
            ("normalised", "cp_dp_ep", OTHERS),
            ("counted", "cp_dp_ep", OTHERS),
            ("averaged", "cp_dp_ep", OTHERS),
        )
    ),
    *(
        of(
            f"experts_{kind}",
            "cp_ep",
            partial(experts, "plain", kind),
            "right",
            TOGETHER,
            plan(WHOLE, ep=True),
            codes=("SP404",),
        )
        for kind in ("averaged", "counted")
    ),
    of("experts_running", "cp_ep", partial(experts, "plain", running=True), "wrong", OTHERS, plan(WHOLE, ep=True)),
    *(
        of(f"hook_{name}", mesh, partial(hooked_module, hook, where, register), "wrong", SLICE)
        for name, hook, where, register, mesh in (
            ("output", centred_tokens, "layers.1.mlp", "register_forward_hook", "cp_dp"),
            ("norm", centred_tokens, "layers.0.norm2", "register_forward_hook", "cp_tp"),
            ("backward", _unit, "layers.1.mlp.up", "register_full_backward_hook", "cp"),
        )
    ),
    of(
        "hook_inside",
        "cp_dp",
        partial(hooked_module, centred_tokens, "layers.1.attn.v", "register_forward_hook"),
        "right",
        INSIDE,
    ),
    *(
        of(f"weight_{name}", mesh, partial(hooked_weight, where, register), "refused", "it is lost with the parameter")
        for name, where, register, mesh in (
            ("hook", "layers.1.mlp.up.weight", "register_hook", "cp_dp"),
            ("accumulated", "layers.0.norm1.weight", "register_post_accumulate_grad_hook", "cp"),
        )
    ),
    of(
        "max_norm",
        "cp_dp",
        Looked,
        "wrong",
        "FSDP2 has a copy of the table, which the forward changes",
        plan(ENDS, MLP),
        ids,
    ),
    of(
        "max_norm",
        "cp",
        Looked,
        "wrong",
        "FSDP2 has a copy of the table, which the forward changes",
        plan(ENDS, MLP),
        ids,
    ),
    of("stages", "cp_pp", blocks, "refused", "cp has no stages", codes=("SP389",)),
    *(
        of(f"after_{name}", mesh, blocks, "raises", SAID, after=partial(change, how, where))
        for mesh in ("cp", "cp_dp", "cp_tp")
        for name, how, where in (
            *((f"{name}_up", CHANGES[name], "layers.1.mlp.up") for name in ("hook_backward", "weight_hook")),
            ("hook_norm", hook_tokens, "layers.1.norm1"),
            ("class_down", own_class_of_tokens, "layers.0.mlp.down"),
            ("forward_block", own_forward_of_tokens, "layers.1"),
        )
    ),
    *(of("after_unfrozen", mesh, frozen, "raises", SAID, after=unfreeze) for mesh in ("cp", "cp_tp")),
    *(of_transformers(*one) for one in OF_TRANSFORMERS),
)
