"""The reduced model has the structure of the original, trains, and leaves no gradient unproven."""

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, LlamaConfig

from shardplan.core.diagnostics import PlanError
from shardplan.model import find_model, found_from_config, tree_of
from shardplan.model.config_numbers import config_numbers
from shardplan.model.find_anything import find_any
from shardplan.model.reduced.fields import role
from shardplan.model.reduced.outcome import loss_of
from shardplan.model.reduced.reduced_model import ReducedModel, make_reduced_model

CONFIGS = Path(__file__).parent / "cases" / "models"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


@cache
def found(name, **settings):
    return find_model(str(CONFIGS / f"{name}.json"), overrides=settings)


def step(reduced_model: ReducedModel, **inputs) -> tuple[float, dict[str, torch.Tensor | None]]:
    """Loss and gradients of one step."""
    model = reduced_model.build()
    loss = model(**reduced_model.inputs(**inputs)).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


RELATED = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "vocab_size",
    "hidden_size",
)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_relations(name, tp):
    large, small = dict(found(name).tree.numbers), config_numbers(make_reduced_model(found(name), tp=tp).config)
    for field in RELATED:
        if field in large:
            assert (small[field] % tp == 0) == (large[field] % tp == 0), field
            assert (small[field] < tp) == (large[field] < tp), field
    pairs = [("num_attention_heads", "num_key_value_heads"), ("hidden_size", "intermediate_size")]
    for one, other in pairs:
        if one in large and other in large:
            assert (small[one] > small[other]) == (large[one] > large[other])
            assert (small[one] == small[other]) == (large[one] == large[other])
    if "num_key_value_heads" in large:
        assert small["num_attention_heads"] % small["num_key_value_heads"] == 0
    if "num_attention_heads" not in large:
        return
    for tree in (large, small):
        tree["product"] = tree["num_attention_heads"] * tree["head_dim"]
    assert (small["product"] > small["hidden_size"]) == (large["product"] > large["hidden_size"])
    assert (small["product"] < small["hidden_size"]) == (large["product"] < large["hidden_size"])
    if "num_experts_per_tok" in large:
        assert small["num_experts_per_tok"] == 2 and small["num_local_experts"] >= 4


def test_an_indexer_has_more_positions_than_it_chooses():
    """So what it computes decides on the result: choosing all of them, it could be wrong unseen."""
    original = found_from_config(AutoConfig.for_model("deepseek_v32"))
    reduced_model = make_reduced_model(original, tp=2)
    inputs = reduced_model.inputs()
    assert reduced_model.config.index_topk < inputs["input_ids"].shape[1]
    model = reduced_model.build()
    before = model(**inputs).loss
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            parameter.data.neg_()
    assert (model(**inputs).loss - before).abs() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_structure(name):
    original = found(name)
    reduced_model = make_reduced_model(original, tp=2)
    small = tree_of(reduced_model.build())
    assert small.class_names == original.tree.class_names and small.model_type == original.tree.model_type
    assert small.tied == original.tree.tied
    assert set(small.modules) <= set(original.tree.modules)
    for module in small.modules.values():
        assert module.kind == original.tree.modules[module.name].kind
        assert [p.name for p in module.parameters] == [p.name for p in original.tree.modules[module.name].parameters]
    assert sum(p.numel for _, p in small.parameters.values()) < 500_000
    assert small.trains
    for module in small.modules.values():
        dropouts = {k: v for k, v in module.numbers.items() if role(k) == "dropout" or k == "p"}
        assert not any(dropouts.values())
    assert not reduced_model.config.get_text_config().use_cache


@pytest.mark.parametrize("name", NAMES)
def test_a_step(name):
    reduced_model = make_reduced_model(found(name), tp=2)
    for kind in reduced_model.kinds:
        loss, gradients = step(reduced_model, kind=kind)
        assert 0 < loss < 20
        missing = {n for n, g in gradients.items() if g is None}
        assert not missing or (kind == "text" and all(".vision_tower." in n or "projector" in n for n in missing))
        largest = max(g.abs().max() for g in gradients.values() if g is not None)
        for parameter, gradient in gradients.items():
            if gradient is not None:
                assert gradient.isfinite().all()
                # A key's bias shifts all scores of a row alike, so its gradient is zero, where no position
                # rotates it.
                assert gradient.abs().max() > 1e-6 * largest or parameter.endswith("k_proj.bias"), parameter


