"""What is told of a plan before torch is imported: nothing but what the whole check tells too."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import shardplan
from shardplan.cli.main import main
from shardplan.compiler.early import NoCheckpoint
from shardplan.model.stored_tensors import INDEX, MAX_DEPTH, fold, stored_tensors
from tests.small_models import meta_model, small_config

ROOT = Path(__file__).parent.parent
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 132}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
# Types whose checkpoints have their models' names: what is wrong is told early.
SAME_NAMES = "llama qwen3 phi3 gemma2 starcoder2".split()
MORE = "qwen2 mistral olmo2 granite glm4 stablelm cohere smollm3".split()
# Types whose names are others in checkpoints, or that are not told by their code's text: nothing is told early.
OTHER_NAMES = "mixtral gpt2 falcon".split()
MORE_OTHERS = "qwen3_moe gemma3_text gpt_neox".split()


def written(folder: Path, config, model: nn.Module | None = None, *, files: int = 2) -> Path:
    """A checkpoint of a model's names and shapes, its files sparse."""
    model = model if model is not None else meta(config)
    skipped = {name for name, p in model.named_parameters(remove_duplicate=False)} - dict(
        model.named_parameters()
    ).keys()
    tensors = {name: list(p.shape) for name, p in model.state_dict().items() if name not in skipped}
    tensors |= (
        {"model.rotary_emb.inv_freq": [4]} if any("rotary_emb" in name for name, _ in model.named_modules()) else {}
    )
    listed = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    return written_as(folder, listed, tensors, files=files)


def written_as(folder: Path, config: dict, tensors: dict[str, list[int]], *, files: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    names = sorted(tensors)
    placed = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        header = {n: {"dtype": "BF16", "shape": tensors[n], "data_offsets": [0, 0]} for n in names[number::files]}
        placed |= dict.fromkeys(header, file)
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}), "utf-8")
    return folder


def meta(config) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def configuration(name: str):
    if name in ("phi3", "mixtral", "qwen3_moe", "gemma3_text", "gpt2"):
        return small_config(name)
    given = {**SIZES, **HEADS, "pad_token_id": 0}
    return AutoConfig.for_model(name, **given)


def said(report, *, code: str = "SP") -> set[tuple]:
    """The errors: what they say, where, and their modules."""
    return {
        (d.code, d.message, d.primary and d.primary.location, d.help, frozenset(d.modules))
        for d in report.errors
        if d.code.startswith(code)
    }


def typos(path: Path) -> list[str]:
    """Plans in which one word of one key is misspelled, or a module is looked for in another place."""
    text = path.read_text("utf-8")
    keys = [line.strip().split(": ")[0].strip('"') for line in text.splitlines() if re.match(r'  "?[\w*]+[.*]', line)]
    found = []
    for key in dict.fromkeys(keys):
        *_, last = key.split(".")
        word = re.sub(r"[{}]", "", last).split(",")[-1]
        if word.isidentifier() and f"{key}:" in text:
            found.append(text.replace(f"{key}:", f"{key.removesuffix(last)}{last.replace(word, word[:-1] + 'jx')}:"))
            found.append(text.replace(f"{key}:", f"{key.removesuffix(last)}mlp.{last}:"))
    return found


@pytest.mark.parametrize(
    "name", [*SAME_NAMES, *OTHER_NAMES, *(pytest.param(n, marks=pytest.mark.slow) for n in (*MORE, *MORE_OTHERS))]
)
def test_what_is_told_early_is_what_the_whole_check_tells(name, tmp_path):
    config = configuration(name)
    folder = str(written(tmp_path / "checkpoint", config))
    plan = ROOT / "plans" / f"{shardplan.coverage(config).plan}.yaml"
    cases = [(str(plan), tp) for tp in (2, 3, 5, 16)]
    for number, text in enumerate(typos(plan)):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text, "utf-8")
        cases.append((str(file), 2))
    early = 0
    for file, tp in cases:
        report = shardplan.validate(folder, file, {"tp": tp}, layouts=False)
        if report.stages == ("plan", "names"):
            early += 1
            assert said(report) and said(report) <= said(shardplan.validate(config, file, {"tp": tp}, layouts=False))
    assert (early > 0) is (name in (*SAME_NAMES, *MORE)), early


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("llama"), configuration("llama"))


