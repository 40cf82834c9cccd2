"""Checks in several threads of one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from transformers import AutoConfig

import shardplan

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TYPES = ("qwen3", "llama", "phi3", "gemma2")


def validated(model_type: str) -> str:
    report = shardplan.validate(AutoConfig.for_model(model_type, **SMALL), "auto", {"tp": 2})
    assert report.ok and report.proven
    return str(report)


@pytest.mark.slow
def test_four_threads_at_once():
    found: dict[str, Any] = {}
    threads = [threading.Thread(target=lambda one=one: found.update({one: validated(one)})) for one in TYPES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {one: validated(one) for one in TYPES}
