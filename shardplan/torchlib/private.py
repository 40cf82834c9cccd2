"""Every private name of torch that shardplan uses: its place upstream, and why we need it.

If a torch release moved one of them, the error gives the name and the version. Where supported releases differ, the
places are listed newest first. All were seen in the torch releases in `private_attributes.SEEN`; that file lists names
that are read on objects.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from .untested import warn_of_untested


@dataclass(frozen=True, slots=True)
class Private:
    """A private name: its places as (module, attribute), newest first; an empty attribute is the module itself."""

    places: tuple[tuple[str, str], ...]
    purpose: str


_COLLECTIVES = "torch.distributed._functional_collectives"
_THREADED = "torch.testing._internal.distributed.multi_threaded_pg"

NAMES: dict[str, Private] = {
    "ThreadedGroup": Private(((_THREADED, "ProcessLocalGroup"),), "all ranks of the tp axis in one process"),
    "ThreadedCollective": Private(((_THREADED, "Collective"),), "one collective of such ranks"),
    "install_threaded_groups": Private(((_THREADED, "_install_threaded_pg"),), "a process group for each thread"),
    "uninstall_threaded_groups": Private(((_THREADED, "_uninstall_threaded_pg"),), "a process group for each thread"),
    "isolate_threads": Private(
        (("torch._C._distributed_c10d", "_set_thread_isolation_mode"),), "names of process groups for each thread"
    ),
    "run_per_rank": Private(
        (("torch.distributed._local_tensor", "maybe_run_for_local_tensor"),),
        "slices that depend on the rank, under torch's LocalTensorMode too",
    ),
    "default_store": Private(
        (("torch.distributed.distributed_c10d", "_get_default_store"),),
        "a note that the other ranks read when they fail",
    ),
    "sharding_propagator": Private(
        (("torch.distributed.tensor._sharding_prop", "ShardingPropagator"),),
        "memory without the whole tensors with which DTensor learns how an operator splits",
    ),
    "fake_pg": Private((("torch.testing._internal.distributed.fake_pg", ""),), "the process group backend `fake`"),
    "all_reduce": Private(((_COLLECTIVES, "all_reduce"),), "collectives that torch.compile can trace"),
    "all_gather": Private(
        ((_COLLECTIVES, "all_gather_single"), (_COLLECTIVES, "all_gather_tensor")),
        "collectives that torch.compile can trace",
    ),
    "reduce_scatter": Private(
        ((_COLLECTIVES, "reduce_scatter_single"), (_COLLECTIVES, "reduce_scatter_tensor")),
        "collectives that torch.compile can trace",
    ),
    "storage_use_count": Private(
        (("torch._C", "_storage_Use_Count"),), "knowing whether a gradient's memory is another tensor's too"
    ),
    "TensorBase": Private(
        (("torch._C", "TensorBase"),), "knowing whether anything else holds a gradient (`_use_count`)"
    ),
    "run_backward": Private(
        (("torch.autograd.graph", "_engine_run_backward"),), "backwards in Python that run in float64 from end to end"
    ),
    "disable_modes": Private(
        (("torch.utils._python_dispatch", "_disable_current_modes"),), "reduced models that are real inside a fake mode"
    ),
    "below_autograd": Private(
        (("torch._C", "_AutoDispatchBelowAutograd"),), "collectives without autograd's Python part"
    ),
    **{
        f"global{kind}": Private((("torch.nn.modules.module", f"_global{kind}"),), "hooks of all modules")
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    },
    "compile_fx": Private((("torch._inductor.compile_fx", "compile_fx"),), "compiled graphs that run below autograd"),
    "compile_fx_inner": Private(
        (("torch._inductor.compile_fx", "compile_fx_inner"),), "compiled graphs that run below autograd"
    ),
    "top_saved_tensors_hooks": Private(
        (("torch._C._autograd", "_top_saved_tensors_default_hooks"),), "leaving what is saved to a checkpoint around"
    ),
    "current_graph_task_id": Private(
        (("torch._C", "_current_graph_task_id"),), "knowing whether a forward is run again by a backward"
    ),
    "TorchDispatchMode": Private(
        (("torch.utils._python_dispatch", "TorchDispatchMode"),), "seeing every operator: counting collectives"
    ),
    "count_dispatch_modes": Private(
        (("torch._C", "_len_torch_dispatch_stack"),), "knowing whether something may see every operator"
    ),
    "is_functorch_wrapped": Private(
        (("torch._C._functorch", "is_functorch_wrapped_tensor"),), "leaving what happens inside torch.vmap unrecorded"
    ),
    "FunctionBase": Private(
        (("torch.autograd.function", "_SingleLevelFunction"),),
        "recording a call of an autograd.Function, until torch 2.14 bound early too",
    ),
    "functorch_active": Private(
        (("torch._C", "_are_functorch_transforms_active"),),
        "calling our autograd.Functions without Python code of torch's",
    ),
    "vmap_home": Private((("torch._functorch.apis", ""),), "recording a call of torch.vmap as one operation"),
    "derivatives_home": Private(
        (("torch._functorch.eager_transforms", ""),),
        "recording a call of torch.func.grad, jvp and vjp as one operation",
    ),
    "DeviceMesh": Private(
        (("torch.distributed.device_mesh", "DeviceMesh"),),
        "the mesh that FSDP2 puts parameters on, of its own axes and tp (`_concatenate`)",
    ),
    "foreach_norm": Private((("torch", "_foreach_norm"),), "the norms of many gradients at once, in float32"),
    "muon_newton_schulz": Private(
        (("torch.optim._muon", "_zeropower_via_newtonschulz"),), "the orthogonal matrix that torch.optim.Muon makes"
    ),
    "muon_adjusted_rate": Private(
        (("torch.optim._muon", "_adjust_lr"),), "the rate of a matrix of some shape, as torch.optim.Muon has it"
    ),
    "weight_norm": Private((("torch", "_weight_norm"),), "checking the sizes that it does not check"),
    "foreach_mul_": Private((("torch", "_foreach_mul_"),), "scaling many gradients at once"),
    "CustomGraphPass": Private(
        (("torch._inductor.custom_graph_pass", "CustomGraphPass"),),
        "seeing whether asynchronous tensor parallelism fired",
    ),
    "enable_symm_mem_for_group": Private(
        (("torch.distributed._symmetric_memory", "enable_symm_mem_for_group"),), "asynchronous tensor parallelism"
    ),
    "FakeTensorMode": Private(
        (("torch._subclasses.fake_tensor", "FakeTensorMode"),), "a step without memory, which `estimate` measures"
    ),
    "FakeTensor": Private(
        (("torch._subclasses.fake_tensor", "FakeTensor"),), "gradients that have no values to look at"
    ),
    "in_kernel_invocation_manager": Private(
        (("torch._subclasses.fake_tensor", "in_kernel_invocation_manager"),), "results without memory, made at once"
    ),
    "throw_on_mutable_data_ptr": Private(
        (("torch._C", "_set_throw_on_mutable_data_ptr"),), "results without memory, made at once"
    ),
    "fake_collectives": Private(
        (("torch.distributed._tools.fake_collectives", ""),), "collectives on tensors without memory"
    ),
    "stored_place": Private(
        (("torch.distributed.checkpoint.filesystem", "_StorageInfo"),), "training states that are read as data"
    ),
    "stored_form": Private(
        (("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),), "training states that are read as data"
    ),
    "layout_of": Private((("torch.serialization", "_get_layout"),), "training states that are read as data"),
    "ArchiveReader": Private((("torch._C", "PyTorchFileReader"),), "training states that are read as data"),
    "tree_leaves": Private((("torch.utils._pytree", "tree_leaves"),), "the tensors among an operator's arguments"),
    "tree_map": Private((("torch.utils._pytree", "tree_map"),), "the tensors in lists that torch.tensor is given"),
}


def private(name: str) -> Any:
    """The torch object of one of `NAMES`.

    Raises:
        RuntimeError: this torch lacks it; the message has the object and the version.
    """
    entry = NAMES[name]
    for module, attribute in entry.places:
        try:
            loaded = importlib.import_module(module)
        except ImportError:
            continue
        if not attribute:
            return loaded
        if hasattr(loaded, attribute):
            return getattr(loaded, attribute)
    places = " or ".join(f"{module}.{attribute}".rstrip(".") for module, attribute in entry.places)
    raise RuntimeError(f"torch {torch.__version__} has no {places}, and shardplan needs it for: {entry.purpose}")


warn_of_untested()  # here, as everything that runs a model imports this file, once per process
