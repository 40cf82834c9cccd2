"""The arguments for Megatron-FSDP: compared with the package's own, as it is installed, or as it was when this was written."""

from __future__ import annotations

import inspect
import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardplan.core.sections import DataParallel, MegatronFSDP
from shardplan.runtime.apply.backends import DTYPES, RENAMED, arguments, dtypes, unit_classes
from shardplan.runtime.apply.wrapped import Wrapped
from shardplan.styles.backends import BACKENDS

RECORD = json.loads((Path(__file__).parent / "megatron_fsdp.json").read_text())
INSTALLED = find_spec("megatron_fsdp") is not None
OURS = {"init_model_with_meta_device"}  # None is seen from the model, where the package says False


def test_options_have_the_defaults_of_the_package():
    own = {RENAMED.get(n, n): v for n, v in MegatronFSDP().values.items() if n not in (*DTYPES, *OURS)}
    assert own == {name: RECORD["fully_shard_model"][name] for name in own}
    policy = {name: None if dtype is None else str(dtype) for name, dtype in dtypes(MegatronFSDP()).items()}
    assert policy == {name: RECORD["MixedPrecisionPolicy"][name] for name in policy}
    assert dtypes(MegatronFSDP(grad_reduce_in_fp32=True, preserve_fp32_weights=False)) == {
        "main_params_dtype": None,
        "main_grads_dtype": torch.float32,
    }


class Layer(nn.Linear):
    pass


def model_and_names(device: str) -> tuple[nn.Module, Wrapped]:
    with torch.device(device):
        model = nn.Sequential(nn.Embedding(4, 4), Layer(4, 4), Layer(4, 4), nn.Linear(4, 4))
    return model, Wrapped(("1", "2"), mesh="the mesh", tp="tp", joint="the group")


def test_arguments_are_those_that_the_package_takes():
    model, names = model_and_names("meta")
    flat, hybrid = (SimpleNamespace(mesh_dim_names=axes) for axes in (("dp_shard_cp",), ("dp_replicate", "dp_shard")))
    section = DataParallel("megatron_fsdp", megatron_fsdp=MegatronFSDP(zero_dp_strategy="optim", nccl_ub=True))
    given = arguments(model, flat, section, names)
    assert given.keys() <= RECORD["fully_shard_model"].keys()
    axes = {"device_mesh": "the mesh", "dp_shard_dim": "dp_shard_cp", "tp_dim": "tp"}
    assert {name: given[name] for name in axes} == axes and "dp_outer_dim" not in given
    assert given["fsdp_unit_modules"] == [Layer] == unit_classes(model, names.units)
    assert (given["zero_dp_strategy"], given["nccl_ub"], given["init_model_with_meta_device"]) == ("optim", True, True)
    given = arguments(model_and_names("cpu")[0], hybrid, DataParallel("megatron_fsdp"), names)
    assert given.keys() <= RECORD["fully_shard_model"].keys()
    assert (given["dp_outer_dim"], given["hybrid_fsdp_group"]) == ("dp_replicate", "the group")
    assert given["init_model_with_meta_device"] is False


def test_the_record_of_the_backend():
    backend = BACKENDS["megatron_fsdp"]
    assert (backend.package, backend.device, backend.wraps) == ("megatron-fsdp", "cuda", True)
    assert set(BACKENDS) == {"fsdp2", "ddp", "megatron_fsdp"}


def plain(value: object) -> object:
    return str(value) if isinstance(value, torch.dtype) else value


@pytest.mark.skipif(not INSTALLED, reason="megatron-fsdp is not installed: the record of its signature is compared")
def test_the_record_is_the_installed_package():
    import megatron_fsdp

    assert megatron_fsdp.__version__.startswith("0.6."), "write the record anew for another version"
    for name in ("fully_shard_model", "fully_shard_optimizer", "MixedPrecisionPolicy"):
        parameters = inspect.signature(getattr(megatron_fsdp, name)).parameters
        said = {n: plain(p.default) for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
        said.pop("mixed_precision_policy", None)
        assert said == RECORD[name], name
