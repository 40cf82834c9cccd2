"""From the word that the user wrote to a model on the meta device, or to a finding that says why not."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shardplan.core.diagnostics import PlanError, Severity
from shardplan.model import classify, find_model, found_from_config, parse_setting

CONFIGS = Path(__file__).parent / "cases" / "models"
SMALL_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}

# Published parameter counts, tied embeddings counted once.
PARAMETERS = {
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472,
    "gpt2": 124_439_808,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "phi-3-mini-4k": 3_821_079_552,
    "qwen2-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
}


def refusal(word, **arguments):
    """The one finding with which a word is refused."""
    with pytest.raises(PlanError) as caught:
        find_model(word, **arguments)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.severity is Severity.ERROR
    return diagnostic


def write(folder, data, name="config.json"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(data if isinstance(data, str) else json.dumps(data))
    return folder


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("llama", "type"),
        ("gpt-sw3", "type"),
        ("meta-llama/Llama-3.1-8B", "hub"),
        ("./llama", "path"),
        ("../x", "path"),
        ("/tmp", "path"),
        ("~/models/llama", "path"),
        (".", "path"),
        ("config.json", "path"),
        ("a/b/c", "path"),
        ("org/config.json", "path"),
        ("checkpoints/", "path"),
        ("my.models:build", "callable"),
        ("m:Model.tiny", "callable"),
        ("./models/own.py:build", "callable"),
        ("a:b:c", "type"),
        ("x\0y/z", "path"),
    ],
)
def test_words(word, kind):
    assert classify(word).kind == kind


def test_an_existing_path_wins_over_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert classify("org/name").kind == "hub"
    (tmp_path / "org").mkdir()
    write(tmp_path / "org" / "name", SMALL_LLAMA)
    assert classify("org/name").kind == "path"
    assert find_model("org/name").tree.model_type == "llama"


def test_there_is_a_count_for_every_configuration():
    assert {path.stem for path in CONFIGS.glob("*.json")} >= set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_configurations_have_the_published_size(name):
    found = find_model(str(CONFIGS / f"{name}.json"))
    again = {other for group in found.tree.tied for other in group[1:]}
    assert sum(p.numel for n, (_, p) in found.tree.parameters.items() if n not in again) == PARAMETERS[name]


def test_build():
    found = found_from_config(find_model("llama", overrides=SMALL_SETTINGS).config)
    meta, real = found.build(), found.build("cpu", torch.bfloat16)
    assert type(meta).__name__ == "LlamaForCausalLM" and meta.training
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    assert {(p.device.type, p.dtype) for p in real.parameters()} == {("cpu", torch.bfloat16)}
    assert found.config.dtype is None, "building must not write into the configuration"
    assert found.build() is not meta


def test_nothing_of_a_model_without_memory_is_on_the_cpu():
    """DiffLlama draws parameters by `torch.normal(0, std, size)`, which asks for no default device; FSDP2 wants all of one kind."""
    assert {p.device.type for p in find_model("diffllama").build().parameters()} == {"meta"}


SMALL_SETTINGS = {key: value for key, value in SMALL_LLAMA.items() if key != "model_type"}


def test_float32_whatever_the_file_says():
    tree = find_model(str(CONFIGS / "llama-3.1-8b.json")).tree
    assert {p.dtype for _, p in tree.parameters.values()} == {"float32"}


def test_a_folder_and_its_file(tmp_path):
    folder = write(tmp_path / "m", SMALL_LLAMA)
    by_folder, by_file = find_model(str(folder)), find_model(str(folder / "config.json"))
    assert by_folder.tree == by_file.tree
    assert by_folder.name == str(folder)


def test_named_architecture(tmp_path):
    folder = write(tmp_path / "m", {**SMALL_LLAMA, "architectures": ["LlamaForSequenceClassification"]})
    tree = find_model(str(folder)).tree
    assert tree.class_names[0] == "LlamaForSequenceClassification"
    assert "score" in tree.modules and "lm_head" not in tree.modules


def test_base_architecture_has_a_prefix(tmp_path):
    folder = write(tmp_path / "m", {**SMALL_LLAMA, "architectures": ["LlamaModel"]})
    tree = find_model(str(folder)).tree
    assert tree.base_prefix == "model"
    assert tree.address("layers.0") == "model.layers.0"


def test_unknown_architecture_is_a_warning(tmp_path):
    folder = write(tmp_path / "m", {**SMALL_LLAMA, "architectures": ["LLaMAForCausalLM"]})
    found = find_model(str(folder))
    (warning,) = found.diagnostics
    assert (warning.code, warning.severity) == ("SP513", Severity.WARNING)
    assert "LLaMAForCausalLM" in warning.message and "LlamaForCausalLM is used" in warning.message


def test_architecture_of_another_type(tmp_path):
    folder = write(tmp_path / "m", {**SMALL_LLAMA, "architectures": ["GPT2LMHeadModel"]})
    assert refusal(str(folder)).code == "SP509"


@pytest.mark.parametrize("name", ["os", "AutoModel", "PreTrainedConfig", "__version__", "../x", 7])
def test_architectures_are_model_classes_only(tmp_path, name):
    folder = write(tmp_path / "m", {**SMALL_LLAMA, "architectures": [name]})
    try:
        found = find_model(str(folder))
    except PlanError as error:
        assert error.diagnostics[0].code == "SP509"
    else:
        assert found.tree.class_names[0] == "LlamaForCausalLM"
        assert [d.code for d in found.diagnostics] == ["SP513"]


def test_default_configuration_of_a_type():
    assert find_model("gpt2").tree.numbers["n_embd"] == 768
    assert find_model("gemma3").tree.class_names[0] == "Gemma3ForConditionalGeneration"


@pytest.mark.parametrize(
    ("word", "code", "message"),
    [
        ("./nothing/here", "SP501", "./nothing/here does not exist"),
        ("nothing.json", "SP501", "nothing.json does not exist"),
        ("~nobody-of-that-name/x", "SP501", "cannot be a path"),
        ("x" * 300 + "/" + "y" * 5000, "SP501", "cannot be a path"),
        ("a/\0", "SP501", r"'a/\x00' does not exist"),
        ("no-such-org/no-such-model", "SP505", "it is not in the local Hugging Face cache"),
        ("a--b/c", "SP505", "it is not in the local Hugging Face cache"),
        ("lama", "SP504", "'lama' is neither a model type"),
        ("", "SP504", "'' is neither a model type"),
        ("no_such_module_at_all:build", "SP507", "cannot be imported"),
        ("json:lods", "SP507", "the module json has no lods"),
        ("./models/own.py:build", "SP507", "./models/own.py is a file, not the name of a module"),
        ("sys:maxsize", "SP507", "sys:maxsize is a int, not a callable"),
        ("os:getcwd", "SP508", "os:getcwd returned a str"),
        ("json:loads", "SP508", "json:loads raised TypeError"),
        ("sys:exit", "SP508", "sys:exit raised SystemExit"),
    ],
)
def test_words_that_name_nothing(word, code, message):
    diagnostic = refusal(word)
    assert diagnostic.code == code
    assert message in diagnostic.message


def test_suggestions():
    assert "`llama`" in refusal("lama").help
    assert "`loads`" in refusal("json:lods").help
    assert refusal("./models/own.py:build").help == "write `models.own:build`"
    assert "./zzzz" in refusal("zzzz").help


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ('{"model_type": "llama",', "SP502", "is not JSON"),
        ("[" * 100_000, "SP502", "nested too deeply"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "SP502", "a number with too many digits"),
        ("[1]", "SP502", "contains a JSON list"),
        ("null", "SP502", "contains a JSON NoneType"),
        ('{"hidden_size": 4}', "SP503", "has no model_type"),
        ('{"model_type": 3}', "SP503", "has no model_type"),
        ('{"model_type": "lama"}', "SP504", "transformers does not know the model_type 'lama'"),
        ('{"model_type": "llama", "hidden_size": "4096"}', "SP509", "refuses the configuration"),
        ('{"model_type": "llama", "hidden_size": -8}', "SP509", ""),
        ('{"model_type": "llama", "intermediate_size": -3}', "SP509", "building the model"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "SP509", ""),
        ('{"model_type": "llama", "vocab_size": 1e400}', "SP509", ""),
        ('{"model_type": "llama", "get_text_config": "x"}', "SP509", ""),
        ('{"model_type": "llama", "attention_dropout": 1.5}', "SP509", "attention_dropout is 1.5, and must be a prob"),
        ('{"model_type": "llama", "attention_dropout": -0.1}', "SP509", "attention_dropout is -0.1"),
        ('{"model_type": "gpt2", "resid_pdrop": NaN}', "SP509", "resid_pdrop is nan"),
        ('\ufeff{"model_type": "llama"}', "SP502", "begins with a byte order mark"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "SP509", "at most 1000 layers can be built"),
        ('{"model_type": "gpt2", "n_layer": 1000000000}', "SP509", "at most 1000 layers can be built"),
        (
            '{"model_type": "mixtral", "num_local_experts": 100000}',
            "SP509",
            "at most 1000000 experts can be built",
        ),
        ('{"model_type": "timesformer_x"}', "SP504", ""),
        ('{"model_type": "sam_vision_model", "architectures": ["LlamaModel"]}', "SP509", ""),
    ],
)
def test_configurations_that_are_no_model(tmp_path, text, code, message):
    folder = write(tmp_path / "m", text)
    diagnostic = refusal(str(folder))
    assert diagnostic.code == code
    assert message in diagnostic.message
    assert "\n" not in diagnostic.message
    assert diagnostic.primary.location.file == f"{folder}/config.json"


def test_unreadable_files(tmp_path):
    assert refusal(str(write(tmp_path / "a", "x", "other.json"))).message.endswith("a has no config.json")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_bytes(b"\xff\xfe\x00")
    assert refusal(str(tmp_path / "b")).code == "SP502"


def test_a_file_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("shardplan.model.config_files.MAX_BYTES", 10)
    assert "is larger than 10 bytes" in refusal(str(write(tmp_path / "m", SMALL_LLAMA))).message


@pytest.mark.parametrize(
    "extra",
    [
        {"auto_map": {"AutoConfig": "code.Config"}},
        {"text_config": {"auto_map": {"AutoModel": "org/repo--code.Model"}}},
        {"attn_implementation": "org/kernel"},
        {"experts_implementation": "org/kernel:fast"},
    ],
)
def test_code_is_refused(tmp_path, extra):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "code.py").write_text("raise RuntimeError('run')")
    diagnostic = refusal(str(write(tmp_path / "m", {**SMALL_LLAMA, **extra})))
    assert diagnostic.code == "SP506"
    assert "--trust-remote-code" in diagnostic.help


def test_trusted_code(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = write(
        tmp_path / "own",
        {
            "model_type": "own-kind",
            "width": 8,
            "auto_map": {
                "AutoConfig": "modeling.OwnConfig",
                "AutoModelForCausalLM": "modeling.OwnForCausalLM",
            },
        },
    )
    (folder / "modeling.py").write_text(
        "from torch import nn\n"
        "from transformers import PreTrainedConfig, PreTrainedModel\n"
        "class OwnConfig(PreTrainedConfig):\n"
        "    model_type = 'own-kind'\n"
        "    width: int = 4\n"
        "class OwnForCausalLM(PreTrainedModel):\n"
        "    config_class = OwnConfig\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.proj = nn.Linear(config.width, config.width)\n"
        "        self.post_init()\n"
    )
    assert refusal(str(folder)).code == "SP506"
    found = find_model(str(folder), trust_remote_code=True, overrides={"width": 16})
    assert found.tree.class_names[0] == "OwnForCausalLM"
    assert found.tree.modules["proj"].parameter("weight").shape == (16, 16)


def test_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    write(repository / "snapshots" / "abc", SMALL_LLAMA)
    assert find_model("org/name").tree.numbers["hidden_size"] == 32
    assert refusal("org/other").code == "SP505"


def test_no_connection_is_opened(tmp_path, monkeypatch):
    import socket

    def connect(*arguments):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    find_model(str(write(tmp_path / "m", SMALL_LLAMA)))
    for word in ("org/name-of-nothing", "lama", "./nothing"):
        with pytest.raises(PlanError):
            find_model(word)
    backbone = {"model_type": "detr", "backbone": "microsoft/resnet-50", "use_pretrained_backbone": True}
    with pytest.raises(PlanError) as caught:
        find_model(str(write(tmp_path / "d", backbone)))
    assert caught.value.diagnostics[0].code == "SP509"


def test_offline_is_undone():
    import huggingface_hub.constants
    import transformers

    before = huggingface_hub.constants.HF_HUB_OFFLINE, transformers.logging.get_verbosity()
    find_model("llama")
    with pytest.raises(PlanError):
        find_model("llama", overrides={"hidden_size": "x"})
    assert (huggingface_hub.constants.HF_HUB_OFFLINE, transformers.logging.get_verbosity()) == before


def test_settings(tmp_path):
    found = find_model("gpt2", overrides={"attn_pdrop": 0, "hidden_size": 96, "n_layer": 1})
    assert found.config.attn_pdrop == 0 and found.config.n_embd == 96 and found.config.num_hidden_layers == 1
    folder = write(tmp_path / "m", SMALL_LLAMA)
    found = find_model(str(folder), overrides={"num_key_value_heads": 2, "tie_word_embeddings": True})
    assert found.tree.modules["model.layers.0.self_attn.k_proj"].parameter("weight").shape == (16, 32)
    assert found.tree.tied


def test_nested_settings():
    file = str(CONFIGS / "gemma-3-4b.json")
    found = find_model(file, overrides={"text_config.num_hidden_layers": 2, "vision_config.num_hidden_layers": 1})
    assert "model.language_model.layers.2" not in found.tree.modules
    assert found.config.text_config.head_dim == 256, "the other settings of the nested configuration are kept"
    assert found.config.text_config.layer_types == ["sliding_attention"] * 2


def test_unknown_settings():
    with pytest.raises(PlanError) as caught:
        find_model("gpt2", overrides={"atn_pdrop": 0, "n_head": 4, "text_config.x": 1, "attribute_map": 2})
    assert [d.code for d in caught.value.diagnostics] == ["SP510"] * 3
    assert "`attn_pdrop`" in caught.value.diagnostics[0].help
    diagnostic = refusal(str(CONFIGS / "gemma-3-4b.json"), overrides={"sliding_window": 4})
    assert "`text_config.sliding_window`" in diagnostic.help
    assert refusal("json:loads", overrides={"a": 1}).code == "SP510"


def test_settings_that_are_refused():
    assert refusal("llama", overrides={"hidden_size": "many"}).code == "SP509"
    assert refusal("llama", overrides={"num_hidden_layers": 10**9}).code == "SP509"


def test_parse_setting():
    assert parse_setting("attn_pdrop=0") == ("attn_pdrop", 0)
    assert parse_setting("a.b=1e-3") == ("a.b", 1e-3)
    assert parse_setting("tie_word_embeddings=true") == ("tie_word_embeddings", True)
    assert parse_setting('hidden_act="relu"') == ("hidden_act", "relu")
    assert parse_setting("x=null") == ("x", None)
    for text in ("x", "=1", "x=relu", "x=[1]", "x={}", "x="):
        with pytest.raises(ValueError, match=r"must be a number|name=value"):
            parse_setting(text)


def test_callables_from_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    (tmp_path / "own_models_here.py").write_text(
        "from torch import nn\n"
        "def build(): return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))\n"
        "class Nested:\n"
        "    build = staticmethod(build)\n"
        "def values(): return nn.Linear(int(nn.Linear(2, 2).weight.sum()), 2)\n"
        "def config():\n"
        "    from transformers import LlamaConfig, LlamaForCausalLM\n"
        "    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1))\n"
    )
    found = find_model("own_models_here:build")
    assert found.config is None and found.tree.class_names == ("Sequential",)
    assert {p.device.type for p in found.build("cpu").parameters()} == {"cpu"}
    assert isinstance(found.build(), nn.Sequential)
    assert find_model("own_models_here:Nested.build").tree.modules.keys() == found.tree.modules.keys()
    assert "reads no values" in refusal("own_models_here:values").help
    assert find_model("own_models_here:config").config.model_type == "llama"
