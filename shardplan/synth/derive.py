"""A tensor-parallel plan for any model, from its structure and its run."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.layout import Workbench
from shardplan.layout.model import ModelLayouts
from shardplan.layout.repairs import general
from shardplan.models import FoundModel

from .draft import Board, Draft, Options
from .flow import Flow
from .regions import Group, grouped, regions
from .solve import Solver

AUXILIARY = "output_router_logits"  # the argument of transformers' models with experts
DOOR = "input_with_grad_allreduce"
EMBEDDING: Options = {"style": "embedding_rowwise"}
HEAD: Options = {"style": "colwise_gather_output"}


@dataclass(frozen=True, slots=True)
class Derived:
    """A plan that was found.

    Args:
        draft: the rules; the layout check has no objection to them.
        whole: the groups that could not be split, and stay whole on every rank.
    """

    draft: Draft
    whole: tuple[Group, ...]


def derive(found: FoundModel, tp: int = 2) -> Derived:
    """Find a plan: split every region for which rules are found that are right, leave the rest whole.

    Args:
        tp: the size for which it is tried; what divides is kept in its relation to it in the small copy.

    Raises:
        PlanError: SP520 to SP523: there is no small copy, or it does not run.
    """
    benches = _benches(ModelLayouts(found, tp))
    board, flow = Board(benches, tp), Flow(benches[0].reference, benches[0].tree)
    solver = Solver(board, flow, found.tree)
    draft, whole = Draft({}), []
    for group in grouped(regions(flow), board.tree):
        solved = solver.solve(group)
        more = None if solved is None else board.mended(draft.with_rules(solved.tensor_parallel))
        if more is None:
            whole.append(group)
        else:
            draft = more
    draft = with_vocabulary(board, flow, draft)
    return Derived(with_doors(board, draft), tuple(whole))


def _benches(layouts: ModelLayouts) -> tuple[Workbench, ...]:
    """The small copy with each kind of input, and with the outputs of routers where the model can give them: an auxiliary
    loss reads them outside the blocks, and a plan is to be right with and without it."""
    benches = layouts.benches
    first = benches[0]
    if AUXILIARY not in vars(getattr(first.model, "config", None) or object):
        return benches
    return (*benches, Workbench(first.model, {**first.inputs, AUXILIARY: True}, first.tree))


def with_vocabulary(board: Board, flow: Flow, draft: Draft) -> Draft:
    """With the embedding of the tokens and the output head split too, as far as that is right."""
    rows = board.tree.numbers.get("vocab_size")
    embeddings, heads = [], []
    for product in dict.fromkeys(flow.products.values()):
        module = board.tree.modules.get(product.name)
        weight = module.parameter("weight") if module is not None else None
        if weight is None or weight.shape[0] != rows or product.name in draft.tensor_parallel:
            continue
        if general(product.name) != product.name:
            continue  # a layer's
        if module.kind == "embedding":
            embeddings.append(product.name)
        elif module.kind == "linear":
            heads.append(product.name)
    split = {**dict.fromkeys(embeddings, EMBEDDING), **dict.fromkeys(heads, HEAD)}
    for names in ((*embeddings, *heads), heads, embeddings):
        if names:
            more = board.mended(draft.with_rules({name: split[name] for name in names}))
            if more is not None:
                return more
    return draft


def with_doors(board: Board, draft: Draft) -> Draft:
    """With one door around the readers of each value that several move on their own."""
    report = board.report(draft)
    doors: dict[str, Options] = {}
    for read in report.reads:
        pattern = general(read.module)
        rule = draft.tensor_parallel.get(pattern, {})
        if rule.get("style", "replicate") == "replicate":
            doors[pattern] = {"style": DOOR, **door_argument(board, read.module, read.argument)}
    return board.mended(draft.with_rules(doors)) or draft


def door_argument(board: Board, module: str, argument: str) -> Options:
    """The option that says which argument a door moves, where it is not the first."""
    first = board.first_argument(module)
    return {} if argument == first else {"argument": argument}