def test_layer_kinds_are_kept_once():
    assert make_reduced_model(found("gemma-3-1b"), tp=2).layers == (0, 5)
    assert make_reduced_model(found("gemma-3-1b"), tp=2).config.layer_types == ["sliding_attention", "full_attention"]
    assert make_reduced_model(found("gemma-3-4b"), tp=2).layers == (0, 5)
    assert make_reduced_model(found("llama-3.1-405b"), tp=2).layers == (0, 1)
    mixed = found("qwen3-30b-a3b", decoder_sparse_step=3)
    reduced_model = make_reduced_model(mixed, tp=2)
    classes = [
        tree_of(reduced_model.build()).modules[f"model.layers.{i}.mlp"].class_name
        for i in range(len(reduced_model.layers))
    ]
    assert classes == ["Qwen3MoeMLP", "Qwen3MoeMLP", "Qwen3MoeSparseMoeBlock"]


def test_dense_layers_named_by_index():
    config = transformers.Qwen3MoeConfig(num_hidden_layers=8, mlp_only_layers=[0, 5], num_experts=8)
    reduced_model = make_reduced_model(found_from_config(config), tp=2)
    assert reduced_model.layers == (0, 1) and reduced_model.config.mlp_only_layers == [0]


def test_layers_that_differ_in_heads():
    large = transformers.AutoConfig.for_model("laguna")
    config = type(large)(num_hidden_layers=4, num_attention_heads_per_layer=[48, 72, 48, 72])
    reduced_model = make_reduced_model(
        found_from_config(config), tp=2
    )  # the first layer's feed-forward is dense, the others' sparse
    assert reduced_model.layers == (0, 1, 2)
    assert reduced_model.config.num_attention_heads_per_layer == [8, 12, 8]


def test_a_model_reads_no_more_books_than_its_codec_has():
    config = make_reduced_model(find_model("moshi"), tp=2).config
    assert config.num_codebooks == config.audio_encoder_config.num_quantizers == 4


def test_windows_matter():
    reduced_model = make_reduced_model(found("mistral-7b"), tp=2)
    assert reduced_model.config.sliding_window < reduced_model.seq_len // 2
    windowed, _ = step(reduced_model)
    unwindowed, _ = step(make_reduced_model(found("mistral-7b", sliding_window=None), tp=2))
    assert windowed != unwindowed


def test_several_codebooks():
    """A model that adds up a list of tables reads a row for each, and is asked for each."""
    reduced_model = make_reduced_model(found_from_config(transformers.AutoConfig.for_model("musicgen_melody")), tp=2)
    made = reduced_model.inputs(padding="right")
    assert made["input_ids"].shape == (8, 16) and made["labels"].shape == (2, 16, 4)
    assert made["attention_mask"].shape == (2, 16)
    assert len({tuple(row.tolist()) for row in made["input_ids"]}) == 8
    for kind in reduced_model.kinds:
        assert step(reduced_model, kind=kind)[0] > 0


SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
FORMS = {  # class -> its small configuration, and the shapes that its inputs have
    "BertForMultipleChoice": (transformers.BertConfig(**SMALL), {"input_ids": (2, 2, 16), "labels": (2,)}),
    "BertForQuestionAnswering": (transformers.BertConfig(**SMALL), {"start_positions": (2,), "end_positions": (2,)}),
    "WavLMForCTC": (transformers.WavLMConfig(**SMALL, conv_dim=[32] * 7), {"labels": (2, 3)}),
    "LasrForCTC": (
        transformers.LasrCTCConfig(encoder_config=SMALL),
        {"input_features": (2, 128, 128), "attention_mask": (2, 128), "labels": (2, 3)},
    ),
    "LayoutLMModel": (transformers.LayoutLMConfig(**SMALL), {"bbox": (2, 16, 4)}),
    "VideoMAEModel": (
        transformers.VideoMAEConfig(**SMALL, num_frames=4, image_size=32, patch_size=8),
        {"pixel_values": (2, 4, 3, 16, 16)},
    ),
    "PatchTSTModel": (transformers.PatchTSTConfig(num_hidden_layers=2, d_model=64), {"past_values": (2, 32, 1)}),
    "VJEPA2Model": (transformers.VJEPA2Config(frames_per_clip=4), {"pixel_values_videos": (2, 4, 3, 16, 16)}),
    "ImageGPTForImageClassification": (
        transformers.ImageGPTConfig(n_embd=64, n_layer=2, n_head=4, n_positions=64),
        {"input_ids": (2, 16), "labels": (2,)},
    ),
    "Blip2QFormerModel": (
        transformers.Blip2QFormerConfig(**SMALL, encoder_hidden_size=32),
        {"query_embeds": (2, 16, 32), "encoder_hidden_states": (2, 16, 32)},
    ),
    "PocketTTSAudioTokenizerDecoderModel": (
        transformers.PocketTTSAudioTokenizerDecoderConfig(),
        {"latents": (2, 32, 16)},
    ),
    "ViltModel": (transformers.ViltConfig(**SMALL), {"input_ids": (2, 16), "pixel_values": (2, 3, 16, 16)}),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_inputs(name):
    """Arrays of several forms are tried, and labels are those of the head; every one of them has a part in the result."""
    config, shapes = FORMS[name]
    config.architectures = [name]
    reduced_model = make_reduced_model(found_from_config(config), tp=2)
    made = reduced_model.inputs()
    assert {key: tuple(made[key].shape) for key in shapes} == shapes
    model = reduced_model.build()
    loss_of(model(**made)).backward()
    assert any(p.grad is not None and p.grad.abs().max() > 1e-6 for p in model.parameters())


def test_no_dropout_of_a_class_without_a_field_for_it():
    """The heads for token classification have one of 0.1: the checks refused them, as a random number that no plan manages."""
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=4, architectures=["LlamaForTokenClassification"])
    found = found_from_config(config)
    assert found.tree.modules["dropout"].numbers["p"] == 0.1
    ones = torch.ones(1000)
    assert make_reduced_model(found, tp=2).build().train().dropout(ones).equal(ones)


def test_pictures_without_tokens():
    """A model that drops a picture's positions from its logits runs with a picture alone."""
    reduced_model = make_reduced_model(found_from_config(transformers.GitConfig()), tp=2)
    assert reduced_model.kinds == ("pixel_values",) and not reduced_model.unseen
    _, gradients = step(reduced_model)
    assert gradients["git.image_encoder.vision_model.encoder.layers.0.mlp.fc1.weight"].abs().max() > 1e-6


def test_a_vision_tower_alone():
    """Widths that must be each other's stay so, and pictures come as patches with a grid."""
    from transformers.models.dots3_note.modeling_dots3_note import Dots3NoteVisionConfig, Dots3NoteVisionModel

    with torch.device("meta"):
        tower = Dots3NoteVisionModel(Dots3NoteVisionConfig())
    reduced_model = make_reduced_model(tower, tp=2)
    config = reduced_model.config
    assert config.adapter_in_dim == config.hidden_size < config.adapter_out_dim
    made = reduced_model.inputs()
    assert reduced_model.kinds == ("picture",) and made["pixel_values"].shape[0] == made["grid_thw"].prod(1).sum()
    assert reduced_model.build()(**made).pooler_output.shape[-1] == config.adapter_out_dim


