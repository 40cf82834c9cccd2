"""What runs of reduced models in chunks of the sequence show, without processes."""

from __future__ import annotations

import pytest
from small_models import small_config
from transformers import LlamaForCausalLM

from shardplan.compiler.layout.context_chunks import context_facts
from shardplan.model import find_any


def seen(model):
    found = find_any(model, settings={}, trust_remote_code=False, inputs=None)
    facts, findings = context_facts(found)
    return facts, " ".join(d.message for d in findings), " ".join(d.help or "" for d in findings)


def test_rounding_is_no_difference():
    """A chunk's products have other shapes: DeepSeek-V3's logits differ by 2e-7."""
    facts, findings, _ = seen("deepseek_v3")
    assert not findings and facts.loss is None
    assert [x.name for table in facts.tables for x in table.arguments if x.positions] == ["position_ids"]


@pytest.mark.parametrize(
    ("model", "words", "help_"),
    [
        ("mamba2", "does not call torch's scaled_dot_product", "attn_implementation='sdpa'"),
        ("mistral", "explicit mask", "with sliding_window=None"),
        ("cwm", "explicit mask", "use a mesh without a cp axis"),  # it is not built without its window
        ("bart", "does not read position_ids", "use a mesh without a cp axis"),
        ("qwen3_5_text", "its tokens meet outside attention", "use a mesh without a cp axis"),
    ],
)
def test_what_cannot_run_in_chunks(model, words, help_):
    _, findings, helps = seen(model)
    assert words in findings and help_ in helps
    assert ("sliding_window" in helps) == ("sliding_window" in help_)


class ByLength(LlamaForCausalLM):
    """A scale by the length of the sequence."""

    def forward(self, input_ids, **others):
        output = super().forward(input_ids, **others)
        output.logits = output.logits * input_ids.shape[1]
        return output


def test_code_that_reads_the_length_is_seen():
    assert "reads the length" in seen(ByLength(small_config("llama")))[1]


def test_a_loss_that_is_no_mean_over_next_tokens_is_seen():
    """Whisper's is that of each token, by a function of its own."""
    facts, findings, _ = seen("whisper")
    assert not findings and facts.loss is not None and "mean of the losses" in facts.loss
