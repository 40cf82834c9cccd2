"""The collection of plans against its committed table, reports/model-types.json; `make zoo` proves all of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from sampling import few, sampled
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardplan import verify
from shardplan.language import builtin_plans, parse_plan
from tests.model_settings import find, without_dropout
from tests.zoo import context, diffusion, image_text
from tests.zoo import entry as judge
from tests.zoo.__main__ import communication, lacks, page, reasons, right
from tests.zoo.block_inputs import TooManyChoices
from tests.zoo.entry import DERIVED, Entry, counted_again, entry, has, made_again
from tests.zoo.init import by_init
from tests.zoo.other_entry import OF_TRUNK, OtherEntry
from tests.zoo.table import read

REPORTS = Path(__file__).parent.parent / "reports"
TABLE = {row["name"]: Entry(**row) for row in json.loads((REPORTS / "model-types.json").read_text("utf-8"))}
SEEING = {row["name"]: Entry(**row) for row in json.loads((REPORTS / "image-text-types.json").read_text("utf-8"))}
PLANNED = sorted(name for name, found in TABLE.items() if found.verdicts)
# Their backward reductions are weighed: there are more than the fewest.
CHOOSING = {
    name: found for name, found in {**SEEING, **TABLE}.items() if "tp" in found.collectives and found.is_a_choice
}
# One of each structure, and more by a seed.
FAMILIES = (
    "bamba",
    "bert",
    "cohere",
    "deepseek_v3",
    "falcon",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "llama",
    "megatron-bert",  # its tables run in another order than they are registered in
    "mixtral",
    "opt",
    "phi3",
    "rwkv",
)
SAMPLE = (*FAMILIES, *random.Random(4).sample([name for name in PLANNED if name not in FAMILIES], 2))


def test_every_type_is_in_the_table() -> None:
    assert set(TABLE) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert all(found.verdicts or found.reason for found in TABLE.values())


def test_every_plan_is_for_a_type_of_the_table() -> None:
    plans = {name: parse_plan(name).plan for name in builtin_plans()}
    of_experts = (
        *read(REPORTS / "expert-types.md").values(),
        *read(REPORTS / "diffusion-types.md", diffusion.Row).values(),
    )
    others = read(REPORTS / "other-types.md", OtherEntry).values()
    found = {one.plan for one in (*TABLE.values(), *SEEING.values(), *of_experts, *others)} - {None, DERIVED, OF_TRUNK}
    by_name = {name for name, plan in plans.items() if not plan.models}  # `auto` finds what they extend
    newer = {name for name in {*plans} - found - by_name if not CONFIG_MAPPING_NAMES.keys() & {*plans[name].models}}
    assert set(plans) == found | by_name | newer and not found & by_name
    # `make judge WHAT=versions` proves them with the release that has them.
    assert newer == {"apertus1p5", "dory", "hy_v4_vl", "omniasr", "omniasr_ctc"}
    assert by_name == {
        "llava_vision",
        "qwen3_vl_vision",
        "olmo_hybrid_gathered",
        "codegen_gathered",
    }  # tests/test_images.py, test_state_spaces.py and test_split_arguments.py prove them


def test_nothing_in_the_table_is_wrong() -> None:
    wrong = {name: text for name, found in TABLE.items() for text in found.verdicts.values() if not right(text)}
    assert wrong == {}


def test_types_over_cp_are_right_or_say_what_stands_in_the_way() -> None:
    run = {name: found for name, found in TABLE.items() if found.context}
    assert len(run) == len(PLANNED)
    right = [found for found in run.values() if context.proven(found)]
    assert len(right) >= 165 and sum(set(found.mixers.values()) == {"heads"} for found in right) >= 120
    assert all({"cp 2 tp 1", "cp 2 tp 2"} <= found.context.keys() for found in run.values())
    assert [found.name for found in right if not found.mixers] == ["xlm"]  # its sequence is split for MLPs alone


def test_what_is_not_split_has_a_reason() -> None:
    """Each type that has less split, or no sequence parallelism, names the line of the model's code that forbids it."""
    short = {name: found for name, entry in TABLE.items() if (found := lacks(entry))}
    assert {name: {what for what, *_ in found} for name, found in reasons().items()} == short


def test_the_reasons_are_lines_of_the_code() -> None:
    folder = Path(transformers.__file__).parent / "models"
    for name, found in (*reasons().items(), *reasons(image_text.LACKING).items()):
        for _, module, line, code, _ in found:
            if not module:
                continue
            lines = (folder / module / f"modeling_{module}.py").read_text("utf-8").splitlines()
            assert code in lines[line - 1], (name, module, line)


def test_every_image_text_type_is_in_its_table() -> None:
    assert list(SEEING) == image_text.names()
    assert all(found.verdicts or found.reason for found in SEEING.values())
    wrong = {name: text for name, found in SEEING.items() for text in found.verdicts.values() if not right(text)}
    assert wrong == {}
    assert (REPORTS / "image-text-types.md").read_text("utf-8") == image_text.page(list(SEEING.values()))


def test_the_plans_for_images_are_proven_with_images() -> None:
    split = [found for found in SEEING.values() if image_text.is_right(found)]
    assert len(split) >= 80
    assert sum(found.has("sp") for found in split) >= 75


