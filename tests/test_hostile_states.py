"""Training states whose files want to run code, or to have other files read: refused by name, and the model is untouched."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import resource
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model, whole_state
from torch.distributed.device_mesh import init_device_mesh

import shardplan
from shardplan.weights.checksums import CHECKSUMS
from shardplan.weights.pickles import check_pickle


class Shell:
    """Runs a command where it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


class Keyed:
    """A dict with a key that takes for ever to hash: a tuple that holds another twice, and that a third."""

    def __reduce__(self) -> Any:
        return OrderedDict, ([(nested(()), 1)],)


def nested(value: Any) -> Any:
    for _ in range(60):
        value = type(value)((value, value))
    return value


def body(value: Any) -> bytes:
    """The instructions that make a value."""
    return pickle.dumps(value, 2)[2:-1]


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def changed(instructions: bytes) -> bytes:
    """What `torch.save` writes, of an empty tuple that these instructions change."""
    return packed(saved(()), ZIP_STORED, lambda content: content.replace(b").", b")" + instructions + b"."))


def packed(content: bytes, compression: int, change: Callable[[bytes], bytes] = bytes) -> bytes:
    with ZipFile(io.BytesIO(content)) as old, ZipFile(stream := io.BytesIO(), "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(old.read(name)))
    return stream.getvalue()


def older(value: Any) -> bytes:
    torch.save(value, stream := io.BytesIO(), _use_new_zipfile_serialization=False)
    return stream.getvalue()


def summed(folder: Path) -> None:
    """The checksums of what is there, as anybody can write them."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != CHECKSUMS}
    sums = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()}
    (folder / CHECKSUMS).write_text(json.dumps(sums))


def saved(value: Any) -> bytes:
    torch.save(value, stream := io.BytesIO())
    return stream.getvalue()


def metadata(folder: Path, change: Callable[[Any], None]) -> None:
    found = pickle.loads((folder / ".metadata").read_bytes())
    change(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def renumbered(values: dict[Any, Any]) -> None:
    """A number in the place of the first key."""
    values[3] = values.pop(next(iter(values)))


def renamed(name: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, marker: Path) -> None:
        metadata(folder, lambda found: [setattr(one, "relative_path", name) for one in found.storage_data.values()])

    return change


def in_a_value(value: Callable[[Path], Any], name: str = ".lr") -> Callable[[Path, Path], None]:
    """The learning rate, or a tensor, is another value."""

    def attack(folder: Path, marker: Path) -> None:
        def change(found: Any) -> None:
            place = next(one for index, one in found.storage_data.items() if index.fqn.endswith(name))
            place.relative_path, place.offset, place.length = "other", 0, len(content)

        content = saved(value(marker))
        (folder / "other").write_bytes(content)
        metadata(folder, change)

    return attack


def first(name: str, change: Callable[[Any], None]) -> Callable[[Path, Path], None]:
    """Another first place (its key, or itself), or another form of the first tensor."""

    def attack(found: Any) -> None:
        tensors = (one for one in found.state_dict_metadata.values() if hasattr(one, "chunks"))
        change(
            {"key": iter(found.storage_data), "place": iter(found.storage_data.values()), "tensor": tensors}[
                name
            ].__next__()
        )

    return lambda folder, marker: metadata(folder, attack)


def file(name: str, content: Callable[[Path], bytes]) -> Callable[[Path, Path], None]:
    return lambda folder, marker: (folder / name).write_bytes(content(marker)) and None


def another(folder: Path, make: Callable[[Path], None]) -> None:
    (folder / CHECKSUMS).unlink()
    make(folder / CHECKSUMS)


DEEP = b"\x85" * 200_000  # tuples of one; Python's code for hashes calls itself
CLASS = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
FORM = b"\x80\x02ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
IN_VALUES = ("code as a value", "a value without an end", "a tensor without an end")
ATTACKS: dict[str, Callable[[Path, Path], None]] = {
    "a memo of gigabytes": file(".metadata", lambda _: b"\x80\x04Nr" + (2**28).to_bytes(4, "little") + b"."),
    "checksums that are a pipe": lambda folder, _: another(folder, os.mkfifo),
    "checksums that are a device": lambda folder, _: another(folder, lambda path: path.symlink_to("/dev/zero")),
    "checksums of a gigabyte": lambda folder, _: os.truncate(folder / CHECKSUMS, 2**30),
    "checksums that are deep": file(CHECKSUMS, lambda _: b'{"a":' * 100_000),
    "checksums without an end": file(CHECKSUMS, lambda _: b'{"extra.pt": [Infinity, "x"]}'),
    "checksums of a name that is too long": file(CHECKSUMS, lambda _: b'{"%s": [1, "x"]}' % (b"a" * 5000)),
    "checksums of a name that a terminal obeys": file(CHECKSUMS, lambda _: rb'{"\u001b[2J": [1, "x"]}'),
    "checksums of the folder above": file(CHECKSUMS, lambda _: b'{"..": [1, "x"]}'),
    "code for the metadata": file(".metadata", lambda marker: pickle.dumps(Shell(marker))),
    "code in the metadata": lambda folder, marker: metadata(folder, lambda found: setattr(found, "planner_data", Shell(marker))),
    "a name of torch": file(".metadata", lambda _: b"ctorch\nload\n(S'extra.pt'\ntR."),
    "a name inside a name": file(".metadata", lambda _: b"\x80\x04\x8c\x05torch\x8c\x0ahub.os.sep\x93."),
    "another object": file(".metadata", lambda _: pickle.dumps({"state_dict_metadata": {}})),
    "no pickle": file(".metadata", lambda _: b"\x00" * 64),
    "nothing": file(".metadata", lambda _: b""),
    "brackets": file(".metadata", lambda _: b"(" * 100_000),
    "no places": lambda folder, _: metadata(folder, lambda found: setattr(found, "storage_data", 3)),
    "places of nothing": lambda folder, _: metadata(folder, lambda found: found.storage_data.update(a=None)),
    "a file above": renamed("../outside"),
    "a file of the system": renamed("/etc/passwd"),
    "a device": renamed("/dev/zero"),
    "a key without an end": file(".metadata", lambda _: b"\x80\x02}" + body(nested(())) + b"K\x01s."),
    "keys without an end": file(".metadata", lambda _: b"\x80\x02}(" + body(nested(())) + b"K\x01u."),
    "a key of a tuple named twice at once": file(".metadata", lambda _: b"\x80\x02})" + b"2\x86" * 60 + b"K\x01s."),
    "a set without an end": file(".metadata", lambda _: b"\x80\x04\x8f(" + body(nested(())) + b"\x90."),
    "a fixed set without an end": file(".metadata", lambda _: b"\x80\x04(" + body(nested(())) + b"\x91."),
    "a deep key": file(".metadata", lambda _: b"\x80\x02})" + DEEP + b"K\x01s."),
    "a number for a tensor's name": lambda folder, _: metadata(folder, lambda found: renumbered(found.state_dict_metadata)),
    "a number for a place": lambda folder, _: metadata(folder, lambda found: renumbered(found.storage_data)),
    "a number for a place's name": first("key", lambda one: object.__setattr__(one, "fqn", 3)),
    "a number for a planned name": lambda folder, _: metadata(folder, lambda found: renumbered(found.planner_data)),
    "a value by a number in text": file(".metadata", lambda _: b"\x80\x02)q\x00" + b"g0\ng0\n\x86q\x00" * 60 + b"}q\x01h\x00K\x01s."),
    "a class that is to be changed": file(".metadata", lambda _: CLASS + b"N}X\x01\x00\x00\x00aK\x01s\x86b."),
    "a place without an end": first("key", lambda one: object.__setattr__(one, "fqn", nested(()))),
    "a place of a part without an end": first("key", lambda one: object.__setattr__(one, "offset", (nested(()),))),
    "a number of a form without an end": file(".metadata", lambda _: FORM + body(nested([])) + b"\x85R."),
    "another number of a form without an end": file(".metadata", lambda _: FORM + body(nested([])) + b"\x85\x81."),
    "a path without an end": file(".metadata", lambda _: b"cpathlib\nPurePosixPath\n" + body(nested([])) + b"\x85R."),
    "a file without an end": first("place", lambda one: setattr(one, "relative_path", nested(()))),
    "a length that is a list": first("place", lambda one: setattr(one, "length", nested([]))),
    "a file that is to be changed": first("place", lambda one: setattr(one, "transform_descriptors", ["zstd"])),
    "a size without an end": first("tensor", lambda one: setattr(one, "size", nested([]))),
    "a part without an end": first("tensor", lambda one: setattr(one.chunks[0], "sizes", nested([]))),
    "another storage_meta": lambda folder, _: metadata(folder, lambda found: setattr(found, "storage_meta", "x")),
    "a key without an end in extra": file("extra.pt", lambda _: saved(Keyed())),
    "a deep key in extra": file("extra.pt", lambda _: changed(DEEP + b"q\x01}h\x01K\x01s")),
    "a list without an end in extra": file("extra.pt", lambda _: saved({"a": nested([])})),
    "a list in itself in extra": file("extra.pt", lambda _: saved({"a": endless()})),
    "a tuple named twice at once in extra": file("extra.pt", lambda _: changed(b"2\x86" * 60)),
    "values in a number in extra": file("extra.pt", lambda _: changed(b"K\x01a")),
    "extra that is compressed": file("extra.pt", lambda _: packed(saved({}), ZIP_DEFLATED)),
    "extra in torch's older form": file("extra.pt", lambda _: older({})),
    "code as a value": in_a_value(Shell),
    "a value without an end": in_a_value(lambda _: Keyed()),
    "a tensor without an end": in_a_value(lambda _: Keyed(), "norm.weight"),
    "code in extra": file("extra.pt", lambda marker: saved(Shell(marker))),
    "a bare pickle as extra": file("extra.pt", lambda marker: pickle.dumps(Shell(marker))),
    "code in the random numbers": file("random.pt", lambda marker: saved({"seed": Shell(marker), "calls": 0})),
    "code in the schedules": file("schedules.pt", lambda marker: saved({"schedules": [("StepLR", Shell(marker))]})),
    "schedules without names": file("schedules.pt", lambda _: saved({"schedules": 7})),
    "schedules that are none": file("schedules.pt", lambda _: saved([1])),
    "random numbers that are none": file("random.pt", lambda _: saved({"seed": "x"})),
    "extra that is none": file("extra.pt", lambda _: saved([1])),
}  # fmt: skip


def attacked(folder: Path) -> dict[str, tuple[str, str, bool]]:
    """The error, what it says, and whether code ran, for each."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    model = shardplan.apply_plan(small_model("llama"), mesh, "auto", prove=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=batch(3), labels=batch(3)).loss.backward()
    optimizer.step()
    shardplan.save_training_state(model, optimizer, folder / "state")
    kept = {path.name: path.read_bytes() for path in (folder / "state").iterdir()}
    (folder / "outside").write_bytes(kept["__0_0.distcp"])
    before, found = whole_state(model), {}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, attack in ATTACKS.items():
        marker = folder / "ran"
        attack(folder / "state", marker)
        if not name.startswith("checksums"):
            summed(folder / "state")
        try:
            shardplan.load_training_state(model, optimizer, folder / "state")
            found[name] = ("none", "", marker.exists())
        except Exception as error:
            found[name] = (type(error).__name__, str(error), marker.exists())
        marker.unlink(missing_ok=True)
        for path in (folder / "state").iterdir():
            path.unlink()
        for other, content in kept.items():
            (folder / "state" / other).write_bytes(content)
        if name not in IN_VALUES:  # which are found while tensors are read
            assert all(torch.equal(value, before[key]) for key, value in whole_state(model).items()), name
    shardplan.load_training_state(model, optimizer, folder / "state")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + 300_000  # KiB
    return found


def test_no_code_runs_and_no_other_file_is_read(tmp_path: Path) -> None:
    (found,) = on_ranks(1, attacked, tmp_path)
    assert found.keys() == ATTACKS.keys()
    for name, (error, said, ran) in found.items():
        assert not ran, name
        assert error == ("RuntimeError" if name in IN_VALUES else "ValueError"), (name, error, said)
        assert str(tmp_path / "state") in said and len(said) < 600 and said.isprintable(), (name, said)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [[1] * 1000] * 1000, ("a", (1, 2)): {(1, (2, 3))}, "of": OrderedDict(a=torch.Size((1, 2))), "b": b"x"},
        [("a", [1], {"b": (2,)})] * 100_000,
        torch.ones(3),
        None,
    ],
    ids=["nested", "shared", "tensor", "nothing"],
)
def test_what_is_saved_is_not_too_large(value: Any) -> None:
    with ZipFile(io.BytesIO(saved(value))) as archive:
        check_pickle(archive.read("archive/data.pkl"))


def test_the_attacks_work_on_torch_itself(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Shell(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()
