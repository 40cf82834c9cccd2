"""The ModuleTree says what the module is."""

import pytest
import torch
import transformers
from torch import nn
from transformers import GPT2Config, LlamaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from shardplan.core.diagnostics import PlanError
from shardplan.model import find_model, hf_tp_plan, tree_of, tree_of_config

LLAMA = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.eps = 1e-6


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(2, 4, 4))
        self.bias = nn.Parameter(torch.zeros(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.norm = RMSNorm()


class OwnLinear(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Linear(2, 3), "linear"),
        (OwnLinear(2, 3), "linear"),
        (Conv1D(3, 2), "conv1d"),
        (nn.Embedding(5, 2), "embedding"),
        (nn.LayerNorm(4), "norm"),
        (RMSNorm(), "norm"),
        (Scalar(), "norm"),
        (nn.Dropout(0.1), "dropout"),
        (nn.AlphaDropout(0.1), "dropout"),
        (nn.ModuleList(), "list"),
        (nn.Sequential(nn.LayerNorm(4)), "list"),
        (nn.ModuleDict(), "list"),
        (nn.ParameterList([nn.Parameter(torch.ones(4))]), "other"),
        (Experts(), "other"),
        (Block(), "other"),
        (nn.GELU(), "other"),
        (nn.Conv1d(2, 2, 3), "other"),
    ],
)
def test_kinds(module, kind):
    assert tree_of(module).modules[""].kind == kind


def test_modules_are_those_of_named_modules():
    model = transformers.LlamaForCausalLM(LlamaConfig(**LLAMA))
    tree = tree_of(model)
    assert list(tree.modules) == [name for name, _ in model.named_modules()]
    assert set(tree.parameters) == {name for name, _ in model.named_parameters()}
    for name, (owner, info) in tree.parameters.items():
        parameter = model.get_parameter(name)
        assert info.shape == tuple(parameter.shape) and info.dtype == "float32"
        assert tree.modules[owner.name] is owner
    assert tree.class_names[:3] == ("LlamaForCausalLM", "LlamaPreTrainedModel", "PreTrainedModel")
    assert "Module" not in tree.class_names and "object" not in tree.class_names


def test_numbers_of_modules():
    tree = tree_of(transformers.LlamaForCausalLM(LlamaConfig(**LLAMA, attention_dropout=0.25, pad_token_id=3)))
    attention = tree.modules["model.layers.1.self_attn"].numbers
    assert attention["head_dim"] == 8 and attention["layer_idx"] == 1 and attention["attention_dropout"] == 0.25
    assert attention["is_causal"] is True and "training" not in attention
    assert tree.modules["model.layers.1.self_attn.q_proj"].numbers == {"in_features": 32, "out_features": 32}
    assert tree.modules["model.embed_tokens"].numbers["padding_idx"] == 3


def test_frozen_and_dtype():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    model[0].weight.requires_grad_(False)
    tree = tree_of(model.eval())
    assert not tree.modules["0"].parameter("weight").requires_grad and tree.modules["0"].parameter("bias").requires_grad
    assert tree.modules["1"].parameter("weight").dtype == "bfloat16"
    assert not tree.trains and tree_of(model.train()).trains


def test_numbers_of_configurations():
    numbers = tree_of_config(GPT2Config()).numbers
    assert numbers["n_head"] == numbers["num_attention_heads"] == 12
    assert numbers["head_dim"] == 64, "left out by the configuration, computed as the attention does"
    llama = tree_of_config(LlamaConfig(**LLAMA, head_dim=16, num_key_value_heads=2)).numbers
    assert llama["head_dim"] == 16 and llama["rope_parameters.rope_theta"] == 10000.0
    gemma = find_model("gemma3").tree.numbers
    assert gemma["hidden_size"] == gemma["text_config.hidden_size"] != gemma["vision_config.hidden_size"]
    assert gemma["mm_tokens_per_image"] == 256


