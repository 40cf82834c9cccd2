"""From a text, a file, a dict or a built-in name to a plan."""

import json
import os
from pathlib import Path

import pytest

from shardplan.compiler.automatic import words_of_models
from shardplan.core.diagnostics import Location
from shardplan.core.plan import Rule
from shardplan.core.shares import Share
from shardplan.language import builtin_plans, parse_plan, parse_text
from shardplan.language.limits import MAX_ALTERNATIVES, MAX_BYTES, MAX_FINDINGS
from shardplan.language.parsing import Parsed

QWEN3 = """\
version: "1"
name: qwen3-large
description: Qwen3 with its own norms on the heads.
models: [qwen3, Qwen3ForCausalLM]

tensor_parallel:
  model.embed_tokens: embedding_rowwise
  model.layers.*.{self_attn,mlp}: {style: input_with_grad_allreduce, shares: num_heads}
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.self_attn.{q,k}_norm: replicated_with_grad_allreduce
  model.layers.*.self_attn.qkv_proj:
    style: packed_colwise
    packed: [hidden_size, num_key_value_heads * head_dim, 1024]
    divides: [num_attention_heads, num_key_value_heads]
    optional: true
  lm_head: {style: colwise_rep, optional: true}

sequence_parallel:
  model.layers.*.self_attn: {style: gather_seq_input, argument: hidden_states, grad: partial, seq_dim: 0}
  model.layers.*.mlp.gate: {style: replicated_with_grad_allreduce, read_outside: [1], override: true}
"""


def codes(parsed: Parsed) -> list[str]:
    return [d.code for d in parsed.diagnostics]


NUMBERS = """\
version: "1"
name: mine
tensor_parallel:
  a: {style: input_with_grad_allreduce, shares: {alibi: {dim: 0, heads: HEADS}}}
  b: {style: colwise_norm, shares: {group_size: {groups: HEADS}}}
  c: {style: colwise, heads: HEADS}
  d: {style: packed_colwise, heads: [HEADS, n_head]}
"""


def test_numbers_of_heads_and_groups_are_written_as_numbers_or_as_text() -> None:
    number, text = (parse_text(NUMBERS.replace("HEADS", word), "mine.yaml") for word in ("8", '"8"'))
    assert number.diagnostics == text.diagnostics == ()
    assert number.plan.tensor_parallel == text.plan.tensor_parallel
    a, b, c, d = number.plan.tensor_parallel
    assert (a.shares, b.shares) == ((Share("alibi", dim=0, heads="8"),), (Share("group_size", groups="8"),))
    assert (c.heads, d.heads) == (("8",), ("8", "n_head"))


@pytest.mark.parametrize("word", ["0", "-1", "true", "1.5", "[]"])
def test_what_counts_nothing_is_no_number_of_heads(word: str) -> None:
    found = parse_text(NUMBERS.replace("HEADS", word), "mine.yaml")
    assert found.plan is None and len(found.diagnostics) == 4, found.diagnostics


def test_a_plan_with_every_option() -> None:
    parsed = parse_text(QWEN3, "mine/qwen3.yaml")
    assert parsed.diagnostics == ()
    plan = parsed.plan
    assert (plan.name, plan.file, plan.version) == ("qwen3-large", "mine/qwen3.yaml", "1")
    assert plan.description == "Qwen3 with its own norms on the heads."
    assert plan.models == ("qwen3", "Qwen3ForCausalLM")
    assert plan.parent is None and plan.lineage == (plan,) and plan.has_overlay and not plan.lenient_dead_rules

    def at(section: str, pattern: str) -> Location:
        return Location("mine/qwen3.yaml", (section, pattern))

    def tensor(pattern: str, style: str, **options: object) -> Rule:
        return Rule(pattern, style, at("tensor_parallel", pattern), **options)

    def sequence(pattern: str, style: str, **options: object) -> Rule:
        return Rule(pattern, style, at("sequence_parallel", pattern), **options)

    assert plan.tensor_parallel == (
        tensor("model.embed_tokens", "embedding_rowwise"),
        tensor("model.layers.*.{self_attn,mlp}", "input_with_grad_allreduce", shares=(Share("num_heads"),)),
        tensor("model.layers.*.self_attn.{q,k,v}_proj", "colwise"),
        tensor("model.layers.*.self_attn.{q,k}_norm", "replicated_with_grad_allreduce"),
        tensor(
            "model.layers.*.self_attn.qkv_proj",
            "packed_colwise",
            packed=("hidden_size", "num_key_value_heads * head_dim", "1024"),
            divides=("num_attention_heads", "num_key_value_heads"),
            optional=True,
        ),
        tensor("lm_head", "colwise_gather_output", optional=True),
    )
    assert plan.sequence_parallel == (
        sequence("model.layers.*.self_attn", "gather_seq_input", argument="hidden_states", grad="partial", seq_dim=0),
        sequence("model.layers.*.mlp.gate", "replicated_with_grad_allreduce", read_outside=(1,), override=True),
    )
    span = parsed.sources.span(plan.tensor_parallel[2].location)
    assert (span.line, span.column, span.end_column) == (9, 3, 40)


