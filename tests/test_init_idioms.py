"""`init` on the ways in which models of one's own are written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from case_models import Stack
from einops.layers.torch import Rearrange
from torch import Tensor, nn
from torch.nn.utils import parametrize

import shardplan
from shardplan.model.build_tree import tree_of
from shardplan.torchlib.attributes import divide_attributes, set_attributes, whole_attributes

WIDTH, HEADS = 32, 4


def hidden(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(seed))}


class Attention(nn.Module):
    """As diffusers has it: what makes the result is a list of a matrix and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x) for f in (self.to_q, self.to_k, self.to_v))
        head = k.shape[-1] // self.heads
        q, k, v = (t.view(len(x), -1, self.heads, head).transpose(1, 2) for t in (q, k, v))
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(x), -1, self.heads * head)
        return self.to_out[1](self.to_out[0](x))


class Gelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.proj(x).chunk(2, -1)
        return x * F.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self, first: type[nn.Module]) -> None:
        super().__init__()
        self.net = nn.ModuleList([first(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        for module in self.net:
            x = module(x)
        return x


class Block(nn.Module):
    def __init__(self, first: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.ff = Attention(), FeedForward(first)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ff(self.norm2(x))


class Blocks(nn.Module):
    """Blocks between two matrices."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.proj_in, self.proj_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x)
        return self.proj_out(x)


@pytest.mark.parametrize(("first", "style"), [(Gelu, "colwise"), (Gated, "packed_colwise")])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_unlike_siblings_have_rules_of_their_own(first: type[nn.Module], style: str, sequence_parallel: bool) -> None:
    build = partial(Blocks, partial(Block, first))
    made = shardplan.init_plan(shardplan.Model(build(), inputs=hidden), sequence_parallel=sequence_parallel)
    rules = made.document["tensor_parallel"]
    assert (rules["blocks.*.attn.to_out.0"], rules["blocks.*.ff.net.2"]) == ("rowwise", "rowwise")
    assert rules["blocks.*.ff.net.0.proj"] == style and not made.diagnostics
    assert shardplan.verify(
        shardplan.Model(build(), inputs=hidden), made.document, {"tp": 2}, sequence_parallel=sequence_parallel
    ).ok


def listed(*modules: nn.Module) -> nn.Module:
    """A model with the modules as a list in a list."""
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.ModuleDict({"parts": nn.ModuleList(copy.deepcopy(modules))}) for _ in range(2)])
    return model


def with_name(name: str, module: nn.Module) -> nn.Module:
    return nn.ModuleDict({name: module})


@pytest.mark.parametrize(
    ("modules", "pattern"),
    [
        ((nn.Linear(4, 4), nn.Dropout(0.1)), "blocks.*.parts.0"),
        ((nn.Linear(4, 4), nn.Linear(4, 4)), "blocks.*.parts.*"),
        ((nn.Linear(4, 8), nn.Linear(8, 4)), "blocks.*.parts.0"),
        ((with_name("a", nn.Linear(4, 4)), nn.Dropout(0.1)), "blocks.*.parts.*.a"),
        ((with_name("a", nn.Linear(4, 4)), Gated()), "blocks.*.parts.*.a"),
    ],
)
def test_patterns_of_lists(modules: tuple[nn.Module, ...], pattern: str) -> None:
    tree = tree_of(listed(*modules))
    name = next(name for name in tree.modules if name.startswith("blocks.0.parts.0") and not tree.children[name])
    assert tree.pattern(name) == pattern
    assert tree.pattern(name.replace("blocks.0", "blocks.1")) == pattern


class ParallelBlock(nn.Module):
    """Attention and MLP side by side in one module, one head of keys and values in one matrix, and a bias for each head from outside."""

    def __init__(self, reads_width: bool = False) -> None:
        super().__init__()
        self.heads, self.size, self.reads_width = HEADS, WIDTH // HEADS, reads_width
        self.norm = nn.LayerNorm(WIDTH)
        self.wq, self.wkv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * self.size, bias=False)
        self.wo, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.wq(y).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = (one[:, None].expand_as(q) for one in self.wkv(y).split(self.size, -1))
        found = F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2)
        found = found.reshape(x.shape) if self.reads_width else found.flatten(2)
        return x + self.wo(found) + self.down(F.gelu(self.up(y)))


class Alibi(Blocks):
    """Blocks with slopes in a buffer."""

    def __init__(self, reads_width: bool = False) -> None:
        super().__init__(partial(ParallelBlock, reads_width))
        distance = torch.arange(8.0)[:, None] - torch.arange(8.0)
        self.register_buffer("bias", -distance.abs() * 2.0 ** -torch.arange(1.0, HEADS + 1)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x, self.bias)
        return self.proj_out(x)


def test_one_head_of_keys_and_values_in_a_parallel_block() -> None:
    """The norm's result goes to attention and MLP, and a block cannot be split by its input: the residual reads that too."""
    made = shardplan.init_plan(shardplan.Model(Alibi(), inputs=hidden))
    rules = made.document["tensor_parallel"]
    assert [rules[f"blocks.*.{name}"] for name in ("wq", "up", "wo", "down")] == ["colwise"] * 2 + ["rowwise"] * 2
    assert not made.diagnostics and made.document["description"] == "Splits wq, wo, up and down of each layer."
    assert rules["blocks.*"]["shares"] == ["heads", {"bias": {"dim": 0}}]
    assert (rules["blocks.*.wkv"], rules["blocks.*.wkv.weight"]) == (
        "input_with_grad_allreduce",
        "replicated_with_grad_allreduce",
    )
    assert shardplan.verify(shardplan.Model(Alibi(), inputs=hidden), made.document, {"tp": 4}).ok


def test_a_norm_gathers_the_sequence_once_for_a_parallel_block() -> None:
    """`wkv` is whole and returns a part of the gradient; the first block, whose input is split, keeps its share of the bias."""
    model = shardplan.Model(Alibi(), inputs=hidden)
    made = shardplan.init_plan(model, sequence_parallel=True)
    rules = made.document["sequence_parallel"]
    assert rules["blocks.*.norm"] == {"style": "sequence_parallel", "output": "gather", "grad": "partial"}
    assert rules["blocks.0"] == "split_seq_input" and not {"blocks.*.wq", "blocks.*.up"} & rules.keys()
    assert shardplan.verify(model, made.document, {"tp": 4}, sequence_parallel=True).ok and not made.diagnostics


def test_the_line_that_is_named_is_the_one_that_gets_furthest() -> None:
    made = shardplan.init_plan(shardplan.Model(Alibi(reads_width=True), inputs=hidden))
    (finding,) = made.diagnostics
    assert "found.reshape(x.shape)" in " ".join(finding.notes)
    assert "count what is split with -1" in finding.help


def test_the_gradient_of_a_norm_that_several_read_is_summed_after_it() -> None:
    """Nothing that is split is given up for it."""
    whole = {"style": "replicate", "shares": ["heads", {"bias": {"dim": 0}}]}
    rules = {"blocks.*": whole, "blocks.*.wkv": "replicated_with_grad_allreduce"}
    rules |= {"blocks.*.{wq,up}": "colwise", "blocks.*.{wo,down}": "rowwise"}
    plan = {"version": "1", "name": "own", "tensor_parallel": rules}
    report = shardplan.validate(shardplan.Model(Alibi(), inputs=hidden), plan, {"tp": 2})
    assert [one.help for one in report.diagnostics] == ["add `blocks.*.norm: output_with_grad_allreduce`"]


@dataclass(frozen=True)
class Sizes:
    n_heads: int = HEADS

    @property
    def kv_heads(self) -> int:
        return self.n_heads

    @property
    def unknown(self) -> int:
        raise AttributeError("nobody said")


class Counting(nn.Module):
    """Attention that reads its number of heads at one of several places."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.place, self._heads, self.args, self.names = place, HEADS, Sizes(), SimpleNamespace(n_heads=HEADS)
        self.sizes, self.lengths = {"heads": {"all": HEADS}}, (HEADS, WIDTH // HEADS)
        self.pairs, self.config = (("heads", HEADS),), Sizes()

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        heads = self.read()
        q, k, v = (one(x).view(b, t, heads, WIDTH // HEADS).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).reshape(b, t, heads * (WIDTH // HEADS)))

    def read(self) -> int:
        places = {
            "_heads": lambda: self._heads,
            "args.n_heads": lambda: self.args.n_heads,
            "names.n_heads": lambda: self.names.n_heads,
            "sizes.heads.all": lambda: self.sizes["heads"]["all"],
            "lengths.0": lambda: self.lengths[0],
            "pairs.0.1": lambda: dict(self.pairs)["heads"],
            "config.kv_heads": lambda: self.config.kv_heads,
        }
        return places[self.place]()


PLACES = ("_heads", "args.n_heads", "names.n_heads", "sizes.heads.all", "lengths.0", "pairs.0.1", "config.kv_heads")


@pytest.mark.parametrize("place", PLACES)
def test_a_number_of_heads_may_stand_anywhere_in_the_module(place: str) -> None:
    model = shardplan.Model(Blocks(partial(Counting, place)), inputs=hidden)
    made = shardplan.init_plan(model)
    assert made.document["tensor_parallel"]["blocks.*"]["shares"] == [place]
    assert {one.code for one in made.diagnostics} <= {"SP532"}  # the matrices around the blocks
    assert shardplan.verify(model, made.document, {"tp": 4}).ok


class Fused(nn.Module):
    """Attention whose queries, keys and values one matrix makes, cut by a list of lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.shared, self.lengths = HEADS, HEADS // 2, [WIDTH, WIDTH // 2, WIDTH // 2]
        self.qkv, self.o = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(self.lengths, dim=-1)
        counts = (self.heads, self.shared, self.shared)
        q, k, v = (
            one.view(*x.shape[:2], n, WIDTH // HEADS).transpose(1, 2) for one, n in zip(parts, counts, strict=True)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("config", "packed"),
    [
        (None, ["32", "16", "16"]),
        (Sizes(), ["n_heads * 8", "2 * 8", "2 * 8"]),
        (SimpleNamespace(n_heads=HEADS, shared=HEADS // 2), ["n_heads * 8", "shared * 8", "shared * 8"]),
        (SimpleNamespace(dropout=0.5), ["32", "16", "16"]),
    ],
)
def test_a_matrix_is_cut_by_a_list_of_lengths(config: object, packed: list[str]) -> None:
    """The lengths are told by the configuration's numbers, as far as it has them."""

    def build() -> nn.Module:
        model = Blocks(Fused)
        model.config = config
        return model

    made = shardplan.init_plan(shardplan.Model(build(), inputs=hidden))
    rules = made.document["tensor_parallel"]
    assert rules["blocks.*"]["shares"] == ["lengths.0", "lengths.1", "lengths.2", "heads", "shared"]
    assert rules["blocks.*.qkv"]["packed"] == packed
    assert shardplan.verify(shardplan.Model(build(), inputs=hidden), made.document, {"tp": 2}).ok


class GroupedExperts(nn.Module):
    """torchtitan's: one product for the sorted rows of all experts, in bfloat16 whatever the model's dtype is."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        inner = torch._grouped_mm(rows.bfloat16(), self.up.bfloat16().transpose(-2, -1), offs=ends)
        return torch._grouped_mm(F.silu(inner), self.down.bfloat16().transpose(-2, -1), offs=ends).type_as(rows)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4, bias=False), GroupedExperts()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=4)
        made = self.experts(rows[order // 2], counts) * weights.flatten()[order].unsqueeze(-1)
        return x + torch.zeros_like(rows).index_add(0, order // 2, made).view_as(x)


def test_one_product_for_the_rows_of_all_experts() -> None:
    model = shardplan.Model(Blocks(Routed), inputs=hidden)
    made = shardplan.init_plan(model)
    rules = made.document["tensor_parallel"]
    assert (rules["blocks.*.experts.up"], rules["blocks.*.experts.down"]) == ("colwise", "rowwise")
    assert shardplan.verify(model, made.document, {"tp": 2}).ok


class Latent(nn.Module):
    """Multi-head latent attention that knows its own sizes: no configuration says them."""

    def __init__(self) -> None:
        super().__init__()
        self.qk_rope_head_dim, self.latent, self.heads = 4, 8, HEADS
        self.q, self.kv_a = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 8 + 4, bias=False)
        self.kv_b, self.norm = nn.Linear(8, HEADS * (4 + 8), bias=False), nn.RMSNorm(8)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, -1, 8).transpose(1, 2)
        latent, shared = self.kv_a(x).split([8, 4], dim=-1)
        k, v = self.kv_b(self.norm(latent)).view(b, t, -1, 12).transpose(1, 2).split([4, 8], dim=-1)
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, k.shape[1], -1, -1)], dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).reshape(b, t, -1))


def test_the_tail_that_all_heads_read_is_a_number_of_the_module() -> None:
    model = shardplan.Model(Blocks(Latent), inputs=hidden)
    assert shardplan.init_plan(model).document["tensor_parallel"]["blocks.*.o"] == "rowwise"
    rules = {"blocks.*.kv_a": "mla_kv_a_proj", "blocks.*.{q,kv_b}": "colwise", "blocks.*.o": "rowwise"}
    plan = {"version": "1", "name": "own", "tensor_parallel": rules}
    assert shardplan.verify(model, plan, {"tp": 2}).ok
    assert shardplan.compile_plan(model, {"tp": 2}, plan).modules["blocks.0.kv_a"].tail == 4


class Arranged(nn.Module):
    """Attention whose heads a layer of einops splits (x-transformers), and a module whose parameters only another one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.split, self.merge = Rearrange("b t (h d) -> b h t d", h=HEADS), Rearrange("b h t d -> b t (h d)")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(one(x)) for one in (self.q, self.k, self.v))
        return self.o(self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Scaled(Counting):
    """A number for each head, in a parameter with dims for broadcasting around it."""

    def __init__(self, *shape: int) -> None:
        super().__init__("_heads")
        self.scales = nn.Parameter(1 + torch.arange(HEADS * 1.0).view(shape))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (one(x).view(b, t, self._heads, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k * self.scales, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("shape", [(HEADS, 1, 1), (1, HEADS, 1, 1)])
def test_a_number_for_each_head(shape: tuple[int, ...]) -> None:
    model = shardplan.Model(Blocks(partial(Scaled, *shape)), inputs=hidden)
    made = shardplan.init_plan(model)
    assert made.document["tensor_parallel"]["blocks.*.scales"] in ("headwise", "rowwise")
    assert made.document["tensor_parallel"]["blocks.*.o"] == "rowwise"
    assert shardplan.verify(model, made.document, {"tp": 4}).ok


class Wrapped(nn.Module):
    """Attention of torch's in a module that gets the same value thrice (speechbrain's MultiheadAttention)."""

    def __init__(self) -> None:
        super().__init__()
        self.att = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query + self.att(query, key, value, need_weights=False)[0]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_att = Wrapped()

    def forward(self, x: Tensor) -> Tensor:
        return self.self_att(x, x, x)


def test_the_first_layer_needs_no_gradient() -> None:
    """It reads the model's own input, which has none."""
    model = shardplan.Model(Stack([Inner(), Inner()]), inputs=hidden)
    made = shardplan.init_plan(model)
    assert made.document["tensor_parallel"]["layers.*.self_att.att.in_proj_weight"]["style"] == "packed_colwise"
    assert shardplan.verify(model, made.document, {"tp": 2}).ok


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def before(self, x: Tensor) -> Tensor:
        return x * self.scale

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Listed(nn.Module):
    """Blocks that are lists, whose parts the model calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.ModuleList([Arranged(), Gate()]) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for attention, gate in self.layers:
            x = gate(x, attention(gate.before(x)))
        return x


def test_a_part_whose_parameters_other_code_reads_is_no_unit() -> None:
    """FSDP2 gathers them for its own forward only, so its plan was refused (SP410)."""
    made = shardplan.init_plan(shardplan.Model(Listed(), inputs=hidden))
    assert made.document["data_parallel"]["units"] == ["layers.*.0"]
    assert made.document["tensor_parallel"]["layers.*.0.split"]["shares"] == ["_axes_lengths.0.1"]
    assert shardplan.verify(shardplan.Model(Listed(), inputs=hidden), made.document, {"tp": 4}).ok
    whole = made.document | {"data_parallel": {"backend": "fsdp2", "units": ["layers.*"]}}
    report = shardplan.validate(shardplan.Model(Listed(), inputs=hidden), whole, {"tp": 2})
    assert {one.code for one in report.errors} == {"SP410"}


class Normed(nn.Module):
    """Its rows have length 1."""

    def forward(self, weight: Tensor) -> Tensor:
        return F.normalize(weight, dim=-1)


class Parametrised(nn.Module):
    def __init__(self, also: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.others = Gelu() if also else nn.Identity()
        self.back = nn.Linear(4 * WIDTH, WIDTH) if also else nn.Identity()
        for one in (self.up, self.down):
            parametrize.register_parametrization(one, "weight", Normed())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x))) + self.back(self.others(x))


@pytest.mark.parametrize("also", [False, True])
def test_a_parametrised_matrix_stays_whole(also: bool) -> None:
    """Its parameter is deeper in the tree than others; nVIT of vit-pytorch has no other matrix in its blocks."""
    model = shardplan.Model(Blocks(partial(Parametrised, also)), inputs=hidden)
    if also:
        made = shardplan.init_plan(model)
        assert made.document["tensor_parallel"]["blocks.*.others.proj"] == "colwise"
        (said,) = (one.message for one in made.diagnostics if "blocks" in one.message)
        assert said == "blocks.*.{up,down} stay whole on every rank (47.0% of all parameters)"  # 8352 of 17760
        return
    with pytest.raises(shardplan.PlanError) as raised:
        shardplan.init_plan(model)
    assert (
        "blocks.*.{up,down} stay whole on every rank (88.8% of all parameters)" in raised.value.diagnostics[0].notes[0]
    )


def test_numbers_inside_values_are_changed_in_copies() -> None:
    args, table = Sizes(), {"heads": [HEADS, 3]}
    one, other = nn.Module(), nn.Module()
    for module in (one, other):
        module.args, module.table, module.pairs = args, table, ("a", HEADS)
    divide_attributes(one, [("args.n_heads", 2), ("table.heads.0", 2), ("pairs.1", 4)])
    set_attributes(one, [("table.heads.1", 7)])
    assert (one.args.n_heads, one.table, one.pairs) == (HEADS // 2, {"heads": [HEADS // 2, 7]}, ("a", 1))
    assert (other.args, other.table, args.n_heads, table) == (args, table, HEADS, {"heads": [HEADS, 3]})
    with whole_attributes(one):
        assert (one.args, one.table, one.pairs) == (args, table, ("a", HEADS))
    assert one.table["heads"] == [HEADS // 2, 7]