def plan_of(folder: Path, rules: dict, **sections) -> str:
    file = folder / "plan.json"
    file.write_text(json.dumps({"version": "1", "name": "mine", "tensor_parallel": rules, **sections}), "utf-8")
    return str(file)


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.*.mlp.act_fn",  # without parameters: not in the checkpoint, but in the model
        "model.layers.*.mlp.act_fnn",  # what was meant has no parameters
        "model.rotary_emb",
        "model.layers.7.mlp.up_proj",  # the configuration says how many there are
        "model.layers.*.mlp.q_proj",  # the word is there, in another place
    ],
)
def test_what_the_names_do_not_decide_waits_for_the_model(key, llama, tmp_path):
    report = shardplan.validate(str(llama), plan_of(tmp_path, {key: "replicate"}), layouts=False)
    assert "structure" in report.stages


def test_single_elements_stand_for_themselves(llama, tmp_path):
    rules = {"model.layers.[1-9].mlp.{gate,up}_proj": "colwise", "model.layers.[1-9].mlp.down_proj": "rowwise"}
    report = shardplan.validate(str(llama), plan_of(tmp_path, rules), {"tp": 5}, layouts=False)
    (error,) = report.errors
    assert report.stages == ("plan", "names") and error.code == "SP303"
    assert sorted(error.modules) == sorted(
        f"model.layers.{i}.mlp.{name}_proj" for i in (1, 2) for name in ("gate", "up", "down")
    )


def test_folding_loses_no_name(llama):
    stored = stored_tensors(llama)
    folded = fold(stored, {}, {})
    whole = fold(stored, {}, {}, apart=lambda index: True).tree
    assert len(folded.tree.modules) < len(whole.modules)
    assert sorted(folded.all_of(tuple(folded.tree.modules))) == sorted(whole.modules)
    model = meta_model("llama", num_hidden_layers=3)
    assert {n: p.shape for n, (_, p) in whole.parameters.items() if "inv_freq" not in n} == {
        n: tuple(p.shape) for n, p in model.named_parameters()
    }


# Files