def test_one_plan_in_yaml_in_json_and_as_a_dict() -> None:
    rules = {"lm_head": {"style": "packed_colwise", "packed": 2}, "norm": "replicate"}
    given = {"version": "1", "name": "x", "tensor_parallel": rules, "compile": {"modules": ["layers.*"]}}
    read = [parse_plan(given), parse_text(json.dumps(given), format="json"), parse_text(json.dumps(given))]
    assert [one.diagnostics for one in read] == [(), (), ()]
    contents = [
        (one.plan.name, [(r.pattern, r.style, r.options) for r in one.plan.tensor_parallel], one.plan.compile.modules)
        for one in read
    ]
    assert contents[0] == contents[1] == contents[2]
    assert contents[0][1][0][2]["packed"] == 2


def test_a_dict_has_paths_instead_of_places() -> None:
    parsed = parse_plan({"version": "1", "tensor_parallel": {"lm_head": "colwize"}})
    (finding,) = parsed.diagnostics
    assert parsed.plan is None
    assert finding.primary.location == Location("<dict>", ("tensor_parallel", "lm_head"), "value")
    assert parsed.sources.span(finding.primary.location) is None


def test_the_name_of_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text('version: "1"\ntensor_parallel: {a: colwise}\n')
    assert parse_plan(path).plan.name == "own"
    assert parse_plan(path, name="other").plan.name == "other"
    assert parse_plan({"version": "1"}).plan.name == "<dict>"
    assert parse_plan({"version": "1"}, name="other").plan.name == "other"
    assert parse_plan({"version": "1", "name": "own"}, name="other").plan.name == "own"


def test_every_builtin_plan_is_read_and_bears_its_name() -> None:
    assert "llama" in builtin_plans()
    for name, path in builtin_plans().items():
        parsed = parse_plan(name)
        assert parsed.diagnostics == ()
        assert words_of_models(path.read_text("utf-8")) >= {*parsed.plan.models}
        assert (parsed.plan.name, parsed.plan.file) == (name, f"plans/{name}.yaml")
        assert {file.name for file in parsed.sources.files.values()} == {p.file for p in parsed.plan.lineage}


def test_a_word_is_a_file_or_a_builtin_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama").write_text('version: "1"\nname: from-a-file\n')
    Path("llama.yml").write_text('version: "1"\nname: from-yml\n')
    Path("Llama.JSON").write_text('{"version": "1", "name": "from-json"}')
    assert parse_plan("llama").plan.name == "llama"
    assert parse_plan("./llama").plan.name == "from-a-file"
    assert parse_plan(Path("llama")).plan.name == "from-a-file"
    assert parse_plan("llama.yml").plan.name == "from-yml"
    assert parse_plan("Llama.JSON").plan.name == "from-json"
    assert codes(parse_plan("qwen4")) == ["SP101"]


@pytest.mark.parametrize("thing", [None, 3, b"llama", ["version"], Path])
def test_what_is_no_plan_at_all_is_a_type_error(thing: object) -> None:
    with pytest.raises(TypeError, match="a plan is a path"):
        parse_plan(thing)


@pytest.mark.parametrize("lines", ["\n", "\r\n", "\r"])
def test_byte_order_mark_and_line_ends(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + lines.join(['version: "1"', "tensor_parallel:", "  a: colwize", ""]).encode())
    parsed = parse_plan(path)
    (finding,) = parsed.diagnostics
    span = parsed.sources.span(finding.primary.location)
    assert (finding.code, span.line, span.column, span.end_column) == ("SP106", 3, 6, 13)
    assert parsed.sources.files[str(path)].lines[2] == "  a: colwize"


