"""The findings of this room."""

from shardplan.core.diagnostics import Code

NO_REDUCED_MODEL = Code(
    "SP520",
    "a model of which no reduced model can be made",
    "`verify` runs a reduced model of the same classes. Its configuration is the original's with fewer layers, "
    "heads and experts and narrower widths, chosen so that every kind of layer and every divisibility stays. "
    "For this model transformers refuses the small configuration, or the reduced model has other layers than "
    "the original. Name a smaller configuration of your own, or give `verify` a `module:callable` that "
    "builds a small model.",
    bad="$ shardplan verify ./model my-plan.yaml --tp 2",
    good="$ shardplan verify my_models:small my-plan.yaml --tp 2",
)
TOO_LARGE = Code(
    "SP521",
    "a module too large to copy",
    "A module without a transformers configuration is copied as it is, up to 2 GiB of weights in float32. A larger one needs "
    "a reduced model of the same structure, made by a function of yours: `--reduced module:callable`, or `reduced=`.",
    bad="$ shardplan validate my_models:seventy_billion my-plan.yaml --tp 2",
    good="$ shardplan validate my_models:seventy_billion my-plan.yaml --tp 2 --reduced my_models:small",
)
NO_INPUTS = Code(
    "SP522",
    "a module that cannot be called on token ids",
    "Nothing says what to feed a module without a transformers configuration. Token ids are tried as the "
    "first argument of `forward`; this module has no embedding, or raises on them.",
    bad="$ shardplan verify my_models:vision_tower my-plan.yaml --tp 2",
    good="verify(module, plan, inputs=lambda seed: {'pixels': torch.randn(2, 3, 8, 8)})",
)

NOT_RUNNING = Code(
    "SP523",
    "a model whose reduced model does not run",
    "The reduced model raises in its own unsharded forward, so there is nothing to hold a plan against. The cause is in "
    "the configuration or in the modelling code; the original raises too, unless the cause is a width.",
    bad="attention_dropout: null   # in the model's config.json",
    good="attention_dropout: 0.0",
)

NOT_CARRIED = Code(
    "SP524",
    "a change of a live model that its reduced model cannot have",
    "A plan is proven on a reduced model. What a live model has beside its class and configuration (a forward set on an "
    "instance, hooks, an exchanged class, changed attributes, added modules and parameters) is carried over into it, "
    "functions are bound to its modules. Some changes cannot be: a function that holds a parameter (which another "
    "takes the place of when the plan is applied), that reads the model through a global name, or that uses one layer that "
    "is not kept; one module object at two places; tensors and sizes that have no one counterpart. What was not carried "
    "over would train unproven, so it is refused by name.",
    bad="weight = mlp.down_proj.weight; mlp.forward = lambda x: F.linear(act(x), weight)",
    good="mlp.forward = types.MethodType(lambda self, x: self.down_proj(act(x)), mlp)",
)

NOT_REDUCED = Code(
    "SP526",
    "a reduced model that is not one of the original",
    "`--reduced module:callable` (`reduced=`) builds the reduced model on which a plan is proven. It must have the modules of the "
    "original, of the same classes and with the same flags, and its parameters with as many dimensions each: layers and "
    "experts may be fewer and narrower, nothing may be missing or new.",
    bad="validate(model, plan, reduced=lambda: MyModel(width=64, gated=False))   # the original is gated",
    good="validate(model, plan, reduced=lambda: MyModel(width=64, layers=2, gated=True))",
)

CODES = (NO_REDUCED_MODEL, TOO_LARGE, NO_INPUTS, NOT_RUNNING, NOT_CARRIED, NOT_REDUCED)
