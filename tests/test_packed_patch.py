"""The patch that keeps transformers' flash attention from looking for packed sequences."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import modeling_flash_attention_utils as flash

from shardplan.model.packed import patch_is_packed_sequence

PLAIN = torch.arange(8).unsqueeze(0)
PACKED = torch.cat([torch.arange(5), torch.arange(3)]).unsqueeze(0)


@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(flash, "_is_packed_sequence", flash._is_packed_sequence)
    assert flash._is_packed_sequence(PACKED, 1) and not flash._is_packed_sequence(PLAIN, 1)
    with pytest.warns(UserWarning, match="does not detect packed sequences"):
        patch_is_packed_sequence()


def test_nothing_is_packed_any_more(patched):
    assert flash._is_packed_sequence(None, 1) is False
    assert flash._is_packed_sequence(PACKED, 2) is False, "rows of a batch are no packed sequences"
    assert flash._is_packed_sequence(PLAIN, 1) is False
    assert flash._is_packed_sequence(PACKED, 1) is False, "the positions are looked at once"


def test_packed_sequences_in_the_first_batch_are_an_error(patched):
    with pytest.raises(ValueError, match="packed sequences"):
        flash._is_packed_sequence(PACKED, 1)


def test_a_second_patch_does_nothing(patched):
    before = flash._is_packed_sequence
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_is_packed_sequence()
    assert flash._is_packed_sequence is before


def test_a_transformers_without_the_function_is_an_error(monkeypatch):
    monkeypatch.delattr(flash, "_is_packed_sequence")
    with pytest.raises(RuntimeError, match="_is_packed_sequence"):
        patch_is_packed_sequence()
