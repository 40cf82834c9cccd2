"""Private names that shardplan reads or sets on objects of other packages: their owners, and the releases that had them.

Names that are imported from torch are in `private.py`. tests/test_private_names.py finds every private attribute in the
package that is in neither file, and looks each of these up in the installed packages.
"""

from __future__ import annotations

from dataclasses import dataclass

SEEN = {
    "torch": ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    "transformers": ("5.17.0", "5.23.0", "5.24.0"),
    "accelerate": ("1.15.0",),
    "argparse": ("3.11", "3.12", "3.13", "3.14"),
    "random": ("3.11", "3.12", "3.13"),
    "sys": ("3.11", "3.12", "3.13", "3.14"),
}


@dataclass(frozen=True, slots=True)
class Attributes:
    """Names of one owner.

    Attributes:
        module, owner: the class whose instances have them, or an object; with dots, or empty for the module itself.
        names: the names.
        purpose: what they are needed for.
        seen: the package releases that had them; empty: those in `SEEN`.
    """

    module: str
    owner: str
    names: tuple[str, ...]
    purpose: str
    seen: tuple[str, ...] = ()

    @property
    def releases(self) -> tuple[str, ...]:
        """The releases of the package that had these names."""
        return self.seen or SEEN[self.module.partition(".")[0]]


_FSDP = "torch.distributed.fsdp._fully_shard"
_STATE = (f"{_FSDP}._fsdp_state", "FSDPState")
_UNITS = "gathering units of FSDP2 for a while, and bringing back what was found (runtime/parallel/fsdp_units.py)"

ATTRIBUTES: tuple[Attributes, ...] = (
    Attributes(
        "torch",
        "Tensor",
        ("_make_wrapper_subclass",),
        "a shape, a dtype and a device without memory (torchlib/hollow.py, runtime/parallel/fused_logits.py)",
    ),
    Attributes("torch.distributed.fsdp", "FSDPModule", ("_get_fsdp_state",), _UNITS),
    Attributes(*_STATE, ("_fsdp_param_groups",), _UNITS, ("2.12.1", "2.13.0", "2.14.1", "2.15.0")),
    # In torch 2.13 this is a property, which raises if there are several groups.
    Attributes(*_STATE, ("_fsdp_param_group",), _UNITS),
    Attributes(
        *_STATE,
        (
            "_is_root",
            "_post_forward",
            "_pre_forward",
            "_training_state",
            "_state_ctx",
            "_modules_to_run_forward",
            "_auto_reshard_after_forward",
        ),
        _UNITS,
    ),
    Attributes(f"{_FSDP}._fsdp_state", "FSDPStateContext", ("iter_forward_root",), _UNITS),
    Attributes(
        f"{_FSDP}._fsdp_param_group",
        "FSDPParamGroup",
        (
            "_partial_reduce_output",
            "_reset_sharded_params",
            "_to_sharded",
            "_training_state",
            "fsdp_params",
            "is_unsharded",
            "post_forward_mesh_info",
            "wait_for_unshard",
        ),
        _UNITS,
    ),
    Attributes(f"{_FSDP}._fsdp_param_group", "FSDPParamGroup", ("_partial_reduce_output_layout",), _UNITS, ("2.15.0",)),
    Attributes(
        f"{_FSDP}._fsdp_param",
        "FSDPParam",
        (
            "_module_info",
            "_param_fqn",
            "_sharded_post_forward_param",
            "_unsharded_param",
            "init_unsharded_param",
            "sharded_param",
        ),
        _UNITS,
    ),
    Attributes(
        "torch.distributed.device_mesh",
        "DeviceMesh",
        ("_concatenate", "_flatten", "_get_root_mesh", "_unflatten"),
        "meshes of several axes, and of parts of one, which have no public spelling",
    ),
    Attributes(
        "torch.distributed.tensor", "DTensor", ("_local_tensor",), "a rank's part, without autograd's Python part"
    ),
    Attributes(
        "torch.distributed.tensor._sharding_prop",
        "ShardingPropagator",
        ("_propagate_tensor_meta_non_cached",),
        "memory without the whole tensors with which DTensor learns how an operator splits",
    ),
    Attributes(
        "torch",
        "Tensor",
        ("_backward_hooks", "_is_view", "_make_subclass", "_post_accumulate_grad_hooks"),
        "hooks of parameters, views that may not be changed in place, and tensors without memory",
    ),
    Attributes("torch", "UntypedStorage", ("_cdata",), "whether two tensors are one memory"),
    Attributes(
        "torch.nn",
        "Module",
        (
            "_backward_hooks",
            "_backward_pre_hooks",
            "_buffers",
            "_forward_hooks",
            "_forward_hooks_with_kwargs",
            "_forward_pre_hooks",
            "_forward_pre_hooks_with_kwargs",
            "_is_full_backward_hook",
            "_modules",
            "_non_persistent_buffers_set",
            "_parameters",
        ),
        "replacing parameters where getattr does not see it, buffers that no checkpoint has, and a model's own hooks in a pipeline stage",
    ),
    Attributes(
        "torch._subclasses.fake_tensor",
        "FakeTensor",
        ("_has_symbolic_sizes_strides",),
        "tensors without memory, whose operators are found in the cache faster",
    ),
    Attributes(
        "torch._subclasses.fake_tensor",
        "FakeTensorMode",
        ("_get_output_tensor_from_cache_entry", "_prep_args_for_hash"),
        "tensors without memory, whose operators are found in the cache faster",
    ),
    Attributes(
        "torch.testing._internal.distributed.multi_threaded_pg",
        "ProcessLocalGroup",
        ("_coll_lock", "_cur_coll_on_pgs", "_start_coll", "_terminate"),
        "simulated ranks after one of them has ended",
    ),
    Attributes(
        "torch.testing._internal.distributed.multi_threaded_pg",
        "Collective",
        ("_collective", "_count", "_world_size"),
        "simulated ranks after one of them has ended",
    ),
    Attributes("torch", "ops", ("_c10d_functional",), "the operators of collectives"),
    Attributes("torch", "ops.aten", ("_unsafe_view",), "views that may be changed in place"),
    Attributes("torch", "ops.aten", ("_scaled_dot_product_efficient_attention",), "an estimate's attention"),
    Attributes(
        "transformers",
        "PreTrainedModel",
        ("_from_config", "_get_dtype_plan"),
        "models without weights, and the dtypes that parameters keep",
    ),
    Attributes(
        "transformers",
        "Trainer",
        (
            "_get_output_dir",
            "_load_best_model",
            "_load_from_checkpoint",
            "_load_optimizer_and_scheduler",
            "_save_checkpoint",
            "_save_optimizer_and_scheduler",
        ),
        "checkpoints of planned models through Trainer",
    ),
    Attributes("transformers", "Trainer", ("_mixed_mesh_grads",), "one norm of gradients over all meshes"),
    Attributes("accelerate", "Accelerator", ("_models", "_optimizers", "_schedulers"), "what `save_state` saves"),
    Attributes("argparse", "", ("_HelpAction", "_SubParsersAction"), "completion, and the page of commands"),
    Attributes("argparse", "ArgumentParser", ("_actions", "_option_string_actions"), "completion, unknown options"),
    Attributes("random", "Random", ("_randbelow",), "the greatest of the numbers that code may draw"),
    Attributes("sys", "", ("_getframe",), "the line of code that an operation is of"),
)
