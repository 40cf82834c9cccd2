"""Reduced models of every causal language model of transformers."""

import random

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardplan.core.diagnostics import PlanError
from shardplan.model.model_findings import reason
from shardplan.model.reduced.reduced_model import make_reduced_model
from tests.model_settings import find

# Why the rest of transformers 5.23 has none: their parts need packages for images, or they are drafts of another model.
WITHOUT = {
    "gemma3n",
    "gemma4_assistant",
    "gemma4_unified_assistant",
}
TYPES = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SAMPLE = random.Random(5).sample(TYPES, 40)


def attempt(model_type):
    reduced_model = make_reduced_model(find(model_type), tp=2, experts_implementation="eager")
    model = reduced_model.build()
    loss = model(**reduced_model.inputs()).loss
    assert loss.isfinite(), "the loss is not finite"
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(g.isfinite().all() for g in gradients), "a gradient is not finite"
    assert sum(bool(g.abs().max() > 0) for g in gradients) > len(gradients) / 2, "most gradients are zero"
    again = make_reduced_model(find(model_type), tp=2, experts_implementation="eager").build().state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items()), "weights differ"


@pytest.mark.parametrize(
    "types",
    [
        pytest.param(SAMPLE, id="sample", marks=pytest.mark.slow),
        pytest.param(TYPES, id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_causal_model_types(types):
    failures = {}
    for model_type in types:
        try:
            attempt(model_type)
        except PlanError as error:
            failures[model_type] = f"{error} {error.diagnostics[0].notes}"
        except Exception as error:  # whatever a model's forward raises
            failures[model_type] = reason(error)
    expected = WITHOUT.intersection(types)
    assert failures.keys() == expected, {name: why for name, why in failures.items() if name not in expected}
