"""The data of reduced models: plans/inputs.toml and plans/numbers.toml say only what the code can read."""

import re

import pytest
import torch

from shardplan.compiler.layout import ModelLayouts
from shardplan.core.expressions import names, parse_expression
from shardplan.model.reduced.fields import TABLE
from shardplan.model.reduced.images import RECIPES
from shardplan.model.reduced.pictures import BATCH, FORMS, arrays, facts_of
from shardplan.model.reduced.shrink import SHRINK
from tests.model_settings import find, find_once

ALONE = FORMS["alone"]
AS_IT_IS = {*"image patch square image_tokens cut stages read_layers bins".split()}  # or vision_fields.py reduces them


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.kind}-{'-'.join(recipe.names)}")
def test_each_form_makes_arrays(recipe):
    config = find("LlavaNextForConditionalGeneration").config
    assert {"tile_rows", "tile_columns"} <= facts_of(config).keys()
    made, again, other = (arrays(recipe.arrays, facts_of(config), seed) for seed in (3, 3, 4))
    assert tuple(made) == recipe.names
    assert all(torch.equal(made[name], again[name]) for name in made), "a seed gives the same values"
    assert any(not torch.equal(made[name], other[name]) for name in made), "another seed gives others"


def test_a_picture_has_the_size_of_the_configuration():
    config = find("LlavaNextForConditionalGeneration").config
    side = config.vision_config.image_size
    picture, film, larger = (
        form["main"] for table in ALONE if "pixel_values" in table["of"] for form in table["forms"]
    )
    assert arrays({"x": picture}, facts_of(config), 0)["x"].shape == (BATCH, 3, side, side)
    assert arrays({"x": larger}, facts_of(config) | {"times": 2}, 0)["x"].shape[-1] == 2 * side
    assert arrays({"x": film}, facts_of(config) | {"film": 5}, 0)["x"].shape[:2] == (BATCH, 5)


@pytest.mark.parametrize("table", ALONE, ids=lambda table: "-".join((*table["of"], table.get("each", ""))))
def test_each_form_of_models_that_read_no_text_uses_what_is_known(table):
    assert {*table["of"]} <= {*FORMS["kinds"], *FORMS["kinds"].values()}
    for form in table.get("forms", ()):
        tried = {one["each"] for one in (table, form) if "each" in one}
        assert tried <= FORMS["candidates"].keys() and {*form.get("lacks", ())} <= FORMS["numbers"].keys()
        for text in (text for name, text in form.items() if name not in ("each", "lacks")):
            known = FORMS["numbers"].keys() | tried | {"batch", "seq", "hidden"}
            assert {*names(parse_expression(text.partition("(")[2].rpartition(")")[0].replace(",", "+")))} <= known


@pytest.mark.parametrize("table", FORMS["beside"], ids=lambda table: list(table)[-1])
def test_what_is_given_next_to_text_has_the_shape_of_the_ids(table):
    texts, ids = {name: text for name, text in table.items() if name != "each"}, (BATCH, 2, 9)
    made = arrays(texts, {table.get("each", ""): 5}, 0, ids)
    assert {value.shape[:3] for value in made.values()} == {ids}
    assert all(len(value.unique()) > 1 for value in made.values()), "tokens differ"


def test_sound_has_the_samples_that_the_convolutions_read():
    """Wav2Vec2's seven convolutions make 4 features of 1,360 samples: a feature for each 320, and the last windows' 80."""
    facts = facts_of(find("Wav2Vec2Model").config, seq=4, hidden=8)
    assert facts["hop"] * facts["seq"] + facts["rest"] == 1360


@pytest.mark.parametrize("role", TABLE)
def test_each_role_is_reduced(role):
    assert role in SHRINK or role in AS_IT_IS
    lists = {key: names for key, names in TABLE[role].items() if key != "at_most"}
    assert lists.keys() <= {"names", *(("widths", "strides", "blocks") if role == "stages" else ())}
    assert all(re.compile(name) for names in lists.values() for name in names)
    assert {*names(parse_expression(TABLE[role].get("at_most", "1")))} <= {"seq_len"}


def test_a_width_that_no_shape_shows_is_made_small_too():
    """An encoder's output size is compared with the decoder's hidden size: kept as it is, the reduced model had one more matrix."""
    found = find_once("SpeechEncoderDecoderModel")
    (recorded,) = ModelLayouts(found, 2).recorded_models
    modules, original = ({tree.pattern(name) for name in tree.modules} for tree in (recorded.tree, found.tree))
    assert modules <= original
