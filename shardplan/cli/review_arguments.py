"""The arguments of the commands for those who review a plan: diff, lock, report."""

from __future__ import annotations

from shardplan.core.mesh import Axis
from shardplan.core.schedules import SCHEDULES

from .argument_parts import (
    MODEL_HELP,
    PLAN_HELP,
    Parser,
    micro_batches,
    model_options,
    sequence_parallel,
    sequences,
    tokens,
)
from .mesh_arguments import mesh_options

BOTH = "only with, or without, the plan's sequence_parallel section; without the option, both"
NO_DERIVE = "refuse a model that no built-in plan is for, instead of deriving a plan for `auto`"


def diff_arguments(parser: Parser) -> None:
    parser.add_argument("old", metavar="OLD", help="the plan as it was: a file, a built-in plan's name, `auto` or `hf`")
    parser.add_argument("new", metavar="NEW", help="the plan as it is")
    text = f"bind both plans to this model; without it their rules are compared as text. {MODEL_HELP}"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    text = "tensor-parallel ranks; without it the smallest size above 1 that both plans allow"
    mesh_options(parser, help={Axis.TP: text})
    sequence_parallel(parser, help=BOTH)
    text = "also estimate memory and communication of a step with this many tokens in a sequence"
    parser.add_argument("--seq-len", type=tokens, metavar="N", help=text)
    text = "with --seq-len: sequences in one forward of a data-parallel rank (1)"
    parser.add_argument("--micro-batch", type=sequences, default=1, metavar="N", help=text)
    text = "with --seq-len: also the least time of a step on this device, as for estimate"
    parser.add_argument("--device", metavar="NAME", help=text)
    parser.add_argument("--no-derive", dest="derive", action="store_false", help=NO_DERIVE)
    model_options(parser)
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    parser.add_argument(
        "--markdown", action="store_true", help="print them as Markdown, for a comment of a pull request"
    )


def lock_arguments(parser: Parser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("plan", nargs="?", metavar="PLAN", help=PLAN_HELP)
    text = (
        "instead of MODEL and PLAN: compare a lock with what its plan is bound to today; exit code 1 where it differs. Code that the lock "
        "names is run where the command line names it too (MODEL, --inputs, --reduced, --trust-remote-code)"
    )
    parser.add_argument("--check", metavar="LOCK", help=text)
    parser.add_argument("-o", "--output", metavar="LOCK", help="write the lock to this file instead of standard output")
    text = "tensor-parallel ranks; without it the smallest size above 1 that the plan allows"
    mesh_options(parser, help={Axis.TP: text})
    sequence_parallel(parser, help=BOTH)
    parser.add_argument("--no-derive", dest="derive", action="store_false", help=NO_DERIVE)
    model_options(parser)
    parser.add_argument("--json", action="store_true", help="print findings, and what --check finds, as JSON")


def report_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("plan", metavar="PLAN", help=PLAN_HELP)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the HTML file to write")
    text = "tensor-parallel ranks; without it the smallest size above 1 that the model allows"
    mesh_options(parser, help={Axis.TP: text})
    sequence_parallel(parser, help=BOTH)
    text = "with memory and communication of a step with this many tokens in a sequence"
    parser.add_argument("--seq-len", type=tokens, metavar="N", help=text)
    text = "with --seq-len: sequences in one forward of a data-parallel rank (1)"
    parser.add_argument("--micro-batch", type=sequences, default=1, metavar="N", help=text)
    text = "with --seq-len: also the least time of a step on this device, as for estimate"
    parser.add_argument("--device", metavar="NAME", help=text)
    text = "with --seq-len: forwards and backwards before the optimizer steps (1): of a pipeline, or accumulated"
    parser.add_argument("--micro-batches", type=micro_batches, default=1, metavar="N", help=text)
    text = "with --seq-len: of the pipeline, with pp above 1 (1f1b)"
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b", help=text)
    parser.add_argument("--no-proof", dest="proof", action="store_false", help="leave out the numeric proof")
    parser.add_argument("--no-derive", dest="derive", action="store_false", help=NO_DERIVE)
    model_options(parser)
