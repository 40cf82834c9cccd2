"""Prove a plan for every class that is neither a causal language model nor an image-text model:
`python -m tests.zoo.other_types [class ...] [--trunks] [--again WORDS] [--table reports/other-types.md]`.

The classes of a type run in one process, the trunk first, and the plan that is derived for it is tried for the heads. Classes that were
judged with what there is now are left out unless they are named, so a run that was ended goes on where it was. A class that takes too long is no row, and
what is left of its type neither: it is said, and tried again by the next run.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from shardplan.core.plan import PlanFile  # noqa: E402
from tests.sampling import share_of  # noqa: E402

from .entry import SIZES  # noqa: E402
from .judged_with import is_current, key  # noqa: E402
from .other_entry import OtherEntry, other_entry, plan_of  # noqa: E402
from .other_names import is_trunk, names, types  # noqa: E402
from .other_page import page  # noqa: E402
from .table import arguments, read, told, write  # noqa: E402
from .workers import SECONDS  # noqa: E402

PATIENCE = 1800  # seconds without a word


def run(
    classes: Sequence[str], trunk: str | None, sizes: Sequence[int] = SIZES[:1], seconds: int = SECONDS
) -> Iterator[OtherEntry]:
    """The entries of classes of one type, found out by a process of their own: where one ends it or takes too long, another goes on
    after it.

    Args:
        trunk: the class whose derived plan is tried first; None where there is none.
        sizes: of tp.
        seconds: of processor time, for a class.
    """
    left = list(classes)
    context = get_context("fork")
    gc.freeze()  # what is loaded is not looked at again by each process
    while left:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(left, trunk, sizes, seconds, theirs))
        process.start()
        theirs.close()
        try:
            while left and ours.poll(PATIENCE):
                yield ours.recv()
                del left[0]
        except EOFError:  # it ended
            process.join()
        process.kill()
        process.join()
        if left:
            name = left.pop(0)
            if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
                print(f"{name} takes more than {seconds} s", file=sys.stderr, flush=True)
                return
            yield OtherEntry(name, reason=f"ends the process ({process.exitcode})")


def _send(classes: Sequence[str], trunk: str | None, sizes: Sequence[int], seconds: int, to: Connection) -> None:
    def of_trunk() -> PlanFile | None:
        return plan_of(trunk) if trunk is not None else None

    for name in classes:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            to.send(other_entry(name, of_trunk, sizes))
        except Exception as error:  # of the modelling code
            said = re.sub(r" from '/[^']*'", "", str(error))  # where a module is on this machine
            to.send(OtherEntry(name, reason=f"{type(error).__name__}: {said}"))


def main(argv: list[str]) -> int:
    parser = arguments("python -m tests.zoo.other_types")
    parser.add_argument("--tp", type=int, nargs="+", default=SIZES[:1], help="sizes of the axis")
    parser.add_argument("--trunks", action="store_true", help="trunks alone")
    parser.add_argument("--again", metavar="WORDS", help="rows of the table whose reason or verdicts have these words")
    args = parser.parse_args(argv)
    before = read(args.table, OtherEntry)
    if args.again is not None:
        wanted = {name for name, one in before.items() if args.again in f"{one.reason} {one.verdicts}"}
    else:
        current = set() if args.types else {name for name, one in before.items() if is_current(one, "verdicts")}
        wanted = set(args.types or share_of(names(), args)) - current
    if args.trunks:
        wanted = {*filter(is_trunk, wanted)}
    done: list[str] = []
    other: list[str] = []
    for of_type in types().values():
        trunk = next(filter(is_trunk, of_type), None)
        for one in run([name for name in of_type if name in wanted], trunk, args.tp, args.seconds):
            done.append(one.name)
            other += [one.name] if one != before.get(one.name, one) else []
            one = replace(one, judged={"verdicts": key(one.plan)})
            said = (one.name, one.plan, one.verdicts or one.reason[:300], one.split)
            print(f"[{len(done)}/{len(wanted)}]", *said, file=sys.stderr, flush=True)
            if args.table is not None:
                write(args.table, {**read(args.table, OtherEntry), one.name: one}, page)
    return int(not told("verdicts", sorted(wanted.difference(done)), other))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
