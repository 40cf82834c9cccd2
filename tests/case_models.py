"""Models that cases name as `tests.case_models:CALLABLE`: what no configuration of a known architecture
has."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """An MLP of 16 features, 64 wide or as wide as is said."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(16, width, bias=False)
        self.down = nn.Linear(width, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def bfloat16_matrices() -> nn.Module:
    """Two blocks whose second matrix is in bfloat16 and has a bias in float32."""
    blocks = [Block(), Block()]
    for block in blocks:
        block.down.to(torch.bfloat16)
        block.down.bias = nn.Parameter(torch.zeros(block.down.out_features))
    return Stack(blocks)


def frozen_block() -> nn.Module:
    """Two blocks; the first is frozen."""
    first = Block().requires_grad_(False)
    return Stack([first, Block()])


def blocks() -> nn.Module:
    """Two blocks."""
    return Stack([Block(), Block()])


def four_bit() -> nn.Module:
    """Two blocks with weights as bitsandbytes stores them: two values in each byte, of shape [n, 1]."""
    stack = Stack([Block(), Block()])
    for module in stack.modules():
        if isinstance(module, nn.Linear):
            packed = torch.zeros(module.weight.numel() // 2, 1, dtype=torch.uint8)
            module.weight = nn.Parameter(packed, requires_grad=False)
    return stack


class NarrowBlock(Block):
    """Does something else where the features are fewer than 64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.up(x))
        return x + self.down(h if h.shape[-1] == 64 else 2 * h.clone())


class ReadingBlock(Block):
    """Reads the first matrix itself, not by calling its module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)) * self.up.weight[:, 0])


class NoisyBlock(Block):
    """Drops features with a probability that no attribute names."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.dropout(self.down(torch.relu(self.up(x))), 0.2, self.training)


def noisy_blocks() -> nn.Module:
    """Two blocks that draw random numbers in training."""
    return Stack([NoisyBlock(), NoisyBlock()])


def narrow_blocks() -> nn.Module:
    """Two blocks that do something else on a slice."""
    return Stack([NarrowBlock(), NarrowBlock()])


def odd_blocks() -> nn.Module:
    """Two blocks that no number of ranks divides."""
    return Stack([Block(63), Block(63)])


def reading_blocks() -> nn.Module:
    """Two blocks that read a parameter of a module below them."""
    return Stack([ReadingBlock(), ReadingBlock()])


def features(seed: int) -> dict[str, torch.Tensor]:
    """What to call them with: no token ids."""
    return {"x": torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))}


class UnitBlock(Block):
    """Goes back with a gradient of length one, whatever its length was."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient / gradient.norm())
        return x + self.down(hidden)


def unit_blocks() -> nn.Module:
    """Two blocks whose backward is not linear."""
    return Stack([UnitBlock(), UnitBlock()])


class TwoWays(Block):
    """Takes another way where there is an image."""

    def __init__(self) -> None:
        super().__init__()
        self.box = Block()

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) if image is None else super().forward(x) + self.box(image)


def two_ways() -> nn.Module:
    """A part of it is for images."""
    return TwoWays()


def no_features(seed: int) -> dict[str, torch.Tensor]:
    raise FileNotFoundError("no such dataset")


def llama_with(**options: object) -> nn.Module:
    """A small Llama with an adapter of peft."""
    from peft import LoraConfig, PromptTuningConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    config_of = LoraConfig if "target_modules" in options else PromptTuningConfig
    return get_peft_model(LlamaForCausalLM(config), config_of(**options))


def mixtral_with_lora() -> nn.Module:
    """LoRA at the stacks of experts."""
    from peft import LoraConfig, get_peft_model
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return get_peft_model(MixtralForCausalLM(config), LoraConfig(target_parameters=["mlp.experts.down_proj"]))


def llama_with_dora() -> nn.Module:
    """DoRA at the matrices of attention."""
    return llama_with(target_modules=["q_proj", "o_proj"], use_dora=True)


def llama_with_lora() -> nn.Module:
    """LoRA at the matrices of attention."""
    return llama_with(target_modules=["q_proj", "o_proj"])


def llama_with_prompts() -> nn.Module:
    """Prompt tuning: parameters around the model."""
    return llama_with(task_type="CAUSAL_LM", num_virtual_tokens=4)