@pytest.mark.parametrize("tp", [2, 4])
def test_windows_that_are_compressed_close(tp):
    """A number for each kind of layer is made small too, and tables of experts that a checkpoint fills name several."""
    reduced_model = make_reduced_model(found_from_config(transformers.DeepseekV4Config()), tp=tp)
    assert reduced_model.config.compress_rates == {
        "compressed_sparse_attention": 4,
        "heavily_compressed_attention": 8,
    }
    _, gradients = step(reduced_model)
    reached = {n for n, g in gradients.items() if g is not None and g.abs().max() > 1e-6}
    for i in range(len(reduced_model.layers)):
        assert {f"model.layers.{i}.self_attn.compressor.position_bias", f"model.layers.{i}.mlp.gate.weight"} <= reached
    table = reduced_model.build().model.layers[0].mlp.gate.tid2eid
    assert set(table.unique().tolist()) == set(range(4)) and bool((table[:, 0] != table[:, 1]).all())


@pytest.mark.parametrize("name", ["qwen3-8b", "gpt2", "mixtral-8x7b"])
def test_the_same_every_time(name):
    reduced_model = make_reduced_model(found(name), tp=2)
    state = reduced_model.build().state_dict()
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    again = make_reduced_model(found(name), tp=2).build().state_dict()
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random numbers are left alone"
    assert state.keys() == again.keys() and all(torch.equal(state[key], again[key]) for key in state)
    other = make_reduced_model(found(name), tp=2, seed=1).build().state_dict()
    assert any(not torch.equal(state[key], other[key]) for key in state)
    assert step(reduced_model) != step(reduced_model, seed=1)
    assert step(reduced_model)[0] == step(reduced_model)[0]


def test_models_share_nothing():
    reduced_model = make_reduced_model(found("qwen3-0.6b"), tp=2)
    one, other = reduced_model.build(), reduced_model.build()
    with torch.no_grad():
        one.model.norm.weight.fill_(3)
    one.config.num_attention_heads = 1
    assert other.model.norm.weight.max() < 3 and reduced_model.build().model.norm.weight.max() < 3
    assert other.config.num_attention_heads == reduced_model.config.num_attention_heads != 1


def test_dtypes_agree():
    single = make_reduced_model(found("llama-3.1-8b"), tp=2)
    double = make_reduced_model(found("llama-3.1-8b"), tp=2, dtype=torch.float64)
    assert {p.dtype for p in double.build().parameters()} == {torch.float64}
    for one, other in zip(single.build().parameters(), double.build().parameters(), strict=True):
        assert torch.equal(one, other.float())
    assert step(single)[0] == pytest.approx(step(double)[0], rel=1e-6)


def test_attention_implementations_agree():
    losses = [
        step(make_reduced_model(found("gemma-3-1b"), tp=2, attn_implementation=implementation), padding=padding)[0]
        for padding in (None, "left", "right")
        for implementation in ("sdpa", "eager")
    ]
    assert losses[0::2] == pytest.approx(losses[1::2], rel=1e-5)
    assert len({round(loss, 3) for loss in losses}) == 3, "padding changes the loss"


