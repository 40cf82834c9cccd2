"""Checkpoints that are damaged or absurd: loading one is refused before the model is touched, and looking at one ends in
bounded time."""

from __future__ import annotations

import json
import os
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shardplan import apply_plan, load_checkpoint
from shardplan.model.stored_tensors import fold
from shardplan.model.stored_tensors import stored_tensors as look
from shardplan.weights.safetensors_folder import stored_tensors
from tests.proofs import fake_mesh
from tests.sampling import examples
from tests.small_models import meta_model, small_model

UP = "model.layers.0.mlp.up_proj.weight"
ONE = "model.safetensors"


def header_of(folder: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / ONE).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return folder


def entry(*shape: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]}


def test_floats_that_a_header_calls_integers_are_refused_by_name(tmp_path):
    small_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / ONE)
    tensors[UP] = tensors[UP].view(torch.int32)
    save_file(tensors, tmp_path / ONE, metadata={"format": "pt"})
    with fake_mesh(2, names=("tp",)) as mesh:
        model = apply_plan(meta_model("llama"), mesh, "llama", src_data_rank=None, prove=False)
        with pytest.raises(ValueError, match=f"{UP} is int32 in the checkpoint and float32 in the model"):
            load_checkpoint(model, tmp_path)
        assert all(parameter.is_meta for parameter in model.parameters())


