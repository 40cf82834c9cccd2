"""Experts whose class has a norm next to their stacks, which all of them share: it is whole on every rank, and its gradient is a
sum over all that run some of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import expert_runs
import pytest
from expert_runs import EXPERTS, Case, batch, equal_to_the_unsharded, of, planned
from processes import on_ranks
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkPreTrainedModel, MuseSparkTextModel

import shardplan
from shardplan.compiler.lower.expected_collectives import expected_collectives
from tests.collective_counter import CollectiveCounter

NAME = "muse_spark_text"
SETTINGS = {
    "intermediate_size": 48,
    "moe_hidden_size": 24,
    "moe_intermediate_size": 16,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "mlp_layer_types": ["dense", "sparse"],
    "qk_scale_factor": 1.0,
}


class Causal(MuseSparkPreTrainedModel):
    """The text model with a head, which transformers has with images alone."""

    config_class = MuseSparkTextConfig

    def __init__(self, config: MuseSparkTextConfig) -> None:
        super().__init__(config)
        self.model = MuseSparkTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for experts in the module of the class

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **others: Any) -> CausalLMOutput:
        logits = self.lm_head(self.model(input_ids=input_ids, **others).last_hidden_state)
        loss = self.loss_function(logits, labels, self.config.vocab_size) if labels is not None else None
        return CausalLMOutput(loss=loss, logits=logits)


expert_runs.OWN[NAME] = Causal, SETTINGS


def few_tokens(case: Case) -> Case:
    """Some ranks have no row, some experts none."""
    return replace(case, tokens=(1, 3))


CASES = [
    of(NAME, dp_shard=4, ep=2),
    of(NAME, dp_shard=2, tp=2, ep=2),
    of(NAME, dp_shard=2, tp=2, ep=4, sequence_parallel=True),
    few_tokens(of(NAME, dp_shard=2, tp=2, ep=4)),
    few_tokens(of(NAME, dp_shard=4, ep=4)),
    of(NAME, dp_replicate=2, dp_shard=1, tp=2, ep=2, implementation="grouped_mm"),
]


def equal(cases: list[Case]) -> None:
    """On ranks that have this module, and so the class."""
    equal_to_the_unsharded(cases)


@pytest.mark.slow
def test_four_ranks():
    on_ranks(4, equal, CASES)


def counted(sequence_parallel: bool) -> tuple[dict, dict]:
    """The collectives over tp of a step, and what is expected of them."""
    case = of(NAME, sequence_parallel=sequence_parallel, tp=2, ep=2)
    model, _ = planned(replace(case, options=(("check_inputs", False),)))
    ids = batch(0)
    with CollectiveCounter() as forward:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with CollectiveCounter() as backward:
        loss.backward()
    found = {"forward": forward.counts, "backward": backward.counts}
    expected = expected_collectives(shardplan.applied(model).program.modules)
    return (
        {when: {op: n for op, n in counts.items() if op != "all_to_all"} for when, counts in found.items()},
        {when: dict(counts) for when, counts in expected.items()},
    )


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_collectives_are_those_that_are_expected(sequence_parallel: bool):
    for numbers, expected in on_ranks(2, counted, sequence_parallel):
        assert numbers == expected


def test_an_fsdp_unit_around_has_the_norm():
    on_ranks(2, equal, [few_tokens(of(NAME, dp_shard=2, ep=2)), of(NAME, tp=2, ep=2)])
