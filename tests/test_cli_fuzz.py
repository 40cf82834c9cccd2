"""Whatever is in a plan or in a model's configuration, the command line answers with findings: never a
traceback, never an exit code but 0 and 1, always in bounded time. What is no lock or no device is a wrong command line, 2."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardplan.cli.main import main
from shardplan.language import builtin_plans
from tests.sampling import examples

BUILTIN = [path.read_text("utf-8") for path in builtin_plans().values()]
TOKENS = [
    "*", "**", "{", "}", "{a,b}", "[", "]", "[a-", "!", "&a ", "*a", "<<: ", ": ", "- ", "\n", "\n  ", "\t",
    "# ", "'", '"',
    "none", "colwise", "rowwise_seq", "extends: llama", "extends: ../../etc/passwd", "version: 1",
    "optional: yes",
    "divides: 1//0", "packed: [a*b]", "packed: -1", "model.layers.*", "!!python/object:os.system",
    "\x00", "\u202e", "é",
    "1e999", "~", "null", "---\n", "...\n", "%TAG ! x\n", "a" * 300, "{" * 60, "[" * 60,
]  # fmt: skip
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.text(max_size=5),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), st.just(10**20),
)  # fmt: skip


@st.composite
def mutated_plans(draw) -> str:
    """A built-in plan with a few pieces cut out, doubled, or replaced."""
    text = draw(st.sampled_from(BUILTIN))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 30)))
        piece = draw(st.one_of(st.sampled_from(TOKENS), st.just(text[start:end] * 2), st.text(max_size=8)))
        text = text[:start] + piece + text[end:]
    return text


def run(*words: str, codes: tuple[int, ...] = (0, 1)) -> tuple[int, str]:
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(["--debug", *words])
    assert code in codes and "Traceback" not in errors.getvalue(), errors.getvalue()
    return code, output.getvalue()


def write(path: Path, text: str) -> str:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


FEW = settings(max_examples=examples(60), deadline=20_000, suppress_health_check=list(HealthCheck))


@FEW
@given(mutated_plans(), st.sampled_from(["plan.yaml", "plan.json"]))
def test_any_plan_is_linted(folder, text, name):
    plan = write(folder / name, text)
    code, shown = run("lint", plan)
    assert (code == 1) == ("error[" in shown)
    assert json.loads(run("lint", plan, "--json")[1])["ok"] is (code == 0)
    assert "\x1b" not in shown and "\u202e" not in shown


@pytest.mark.torch
@FEW
@given(mutated_plans(), st.sampled_from([[], ["--tp", "2"], ["--tp", "3", "--seq-len", "7"]]))
def test_any_plan_is_validated(folder, text, options):
    model = write(folder / "config.json", json.dumps(MODEL))
    run("validate", model, write(folder / "mine.yaml", text), *options)


@pytest.mark.torch
@FEW
@given(st.dictionaries(st.sampled_from([*MODEL, "head_dim", "attention_dropout", "rope_theta"]), ODD, max_size=3))
def test_any_model_is_validated(folder, changes):
    model = write(folder / "changed.json", json.dumps({**MODEL, **changes}))
    run("validate", model, "llama")


LOCK = {
    "lock": "1",
    "asked": {
        "model": "no-such-type",
        "plan": "llama",
        "mesh": {"tp": 2, "dp_shard": 4},
        "sequence_parallel": None,
        "settings": {"num_hidden_layers": 2},
        "inputs": None,
        "reduced": None,
        "trust_remote_code": False,
        "derive": True,
    },
    "versions": {"torch": "2"},
    "files": {"plan.yaml": "0"},
    "parameters": {"a.weight": "[2, 2] float32"},
    "variants": {"tensor_parallel": {"a": ["style colwise"]}},
    "sections": {"data_parallel.backend": "fsdp2"},
    "digest": "0",
}
DEVICE = {
    "memory": 8e9,
    "flops": {"bfloat16": 1e12},
    "memory_bandwidth": 1e11,
    "node_gpus": 2,
    "node_bandwidth": 1e9,
    "network_bandwidth": 1e9,
    "source": "",
    "efficiency": [0.2, 0.5],
}
ANYTHING = st.one_of(
    ODD, st.sampled_from([1e30, -0.0, 10**400, 2**20, "8", "\x1b[2J", "\ud800", "a\0b", {"tp": 1e30}, [[]], "os:abort"])
)


@st.composite
def mutated(draw, data):
    """Data with values exchanged or removed, at any depth, or as a text of JSON that is cut."""
    made = json.loads(json.dumps(data))
    for _ in range(draw(st.integers(1, 2))):
        at = made
        while True:
            key = draw(st.sampled_from(sorted(at)))
            if isinstance(at[key], dict) and at[key] and draw(st.booleans()):
                at = at[key]
                continue
            if draw(st.integers(0, 5)):
                at[key] = draw(ANYTHING)
            else:
                at[draw(st.text(max_size=3))] = at.pop(key)
            break
    text = json.dumps(made)
    return (
        text
        if draw(st.integers(0, 9))
        else text[: draw(st.integers(0, len(text)))] + draw(st.sampled_from(["", "[" * 100_000]))
    )


@pytest.mark.torch
@settings(FEW, max_examples=examples(60))
@given(mutated(LOCK))
def test_any_lock_is_read(folder, text):
    run("diff", "--against", write(folder / "lock.json", text), codes=(1, 2))


@pytest.mark.torch
@settings(FEW, max_examples=examples(12))
@given(
    mutated(
        {
            **LOCK,
            "asked": {
                **LOCK["asked"],
                "model": "llama",
                "settings": {n: v for n, v in MODEL.items() if isinstance(v, int)},
            },
        }
    )
)
def test_any_lock_is_checked(folder, text):
    run("diff", "--against", write(folder / "lock.json", text), codes=(0, 1, 2))


@pytest.mark.torch
@settings(FEW, max_examples=examples(60))
@given(mutated(DEVICE))
def test_any_device_is_read(folder, text):
    """A model that there is none of is looked for after the device is read."""
    words = ["fit", "no-such-type", "--gpus", "4", "--global-batch", "8", "--seq-len", "8"]
    run(*words, "--device", write(folder / "device.json", text), codes=(1, 2))
