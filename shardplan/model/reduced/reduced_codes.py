"""The findings of this room."""

from shardplan.core.diagnostics import Code

NO_REDUCED_MODEL = Code(
    "SP520",
    "a model without a possible reduced model",
    "`verify` runs a reduced model of the same classes. Its configuration is the original's with fewer layers, "
    "heads and experts and narrower widths, chosen so that every kind of layer and every divisibility stays. "
    "For this model, transformers rejects the reduced configuration, or the reduced model has other layers than "
    "the original. All ranks run in one process, and at most 1024 of them are tried. Name a smaller configuration of your own, or pass `verify` a `module:callable` that "
    "builds a small model.",
    bad="$ shardplan verify ./model my-plan.yaml --tp 2",
    good="$ shardplan verify my_models:small my-plan.yaml --tp 2",
)
TOO_LARGE = Code(
    "SP521",
    "a module too large to copy",
    "A module without a transformers configuration is copied as it is, up to 2 GiB of weights in float32. A larger one needs "
    "a reduced model of the same structure, built by your own function: `--reduced module:callable`, or `reduced=`.",
    bad="$ shardplan validate my_models:seventy_billion my-plan.yaml --tp 2",
    good="$ shardplan validate my_models:seventy_billion my-plan.yaml --tp 2 --reduced my_models:small",
)
NO_INPUTS = Code(
    "SP522",
    "a module that cannot be called on token ids",
    "The inputs of a module without a transformers configuration are not known. `verify` tries token ids as the "
    "first argument of `forward`; this module has no embedding, or raises on them.",
    bad="$ shardplan verify my_models:vision_tower my-plan.yaml --tp 2",
    good="verify(module, plan, inputs=lambda seed: {'pixels': torch.randn(2, 3, 8, 8)})",
)

NOT_RUNNING = Code(
    "SP523",
    "a model whose reduced model does not run",
    "The reduced model raises in its own unsharded forward, so there is no reference for a plan. The cause is in "
    "the configuration or in the modelling code; the original raises too, unless the cause is a width.",
    bad="attention_dropout: null   # in the model's config.json",
    good="attention_dropout: 0.0",
)

NOT_CARRIED = Code(
    "SP524",
    "a change of a live model that its reduced model cannot have",
    "A plan is proven on a reduced model. Changes of the live model (a forward set on an instance, hooks, a replaced "
    "class, changed attributes, added modules and parameters) are carried over to it, and functions are bound to its "
    "modules. Some changes cannot be carried over: a function that uses a parameter directly (applying the plan replaces "
    "it), a list or dict of a module with a parameter in it, or a tensor that was computed from one before forward, for the same "
    "reason; a function that reads the model through a global name, or that uses a layer that the reduced model leaves out; one module "
    "object under two names; tensors and sizes without a unique counterpart. A change that is not carried over would train "
    "unproven, so it is refused by name.",
    bad="weight = mlp.down_proj.weight; mlp.forward = lambda x: F.linear(act(x), weight)",
    good="mlp.forward = types.MethodType(lambda self, x: self.down_proj(act(x)), mlp)",
)

NOT_REDUCED = Code(
    "SP526",
    "a reduced model that does not match the original",
    "`--reduced module:callable` (`reduced=`) builds the reduced model on which a plan is proven. It must have the modules of the "
    "original, of the same classes and with the same flags, and its parameters with as many dimensions each: there may "
    "be fewer layers and experts, and they may be narrower, but nothing may be missing or new.",
    bad="validate(model, plan, reduced=lambda: MyModel(width=64, gated=False))   # the original is gated",
    good="validate(model, plan, reduced=lambda: MyModel(width=64, layers=2, gated=True))",
)

CODES = (NO_REDUCED_MODEL, TOO_LARGE, NO_INPUTS, NOT_RUNNING, NOT_CARRIED, NOT_REDUCED)