def test_what_an_image_text_type_lacks_has_a_reason() -> None:
    short = {name: {what} for name, found in SEEING.items() if (what := image_text.lacks(found))}
    assert {name: {what for what, *_ in found} for name, found in reasons(image_text.LACKING).items()} == short


LONG_IMAGE_TEXT = (
    "Llama4ForConditionalGeneration",
    "qwen2_vl",
    "internvl",
    "aria",
    "glm4v",
)  # processor time: a minute and more


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    few([*LONG_IMAGE_TEXT, "mistral3", "smolvlm", "got_ocr2", "paligemma"], 2, long=LONG_IMAGE_TEXT),
)
def test_an_image_text_type_is_as_the_table_says(name: str) -> None:
    assert entry(name, derives=True) == SEEING[name]


FOUND = ("axk1", "bloom", "xmod")  # by `init`, what stands in no model of the tests' own


def test_the_goal_is_met() -> None:
    split = [found for found in TABLE.values() if found.has("tp") and found.split > 0]
    assert len(split) >= 165
    assert sum(found.has("sp") for found in split) >= 150


def test_init_is_right_where_it_writes_a_plan() -> None:
    """Without looking at the built-in plans, which it finds again for most types."""
    assert {name: e.init for name, e in TABLE.items() if not e.init or any(not right(t) for t in e.init.values())} == {}
    assert sum(has(found.init, "tp") for found in TABLE.values()) >= 150
    assert sum(has(found.init, "tp") and "tp" not in found.init_more for found in TABLE.values()) >= 157


def test_most_plans_communicate_at_the_minimum() -> None:
    """Of their structure; why the others do not is said below the table."""
    at_minimum = {name for name, found in TABLE.items() if found.collectives and not found.more("tp")}
    assert at_minimum >= {
        "llama",
        "qwen3",
        "gemma3_text",
        "phi3",
        "gpt2",
        "mixtral",
        "cohere",
        "gptj",
        "phi",
        "opt",
        "bert",
    }
    assert len(at_minimum) >= 100


def test_the_page_is_made_from_the_table() -> None:
    assert (REPORTS / "model-types.md").read_text("utf-8") == page(list(TABLE.values()))
    assert "- xlnet, split: " in page([TABLE["xlnet"]]) and "xlnet" not in page([TABLE["llama"]])  # one type's own


def test_the_collection_stays_readable() -> None:
    assert sum(len(path.read_text("utf-8").splitlines()) for path in builtin_plans().values()) < 4400


@pytest.mark.slow
@pytest.mark.parametrize("name", few(SAMPLE, 5, long=["hy_v4", "rwkv"]))
def test_a_type_is_as_the_table_says(name: str) -> None:
    known = TABLE[name]
    assert made_again(known) == known


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_neox"])
@pytest.mark.slow
def test_what_is_reduced_backward_is_as_the_table_says(name: str) -> None:
    known, found = CHOOSING[name], counted_again(CHOOSING[name])
    assert found == known, (found.reduced, found.choices)


def test_no_choice_of_block_inputs_is_overlooked() -> None:
    """The judge knows of one that is at least as good as the plan's."""
    for name, known in CHOOSING.items():
        if not known.untried:
            count, *size = known.reduced
            assert any(n <= count and least <= size for n, *least in known.choices), name


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_what_init_writes_is_as_the_table_says(name: str) -> None:
    assert by_init(TABLE[name]) == TABLE[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sampled(["bamba", "cohere", "deepseek_v3", "gpt2", "gpt_neox", "gpt_oss", "olmo2"], 3, long=["bamba"])
)
def test_a_family_in_real_processes(name: str) -> None:
    """dp 2 x tp 2 with FSDP2: state-space, parallel residual, MLA, Conv1D, fused, mixture of experts,
    norms over all heads. Dense and packed models
    are trained so by tests/test_processes_training.py, an image-text model is proven so by tests/test_images.py."""
    report = verify(without_dropout(find(name).config), "auto", {"tp": 2, "dp_shard": 2}, processes=True)
    assert report.ok, report
    assert set(report.variants) == {"tensor_parallel", "sequence_parallel"}


def test_choices_that_are_too_many_are_said_and_end_nothing(monkeypatch):
    """`make zoo` goes on to the next type; the table says that whether there is a better one is not known."""

    def choices(*_):
        raise TooManyChoices("there are too many places for block inputs in model.layers.2.norm")

    one = {"forward": {"all_reduce": 4}, "backward": {"all_reduce": 6}}
    monkeypatch.setattr(judge, "collectives", lambda *_: one)
    monkeypatch.setattr(judge, "minimum", lambda *_: {**one, "backward": {"all_reduce": 5}})
    monkeypatch.setattr(judge, "spent", lambda *_: (6, (1.0, 0.0)))
    monkeypatch.setattr(judge, "choices", choices)
    found = judge.communicating(Entry("many"), {"tp": None}, SimpleNamespace(reference=None), None)
    assert found.more("tp") and not found.choices
    assert "too many places for block inputs in model.layers.2.norm" in communication(found)
