"""Files with a flipped bit: nothing is loaded, and the file is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from processes import on_ranks
from small_models import batch, small_model, whole_state
from torch.distributed.device_mesh import init_device_mesh

import shardplan


@contextmanager
def flipped(file: Path, position: int, bit: int) -> Iterator[None]:
    before = file.read_bytes()
    after = bytearray(before)
    after[position] ^= 1 << bit
    file.write_bytes(after)
    try:
        yield
    finally:
        file.write_bytes(before)


def answers(call: Callable[[], Any], file: Path, positions: range, count: int) -> set[tuple[str, bool]]:
    """The kinds of errors, and whether they name the file's folder, where one bit of it is flipped; count times."""
    draw, found = random.Random(0), set()
    for _ in range(count):
        with flipped(file, draw.choice(positions), draw.randrange(8)):
            try:
                call()
                found.add(("none", False))
            except Exception as error:
                found.add((type(error).__name__, str(file.parent) in str(error)))
    return found


def damage(folder: Path) -> dict[str, set[tuple[str, bool]]]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    model = shardplan.apply_plan(small_model("llama"), mesh, "auto", prove=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=batch(3), labels=batch(3)).loss.backward()
    optimizer.step()
    weights, training = folder / "weights", folder / "training"
    shardplan.save_checkpoint(model, weights)
    shardplan.save_training_state(model, optimizer, training)
    before, found = whole_state(model), {}
    file = weights / "model.safetensors"
    header = range(8 + int.from_bytes(file.read_bytes()[:8], "little"))
    found["header"] = answers(lambda: shardplan.load_checkpoint(model, weights, progress=False), file, header, 40)
    for path in training.iterdir():
        every = range(path.stat().st_size)
        found[path.name] = answers(
            lambda: shardplan.load_training_state(model, optimizer, training),
            path,
            every,
            4 if len(every) > 1e5 else 12,
        )
    assert all(torch.equal(value, before[name]) for name, value in whole_state(model).items()), "nothing was touched"
    shardplan.load_training_state(model, optimizer, training)
    return found


def test_one_bit_is_enough(tmp_path):
    (found,) = on_ranks(1, damage, tmp_path)
    assert {"header", ".metadata", "extra.pt", "checksums.json", "__0_0.distcp"} == set(found)
    for name, said in found.items():
        assert said <= {("ValueError", True), ("FileNotFoundError", True)}, (name, said)
