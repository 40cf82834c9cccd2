"""Training states whose files want to run code, or to have other files read: refused by name, and the model is untouched."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from processes import on_ranks
from small_models import batch, small_model, whole_state
from torch.distributed.device_mesh import init_device_mesh

import shardplan
from shardplan.weights.checksums import CHECKSUMS


class Shell:
    """Runs a command where it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


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


def renamed(name: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, marker: Path) -> None:
        metadata(folder, lambda found: [setattr(one, "relative_path", name) for one in found.storage_data.values()])

    return change


def in_a_value(folder: Path, marker: Path) -> None:
    """The learning rate is a call."""

    def change(found: Any) -> None:
        (place,) = (one for index, one in found.storage_data.items() if index.fqn.endswith(".lr"))
        place.relative_path, place.offset, place.length = "rate", 0, len(content)

    content = saved(Shell(marker))
    (folder / "rate").write_bytes(content)
    metadata(folder, change)


def file(name: str, content: Callable[[Path], bytes]) -> Callable[[Path, Path], None]:
    return lambda folder, marker: (folder / name).write_bytes(content(marker)) and None


def another(folder: Path, make: Callable[[Path], None]) -> None:
    (folder / CHECKSUMS).unlink()
    make(folder / CHECKSUMS)


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
    "code as a value": in_a_value,
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
        if name != "code as a value":  # which is found while tensors are read
            assert all(torch.equal(value, before[key]) for key, value in whole_state(model).items()), name
    shardplan.load_training_state(model, optimizer, folder / "state")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + 300_000  # KiB
    return found


def test_no_code_runs_and_no_other_file_is_read(tmp_path: Path) -> None:
    (found,) = on_ranks(1, attacked, tmp_path)
    assert found.keys() == ATTACKS.keys()
    for name, (error, said, ran) in found.items():
        assert not ran, name
        assert error == ("RuntimeError" if name == "code as a value" else "ValueError"), (name, error, said)
        assert str(tmp_path / "state") in said and len(said) < 600 and said.isprintable(), (name, said)


def test_the_attacks_work_on_torch_itself(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Shell(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()
