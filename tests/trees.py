"""Module trees of real architectures at their real dimensions, written down without torch.

The names, kinds, shapes and numbers are those that `transformers` builds; tests/test_models*.py compares
trees built from real modules with the same expectations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shardplan.core.tree import ModuleInfo, ModuleKind, ModuleTree, ParameterInfo

Number = int | float


class Builder:
    """Collects modules; `prefix` is put before every name but the root's."""

    def __init__(self, class_name: str):
        self.modules: dict[str, ModuleInfo] = {"": ModuleInfo("", class_name, "other")}

    def add(
        self,
        name: str,
        class_name: str,
        kind: ModuleKind = "other",
        parameters: Mapping[str, tuple[int, ...]] | None = None,
        dtype: str = "float32",
        **numbers: Number,
    ) -> None:
        infos = tuple(ParameterInfo(p, shape, dtype) for p, shape in (parameters or {}).items())
        self.modules[name] = ModuleInfo(name, class_name, kind, infos, numbers)

    def linear(self, name: str, out: int, into: int, bias: bool = False) -> None:
        parameters = {"weight": (out, into)} | ({"bias": (out,)} if bias else {})
        self.add(name, "Linear", "linear", parameters, in_features=into, out_features=out)

    def conv1d(self, name: str, out: int, into: int) -> None:
        self.add(name, "Conv1D", "conv1d", {"weight": (into, out), "bias": (out,)}, nf=out, nx=into)

    def embedding(self, name: str, rows: int, features: int) -> None:
        self.add(
            name,
            "Embedding",
            "embedding",
            {"weight": (rows, features)},
            num_embeddings=rows,
            embedding_dim=features,
        )

    def norm(self, name: str, size: int, class_name: str = "RMSNorm") -> None:
        self.add(name, class_name, "norm", {"weight": (size,)}, variance_epsilon=1e-6)

    def dropout(self, name: str, p: float) -> None:
        self.add(name, "Dropout", "dropout", p=p, inplace=False)

    def tree(
        self,
        class_names: tuple[str, ...],
        model_type: str | None,
        numbers: Mapping[str, Number],
        tied: tuple[tuple[str, ...], ...] = (),
        base_prefix: str = "",
    ) -> ModuleTree:
        return ModuleTree(class_names, model_type, self.modules, numbers, tied, base_prefix, fields=numbers)


def attention(
    b: Builder,
    name: str,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    class_name: str = "LlamaAttention",
) -> None:
    """Separate q, k, v and o projections; each head has `head_dim` features."""
    groups = heads // kv_heads
    b.add(name, class_name, layer_idx=0, head_dim=head_dim, num_key_value_groups=groups, attention_dropout=0.0)
    b.linear(f"{name}.q_proj", heads * head_dim, hidden)
    b.linear(f"{name}.k_proj", kv_heads * head_dim, hidden)
    b.linear(f"{name}.v_proj", kv_heads * head_dim, hidden)
    b.linear(f"{name}.o_proj", hidden, heads * head_dim)


def gated_mlp(b: Builder, name: str, hidden: int, width: int) -> None:
    b.add(name, "LlamaMLP", hidden_size=hidden, intermediate_size=width)
    b.linear(f"{name}.gate_proj", width, hidden)
    b.linear(f"{name}.up_proj", width, hidden)
    b.linear(f"{name}.down_proj", hidden, width)
    b.add(f"{name}.act_fn", "SiLU")


