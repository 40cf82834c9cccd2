"""Models with a head that classifies sequences, as rewards are modelled: the built-in plan of the type fits them, and the
head, which reads one position of each sequence, is whole."""

from __future__ import annotations

import random

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from shardplan import compile_plan, validate
from shardplan.core.layout import I
from tests.model_settings import find, without_dropout

FAST = ("bert", "gpt2", "llama", "qwen3")
OTHERS = (
    *("bloom", "camembert", "data2vec-text", "deepseek_v3", "electra", "ernie", "falcon", "gemma", "gemma2", "gemma3"),
    *("gemma3_text", "gpt_neox", "gptj", "mistral", "mixtral", "opt", "phi", "phi3", "qwen2", "qwen3_moe", "rembert"),
    *("roberta", "roc_bert", "roformer", "xlm-roberta"),
)

SLOW = random.Random(4).sample(OTHERS, 8)


def marks(name: str) -> tuple:
    return () if name in FAST else (pytest.mark.slow,) if name in SLOW else (pytest.mark.exhaustive,)


def classifier(name: str):
    """The configuration of the type's classifying class, without dropout."""
    config = without_dropout(find(name).config)
    config.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[name]]
    for part in (config, config.get_text_config()):
        if getattr(part, "classifier_dropout", 0.0) is None:
            part.classifier_dropout = 0.0
    return config


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in (*FAST, *OTHERS)])
def test_the_plan_of_the_type_is_right(name: str) -> None:
    config = classifier(name)
    checked = validate(config, "auto", {"tp": 2})
    assert checked.ok, checked
    assert checked.proof is not None and checked.proof.ok
    assert [one.variant for one in checked.proof.variants] == list(checked.variants)


def test_the_head_is_whole() -> None:
    program = compile_plan(classifier("llama"), {"tp": 2}, "auto", sequence_parallel=True)
    (weight,) = program.modules["score"].parameters
    assert (weight.name, weight.stored, weight.computed) == ("weight", I, I)
