"""Classes that are no causal language models against their table, reports/other-types.md; the best known in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AltCLIPTextConfig

from shardplan import validate, verify
from tests.model_settings import find, without_dropout
from tests.zoo.other_entry import OtherEntry, other_entry
from tests.zoo.other_names import is_trunk, names
from tests.zoo.other_page import page
from tests.zoo.table import read

PAGE = Path(__file__).parent.parent / "reports" / "other-types.md"
TABLE = read(PAGE, OtherEntry)
RIGHT = [name for name, found in TABLE.items() if found.is_right]


def test_the_page_is_made_from_the_table() -> None:
    assert set(TABLE) <= set(names())
    assert PAGE.read_text("utf-8") == page(list(TABLE.values()))


def test_what_is_said_of_a_class_fits() -> None:
    """It is right, or a reason says why not; nothing is valid and wrong."""
    for found in TABLE.values():
        assert bool(found.verdicts) != bool(found.reason), found
        assert not any(text.startswith("valid, but wrong") for text in found.verdicts.values()), found
        assert not found.verdicts or found.inputs, found


def test_how_many_are_right() -> None:
    assert len(RIGHT) >= 480 and sum(map(is_trunk, RIGHT)) >= 205
    assert sum(TABLE[name].has_sequence for name in RIGHT) >= 300


def test_a_derived_overlay_is_right_with_padding() -> None:
    """Roberta's mask is made from the length of the embeddings, so the norm behind them cannot split the sequence."""
    config = AltCLIPTextConfig(architectures=["AltCLIPTextModel"])
    report = validate(config, "auto", {"tp": 2}, sequence_parallel=True)
    assert report.ok and set(report.variants) == {"sequence_parallel"}


@pytest.mark.slow
def test_a_class_is_as_the_table_says() -> None:
    """`make zoo` compares all."""
    assert other_entry("BertModel") == TABLE["BertModel"]


BOTH = {"tensor_parallel", "sequence_parallel"}
# Class -> what `sequence_parallel` is, and the variants that are proven then. A plan that is derived has an overlay where it is asked for.
IN_PROCESSES = {
    "BertForSequenceClassification": (None, BOTH),
    "T5ForConditionalGeneration": (None, BOTH),
    "WhisperForConditionalGeneration": (None, BOTH),
    "ViTForImageClassification": (None, {"tensor_parallel"}),  # 197 positions
    "Wav2Vec2Model": (True, {"sequence_parallel"}),
    "HubertModel": (True, {"sequence_parallel"}),
    "CLIPModel": (True, {"sequence_parallel"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name.startswith("T5") else pytest.param(name, marks=pytest.mark.exhaustive) for name in IN_PROCESSES],
)
def test_a_class_in_real_processes(name: str) -> None:
    """Loss, outputs and every gradient on both ranks."""
    sequence_parallel, variants = IN_PROCESSES[name]
    config = without_dropout(find(name).config)
    report = verify(config, "auto", {"tp": 2}, processes=True, sequence_parallel=sequence_parallel)
    assert report.ok, report
    assert set(report.variants) == variants