def test_lists_of_equal_numbers_count_as_the_number():
    class Config:
        widths = None

        def __init__(self):
            self.widths, self.mixed, self.nothing, self.words = [8, 8, 8], [8, 4], [], ["a", "a"]

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = Config()

    assert tree_of(Own()).numbers == {"widths": 8}
    assert tree_of(Own()).model_type is None


def test_ties_by_identity_and_by_declaration():
    config = LlamaConfig(**LLAMA, tie_word_embeddings=True)
    expected = (("model.embed_tokens.weight", "lm_head.weight"),)
    assert tree_of_config(config).tied == expected
    model = transformers.LlamaForCausalLM(config)
    assert tree_of(model).tied == expected

    with torch.device("meta"):
        untied = transformers.LlamaForCausalLM(config)
        untied.lm_head.weight = nn.Parameter(torch.empty_like(untied.lm_head.weight))
    assert tree_of(untied).tied == expected, "on meta the declaration counts"
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    assert tree_of(model).tied == (), "two real parameters are two"
    assert tree_of_config(LlamaConfig(**LLAMA, tie_word_embeddings=False)).tied == ()


def test_ties_of_models_inside_models():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = transformers.LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True))

    with torch.device("meta"):
        wrapper = Wrapper()
    wrapper.student.lm_head.weight = nn.Parameter(torch.empty_like(wrapper.student.lm_head.weight))
    assert tree_of(wrapper).tied == (("student.model.embed_tokens.weight", "student.lm_head.weight"),)


def test_groups_of_three_and_shared_modules():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(2, 2, bias=False) for _ in range(4))
            self.b.weight = self.a.weight
            self.c.weight = self.a.weight
            self.again = self.d

    tree = tree_of(Own())
    assert tree.tied == (("a.weight", "b.weight", "c.weight"),)
    assert "again" not in tree.modules, "a module object has one name"


def test_base_models():
    base = tree_of(transformers.LlamaModel(LlamaConfig(**LLAMA)))
    assert base.base_prefix == "model"
    assert tree_of(transformers.GPT2Model(GPT2Config(n_layer=1, n_embd=24))).base_prefix == "transformer"
    assert tree_of(nn.Linear(2, 2)).base_prefix == ""
    headed = tree_of(transformers.LlamaForCausalLM(LlamaConfig(**LLAMA)))
    assert headed.base_prefix == ""
    assert {base.address(name) for name in base.modules if name} <= set(headed.modules)


def test_hf_plan():
    model = transformers.LlamaForCausalLM(LlamaConfig(**LLAMA))
    plan, prefix = hf_tp_plan(model)
    assert prefix == "" and plan["model.layers.*.self_attn.q_proj"] == "colwise"
    plan["x"] = "y"
    assert "x" not in model.tp_plan, "a copy"
    plan, prefix = hf_tp_plan(transformers.LlamaModel(LlamaConfig(**LLAMA)))
    assert prefix == "model" and plan["layers.*.self_attn.q_proj"] == "colwise"
    for module in (transformers.GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=24)), nn.Linear(2, 2)):
        with pytest.raises(PlanError) as caught:
            hf_tp_plan(module)
        assert caught.value.diagnostics[0].code == "SP514"


# Model types whose default configuration transformers itself cannot build a causal language model from.
DEFAULT_FAILS = frozenset(
    "cohere_compass_text dbrx dots1 dots3_note emu3 gemma3n gemma4_assistant gemma4_unified_assistant "
    "hunyuan_v1_dense hunyuan_v1_moe lfm2_moe ministral musicgen musicgen_melody nemotron qwen4_exp "
    "qwen4_exp_text reformer".split()
)


@pytest.mark.exhaustive
def test_every_causal_model_type_has_a_tree():
    failed = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            tree = find_model(model_type).tree
        except PlanError as error:
            failed[model_type] = error.diagnostics[0]
            continue
        assert tree.base_prefix == "", model_type
        assert tree.numbers, model_type
    assert set(failed) <= DEFAULT_FAILS, {name: failed[name].notes for name in set(failed) - DEFAULT_FAILS}
