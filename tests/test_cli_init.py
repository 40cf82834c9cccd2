"""`shardplan init` and `shardplan.init_plan`: a plan for a model, written, validated and proven."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn
from transformers import AutoConfig

from shardplan import Model, PlanError, init_plan, validate
from shardplan.authoring.init.write import joined
from shardplan.cli.main import main
from shardplan.core.folded_names import braced
from shardplan.language import parse_plan, parse_text
from shardplan.language.globs import parse_glob
from tests.adversaries.functions import changed
from tests.adversaries.hooks import hooked
from tests.adversaries.parts import MlpBlock, Stack, features
from tests.case_models import narrow_blocks


@pytest.fixture(autouse=True)
def no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["init", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_text_is_the_document() -> None:
    made = init_plan("qwen3", sequence_parallel=True)
    read, said = parse_text(made.text).plan, parse_plan(dict(made.document), name="said").plan
    assert read is not None and said is not None
    for section in ("tensor_parallel", "sequence_parallel"):
        assert patterns(getattr(read, section)) == patterns(getattr(said, section))
    assert made.diagnostics == ()


def patterns(rules) -> dict[str, tuple[str, dict]]:
    """Every single pattern that rules match."""
    return {text: (rule.style, rule.options) for rule in rules for text in parse_glob(rule.pattern).texts}


def test_a_file_is_written_and_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.yaml"
    code, out, err = run(capsys, "gpt2", "-o", str(file), "--sequence-parallel", "--name", "mine")
    assert (code, out) == (0, "") and err.endswith("plan.yaml: proven at tp=2\n")
    plan = parse_plan(str(file)).plan
    assert plan is not None and plan.name == "mine" and plan.models == ("gpt2",)
    still = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "summary_first_dropout": 0.0,
        "vocab_size": 50304,
    }
    assert validate(Model("gpt2", settings=still), str(file), {"tp": 4}).diagnostics == ()
    before = file.read_text("utf-8")
    code, _, err = run(capsys, "gpt2", "-o", str(file))
    assert code == 2 and "exists; --force overwrites it" in err
    assert file.read_text("utf-8") == before
    assert run(capsys, "gpt2", "-o", str(file), "--force")[0] == 0
    assert "sequence_parallel" not in file.read_text("utf-8")


def test_what_stays_whole_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "qwen3", "--set", "intermediate_size=12287")
    assert code == 0
    assert err.startswith("warning[SP532]: model.layers.*.mlp.{gate,up,down}_proj stay whole on every rank (")
    assert "which tp=2 does not divide" in err
    assert "\n# model.layers.*.mlp.{gate,up,down}_proj stay whole" in out
    assert "model.layers.*.self_attn.o_proj: rowwise\n" in out


def test_nothing_can_be_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.yaml"
    code, out, _ = run(
        capsys, "tests.case_models:odd_blocks", "-o", str(file), "--inputs", "tests.case_models:features"
    )
    assert code == 1 and out.startswith("error[SP530]: nothing of tests.case_models:odd_blocks can be split at tp=2")
    assert not file.exists()


def test_what_validate_refuses_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No batch has values so large that the split part counts."""
    file = tmp_path / "plan.yaml"
    inputs = ("--inputs", "tests.adversaries.parts:features")
    code, out, _ = run(capsys, "tests.adversaries.gates:masked_by_value", "-o", str(file), *inputs)
    assert code == 1 and out.startswith("error[SP421]: no run reaches layers.0.mlp.up.weight")
    assert "--> <init>:" in out and "layers.*.mlp.up: colwise" in out
    assert not file.exists()


def test_rules_that_the_numbers_refute_are_not_returned() -> None:
    """A hook on a tensor of split features centres its gradient."""
    with pytest.raises(PlanError) as raised:
        init_plan(Model(hooked("centre"), inputs=features))
    assert [one.code for one in raised.value.diagnostics] == ["SP420"]
    assert "--> <init>:" in str(raised.value) and "layers.*.mlp.up: colwise" in str(raised.value)


def test_an_overlay_that_the_numbers_refute_is_none() -> None:
    """A gradient is divided by its norm over the whole sequence."""
    model = Model(changed("unit", "output"), inputs=features)
    made = init_plan(model, sequence_parallel=True)
    assert [one.code for one in made.diagnostics if one.is_error] == ["SP420", "SP531"]
    assert "sequence_parallel" not in made.document and validate(model, dict(made.document), {"tp": 2}).proven


@pytest.mark.slow
def test_no_overlay_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """OPT flattens batch and sequence in front of its MLP, so that the slices of ranks are no slice of the whole."""
    file = tmp_path / "plan.yaml"
    code, _, err = run(capsys, "opt", "--sequence-parallel", "-o", str(file))
    assert code == 1 and "error[SP531]: no sequence-parallel overlay was found for opt" in err
    assert "tensor_parallel" in file.read_text() and "sequence_parallel" not in file.read_text()


def test_wrong_calls(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "qwen3", "--tp", "1")[0] == 2
    with pytest.raises(ValueError, match="tp is 1"):
        init_plan("qwen3", tp=1)
    with pytest.raises(PlanError, match="SP504"):
        init_plan("no_such_type")
    with pytest.raises(TypeError):
        init_plan(3)  # type: ignore[arg-type]


def test_the_users_own_objects_are_not_changed() -> None:
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2)
    before = config.to_dict()
    init_plan(config)
    assert config.to_dict() == before
    module = narrow_blocks()
    names = [name for name, _ in module.named_modules()]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(PlanError):
        init_plan(module)
    assert [name for name, _ in module.named_modules()] == names
    assert all(value.equal(state[name]) for name, value in module.state_dict().items())
    assert isinstance(module, nn.Module)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("q_proj", "k_proj", "v_proj"), "{q,k,v}_proj"),
        (("ln_1", "ln_2"), "ln_{1,2}"),
        (("norm1", "norm2"), "norm{1,2}"),
        (("input_layernorm", "post_attention_layernorm"), "{input,post_attention}_layernorm"),
        (("self_attn", "mlp"), "{self_attn,mlp}"),
        (("proj", "q_proj"), "{proj,q_proj}"),
        (("one",), "one"),
    ],
)
def test_words_in_braces(words: tuple[str, ...], text: str) -> None:
    assert braced(words) == text


def test_rules_that_say_the_same_are_one() -> None:
    rules = {
        "a.*.q_proj": {"style": "colwise"},
        "a.*.out": {"style": "rowwise"},
        "a.*.k_proj": {"style": "colwise"},
        "b.0": {"style": "split_seq_input"},
    }
    assert list(joined(rules)) == ["a.*.{q,k}_proj", "a.*.out", "b.0"]


def test_a_model_that_no_plan_is_for_has_none() -> None:
    """A hook on a parameter that tp replaces: `validate` refuses every plan."""
    model = Stack(MlpBlock(), MlpBlock())
    model.layers[0].mlp.up.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(PlanError) as raised:
        init_plan(Model(model, inputs=features))
    assert [one.code for one in raised.value.diagnostics] == ["SP525"]
