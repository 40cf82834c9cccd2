"""Numbers of a configuration that code ties to each other are tied in the reduced one too, so that its model runs."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoConfig, CanineConfig, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from shardplan.model.build_tree import tree_of
from shardplan.model.reduced import reduced_transformers
from shardplan.model.reduced.layers import Kept, candidates, sections
from shardplan.model.reduced.measured import SMALLEST
from shardplan.model.reduced.model_inputs import CHARACTERS, text_inputs
from shardplan.model.reduced.outcome import results_of
from shardplan.model.reduced.reduced_model import make_reduced_model
from shardplan.model.reduced.reduced_transformers import original_of, roles_of
from shardplan.model.reduced.shrink import reduced_config
from tests.model_settings import find


def small(model_type: str, kept: Kept, tp: int = 2, **options: Any) -> PreTrainedConfig:
    """The reduced configuration of a type's defaults."""
    _, _, config, cls, tree, _ = original_of(find(model_type))
    named = partial(reduced_config, config, tp=tp, seq_len=16, kept=kept, **options)
    return named(roles=roles_of(cls, config, tree, named, SMALLEST))


def test_numbers_that_the_class_computes_are_computed_again():
    config = small("bros", Kept(12, (0, 1)), head_dim=16)
    assert 4 * config.dim_bbox * config.dim_bbox_sinusoid_emb_1d == config.hidden_size == 64


def test_widths_that_are_joined_keep_their_share():
    config = small("layoutlmv3", Kept(12, (0, 1)), head_dim=12)
    assert 4 * config.coordinate_size + 2 * config.shape_size == config.hidden_size == 48


def test_a_bottleneck_is_narrower():
    config = small("mobilebert", Kept(24, (0, 1)))
    assert config.true_hidden_size == config.intra_bottleneck_size < config.hidden_size


def test_both_sides_have_as_many_layers():
    config = small("moonshine", Kept(6, (0, 1)))
    assert config.encoder_num_hidden_layers == config.decoder_num_hidden_layers == 2


def test_sparse_layers_stay_where_they_are():
    config = small("switch_transformers", Kept(12, (0, 1, 2)))
    steps = (config.encoder_sparse_step, config.decoder_sparse_step)
    assert steps == (3, 3)  # the second of each three is sparse; of the original's, the second of each four


@pytest.mark.parametrize("kind", ["pvt", "swin"])
def test_the_heads_of_each_stage_divide_its_width(kind):
    config = small(kind, Kept(4, (0, 1, 2, 3)))
    heads = config.num_heads if kind == "swin" else config.num_attention_heads
    widths = [config.embed_dim * 2**i for i in range(4)] if kind == "swin" else config.hidden_sizes
    assert all(width % count == 0 for width, count in zip(widths, heads, strict=True))


def test_windows_fit_each_stage():
    config = small("swin", Kept(4, (0, 1, 2, 3)))
    assert config.image_size == config.patch_size * config.window_size * 2**3


def test_half_of_another_parts_width():
    config = small("sam", Kept(1, (0,)))
    assert 2 * config.vision_config.num_pos_feats == config.prompt_encoder_config.hidden_size == 32
    assert config.prompt_encoder_config.image_embedding_size == 4


def test_a_tower_whose_width_is_its_hidden_dim():
    assert small("granite_speech", Kept(32, (0, 1))).encoder_config.hidden_dim < 128


@pytest.mark.parametrize(("kind", "side"), [("clip_vision_model", 3), ("vit", 4)])
def test_a_picture_alone_has_an_odd_side_where_it_had_one(kind, side):
    """With the class's position tp divides the positions of the one and not those of the other, as of the large ones: 50 and 197."""
    config = small(kind, Kept(12, (0, 1)))
    assert config.image_size == side * config.patch_size


