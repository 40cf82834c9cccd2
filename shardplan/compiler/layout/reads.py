"""Values that several modules read, each with its own move. Finds which modules share a move at run time, and where
one block input could make the move for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardplan.core.by_key import by_key
from shardplan.core.tree import ModuleTree, ancestors, homes
from shardplan.model.forward_code import argument_names
from shardplan.model.reduced.trace import Event, Trace


@dataclass(frozen=True, slots=True)
class SharedRead:
    """One value, moved I -> R by each of several readers.

    Args:
        module: where one block input would do: the innermost module that gets the value as an argument and has no
            other differentiable reader of it inside.
        argument: the argument.
        readers: the modules that move it.
    """

    module: str
    argument: str
    readers: tuple[str, ...]


def first_readers(tree: ModuleTree, run: Trace, moving: Sequence[tuple[int, str]]) -> dict[str, str | None]:
    """Reader -> the module that moved the same tensor I -> R before it, in each call of the block around both; None
    if there was none before it in some call. (At run time `torchlib.shared_reads` finds the same.)

    Args:
        tree: the tree of the modules that run.
        run: the run of a rank.
        moving: (value, module) for each I that a module moves to R.
    """
    known, around = set(moving), homes(tree, dict.fromkeys(name for _, name in moving))
    calls: Counter[str] = Counter()
    moved: dict[tuple[str, int, int], str] = {}
    found: dict[str, str | None] = {}
    for event, running in run.with_running():
        if event.kind == "enter":
            for number in dict.fromkeys(event.inputs):
                if (number, event.module) in known:
                    home = around.get(event.module)
                    key = (home, calls[home], number) if home in running else None
                    first = None
                    if key is not None:
                        first = moved.get(key)
                        moved.setdefault(key, event.module)
                    found[event.module] = found.get(event.module, first) and first
            calls[event.module] += 1
    return found


def same_arguments(model: nn.Module, run: Trace) -> dict[str, dict[str, frozenset[str]]]:
    """Module -> argument -> the others that were the same tensor in each of its calls; "" is its first argument.

    Args:
        model: the model that was run.
        run: unsharded.
    """
    found: dict[str, dict[str, frozenset[str]]] = {}
    for event in (event for event in run.events if event.kind == "enter"):
        first = next(iter(argument_names(model.get_submodule(event.module))), None)
        names = ["" if name == first else name for name in event.names]
        own = found.setdefault(event.module, {})
        for name, number in zip(names, event.inputs, strict=True):
            alike = frozenset(n for n, i in zip(names, event.inputs, strict=True) if i == number and n != name)
            own[name] = own.get(name, alike) & alike
    return {
        module: {n: alike for n, alike in own.items() if alike} for module, own in found.items() if any(own.values())
    }


def agreed(reads: Iterable[Mapping[str, str | None]]) -> dict[str, str]:
    """The agreement of several runs: a module shares its move if it did so in every run in which it ran."""
    found = by_key(one for run in reads for one in run.items())
    return {module: first for module, (*others, first) in found.items() if first is not None and None not in others}


def shared_reads(run: Trace, incoming: Iterable[tuple[int, str]], taken: Iterable[str]) -> tuple[SharedRead, ...]:
    """The block inputs that a plan lacks.

    Args:
        run: the run of a rank.
        incoming: (value, module) for each I that a module moves to R.
        taken: modules that have a rule for their argument or result already, and can have no other.
    """
    readers, taken = by_key(incoming), set(taken)
    found = (_block_input(run, number, names, taken) for number, names in readers.items() if len(set(names)) > 1)
    return tuple(read for read in found if read is not None)


def _block_input(run: Trace, number: int, readers: list[str], taken: set[str]) -> SharedRead | None:
    around = [set(ancestors(name)) for name in readers]
    common = [name for name in ancestors(readers[0]) if all(name in one for one in around)]
    passed: set[int] = set()  # operations between the argument and the readers
    while True:
        for module in common:
            block_input = _argument(run.readers.get(number, ()), module, number)
            if (
                block_input is not None
                and module
                and module not in taken
                and _alone(run, number, module, readers, passed)
            ):
                return SharedRead(module, block_input, tuple(dict.fromkeys(readers)))
        before = run.producers.get(number)
        if before is None or before.kind != "op" or before.place[2] == "atom":
            return None
        sources = [i for i in dict.fromkeys(before.inputs) if run.requires_grad[i]]
        if len(sources) != 1 or not _alone(run, number, "", readers, passed):
            return None
        passed.add(id(before))
        number = sources[0]


def _argument(events: Sequence[Event], module: str, number: int) -> str | None:
    """The argument of a module that is the value."""
    entered = (event for event in events if event.kind == "enter" and event.module == module)
    return next((event.names[event.inputs.index(number)] for event in entered), None)


def _alone(run: Trace, number: int, module: str, readers: Sequence[str], passed: set[int]) -> bool:
    """Whether, inside the module, only the readers compute something differentiable from the value."""
    inside = f"{module}." if module else ""
    events = (e for e in run.readers.get(number, ()) if f"{e.module}.".startswith(inside) and id(e) not in passed)
    others = (e for e in events if e.module not in readers)
    return not any(
        e.kind == "leave" or (e.kind == "op" and any(run.requires_grad[o] for o in e.outputs)) for e in others
    )