def decoder(
    *,
    family: str,
    model_type: str,
    vocab: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int | Callable[[int], int],
    head_dim: int,
    width: int,
    qk_norm: bool = False,
    tied: bool = False,
    headless: bool = False,
    experts: int = 0,
) -> ModuleTree:
    """A decoder with the module names of llama. `kv_heads` may differ per layer; `experts` packs the MLPs."""
    classes = (f"{family}Model",) if headless else (f"{family}ForCausalLM",)
    b = Builder(classes[0])
    base = "" if headless else "model."
    if not headless:
        b.add("model", f"{family}Model")
    kv_of = kv_heads if callable(kv_heads) else lambda _: kv_heads
    b.embedding(f"{base}embed_tokens", vocab, hidden)
    b.add(f"{base}layers", "ModuleList", "list")
    for i in range(layers):
        layer = f"{base}layers.{i}"
        b.add(layer, f"{family}DecoderLayer", hidden_size=hidden)
        attention(b, f"{layer}.self_attn", hidden, heads, kv_of(i), head_dim, f"{family}Attention")
        if qk_norm:
            b.norm(f"{layer}.self_attn.q_norm", head_dim)
            b.norm(f"{layer}.self_attn.k_norm", head_dim)
        if experts:
            b.add(f"{layer}.mlp", f"{family}SparseMoeBlock", top_k=2, jitter_noise=0.0)
            b.add(
                f"{layer}.mlp.gate",
                f"{family}TopKRouter",
                parameters={"weight": (experts, hidden)},
                top_k=2,
                num_experts=experts,
                hidden_dim=hidden,
            )
            packed = {"gate_up_proj": (experts, 2 * width, hidden), "down_proj": (experts, hidden, width)}
            b.add(
                f"{layer}.mlp.experts",
                f"{family}Experts",
                parameters=packed,
                num_experts=experts,
                hidden_dim=hidden,
                intermediate_dim=width,
            )
            b.add(f"{layer}.mlp.experts.act_fn", "SiLU")
        else:
            gated_mlp(b, f"{layer}.mlp", hidden, width)
        b.norm(f"{layer}.input_layernorm", hidden)
        b.norm(f"{layer}.post_attention_layernorm", hidden)
    b.norm(f"{base}norm", hidden)
    b.add(f"{base}rotary_emb", f"{family}RotaryEmbedding")
    if not headless:
        b.linear("lm_head", vocab, hidden)
    numbers = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_of(0),
        "head_dim": head_dim,
        "attention_dropout": 0.0,
    }
    groups = (("model.embed_tokens.weight", "lm_head.weight"),) if tied and not headless else ()
    return b.tree(classes, model_type, numbers, groups, "model" if headless else "")


def llama_8b(layers: int = 32, **changes: object) -> ModuleTree:
    """Llama-3.1-8B."""
    facts = dict(
        family="Llama", model_type="llama", vocab=128256, hidden=4096, layers=layers, heads=32, kv_heads=8,
        head_dim=128, width=14336,
    )  # fmt: skip
    return decoder(**(facts | changes))


def llama_405b(layers: int = 126) -> ModuleTree:
    """Llama-3.1-405B."""
    return decoder(
        family="Llama", model_type="llama", vocab=128256, hidden=16384, layers=layers, heads=128, kv_heads=8,
        head_dim=128, width=53248,
    )  # fmt: skip


def qwen3_8b(layers: int = 36) -> ModuleTree:
    """Qwen3-8B."""
    return decoder(
        family="Qwen3", model_type="qwen3", vocab=151936, hidden=4096, layers=layers, heads=32, kv_heads=8,
        head_dim=128, width=12288, qk_norm=True,
    )  # fmt: skip


def mixtral_8x7b(layers: int = 32) -> ModuleTree:
    """Mixtral-8x7B, its experts packed into two parameters a layer."""
    return decoder(
        family="Mixtral", model_type="mixtral", vocab=32000, hidden=4096, layers=layers, heads=32, kv_heads=8,
        head_dim=128, width=14336, experts=8,
    )  # fmt: skip


def llama_tied() -> ModuleTree:
    """SmolLM2-135M: a small llama with tied embeddings, 9 heads and 3 key-value heads."""
    return decoder(
        family="Llama", model_type="llama", vocab=49152, hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64,
        width=1536, tied=True,
    )  # fmt: skip


def llama_1b_tied() -> ModuleTree:
    """Llama-3.2-1B: tied embeddings, 32 heads and 8 key-value heads."""
    return decoder(
        family="Llama", model_type="llama", vocab=128256, hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64,
        width=8192, tied=True,
    )  # fmt: skip