@pytest.mark.parametrize("tp", [3, 8])
def test_a_number_of_positions_keeps_what_tp_leaves_of_it(tp):
    """Whisper reads all of its 1500 positions, SigLIP all patches, 14 by 14: with sequence parallelism eight ranks would raise."""
    positions = small("whisper", Kept(6, (0, 1)), tp=tp).max_source_positions
    picture = small("siglip_vision_model", Kept(12, (0, 1)), tp=tp)
    patches = (picture.image_size // picture.patch_size) ** 2
    assert positions < 1500 and patches < 196
    assert (positions % tp, patches % tp) == (1500 % tp, 196 % tp)


def test_patches_with_strides_of_their_own_keep_their_size():
    kind = "audio-spectrogram-transformer"
    assert small(kind, Kept(12, (0, 1))).patch_size == AutoConfig.for_model(kind).patch_size


def test_a_model_without_a_vocabulary_reads_characters():
    assert text_inputs(CanineConfig(), None, 16, 0, None)["input_ids"].max() < CHARACTERS


def test_a_list_of_a_layer_for_each_is_no_difference_in_kind():
    """All of Mistral Large 4's 72 layers were kept, and its reduced model was too large at tp 4."""
    reduced = make_reduced_model(find("mistral_large4"), tp=4)
    assert reduced.layers == (0, 1, 3) and reduced.config.text_config.kv_source_layers == [0, 1, 2]
    assert Kept(7, (0, 1, 5)).of_each([0, 1, 1, 3, 4, 3, 6]) == [0, 1, 1]
    assert Kept(7, (0, 1, 5)).of_each([0, 1, 1, 0, 1, 1, 0]) == [0, 1, 1], "flags"


class Sections(LlamaConfig):
    """A loop over some layers, with others before and after; what is written counts two blocks for each layer, as Dory's."""

    model_type = "sections"

    def __init__(self, n_input_layers=3, n_recurrent_layers=6, n_output_layers=3, **fields: Any):
        super().__init__(**{"num_hidden_layers": 12, "kinds": ["a"] * 12, "first_k_dense_replace": 3, **fields})
        self.n_input_layers, self.n_recurrent_layers, self.n_output_layers = (
            n_input_layers,
            n_recurrent_layers,
            n_output_layers,
        )
        if n_input_layers + n_recurrent_layers + n_output_layers != self.num_hidden_layers:
            raise ValueError("other layers than the sections have")

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        twice = ("num_hidden_layers", "kinds", "first_k_dense_replace")
        return {**data, **{name: 2 * data[name] for name in twice}}


def test_each_section_of_the_layers_has_some():
    """Of a configuration that numbers them; what else adds up to another number is none."""
    numbers = {"n_input_layers": 3, "n_recurrent_layers": 6, "n_output_layers": 3, "num_hidden_layers": 12}
    assert sections(numbers, 12) == {
        "n_input_layers": range(3),
        "n_recurrent_layers": range(3, 9),
        "n_output_layers": range(9, 12),
    }
    assert sections(numbers, 13) == sections({"n_input_layers": 12}, 12) == {}
    config = Sections()
    with torch.device("meta"):
        tree = tree_of(LlamaForCausalLM(config))
    kept, *_ = candidates(tree, 12, vars(config))
    assert kept == Kept(12, (0, 3, 9))
    reduced = reduced_config(config, tp=2, seq_len=16, kept=kept)
    assert [getattr(reduced, name) for name in numbers] == [1, 1, 1, 3]
    assert (reduced.kinds, reduced.first_k_dense_replace) == (["a"] * 3, 1), (
        "as the model reads it, not as it is written"
    )


HEADS = "LiltModel"  # its head dim is tried until six places of a box fill the hidden size
DICTIONARY = "SwitchTransformersModel"  # its experts are in a dictionary, and fewer
PYRAMID = "Sam2VisionModel"  # its neck has the widths of the stages in the other order
SLOW = ("BrosModel", "CanineModel", "GraniteSpeechModel", "LayoutLMv3Model", "MobileBertModel", "MoonshineModel")
SLOW += ("PvtModel", "SamModel", "SwinModel")


def test_a_pyramid_of_numbered_blocks_keeps_each_kind():
    """Of one list over all stages; 12 blocks, of which 5, 7 and 9, all in the third stage, see the whole picture."""
    found = find(PYRAMID)
    backbone = make_reduced_model(found, tp=2).build().config.backbone_config
    assert found.config.backbone_config.global_attention_blocks == [5, 7, 9]
    assert (backbone.blocks_per_stage, backbone.global_attention_blocks) == ([1, 2, 2, 2], [4])
    assert (backbone.embed_dim_per_stage, backbone.num_attention_heads_per_stage) == ([8, 16, 32, 64], [1, 2, 4, 8])


def test_a_pyramid_whose_stages_are_layers_has_fewer():
    """The sound of Muse Spark: 4 stages, which its number of layers counts."""
    found = find("muse_spark")
    audio = make_reduced_model(found, tp=2).build().config.audio_config
    assert len(found.config.audio_config.hidden_sizes) == 4
    assert len(audio.hidden_sizes) == len(audio.depths) == audio.num_hidden_layers < 4


@pytest.mark.parametrize(
    "name", [HEADS, DICTIONARY, PYRAMID, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SLOW)]
)
def test_the_reduced_model_runs(name):
    reduced = make_reduced_model(find(name), tp=2)
    with torch.no_grad():
        results = results_of(reduced.build()(**reduced.inputs()))
    assert results and all(bool(result.isfinite().all()) for result in results.values())


def test_a_reduced_model_does_not_depend_on_those_before(monkeypatch):
    """Qwen 4's experts had another width where a process made the model for tp first: real processes make it for cp alone."""
    monkeypatch.setattr(reduced_transformers, "MEASURED", {})
    found, of_cp = find("qwen4_exp"), {"tp": 2, "cp": 2, "shared": {2: 1}}
    first = make_reduced_model(found, **of_cp).config.to_dict()
    reduced_transformers.MEASURED.clear()
    make_reduced_model(found, tp=2)
    assert make_reduced_model(found, **of_cp).config.to_dict() == first
