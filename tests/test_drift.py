"""The list of what changed between two releases, from small wheels that have each kind of change."""

import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.drift.__main__ import main
from tests.drift.changes import Drift
from tests.drift.facts import Facts
from tests.drift.known import found, table
from tests.drift.sources import Release

MODELS = "".join(
    f"class Block{n}(nn.Module):\n    def forward(self, x, past_key_values=None):\n        return past_key_values.update(x)\n"
    for n in range(20)
)
OLD = {
    "transformers/models/auto/modeling_auto.py": 'MODEL_MAPPING_NAMES = OrderedDict([("llama", "LlamaModel"), ("gone", "GoneModel")])\n',
    "transformers/models/llama/configuration_llama.py": (
        'class LlamaConfig(PreTrainedConfig):\n    model_type = "llama"\n    base_model_tp_plan = {"q": "colwise", "k": "colwise"}\n'
        "    rope: int = 10\n"
    ),
    "transformers/models/llama/modeling_llama.py": (
        "class LlamaAttention(nn.Module):\n    def __init__(self, config):\n        self.q = nn.Linear(config.size, 4)\n"
        "        self.scale = torch.sqrt(4)\n    def forward(self, x, mask=None):\n        return self.q(x)\n"
    ),
    "transformers/models/other/configuration_other.py": 'class OtherConfig(PreTrainedConfig):\n    model_type = "other"\n',
    "transformers/models/other/modeling_other.py": MODELS
    + "class Other(nn.Module):\n    def forward(self, x):\n        return x\n",
    "transformers/modeling_utils.py": "class PreTrainedModel:\n    def _from_config(cls): ...\n    def _get_dtype_plan(self): ...\n",
}
NEW = {
    "transformers/models/auto/modeling_auto.py": 'MODEL_MAPPING_NAMES = OrderedDict([("llama", "LlamaModel"), ("new", "NewModel")])\n',
    "transformers/models/new/configuration_new.py": 'class NewConfig(PreTrainedConfig):\n    model_type = "new"\n',
    "transformers/models/llama/configuration_llama.py": (
        'class LlamaConfig(PreTrainedConfig):\n    model_type = "llama"\n    base_model_tp_plan = {"q": "rowwise", "k": "colwise"}\n'
        "    rope: int = 20\n"
    ),
    "transformers/models/llama/modeling_llama.py": (
        "class LlamaAttention(nn.Module):\n    def __init__(self, config):\n        self.q = Projection(config)\n"
        "        self.scale = torch.sqrt(5)\n    def forward(self, x, mask=None, bias=None):\n        return self.q(x)\n"
    ),
    "transformers/models/other/configuration_other.py": 'class OtherConfig(PreTrainedConfig):\n    model_type = "other"\n',
    "transformers/models/other/modeling_other.py": MODELS.replace("past_key_values", "cache")
    + 'class Other(nn.Module):\n    @new\n    def forward(self, x: Tensor):\n        """Text."""\n        return -x\n',
    "transformers/modeling_utils.py": "class PreTrainedModel:\n    def _from_config(cls): ...\n",
}
# A line of the list for each change, and nothing else.
SAID = """old -> new

model types of the auto classes: 1 came, 1 went, 0 changed
  - MODEL_MAPPING_NAMES[gone]: GoneModel
  + MODEL_MAPPING_NAMES[new]: NewModel

plans of classes: 0 came, 0 went, 1 changed
  ~ models.llama.configuration_llama.LlamaConfig.base_model_tp_plan: q: colwise -> rowwise

arguments of forward: 0 came, 0 went, 21 changed
  ~ llama.modeling_llama.LlamaAttention.forward: +bias
  ~ {blocks} and 8 more: -past_key_values +cache

modules, parameters and buffers that classes make: 0 came, 0 went, 1 changed
  ~ llama.modeling_llama.LlamaAttention.q: nn.Linear(config.size, 4) -> Projection(config)

fields and arguments of configurations, with their defaults: 0 came, 0 went, 1 changed
  ~ models.llama.configuration_llama.LlamaConfig.rope: 10 -> 20

private names that shardplan reads: 0 came, 1 went, 0 changed
  - transformers.PreTrainedModel._get_dtype_plan: there

arguments with another name everywhere: past_key_values is cache

classes whose methods are other ones, these names aside: 1
  models.other.modeling_other.Other

model types whose plans, modules, fields or arguments differ: 2
  llama new

model types whose methods alone are other ones: 1
  other
""".format(blocks=", ".join(f"other.modeling_other.Block{n}.forward" for n in sorted(range(20), key=str)[:12]))


def wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as opened:
        for path, text in files.items():
            opened.writestr(path, text)
    return folder / f"{name}-py3-none-any.whl"


def drift(folder: Path, old: dict[str, str], new: dict[str, str]) -> Drift:
    return Drift(Facts(Release(wheel(folder, "old", old))), Facts(Release(wheel(folder, "new", new))))


@pytest.mark.torch
def test_each_kind_of_change_has_its_line(tmp_path):
    assert "\n".join(drift(tmp_path, OLD, NEW).lines()) + "\n" == SAID


@pytest.mark.torch
def test_releases_that_are_alike_have_no_lines(tmp_path):
    assert [*drift(tmp_path, OLD, OLD).lines()] == ["old -> new"]


def test_files_that_both_releases_have_and_most_of_torch_are_not_parsed(tmp_path):
    """A release of torch has 49 million characters, which take most of an hour to parse beside other work."""
    old = {"torch/distributed/a.py": "A = 1\n", "torch/distributed/b.py": "B = 1\n", "torch/_inductor/c.py": "C = 1\n"}
    found = drift(tmp_path, old, old | {"torch/distributed/b.py": "B = 2\n", "torch/_inductor/c.py": "C = 2\n"})
    assert [*found.after.release.trees] == [*found.before.release.trees] == ["distributed/b.py"]