def test_an_index_with_a_byte_order_mark_is_read(tmp_path):
    tensors = {UP: torch.ones(2, 2)}
    save_file(tensors, tmp_path / "one.safetensors", metadata={"format": "pt"})
    index = json.dumps({"weight_map": {UP: "one.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8-sig")
    assert stored_tensors(tmp_path).keys() == tensors.keys()
    found = look(tmp_path)
    assert found is not None and UP in fold(found, {}, {}).tree.parameters


@pytest.mark.parametrize("index", ["9" * 11, "9" * 5000, "\u00b2"])
def test_an_absurd_layer_is_refused_by_its_name(tmp_path, index):
    name = f"model.layers.{index}.mlp.up_proj.weight"
    small_model("llama").save_pretrained(tmp_path)
    save_file({**load_file(tmp_path / ONE), name: torch.ones(2)}, tmp_path / ONE, metadata={"format": "pt"})
    assert not index.isdecimal() or look(tmp_path) is None
    with fake_mesh(2, names=("tp",)) as mesh:
        model = apply_plan(meta_model("llama"), mesh, "llama", src_data_rank=None, prove=False)
        with pytest.raises(ValueError, match=f"the index in .{name[:100]}.*is not a number of at most 9 digits"):
            load_checkpoint(model, tmp_path)
        assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    "name", ["model.layers.{}.mlp.up_proj.weight", "model.layers.{0}.weight_{0}", "t{}", "a{}.b.weight"]
)
def test_very_many_tensors_take_linear_time(tmp_path, name):
    def seconds(count: int) -> float:
        header_of(tmp_path, {name.format(i): entry(0, 4) for i in range(count)})
        start = time.process_time()
        found = look(tmp_path)
        assert found is not None
        fold(found, {}, {})
        return time.process_time() - start

    assert seconds(20_000) < 15 * max(seconds(4_000), 0.1)


INDEX = "model.safetensors.index.json"


class Shell:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> object:
        return os.system, ("touch ran",)


def placed(name: str, tensor: str = UP) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": {tensor: name}}))


def pickled(name: str) -> Callable[[Path], object]:
    return lambda folder: torch.save({UP: Shell()}, folder / name)


def instead(make: Callable[[Path], object], name: str = INDEX) -> Callable[[Path], object]:
    return lambda folder: ((folder / name).unlink(missing_ok=True), make(folder / name))


def both(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: [change(folder) for change in changes]


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**30)


# What is done to a folder whose index names one.safetensors, and what is said.
FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle alone": (
        both(instead(lambda path: None), pickled("pytorch_model.bin")),
        "pytorch_model.bin is in an older format",
    ),
    "an index of a pickle": (both(placed("model.bin"), pickled("model.bin")), "not a complete safetensors file"),
    "a pickle in the place of a shard": (pickled("one.safetensors"), "not a complete safetensors file"),
    "a pickle in the place of all": (pickled(ONE), "not a complete safetensors file"),
    "a pipe": (instead(os.mkfifo), f"{INDEX} is not a regular file"),
    "a device": (instead(zero), f"{INDEX} is not a regular file"),
    "another text": (instead(lambda path: path.symlink_to("/etc/passwd")), "is not JSON"),
    "a gigabyte": (instead(large), "is larger than 32 MiB"),
    "brackets": (instead(lambda path: path.write_text("[" * 100_000)), "is not JSON"),
    "a shard that is a pipe": (instead(os.mkfifo, "one.safetensors"), "which .* names, is not a regular file"),
    "a shard that is a device": (instead(zero, "one.safetensors"), "which .* names, is not a regular file"),
    "a shard that is a folder": (instead(Path.mkdir, "one.safetensors"), "which .* names, is not a regular file"),
    "a shard elsewhere": (placed("../one.safetensors"), "outside the folder: nothing is read there"),
    "a shard without a name": (placed(""), "which is no name of a file"),
    "the folder itself": (placed("."), "which is no name of a file"),
    "a long name": (placed("a/" * 5000), "which is no name of a file"),
    "a name that a terminal obeys": (placed("\x1b[2J\nsafe"), r"in '\\x1b\[2J\\nsafe', which is no name of a file"),
    "a tensor that a terminal obeys": (placed("one.safetensors", "\x1b[2J"), r"'\\x1b\[2J' is not in the file"),
    "a tensor with a long name": (placed("one.safetensors", "a." * 5000), "is not in the file"),
    "very many files": (
        lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": {str(i): f"{i}.x" for i in range(50_000)}})),
        "names 50,000 files, and at most 2,000 are read",
    ),
    "a configuration of a gigabyte": (instead(large, "config.json"), "is larger than 32 MiB"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_made_to_harm_is_refused_with_words(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    save_file({UP: torch.ones(2, 2)}, tmp_path / "one.safetensors", metadata={"format": "pt"})
    placed("one.safetensors")(tmp_path)
    assert stored_tensors(tmp_path).keys() == {UP}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    change, words = FOLDERS[name]
    change(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=words) as error:
        stored_tensors(tmp_path)
    assert str(error.value).isprintable() and len(str(error.value)) < 700
    assert not Path("ran").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000  # KiB
    look(tmp_path)


def test_links_of_a_download_are_followed(tmp_path):
    """As the cache of the Hugging Face hub has them: the files are elsewhere, and are data wherever they are."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir(), folder.mkdir()
    save_file({UP: torch.ones(2, 2)}, blobs / "1", metadata={"format": "pt"})
    placed("one.safetensors")(blobs)
    (folder / "one.safetensors").symlink_to("../blobs/1")
    (folder / INDEX).symlink_to(f"../blobs/{INDEX}")
    assert stored_tensors(folder).keys() == {UP}


def test_unexpected_names_are_shown_as_text(tmp_path):
    small_model("llama").save_pretrained(tmp_path)
    save_file({**load_file(tmp_path / ONE), "\x1b[2J": torch.ones(2)}, tmp_path / ONE, metadata={"format": "pt"})
    with fake_mesh(2, names=("tp",)) as mesh:
        model = apply_plan(meta_model("llama"), mesh, "llama", src_data_rank=None, prove=False)
        with pytest.raises(ValueError, match=r"the model lacks '\\x1b\[2J'"):
            load_checkpoint(model, tmp_path)


NAMES = st.sampled_from(
    ["a", "a.b", "a.0.b", "a.1.b", "a..b", "", ".", "0", "a.-1.b", "__metadata__", "a." + "9" * 20 + ".b"]
)
NUMBERS = st.sampled_from([0, 1, 4, -1, 2**31, 2**64, 10**30, 0.5, None, "4", True])
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "I32", "BF16", "f32", "F4", "", None, 3, ["F32"]]),
        "shape": st.lists(NUMBERS, max_size=10) | NUMBERS,
        "data_offsets": st.lists(NUMBERS, max_size=3) | NUMBERS,
    },
)
HEADERS = st.lists(st.tuples(NAMES, ENTRIES | NUMBERS), max_size=4)  # names may stand there twice


@seed(0)
@settings(max_examples=examples(100), deadline=None)
@given(HEADERS, st.none() | st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1]), st.integers(0, 40))
def test_any_header_is_read_or_refused(tmp_path_factory, header, length, data):
    folder = tmp_path_factory.mktemp("header")
    inner = ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in header)
    header_of(folder, f"{{{inner}}}".encode(), bytes(data), length=length)
    found = look(folder)
    assert found is None or fold(found, {}, {}).tree.modules
    try:
        stored_tensors(folder)
    except ValueError as error:
        assert ONE in str(error)


def test_a_file_that_ends_anywhere_is_refused(tmp_path):
    save_file({UP: torch.ones(4, 4), "b": torch.ones(3)}, tmp_path / ONE)
    whole = (tmp_path / ONE).read_bytes()
    for end in random.Random(0).sample(range(len(whole)), 30):
        (tmp_path / ONE).write_bytes(whole[:end])
        with pytest.raises(ValueError, match="damaged or truncated"):
            stored_tensors(tmp_path)
        look(tmp_path)
