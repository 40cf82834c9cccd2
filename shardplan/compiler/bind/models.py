"""A plan is for the models that it names."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Label, Location, Severity
from shardplan.core.plan import PlanFile
from shardplan.core.tree import ModuleTree

OTHER_MODEL = Code(
    code="SP205",
    title="a plan for another model",
    text="""`models` lists the Hugging Face model types or class names that a plan was written for. For another model
the plan may still be right, if the names and the structure are the same, but nobody has verified it.""",
    bad="""# shardplan validate qwen3-8b.json mine.yaml
version: "1"
name: mine
models: [llama]
tensor_parallel:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml
version: "1"
name: mine
models: [llama]
tensor_parallel:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
)


def other_model(plan: PlanFile, tree: ModuleTree) -> Iterator[Diagnostic]:
    """A warning where the plan names models, but neither this model's type nor its class."""
    if not plan.models or tree.model_type in plan.models or set(tree.class_names) & set(plan.models):
        return
    model = tree.class_names[0] if tree.class_names else "this model"
    typed = f" (model type {tree.model_type})" if tree.model_type else ""
    yield Diagnostic(
        code=OTHER_MODEL.code,
        severity=Severity.WARNING,
        message=f"the plan is for {', '.join(plan.models)}, not for {model}{typed}",
        primary=Label(Location(plan.file, ("models",), "value"), "names other models"),
        help=f"use a plan for this model, or add `{tree.model_type or model}` to `models` once it is verified",
    )