@pytest.mark.torch
def test_private_names_of_torch_are_found_in_modules_stubs_and_classes(tmp_path):
    old = {
        "torch/_C/__init__.pyi": "def _current_graph_task_id() -> int: ...\nclass TensorBase:\n    _is_view: bool\n",
        "torch/_tensor.py": "class Tensor:\n    _backward_hooks = None\n",
        "torch/utils/_pytree.py": "def tree_map(): ...\n",
    }
    new = {"torch/_tensor.py": "class Tensor: ...\n", "torch/utils/_pytree.py": "def tree_leaves(): ...\n"}
    assert [(one.sign, one.name) for one in drift(tmp_path, old, new).tables["private"]] == [
        ("-", "torch.Tensor._backward_hooks"),
        ("-", "torch.Tensor._is_view"),
        ("-", "torch._C.TensorBase"),
        ("-", "torch._C._current_graph_task_id"),
        ("+", "torch.utils._pytree.tree_leaves"),
        ("-", "torch.utils._pytree.tree_map"),
    ]


@pytest.mark.torch
def test_fields_defaults_names_and_plans_of_other_projects(tmp_path):
    old = {
        "nemo_automodel/components/distributed/config.py": "OLD_NAME = 1\n@dataclass\nclass FSDP2Config:\n    policy: str = 'bf16'\n",
        "nemo_automodel/components/distributed/plans.py": "def qwen3_plan(a):\n    return {'q': Colwise()}\n",
        "nemo_automodel/components/datasets/text.py": "def load(rows=3): ...\n",
    }
    new = {
        "nemo_automodel/components/distributed/config.py": (
            "@dataclass\nclass FSDP2Config:\n    policy: str = 'float32'\n    more: int\ndef parallelize(model, mesh=None): ...\n"
        ),
        "nemo_automodel/components/distributed/plans.py": "def qwen3_plan(a):\n    return {'q': Replicated()}\n",
        "nemo_automodel/components/datasets/text.py": "def load(rows=4): ...\n",
    }
    found = drift(tmp_path, old, new)
    place = "components.distributed."
    assert {
        name: [(one.sign, one.name) for one in changes]
        for name, changes in found.tables.items()
        if changes and name != "private"
    } == {
        "plans": [("~", f"{place}plans.qwen3_plan")],
        "fields": [
            ("+", f"{place}config.FSDP2Config.more"),
            ("~", f"{place}config.FSDP2Config.policy"),
            ("+", f"{place}config.parallelize(mesh)"),
            ("+", f"{place}config.parallelize(model)"),
        ],
        "names": [("-", f"{place}config.OLD_NAME"), ("+", f"{place}config.parallelize")],
    }


def test_source_distributions_are_read_and_other_packages_refused(tmp_path):
    (tmp_path / "config.py").write_text("class A:\n    a: int = 1\n")
    with tarfile.open(tmp_path / "deepspeed-0.19.8.tar.gz", "w:gz") as opened:
        opened.add(tmp_path / "config.py", "deepspeed-0.19.8/deepspeed/module_inject/config.py")
    release = Release(tmp_path / "deepspeed-0.19.8.tar.gz")
    assert (release.name, Facts(release).fields) == ("deepspeed-0.19.8", {"module_inject.config.A.a": "1"})
    with pytest.raises(ValueError, match=r"has none of transformers, torch, nemo_automodel, deepspeed; one is needed"):
        Release(wheel(tmp_path, "x", {"x/__init__.py": ""}))
    with pytest.raises(ValueError, match=r"is of deepspeed, and .* of transformers"):
        Drift(Facts(release), Facts(Release(wheel(tmp_path, "y", OLD))))


@pytest.mark.torch
def test_what_is_known_of_two_releases_is_looked_for(tmp_path, capsys):
    lines = [
        "  ~ a._parallelize_qwen: q_norm: nothing -> ReplicatedWithGradAllReduce()",
        "  + a.FSDP2Manager.__init__(moe_config): None",
    ]
    rows = found("nemo_automodel-0.6.0", "nemo_automodel-0.7.0", lines)
    assert [line for line in rows.values() if line is not None] == [line.strip() for line in lines]
    assert "| the default `mp_policy` | `none` |" in table(rows)
    old, new = (wheel(tmp_path, name, files) for name, files in (("old", OLD), ("new", NEW)))
    with pytest.raises(ValueError, match="nothing is known of old to new, but of "):
        main([str(old), str(new), "--known"])


@pytest.mark.torch
def test_functions_that_make_plans_and_what_goes_are_said(tmp_path):
    place = "nemo_automodel/components/distributed/"
    old = {place + "tp_plans.py": "def _parallelize_phi(model):\n    return {f'{model}.q': Colwise()}\n"}
    new = {
        place + "tp_plans.py": "def _parallelize_phi(model):\n    return {f'{model}.q': Colwise(), 'norm': Summed()}\n",
        place + "ddp.py": "class DDPManager:\n    def __init__(self):\n        warn('DDPManager is deprecated')\n",
    }
    tables = drift(tmp_path, old, new).tables
    assert [(one.name.rpartition(".")[2], one.lines) for one in tables["plans"]] == [
        ("_parallelize_phi", ("norm: nothing -> Summed()",))
    ]
    assert [one.after for one in tables["notices"]] == ["DDPManager is deprecated"]