class Experts(nn.Module):
    """Eight experts, token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 8
        self.up = nn.Parameter(torch.randn(8, 32, 16) * 0.1)
        self.down = nn.Parameter(torch.randn(8, 16, 32) * 0.1)

    def forward(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, slot = torch.where(ids == expert)
            added = torch.relu(tokens[token] @ self.up[expert].T) @ self.down[expert].T
            result = result.index_add(0, token, added * weights[token, slot].unsqueeze(1))
        return result


class ExpertsWithAMean(Experts):
    """Each token's result has the mean of all tokens taken off."""

    def forward(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = super().forward(tokens, ids, weights)
        return result - result.mean(0)


class ChoosingExperts(Experts):
    """Is called with the scores of all experts, and chooses among them itself."""

    def forward(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        weights, ids = scores.topk(2)
        return super().forward(tokens, ids, weights)


class FlatExperts(nn.Module):
    """Eight experts below each other in two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 8
        self.up = nn.Parameter(torch.randn(8 * 32, 16) * 0.1)
        self.down = nn.Parameter(torch.randn(8 * 32, 16) * 0.1)

    def forward(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ups, downs = (p.view(self.num_experts, 32, 16) for p in (self.up, self.down))
        result = torch.zeros_like(tokens)
        for expert, (up, down) in enumerate(zip(ups, downs, strict=True)):
            token, slot = torch.where(ids == expert)
            added = torch.relu(tokens[token] @ up.T) @ down
            result = result.index_add(0, token, added * weights[token, slot].unsqueeze(1))
        return result


class Routed(nn.Module):
    """A block of experts, and `identities` more that add nothing and have no stack."""

    def __init__(self, kind: type[Experts] | type[FlatExperts] = Experts, identities: int = 0) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 8 + identities, bias=False)
        self.experts = kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        scores = self.gate(rows).softmax(-1)
        weights, ids = scores.topk(2)
        chosen = (scores,) if isinstance(self.experts, ChoosingExperts) else (ids, weights)
        return x + self.experts(rows, *chosen).view_as(x)


class ReadingRouted(Routed):
    """Reads its experts' parameters itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.experts.up.mean((0, 1))


def experts_read_outside() -> nn.Module:
    """Two blocks that read the stacks of their experts."""
    return Stack([ReadingRouted(), ReadingRouted()])


def flat_experts() -> nn.Module:
    """Two blocks whose experts' stacks have experts and features in one dim."""
    return Stack([Routed(FlatExperts), Routed(FlatExperts)])


def experts_with_a_mean() -> nn.Module:
    """Two blocks whose experts are not token by token."""
    return Stack([Routed(ExpertsWithAMean), Routed(ExpertsWithAMean)])


def choosing_experts() -> nn.Module:
    """Two blocks whose experts get no ids."""
    return Stack([Routed(ChoosingExperts), Routed(ChoosingExperts)])


def identity_experts() -> nn.Module:
    """Two blocks whose routers choose among more experts than their stacks have."""
    return Stack([Routed(identities=8), Routed(identities=8)])


def sequences(seed: int) -> dict[str, torch.Tensor]:
    """Inputs of a `Stack`."""
    return {"x": torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(seed))}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


def a_mask_token() -> nn.Module:
    """Two blocks, and a parameter that no run reads."""
    model = Stack([Residual(), Residual()])
    model.mask_token = nn.Parameter(torch.zeros(16))
    return model


class Placed(Stack):
    """Blocks whose tokens have three positions each, in the first dim of a tensor."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return super().forward(x + places.sum(0).unsqueeze(-1))


def placed_blocks() -> nn.Module:
    return Placed([Block(), Block()])


def with_places(seed: int) -> dict[str, torch.Tensor]:
    return {**features(seed), "places": torch.zeros(3, *features(seed)["x"].shape[:2])}


class DictBlock(Block):
    """A block that returns a mapping."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": super().forward(x)}


class OfDicts(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)["x"]
        return x


def dict_blocks() -> nn.Module:
    return OfDicts([DictBlock(), DictBlock()])


class SideBySide(Stack):
    """Blocks that all read the same value: the second does not read what the first returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) + self.layers[1](x)


def blocks_side_by_side() -> nn.Module:
    return SideBySide([Block(), Block()])


class Looking(Stack):
    """Code that looks at a parameter of a block, without an operation of torch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * len(layer.up.weight)
        return x


def looking_blocks() -> nn.Module:
    return Looking([Block(), Block()])


def shared_parts() -> nn.Module:
    """Two blocks with one matrix module in both."""
    first, second = Block(), Block()
    second.up = first.up
    return Stack([first, second])


class BoundedTable(Stack):
    """Looks tokens up in a table whose rows it shortens."""

    def __init__(self) -> None:
        super().__init__([Block(), Block()])
        self.table = nn.Embedding(64, 16, max_norm=1.0)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(self.table(input_ids))


def bounded_table() -> nn.Module:
    """Two blocks after a table with `max_norm`."""
    return BoundedTable()


class Told(Stack):
    """Takes off the mean of the hidden features where it is told so."""

    def forward(self, x: torch.Tensor, centred: bool = False) -> torch.Tensor:
        for layer in self.layers:
            hidden = torch.relu(layer.up(x))
            x = x + layer.down(hidden - hidden.mean(-1, keepdim=True) if centred else hidden)
        return x


def told_blocks() -> nn.Module:
    """Two blocks that compute something else with a switch of the call."""
    return Told([Block(), Block()])


class UnitText(Stack):
    """With a head, whose logits its loss reads."""

    def __init__(self) -> None:
        super().__init__([UnitBlock(), UnitBlock()])
        self.head = nn.Linear(16, 128)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(super().forward(x))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def unit_text() -> nn.Module:
    """Two blocks whose backward is not linear, and a head."""
    return UnitText()


def features_and_labels(seed: int) -> dict[str, torch.Tensor]:
    labels = torch.randint(128, (2, 8), generator=torch.Generator().manual_seed(seed))
    return {**features(seed), "labels": labels}


class UnitSiLU(nn.SiLU):
    """As UnitBlock."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient / gradient.norm())
        return hidden


def unit_qwen3() -> nn.Module:
    """A small Qwen3 whose backward is not linear."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2)
    model = Qwen3ForCausalLM(Qwen3Config(hidden_size=32, intermediate_size=64, head_dim=16, vocab_size=64, **sizes))
    for layer in model.model.layers:
        layer.mlp.act_fn = UnitSiLU()
    return model


class NoViews(UnitBlock):
    """Does not run on views."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.act(self.up(x))._is_view():
            raise RuntimeError("needs a tensor with memory of its own")
        return super().forward(x)


def no_views() -> nn.Module:
    return Stack([NoViews(), NoViews()])


class Twice(Stack):
    """Returns its result twice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        every = [x]
        for layer in self.layers:
            every.append(layer(every[-1]))
        return every[-1], every


class ReadsSecond(nn.Module):
    """Reads the second of two that are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Twice([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, every = self.encoder(x)
        return 2.0 * every[-1]


def reads_second() -> nn.Module:
    return ReadsSecond()
