"""Mutants that change no number of a step that a plan runs, and those of code that change nothing that anybody sees."""

from __future__ import annotations

from .sites import ROOT, Site

# By the rules of a change: file, function, operator and a part of the line that the change takes away; "" is any -> why. What differs between ranks only after a user's mistake is made different
# by tests of their own, which these name.
NEW_MEMORY = "a sum does not take the memory of its operand: the same numbers (test_processes_references)"
_OF_MOVES = {
    ("same_weights.py", "", "", ""): "compares what ranks have loaded, which is the same here",
    ("same_inputs.py", "", "", ""): "compares what ranks are fed, which is the same here (test_same_inputs)",
    (
        "tied_copies.py",
        "compare_copies",
        "",
        "",
    ): "compares what stages have, the same here (test_processes_pipeline_steps)",
    ("agreement.py", "", "", ""): "tells ranks that another one failed, and none fails here",
    ("failed_steps.py", "", "", ""): "tells ranks that another one failed, and none fails here",
    ("expert_units.py", "place", "dim", ""): "FSDP2 cuts stacks of experts along another dim: the whole is the same",
    ("fsdp2.py", "_options", "group", ""): "of this mesh only the kind of device is read",
    (
        "apply_stages.py",
        "",
        "argument",
        "place=",
    ): "the place of a stage among random streams, which a proof does not draw from",
    (
        "apply_stages.py",
        "",
        "argument",
        "kind='stage'",
    ): "guards look at what a user does to a stage afterwards, and a proof does nothing (the adversaries that raise on pp)",
    (
        "apply_stages.py",
        "",
        "argument",
        "compare=",
    ): "the default compares inputs and weights, which are the same here (test_same_inputs)",
    (
        "apply_stages.py",
        "",
        "argument",
        "ranks=",
    ): "tells ranks of a failure, and none fails (test_processes_pipeline_steps)",
    (
        "stage_forward.py",
        "__call__",
        "drop",
        "_Taken.apply(*received)",
    ): "this torch sends zeros itself where nothing read a value; torch 2.11 raises there",
    (
        "pipelined_model.py",
        "__init__",
        "argument",
        "comparing(one, axis)",
    ): "the axis in the words of an error about other inputs, which are the same here (test_processes_pipeline_steps)",
    (
        "pipelined_model.py",
        "step",
        "group",
        "compare_copies(self.copies, self.group, self.device)",
    ): "compares what stages have, the same here (test_processes_pipeline_steps)",
    (
        "own_experts.py",
        "_summed_after",
        "argument",
        "regime.reduce_dtype",
    ): "a proof is in the dtypes of the model, and gradients are reduced in their own (test_pitfalls_gradients)",
    (
        "own_experts.py",
        "__call__",
        "argument",
        "size=number",
    ): "the number of tokens divides by tp here; where it does not, the move raises",
    (
        "shared_reads.py",
        "read",
        "",
        "return move(x, mesh, I, R)",
    ): "no gradient is recorded: a value in I and in R is the same",
    (
        "",
        "",
        "argument",
        "wait=False",
    ): "waits for a reduction earlier: the same numbers (test_processes_later_weights)",
    ("", "", "argument", "only="): NEW_MEMORY,
    (
        "tensor_moves.py",
        "__init__",
        "swap",
        'self.exchanges = ops.forward == "all_to_all"',
    ): "what goes by all-to-all comes back by it",
    (
        "tensor_moves.py",
        "__init__",
        "swap",
        "self.over = ops.backward in BEGUN",
    ): "autograd's own nodes compute the weights' gradients, which are the same",
    (
        "tensor_moves.py",
        "__init__",
        "swap",
        'self.in_place = _How(mesh, ops, 0, 0, only=True) if ops.forward == "all_reduce" else None',
    ): NEW_MEMORY,
    (
        "tensor_moves.py",
        "backward",
        "swap",
        'only = ops.backward == "all_reduce" and only_gradient(gradient)',
    ): NEW_MEMORY,
    ("", "", "argument", "later=later"): "autograd's own nodes compute the weights' gradients, which are the same",
    ("leave_weights.py", "", "factor", ""): "which layers leave their weights' gradients changes no number",
    (
        "gathering.py",
        "of_all",
        "argument",
        "group=group",
    ): "a proof gathers of all ranks; a group of some is that of saved stages (test_processes_pipeline_weights)",
    (
        "phases.py",
        "apply_program",
        "argument",
        "streams_of(mesh, seed, place)",
    ): "the place of a stage among random streams, which a proof does not draw from",
    (
        "tensor_moves.py",
        "forward",
        "swap",
        'ops.forward == "slice"',
    ): "a view or a copy of the same numbers; what changes a view in place raises (test_moves)",
    (
        "plan_mesh.py",
        "read_mesh",
        "group",
        "experts = ep_of(mesh, ep)",
    ): "finds what build_mesh was told of a mesh, and a proof gives ep itself (test_expert_mesh)",
    (
        "step_loss.py",
        "zero_like_loss",
        "argument",
        "dtype=torch.float32",
    ): "torch's default, where nobody has set another one (test_stage_proof)",
    (
        "reading.py",
        "_moved",
        "argument",
        "program.computed, size=size)",
    ): "tp divides what is moved: SP303 refuses other plans (test_gathered_parameters)",
}

_OF_CODE: dict[tuple[str, str, str, str], str] = {}
REASONS = {"moves": _OF_MOVES, "code": _OF_CODE}


def reason(site: Site) -> str:
    """ "" where the proof, or a test, must see a change."""
    line = (ROOT / site.path).read_text().splitlines()[site.lines[0] - 1].strip()
    for (name, function, operator, code), why in REASONS[site.rules].items():
        here = (
            site.path.endswith(f"/{name}" if name else "")
            and function in ("", site.function)
            and operator in ("", site.operator)
        )
        if here and (not code or ((code == line or code in site.before) and code not in site.after)):
            return why
    return ""
