"""Configurations with any values at all give a model or a finding, never another exception."""

import copy
import json
import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardplan.core.diagnostics import PlanError
from shardplan.model import find_model
from tests.sampling import examples

CONFIGS = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "cases/models").glob("*.json")}
NAMES = ("llama-3.1-8b", "gpt2", "gemma-3-4b", "phi-3-mini-4k", "mixtral-8x7b", "qwen3-30b-a3b")

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-4, 4)
    | st.sampled_from([7, 64, 10**6, 2**31, 2**63, 10**30, -(2**63), 1e308, -0.5, 0.3])
    | st.text(max_size=8)
    | st.sampled_from(["llama", "gpt2", "torch.float16", "eager", "../x", "\x00", "longrope", "sliding_attention"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@st.composite
def configurations(draw):
    """A known configuration with some fields changed, removed or added."""
    data = copy.deepcopy(CONFIGS[draw(st.sampled_from(NAMES))])
    # Layers are few, so that the models that can be built are built fast.
    for part in (data, data.get("text_config", {}), data.get("vision_config", {})):
        for name in ("num_hidden_layers", "n_layer"):
            if name in part:
                part[name] = 2
    for _ in range(draw(st.integers(1, 3))):
        part = draw(st.sampled_from([data, *(value for value in data.values() if isinstance(value, dict))]))
        name = draw(st.sampled_from([*part, "per_layer_config", "layer_types", "head_dim", "rope_parameters", "x"]))
        if draw(st.booleans()) or name not in part:
            part[name] = draw(VALUES)
        else:
            del part[name]
    return data


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=configurations())
def test_any_configuration(tmp_path, data):
    (tmp_path / "config.json").write_text(json.dumps(data))
    try:
        found = find_model(str(tmp_path))
    except PlanError as error:
        assert error.diagnostics
        for diagnostic in error.diagnostics:
            assert diagnostic.code.startswith("SP50") and "\n" not in diagnostic.message
            assert all("\n" not in note for note in diagnostic.notes)
    else:
        assert found.tree.modules


HUGE = {
    "layers that a class lists": {"model_type": "qwen3", "num_hidden_layers": 10**9},
    "layers of a part": {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}},
    "labels": {"model_type": "llama", "num_labels": 10**9},
    "more labels than numbers": {"model_type": "llama", "num_labels": 1e30},
    "experts": {"model_type": "mixtral", "num_local_experts": 10**9},
    "negative layers": {"model_type": "qwen3", "num_hidden_layers": -(10**9)},
    "one layer less than none": {"model_type": "llama", "num_hidden_layers": -1},
    "hidden sizes": {"model_type": "llama", "hidden_size": 2**62},
    "words": {"model_type": "llama", "vocab_size": 10**30},
}


@pytest.mark.parametrize("name", HUGE)
def test_what_would_fill_the_memory_is_refused_before_it_is_made(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(HUGE[name]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PlanError) as error:
        find_model(str(tmp_path))
    assert error.value.diagnostics[0].code == "SP509"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 500_000  # KiB


@pytest.mark.parametrize("name", ["num_labels", "num_hidden_layers"])
def test_settings_are_bounded_alike(name):
    with pytest.raises(PlanError, match=f"{name} is 1000000000, and at most"):
        find_model("qwen3", overrides={name: 10**9})


WORDS = ["x" * 100_000, "x" * 300, "/".join(["a" * 200] * 50), "\udcff", "a\0b", "-", "....", "/", "~nobody/x", "/proc/self/environ",
         "/dev/zero", "/dev/stdin.json", "https://example.com/x", "file:///etc/passwd", "s3://a/b", "llama@main", "a--b/c", "x.py:make"]  # fmt: skip


@pytest.mark.parametrize("index", range(len(WORDS)))
def test_any_word_is_a_finding(index):
    with pytest.raises(PlanError) as error:
        find_model(WORDS[index])
    assert error.value.diagnostics[0].code.startswith("SP50")
