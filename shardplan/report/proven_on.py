"""The cases of a proof, in one line."""

from __future__ import annotations

from shardplan.core.report import NumericProof

from .width import printable


def proven_on(proof: NumericProof) -> str:
    """The cases of a proof, in one line: the meshes, the inputs, the steps, the further arguments of calls, and those
    left out. Empty where there were no calls."""
    if not proof.calls:
        return ""
    inputs = [f"{one.kind} {list(next(iter(one.shapes.values()), ()))}" for one in proof.calls]
    dtypes = " and ".join(dict.fromkeys(("float32", *(row.dtype for row in proof.rows))))
    dtypes += f", once in {proof.once_in}" if proof.once_in else ""
    told = dict.fromkeys(word for one in proof.calls for word in (*one.switched, *one.replaced))
    untold = dict.fromkeys(word for one in proof.calls for word in one.left_out if word not in told)
    steps = f"{max(one.steps for one in proof.calls)} steps in train mode"
    parts = [
        f"on {' and '.join(mesh.shown for mesh in proof.meshes)}: {', '.join(inputs)}, {steps}, {dtypes}",
        *([f"with {', '.join(told)}"] if told else []),
        *([f"not with {', '.join(untold)}"] if untold else []),
    ]
    return printable("; ".join(parts))