def gpt2(dropout: float = 0.0, layers: int = 12) -> ModuleTree:
    """GPT-2 small: Conv1D, fused q, k and v, learned positions, tied, 50257 tokens."""
    hidden, heads, vocab = 768, 12, 50257
    b = Builder("GPT2LMHeadModel")
    b.add("transformer", "GPT2Model", embed_dim=hidden)
    b.embedding("transformer.wte", vocab, hidden)
    b.embedding("transformer.wpe", 1024, hidden)
    b.dropout("transformer.drop", dropout)
    b.add("transformer.h", "ModuleList", "list")
    for i in range(layers):
        block = f"transformer.h.{i}"
        b.add(block, "GPT2Block")
        b.norm(f"{block}.ln_1", hidden, "LayerNorm")
        b.add(
            f"{block}.attn", "GPT2Attention", embed_dim=hidden, num_heads=heads, head_dim=hidden // heads,
            split_size=hidden,
        )  # fmt: skip
        b.conv1d(f"{block}.attn.c_attn", 3 * hidden, hidden)
        b.conv1d(f"{block}.attn.c_proj", hidden, hidden)
        b.dropout(f"{block}.attn.attn_dropout", dropout)
        b.dropout(f"{block}.attn.resid_dropout", dropout)
        b.norm(f"{block}.ln_2", hidden, "LayerNorm")
        b.add(f"{block}.mlp", "GPT2MLP")
        b.conv1d(f"{block}.mlp.c_fc", 4 * hidden, hidden)
        b.conv1d(f"{block}.mlp.c_proj", hidden, 4 * hidden)
        b.add(f"{block}.mlp.act", "NewGELUActivation")
        b.dropout(f"{block}.mlp.dropout", dropout)
    b.norm("transformer.ln_f", hidden, "LayerNorm")
    b.linear("lm_head", vocab, hidden)
    numbers = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "n_embd": hidden,
        "num_hidden_layers": layers,
        "n_layer": layers,
        "num_attention_heads": heads,
        "n_head": heads,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
    }
    return b.tree(("GPT2LMHeadModel",), "gpt2", numbers, (("transformer.wte.weight", "lm_head.weight"),))


def phi3_mini(layers: int = 32) -> ModuleTree:
    """Phi-3-mini: fused q, k and v, fused gate and up."""
    hidden, heads, width, vocab = 3072, 32, 8192, 32064
    b = Builder("Phi3ForCausalLM")
    b.add("model", "Phi3Model")
    b.embedding("model.embed_tokens", vocab, hidden)
    b.add("model.layers", "ModuleList", "list")
    for i in range(layers):
        layer = f"model.layers.{i}"
        b.add(layer, "Phi3DecoderLayer")
        b.add(
            f"{layer}.self_attn",
            "Phi3Attention",
            head_dim=96,
            num_key_value_heads=heads,
            attention_dropout=0.0,
        )
        b.linear(f"{layer}.self_attn.o_proj", hidden, hidden)
        b.linear(f"{layer}.self_attn.qkv_proj", 3 * hidden, hidden)
        b.add(f"{layer}.mlp", "Phi3MLP")
        b.linear(f"{layer}.mlp.gate_up_proj", 2 * width, hidden)
        b.linear(f"{layer}.mlp.down_proj", hidden, width)
        b.norm(f"{layer}.input_layernorm", hidden)
        b.norm(f"{layer}.post_attention_layernorm", hidden)
    b.norm("model.norm", hidden)
    b.linear("lm_head", vocab, hidden)
    numbers = {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads,
    }  # fmt: skip
    return b.tree(("Phi3ForCausalLM",), "phi3", numbers)


def mixtral_with(gate: ParameterInfo) -> ModuleTree:
    """Mixtral-8x7B of two layers, whose routers own a further parameter or another dtype."""
    tree = mixtral_8x7b(layers=2)
    modules = dict(tree.modules)
    for name, module in tree.modules.items():
        if name.endswith(".gate"):
            kept = tuple(p for p in module.parameters if p.name != gate.name)
            modules[name] = replace(module, parameters=(*kept, gate))
    return replace(tree, modules=modules)


def with_frozen(tree: ModuleTree, *prefixes: str) -> ModuleTree:
    """The same with the parameters of some modules frozen."""
    modules = {
        name: replace(module, parameters=tuple(replace(p, requires_grad=False) for p in module.parameters))
        for name, module in tree.modules.items()
        if any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)
    }
    return replace(tree, modules={**tree.modules, **modules})


def llama_with_adapters(*, dora: bool) -> ModuleTree:
    """Llama-3.1-8B of two layers with LoRA of rank 8 at q_proj and o_proj."""
    tree = llama_8b(layers=2)
    modules = dict(tree.modules)
    for name, module in tree.modules.items():
        if name.endswith(("q_proj", "o_proj")):
            (weight,) = module.parameters
            out, into = weight.shape
            parameters = [
                replace(weight, name="base_layer.weight", requires_grad=False),
                ParameterInfo("lora_A.default.weight", (8, into), adapter="A"),
                ParameterInfo("lora_B.default.weight", (out, 8), adapter="B"),
            ]
            if dora:
                parameters.append(ParameterInfo("lora_magnitude_vector.default.weight", (out,), adapter="magnitude"))
            modules[name] = replace(module, parameters=tuple(parameters), layer="base_layer")
    return replace(tree, modules=modules)


