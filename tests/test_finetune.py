"""examples/finetune.py: a run from a Hugging Face folder to another one, killed on its way and not."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from processes import RanksFailed, on_ranks
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config

from shardplan.weights import training_state

ROOT = Path(__file__).parent.parent


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("finetune", ROOT / "examples" / "finetune.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(folder: Path, output: str) -> list[str]:
    text = str(ROOT / "demo/text.txt")
    words = ["--model", str(folder / "model"), "--text", text, "--output", str(folder / output), "--tp", "2"]
    words += ["--steps", "7", "--batch", "8", "--micro-batch", "2", "--seq-len", "32", "--lr", "1e-2", "--warmup", "2"]
    return [*words, "--save-every", "2", "--keep", "2"]


def make_model(folder: Path) -> None:
    """A model with dropout, in bfloat16 and in several files, and a tokenizer whose tokens are bytes."""
    config = Qwen3Config(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, bos_token_id=None, eos_token_id=None, attention_dropout=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    make_tokenizer(folder)


def make_tokenizer(folder: Path) -> None:
    """One whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def run(folder: str, output: str, killed: str) -> None:
    finetune, saved = script(), training_state.commit

    def kill_in_save(new: Path, place: Path, keep: object) -> None:
        if place.name == "step-4":
            os.kill(os.getpid(), signal.SIGKILL)
        saved(new, place, keep)

    def kill_in_step(*given: object) -> torch.Tensor:
        if given[0] == 6 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch_of(*given)

    batch_of = finetune.batch_of
    if killed == "in a save":
        training_state.commit = kill_in_save
    if killed == "in a step":
        finetune.batch_of = kill_in_step
    finetune.train(finetune.arguments(words(Path(folder), output)))


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}


@pytest.mark.slow
def test_a_run_that_is_killed_ends_like_one_that_was_not(tmp_path):
    make_model(tmp_path / "model")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    on_ranks(4, run, str(tmp_path), "whole", "never", seconds=240)
    for when, left in {"in a save": {"step-2"}, "in a step": {"step-2", "step-4"}}.items():
        with pytest.raises(RanksFailed, match="exit code -9"):
            on_ranks(4, run, str(tmp_path), "killed", when, seconds=240)
        assert names(killed) == left
    on_ranks(4, run, str(tmp_path), "killed", "never", seconds=240)
    assert names(killed) == names(whole) == {"step-6", "step-7", "model"}
    # Of a save that was killed an empty file stays, next to the folder (docs/decisions/0016).
    assert not any(
        file.is_dir() or file.stat().st_size for saves in killed.glob(".*.saves") for file in saves.iterdir()
    )

    wanted = rows(whole)
    found = rows(killed)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 3, 4, 5, 5, 6, 7]
    assert all(row == wanted[row["step"] - 1] for row in found) and wanted[-1]["loss"] < wanted[0]["loss"]
    for name in ("step-7", "model"):
        for file in sorted((whole / name).iterdir()):
            same = (
                file.name in (".metadata", "checksums.json")
                or file.read_bytes() == (killed / name / file.name).read_bytes()
            )
            assert same, file
    exported = AutoModelForCausalLM.from_pretrained(killed / "model")
    assert exported.dtype == torch.bfloat16
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not torch.equal(exported.lm_head.weight, before.lm_head.weight)
    assert AutoTokenizer.from_pretrained(killed / "model")("text")["input_ids"]


def test_the_order_of_the_data_follows_from_the_seed():
    finetune = script()
    args = finetune.arguments(["--model", "m", "--text", "t", "--output", "o", "--batch", "4"])
    sequences = torch.arange(6)[:, None]
    seen = torch.cat([finetune.batch_of(step, sequences, args) for step in (1, 2, 3)]).flatten().tolist()
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6)) and seen[:6] != seen[6:]
    assert finetune.batch_of(2, sequences, args).flatten().tolist() == seen[4:8]


def test_parts_are_equal():
    finetune = script()
    args = finetune.arguments(["--model", "m", "--text", "t", "--output", "o", "--batch", "8", "--micro-batch", "2"])
    parts = finetune.parts_of(torch.arange(8), 1, 2, args)
    assert [part.tolist() for part in parts] == [[4, 5], [6, 7]]
    with pytest.raises(SystemExit, match="not a multiple of 3 data-parallel ranks x --micro-batch 2"):
        finetune.parts_of(torch.arange(8), 1, 3, args)