def test_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "utf16.yaml").write_bytes('version: "1"'.encode("utf-16"))
    (tmp_path / "large.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    (tmp_path / "full.yaml").write_bytes(b'version: "1"\n#' + b"-" * (MAX_BYTES - 14))
    os.mkfifo(tmp_path / "pipe.yaml")

    def reading(word: str) -> tuple[str, str]:
        (finding,) = parse_plan(word).diagnostics
        return finding.code, finding.message.replace(str(tmp_path), "")

    long = "x" * 5000
    assert reading(f"{tmp_path}/none.yaml") == ("SP101", "`/none.yaml` does not exist")
    assert reading(f"{tmp_path}/folder.yaml") == ("SP101", "`/folder.yaml` is a folder")
    assert reading(f"{tmp_path}/pipe.yaml") == ("SP101", "`/pipe.yaml` is not a regular file")
    assert reading("/dev/zero") == ("SP101", "`/dev/zero` is not a regular file")
    assert reading(f"{tmp_path}/utf16.yaml")[1].endswith("is not UTF-8 text: byte 0 is 0xff (it looks like UTF-16)")
    assert reading(f"{tmp_path}/large.yaml") == ("SP111", "`/large.yaml` is larger than 1 MiB")
    assert reading(f"./{long}.yaml")[0] == "SP101"
    assert reading("./a\0b.yaml")[0] == "SP101"
    assert reading("./\ud800.yaml")[0] == "SP101"
    assert reading(f"{tmp_path}/none.yaml/x.yaml")[0] == "SP101"
    assert codes(parse_plan(f"{tmp_path}/full.yaml")) == []


def test_findings_and_alternatives_are_limited() -> None:
    rules = "".join(f"  m.{i}: colwize{i}\n" for i in range(3 * MAX_FINDINGS))
    found = codes(parse_text(f'version: "1"\ntensor_parallel:\n{rules}'))
    assert found == ["SP106"] * MAX_FINDINGS + ["SP111"]
    digits = "{0,1,2,3,4,5,6,7,8,9}"
    rules = "".join(f"  m{i}.{digits * 3}: colwise\n" for i in range(1 + MAX_ALTERNATIVES // 1000))
    (finding,) = parse_text(f'version: "1"\ntensor_parallel:\n{rules}').diagnostics
    assert finding.message == f"the patterns of this plan have more than {MAX_ALTERNATIVES} alternatives"
    (finding,) = parse_text(f'version: "1"\ntensor_parallel:\n  m.{digits * 9}: colwise\n').diagnostics
    assert finding.message == "the pattern has at least 10^9 alternatives, at most 1000 are allowed"


def test_all_findings_of_all_kinds_come_at_once() -> None:
    parsed = parse_text(
        """\
version: 1
nme: x
extends: nowhere.yaml
tensor_parallel:
  a..b: colwise
  c: {style: colwise, packed: 1.5, optional: on}
  d: {style: packed_colwise, packed: [x y, z]}
  e: colwize
  e: colwise
compile: {modules: ["a["]}
""",
        folder="/nowhere",
    )
    assert parsed.plan is None
    assert sorted(codes(parsed)) == [
        "SP103", "SP104", "SP105", "SP105", "SP106", "SP107", "SP108", "SP112", "SP112", "SP113", "SP114",
    ]  # fmt: skip


def test_keys_that_look_like_parts_of_a_path_are_only_keys() -> None:
    for key in ("[key]", "the name of a style", "style", "0"):
        parsed = parse_text(f'version: "1"\n"{key}": 1\ntensor_parallel: {{"{key}": 1, "a": {{"{key}": []}}}}\n')
        places = {d.primary.location.path for d in parsed.diagnostics}
        assert places >= {(key,), ("tensor_parallel", key), ("tensor_parallel", "a", key)}


def test_messages_hold_no_control_characters_and_no_whole_novels() -> None:
    long = "x" * 10_000
    parsed = parse_text(
        f'version: "1"\nmodels: {long}\ndescription: {"9" * 10_000}\n"a\\e[31mb": 1\n'
        f'tensor_parallel:\n  a: {long}\n  b: "col\\nwise"\n'
    )
    shown = "".join(d.message + (d.help or "") for d in parsed.diagnostics)
    assert shown.isprintable() and len(shown) < 2500
    assert "`a\\x1b[31mb`" in shown and "`col\\nwise`" in shown


def test_dtypes_have_the_spellings_that_users_write() -> None:
    precision = {"param": "bf16", "reduce": "fp32", "output": "float16"}
    plan = {"version": "1", "name": "mine", "data_parallel": {"backend": "fsdp2", "mixed_precision": precision}}
    parsed = parse_plan(plan).plan
    assert parsed is not None and parsed.data_parallel is not None and parsed.data_parallel.mixed_precision is not None
    read = parsed.data_parallel.mixed_precision
    assert (read.param, read.reduce, read.output) == ("bfloat16", "float32", "float16")