def test_experts_implementations_agree():
    losses = [
        step(make_reduced_model(found("mixtral-8x7b"), tp=2, experts_implementation=implementation))[0]
        for implementation in ("eager", "grouped_mm")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-1b", "gpt2", "gemma-3-4b"])
@pytest.mark.parametrize("tied", [True, False])
def test_ties_as_asked(name, tied):
    reduced_model = make_reduced_model(found(name), tp=2, tied=tied)
    model = reduced_model.build()
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert bool(tree_of(model).tied) == tied
    step(reduced_model)


def test_nothing_to_tie():
    config = LlamaConfig(architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ValueError, match="no embedding and head to tie"):
        make_reduced_model(found_from_config(config), tp=2, tied=True)


def test_inputs():
    reduced_model = make_reduced_model(found("phi-3-mini-4k"), tp=4)
    inputs = reduced_model.inputs(3)
    assert inputs.keys() == {"input_ids", "labels"} and inputs["input_ids"].shape == (2, reduced_model.seq_len)
    assert reduced_model.seq_len % 4 == 0 and reduced_model.seq_len > 4
    pad = reduced_model.config.pad_token_id
    assert (inputs["input_ids"] == pad).any(), "the row that may not learn is looked up"
    assert len(inputs["input_ids"].unique()) > reduced_model.config.vocab_size // 2
    assert all(torch.equal(inputs[key], reduced_model.inputs(3)[key]) for key in inputs)
    masked = reduced_model.inputs(3, padding="left")
    assert masked["attention_mask"].sum(1).tolist() == [reduced_model.seq_len, reduced_model.seq_len * 3 // 4]
    assert masked["attention_mask"][1, 0] == 0 and masked["labels"][1, 0] == -100
    with pytest.raises(ValueError, match="inputs of kind text, not 'image'"):
        reduced_model.inputs(kind="image")


def test_image_inputs():
    reduced_model = make_reduced_model(found("gemma-3-4b"), tp=2)
    assert reduced_model.kinds == ("text", "image")
    token = reduced_model.config.image_token_id
    assert token < reduced_model.config.text_config.vocab_size
    assert not (reduced_model.inputs(kind="text")["input_ids"] == token).any()
    inputs = reduced_model.inputs(kind="image")
    per_image = reduced_model.config.mm_tokens_per_image
    assert (inputs["input_ids"] == token).sum(1).tolist() == [per_image] * 2
    model = reduced_model.build()
    before = model(**inputs).logits
    inputs["pixel_values"] = inputs["pixel_values"] + 1
    assert not torch.allclose(before, model(**inputs).logits), "the image is seen"


def test_ids_lie_in_the_smallest_table_that_code_lets_them_reach(monkeypatch):
    """The per-layer table of Gemma 3n lacks the last ids. Its code keeps them from the table; that of older transformers does not."""
    made = make_reduced_model(find_model("gemma3n_text"), tp=2)
    rows = made.config.vocab_size_per_layer_input
    assert int(made.inputs()["input_ids"].max()) >= rows

    def per_layer(self, input_ids):
        return self.embed_tokens_per_layer(input_ids).unflatten(-1, (self.config.num_hidden_layers, -1))

    monkeypatch.setattr(transformers.Gemma3nTextModel, "get_per_layer_inputs", per_layer)
    older = make_reduced_model(find_model("gemma3n_text"), tp=2)
    assert all(int(older.inputs(seed)["input_ids"].max()) < rows for seed in range(4))
    step(older)


@pytest.mark.parametrize(
    "architecture", ["LlamaModel", "LlamaForSequenceClassification", "LlamaForTokenClassification"]
)
def test_other_heads(architecture):
    config = LlamaConfig(architectures=[architecture], num_hidden_layers=3)
    reduced_model = make_reduced_model(found_from_config(config), tp=2)
    output = reduced_model.build()(**reduced_model.inputs())
    assert type(reduced_model.build()).__name__ == architecture
    assert ("loss" in output) == (architecture != "LlamaModel")
    assert reduced_model.build()(**reduced_model.inputs(padding="right"))[0].isfinite().all()


@pytest.mark.parametrize("config", [transformers.BartConfig, transformers.T5Config])
def test_heads_of_the_end_token(config):
    """They raise where it is not in all rows the same number of times."""
    config = config(
        architectures=[config.__name__.replace("Config", "ForSequenceClassification")], decoder_start_token_id=0
    )
    reduced_model = make_reduced_model(found_from_config(config), tp=2)
    inputs = reduced_model.inputs()
    assert (inputs["input_ids"] == reduced_model.config.eos_token_id).sum(1).tolist() == [1, 1]
    assert inputs["labels"].shape == (2,)
    assert "loss" in reduced_model.build()(**inputs)


def test_from_a_module():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3))
    by_module = make_reduced_model(model, tp=2)
    by_config = make_reduced_model(found_from_config(model.config), tp=2)
    assert step(by_module)[0] == step(by_config)[0]
    with pytest.raises(ValueError, match="tp must be a positive integer"):
        make_reduced_model(model, tp=0)