def broken(name: str, folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    content = file.read_bytes()
    header = json.loads(content[8:])
    first = next(iter(header))
    if name == "no file":
        file.unlink()
    elif name == "cut off":
        file.write_bytes(content[:-5])
    elif name == "a length beyond all":
        file.write_bytes(struct.pack("<Q", 2**62) + content[8:])
    elif name == "no JSON":
        file.write_bytes(content[:8] + b"x" + content[9:])
    elif name == "deeply nested":
        text = b"[" * 100_000
        file.write_bytes(struct.pack("<Q", len(text)) + text)
    elif name == "a pipe":
        file.unlink()
        os.mkfifo(file)
    elif name == "outside":
        index = json.loads((folder / INDEX).read_text("utf-8"))
        index["weight_map"][first] = "../other.safetensors"
        (folder / INDEX).write_text(json.dumps(index), "utf-8")
    else:
        header[first] |= {
            "shape": {"negative": [-1], "text": "12", "many dims": [1] * 99, "no number": [1.5]}.get(name, [1])
        }
        if name == "an empty segment":
            header["model..layers"] = header.pop(first)
        if name == "a name inside a name":
            header[f"{first}.more"] = header[first]
        if name == "too deep":
            header[".".join("a" * (MAX_DEPTH + 2))] = header[first]
        if name == "too deep in lists":
            header["a.1." * MAX_DEPTH + "weight"] = header[first]
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize(
    "name",
    [
        "no file",
        "cut off",
        "a length beyond all",
        "no JSON",
        "deeply nested",
        "a pipe",
        "outside",
        "negative",
        "text",
        "many dims",
        "no number",
        "an empty segment",
        "a name inside a name",
        "too deep",
        "too deep in lists",
    ],
)
def test_a_checkpoint_that_is_not_as_it_should_be_says_nothing(name, tmp_path):
    folder = written(tmp_path / "checkpoint", configuration("llama"))
    assert stored_tensors(folder) is not None
    broken(name, folder)
    assert stored_tensors(folder) is None


def test_one_file_goes_before_an_index(tmp_path):
    folder = written(tmp_path / "checkpoint", configuration("llama"))
    text = json.dumps(
        {"__metadata__": {}, "lm_head.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}
    )
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text.encode())
    assert list(fold(stored_tensors(folder), {}, {}).tree.parameters) == ["lm_head.weight"]


# The quick look


def test_quick_looks_no_further(llama, capsys):
    assert main(["validate", str(llama), "llama", "--tp", "2", "--quick"]) == 0
    assert capsys.readouterr().out.startswith("no findings\nchecked: the plan, and the names and sizes")
    assert main(["validate", str(llama), "auto", "--tp", "3", "--quick", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["stages"] == ["plan", "names"] and {f["code"] for f in report["diagnostics"]} == {"SP301"}


def test_quick_says_what_is_not_certain(tmp_path):
    folder = written(tmp_path / "checkpoint", configuration("mixtral"))
    report = shardplan.validate(str(folder), "mixtral", {"tp": 12}, quick=True)
    assert report.ok and {d.code for d in report.warnings} >= {"SP302"}
    assert all(d.notes[-1].startswith("this follows from the names and shapes") for d in report.warnings)


@pytest.mark.parametrize(
    ("model", "plan", "settings", "message"),
    [
        ("llama", "llama", {}, "is not a folder"),
        ("{folder}", "hf", {}, "the plan `hf`"),
        ("{folder}", "llama", {"num_hidden_layers": 2}, "cannot be changed"),
        (
            str(ROOT / "tests" / "cases" / "models" / "qwen3-8b.json"),
            "llama",
            {},
            "has no complete safetensors checkpoint",
        ),
    ],
)
def test_nothing_to_look_at_quickly(model, plan, settings, message, llama):
    with pytest.raises(NoCheckpoint, match=message):
        shardplan.validate(shardplan.Model(model.format(folder=llama), settings), plan, quick=True)


def test_the_command_line_says_so_too(capsys):
    assert main(["validate", "llama", "llama", "--quick"]) == 2
    assert "is not a folder" in capsys.readouterr().err


# What is imported

PROBE = """
import sys
from shardplan.cli.main import main
code = main({words!r})
print("imported:", code, *sorted(sys.modules), file=sys.stderr)
"""
LINT = {"torch", "transformers", "numpy", "jsonschema", "asyncio", "safetensors", "huggingface_hub", "tqdm", "sympy"}
LINT |= {
    "shardplan.api",
    "shardplan.compiler.pipeline",
    "shardplan.compiler.bind",
    "shardplan.compiler.check",
    "shardplan.compiler.layout",
    "shardplan.authoring.init",
}
LINT |= {
    "shardplan.model",
    "shardplan.compiler.lower",
    "shardplan.model.reduced",
    "shardplan.proof",
    "shardplan.weights",
    "multiprocessing",
}
EARLY = {"torch", "transformers", "numpy", "jsonschema", "asyncio", "safetensors", "huggingface_hub", "tqdm", "sympy"}
EARLY |= {
    "shardplan.compiler.layout",
    "shardplan.compiler.lower",
    "shardplan.model.reduced",
    "shardplan.proof",
    "shardplan.weights",
    "multiprocessing",
}


def imported_by(*words: str) -> tuple[int, set[str]]:
    made = subprocess.run([sys.executable, "-c", PROBE.format(words=words)], cwd=ROOT, capture_output=True, text=True)
    *_, last = made.stderr.splitlines()
    label, code, *modules = last.split()
    assert label == "imported:", made.stderr
    return int(code), set(modules)


def test_lint_imports_what_it_needs():
    code, modules = imported_by("lint", "plans/qwen3.yaml")
    assert code == 0 and not modules & LINT and "pydantic" in modules


@pytest.mark.parametrize(("tp", "options", "expected"), [("2", ["--quick"], 0), ("3", [], 1)])
def test_what_is_told_early_needs_no_torch(tp, options, expected, llama):
    code, modules = imported_by("validate", str(llama), "llama", "--tp", tp, *options)
    assert code == expected and not modules & EARLY and "shardplan.compiler.check" in modules


def test_a_wrong_plan_needs_no_torch(tmp_path):
    code, modules = imported_by("validate", "llama", plan_of(tmp_path, {"lm_head": "colwize"}))
    assert code == 1 and not modules & EARLY