def llama_four_bit(layers: int = 2) -> ModuleTree:
    """Llama-3.1-8B whose matrices bitsandbytes stores: two values in each byte, of shape [n, 1]."""
    tree = llama_8b(layers)
    modules = dict(tree.modules)
    for name, module in tree.modules.items():
        if module.kind == "linear" and name != "lm_head":
            (weight,) = module.parameters
            packed = ParameterInfo("weight", (weight.numel // 2, 1), "uint8", False)
            modules[name] = replace(module, class_name="Linear4bit", parameters=(packed,))
    return replace(tree, modules=modules)


def mamba2_7b(layers: int = 64) -> ModuleTree:
    """Mamba-Codestral 7B: heads of a state, in groups, packed with the gate and the step."""
    hidden, inner, heads, groups, state, vocab = 4096, 8192, 128, 8, 128, 32768
    channels = inner + 2 * groups * state
    b = Builder("Mamba2ForCausalLM")
    b.add("backbone", "Mamba2Model")
    b.embedding("backbone.embeddings", vocab, hidden)
    b.add("backbone.layers", "ModuleList", "list")
    for i in range(layers):
        layer = f"backbone.layers.{i}"
        b.add(layer, "Mamba2Block")
        b.norm(f"{layer}.norm", hidden)
        b.add(
            f"{layer}.mixer", "Mamba2Mixer", "other", {"dt_bias": (heads,), "A_log": (heads,), "D": (heads,)},
            num_heads=heads, hidden_size=hidden, ssm_state_size=state, intermediate_size=inner, n_groups=groups,
            head_dim=64, conv_dim=channels,
        )  # fmt: skip
        mixer = b.modules[f"{layer}.mixer"]
        b.modules[mixer.name] = replace(mixer, training_reads=("conv1d", "norm", "out_proj"))
        b.add(
            f"{layer}.mixer.conv1d", "Conv1d", "depthwise", {"weight": (channels, 1, 4), "bias": (channels,)},
            groups=channels,
        )  # fmt: skip
        b.linear(f"{layer}.mixer.in_proj", inner + channels + heads, hidden)
        b.add(f"{layer}.mixer.norm", "MambaRMSNormGated", "norm", {"weight": (inner,)}, group_size=inner // groups)
        b.linear(f"{layer}.mixer.out_proj", hidden, inner)
    b.norm("backbone.norm_f", hidden)
    b.linear("lm_head", vocab, hidden)
    numbers = {
        "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers, "num_heads": heads, "head_dim": 64,
        "n_groups": groups, "state_size": state,
    }  # fmt: skip
    return b.tree(("Mamba2ForCausalLM", "Mamba2PreTrainedModel"), "mamba2", numbers)


TREES: dict[str, Callable[[], ModuleTree]] = {
    "llama-3.1-8b": llama_8b,
    "llama-3.1-405b": llama_405b,
    "llama-3.2-1b": llama_1b_tied,
    "smollm2-135m": llama_tied,
    "qwen3-8b": qwen3_8b,
    "mixtral-8x7b": mixtral_8x7b,
    "gpt2": lambda: gpt2(dropout=0.1),
    "gpt2-no-dropout": gpt2,
    "phi-3-mini-4k": phi3_mini,
    "mamba-codestral-7b": mamba2_7b,
    "my_models:llama_with_lora": lambda: llama_with_adapters(dora=False),
    "my_models:llama_with_dora": lambda: llama_with_adapters(dora=True),
    "my_models:llama_in_4_bits": llama_four_bit,
    "mixtral-scalar-gate": lambda: mixtral_with(ParameterInfo("scale", ())),
    "my_models:encoder_decoder": lambda: replace(
        llama_8b(), numbers={**llama_8b().numbers, "is_encoder_decoder": True}
    ),
    "my_models:shared_block": lambda: replace(llama_8b(), shared=(("model.layers.0.mlp", "model.layers.6.mlp"),)),
    "llama-frozen-embedding": lambda: with_frozen(llama_8b(layers=2), "model.embed_tokens"),
    "mixtral-float64-bias": lambda: mixtral_with(ParameterInfo("bias", (8,), "float64")),
    "mixtral-float64-router": lambda: mixtral_with(ParameterInfo("weight", (8, 4096), "float64")),
}