class Tiny(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(24, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(width, 24, bias=False)

    def forward(self, tokens):
        return self.head(self.drop(self.norm(self.embed(tokens))))


def test_own_modules():
    reduced_model = make_reduced_model(Tiny(), tp=2)
    model = reduced_model.build()
    assert reduced_model.kinds == ("own",) and reduced_model.config is None
    assert torch.equal(model(**reduced_model.inputs()), reduced_model.build()(**reduced_model.inputs()))
    assert reduced_model.inputs(1)["tokens"].shape == (2, 16)
    assert not ((model.norm.weight == 1) | (model.norm.bias == 0)).any()
    with torch.device("meta"):
        unbuilt = Tiny()
    built = make_reduced_model(unbuilt, tp=2).build()
    assert {p.device.type for p in built.parameters()} == {"cpu"}
    assert torch.equal(built.head.weight, model.head.weight), "weights follow from seed and names"


def test_own_inputs():
    reduced_model = make_reduced_model(
        nn.Linear(4, 4), tp=2, inputs=lambda seed: {"input": torch.full((1, 4), float(seed))}
    )
    assert reduced_model.inputs(5)["input"].max() == 5
    reduced_model.build()(**reduced_model.inputs(5))


class Buffered(Tiny):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))


class Picky(Tiny):
    def forward(self, tokens):
        raise RuntimeError("not like this")


def refusal(module, **arguments):
    with pytest.raises(PlanError) as caught:
        make_reduced_model(module, tp=2, **arguments)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def test_own_modules_that_cannot():
    assert refusal(nn.Linear(4, 4)).code == "SP522"
    diagnostic = refusal(Picky())
    assert diagnostic.code == "SP522" and diagnostic.notes == ("RuntimeError: not like this",)
    with torch.device("meta"):
        large, unknown = Tiny(20_000_000), Buffered()
    assert refusal(large).code == "SP521"
    diagnostic = refusal(unknown)
    assert diagnostic.code == "SP520" and diagnostic.notes == ("scale",)
    with pytest.raises(ValueError, match="no transformers configuration"):
        make_reduced_model(Tiny(), tp=2, tied=True)


def test_a_small_copy_that_stays_large_is_refused(monkeypatch):
    monkeypatch.setattr("shardplan.model.reduced.reduced_transformers.LARGEST", 1000)
    diagnostic = refusal(found("llama-3.1-8b"))
    assert diagnostic.code == "SP520" and "more than 1,000" in diagnostic.notes[0]


def test_a_found_module_is_copied_from_the_module():
    with torch.device("meta"):
        unbuilt = Tiny()
    unbuilt.embed.weight.requires_grad_(False)
    for module in (Tiny(), unbuilt):
        found_module = find_any(module)
        picture = found_module.build()
        assert {p.device.type for p in picture.parameters()} == {"meta"} and picture is not module
        assert picture.embed.weight.requires_grad == module.embed.weight.requires_grad
        built = make_reduced_model(found_module, tp=2).build()
        assert torch.equal(built.head.weight, make_reduced_model(module, tp=2).build().head.weight)
    large = transformers.LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3))
    assert len(make_reduced_model(find_any(large), tp=2).layers) == 2


def test_a_model_that_does_not_run_is_a_finding_with_every_cause_and_its_line() -> None:
    """Of an exception without a text, and of one that was raised from another."""

    class Checked(nn.Module):
        def __init__(self, own: bool):
            super().__init__()
            self.inner, self.own = nn.Linear(4, 4), own

        def forward(self, x):
            if self.own:
                raise ValueError
            try:
                return {}["rotary"]
            except KeyError as error:
                raise RuntimeError("no table") from error

    def notes(own: bool) -> tuple[str, ...]:
        small = ReducedModel.__new__(ReducedModel)
        object.__setattr__(small, "name", "checked")
        with pytest.raises(PlanError) as raised:
            with small.running():
                Checked(own)(torch.ones(2, 4))
        (found,) = raised.value.diagnostics
        assert found.code == "SP523"
        return found.notes

    assert notes(False) == ("RuntimeError: no table", "KeyError: 'rotary'")
    (line,) = notes(True)
    assert line.startswith("ValueError at ") and line.endswith(": raise ValueError")
