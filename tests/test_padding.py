"""`pad_to_multiple`: padded batches train as the batches do."""

from __future__ import annotations

import pytest
import torch
from small_models import batch, small_model

from shardplan import pad_to_multiple
from shardplan.proof.compare import TOLERANCE, relative_error


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_the_loss_and_every_gradient_stay(name, masked):
    model = small_model(name, dtype=torch.float64)
    ids = batch(1, length=13)
    given = {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}
    if masked:
        given["attention_mask"] = (torch.arange(13) >= torch.tensor([[0], [3]])).long()  # padded on the left before
    results = []
    for one in (given, pad_to_multiple(given, 8, pad_token_id=3)):
        model.zero_grad()
        output = model(**one)
        output.loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        results.append((output.loss.detach(), output.logits.detach()[:, :13], *gradients))
    assert one["input_ids"].shape == one["labels"].shape == (2, 16)
    for before, after in zip(*results, strict=True):
        assert relative_error(after, before) < TOLERANCE[torch.float64]


def test_every_argument_is_padded_in_its_way():
    ids = torch.tensor([[5, 6, 7]])
    given = {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": torch.ones(1, 3),
        "position_ids": torch.tensor([[4, 5, 6]]),
        "inputs_embeds": torch.ones(1, 3, 2),
        "weights": torch.ones(1, 3),
        "pixel_values": torch.ones(4, 3),
        "use_cache": False,
    }
    padded = pad_to_multiple(given, 4, pad_token_id=9, fill={"weights": 0.0})
    assert padded["input_ids"].tolist() == [[5, 6, 7, 9]] and padded["labels"].tolist() == [[5, 6, 7, -100]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 0]] and padded["weights"].tolist() == [[1, 1, 1, 0]]
    assert padded["position_ids"].tolist() == [[4, 5, 6, 7]]
    assert padded["inputs_embeds"].shape == (1, 4, 2) and padded["inputs_embeds"][0, 3].tolist() == [0, 0]
    assert padded["pixel_values"] is given["pixel_values"] and padded["use_cache"] is False
    assert given["input_ids"].shape == (1, 3), "the batch itself is not changed"


def test_what_divides_stays():
    ids = torch.zeros(2, 8, dtype=torch.long)
    assert pad_to_multiple({"input_ids": ids}, 4, pad_token_id=0)["input_ids"] is ids


@pytest.mark.parametrize(
    ("given", "multiple", "words"),
    [
        ({"input_ids": torch.zeros(1, 3), "labels": torch.zeros(1, 4)}, 2, "one common length: input_ids 3, labels 4"),
        ({"pixel_values": torch.zeros(1, 3)}, 2, "there are none"),
        ({"input_ids": torch.zeros(1, 3)}, 0, "multiple is 0"),
    ],
)
def test_wrong_calls(given, multiple, words):
    with pytest.raises(ValueError, match=words):
        pad_to_multiple(given, multiple, pad_token_id=0)
