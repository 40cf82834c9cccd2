"""The command line as data: every command, argument and example. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import get_args

from shardplan.core.estimates import OptimizerName
from shardplan.core.mesh import AXES, Axis
from shardplan.core.schedules import SCHEDULES
from shardplan.core.suggest import closest

from .argument_parts import (
    MODEL_HELP,
    Parser,
    Versions,
    allow_unproven,
    configuration,
    debug,
    derivation,
    findings_output,
    micro_batches,
    model_and_plan,
    model_options,
    ranks,
    sequence_parallel,
    sequences,
    several,
    shares,
    sizes,
    tokens,
)
from .mesh_arguments import AXIS_HELP, mesh_options

BOTH = "check only the plan with, or without, its sequence_parallel section; without the option, both"
ONE = "with, or without (the default), the plan's sequence_parallel section"
OPTIMIZER = "an optimizer of torch; adamw without options makes a list as large as the parameters on a GPU (adamw)"
DESCRIPTION = "A compiler for sharding plans: tensor and sequence parallelism of PyTorch models as checked data."


def build_parser() -> Parser:
    """The parser of the whole command line; `args.command` names the module under `shardplan.cli` to run."""
    parser = Parser(
        "shardplan",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action=Versions, nargs=0, help="print the versions of shardplan, torch, transformers and Python"
    )
    debug(parser, default=False)
    parser.epilog = "example:\n  shardplan validate llama plans/llama.yaml --tp 8"
    _add_commands(parser, COMMANDS, dest="command")
    return parser


Table = dict[str, tuple[str, str, Callable[[Parser], None]]]  # command -> its summary, an example, its arguments


def _add_commands(parser: Parser, table: Table, *, dest: str) -> None:
    commands = parser.add_subparsers(dest=dest, metavar="COMMAND", required=True)
    for name, (summary, example, add_arguments) in table.items():
        command = commands.add_parser(
            name,
            help=summary[0].lower() + summary[1:].rstrip("."),
            description=summary,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add_arguments(command)
        debug(command, default=argparse.SUPPRESS)  # accepted both before and after the command


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's subcommands; empty for a command without subcommands."""
    return next((dict(a.choices) for a in parser._actions if isinstance(a, argparse._SubParsersAction)), {})


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line. Raises SystemExit after a message, which gives the option nearest to an unknown one, or
    the form to use for a word that is left over."""
    from .unknown_words import unexpected_words, unknown_option

    parser = build_parser()
    command: argparse.ArgumentParser = parser
    names, rest = [], list(words)
    while (word := _first_word(rest)) in (below := commands_of(command)):
        names.append(word)
        command, rest = below[word], rest[rest.index(word) + 1 :]
    name = " ".join(names)
    if names and not commands_of(command) and (wrong := unknown_option(name, command, rest)) is not None:
        command.error(wrong)
    args, left = parser.parse_known_args(words)
    if left:
        command.error(unexpected_words(name, command, left))
    return args


def misspelt(words: Sequence[str]) -> str | None:
    """The command that the first word probably means, where this word is not a command."""
    word = _first_word(words)
    return closest(word, COMMANDS) if word not in COMMANDS else None


def _first_word(words: Sequence[str]) -> str:
    """The word in the position of the command; empty where there are only options."""
    return next((word for word in words if not word.startswith("-")), "")


def _checking(parser: Parser, tp: str) -> None:
    """The arguments that `validate` and `verify` share."""
    model_and_plan(parser)
    mesh_options(parser, help={Axis.TP: tp})
    sequence_parallel(parser, help=BOTH)
    parser.add_argument("--seq-len", type=tokens, metavar="N", help="the sequence length to check divisibility for")
    model_options(parser)
    allow_unproven(parser)
    parser.add_argument("--verbose", action="store_true", help="also print findings that follow from others")
    findings_output(parser)


def _validate(parser: Parser) -> None:
    _checking(parser, "tensor-parallel ranks; without it every size is checked")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="check only names and sizes in a checkpoint's folder, without torch and the model's code",
    )
    text = "skip the numeric proof, for editors; the report says so"
    parser.add_argument("--no-proof", dest="proof", action="store_false", help=text)
    text = "write the changes that help lines propose into PLAN, a YAML file, where trying them leaves fewer errors; comments and order stay"
    parser.add_argument("--fix", action="store_true", help=text)
    parser.add_argument("--diff", action="store_true", help="show what --fix would write, as a unified diff")


def _init(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan to FILE instead of standard output")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument("--name", metavar="NAME", help="the plan's name; without it the model's type")
    text = "the size for which rules are tried and proven (2)"
    mesh_options(parser, (Axis.TP,), help={Axis.TP: text}, types={Axis.TP: several})
    parser.add_argument("--sequence-parallel", action="store_true", help="also write a sequence_parallel section")
    text = (
        "also write a context_parallel section, for the axis cp, and the sequence_parallel section that it follows from"
    )
    parser.add_argument("--context-parallel", action="store_true", help=text)
    parser.add_argument("--expert-parallel", action="store_true", help="also write an expert_parallel section")
    model_options(parser)
    parser.add_argument("--json", action="store_true", help="print findings as JSON")


def _convert(parser: Parser) -> None:
    source_help = "a JSON or YAML file, or `hf` (the plan that transformers has for MODEL)"
    parser.add_argument("source", nargs="?", metavar="SOURCE", help=source_help)
    parser.add_argument(
        "--model", metavar="MODEL", help=f"what the plan is for, and is validated against: {MODEL_HELP}"
    )
    parser.add_argument(
        "--from",
        dest="form",
        choices=("transformers", "automodel", "torch", "deepspeed"),
        help="the project that the plan comes from; without it, found from the plan's form",
    )
    parser.add_argument(
        "--import",
        dest="import_path",
        metavar="MODULE:NAME",
        help="instead of SOURCE: import a dictionary of styles, or a function that returns one; runs the module's code",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan to FILE instead of standard output")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument(
        "--name", metavar="NAME", help="the plan's name; without it the model's type or the file's name"
    )
    mesh_options(parser, (Axis.TP,), help={Axis.TP: "the tp size to validate the plan at"})
    model_options(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON; the plan goes to FILE alone")


def _export(parser: Parser) -> None:
    model_and_plan(parser)
    text = "transformers: the tp_plan of a DistributedConfig, as JSON; torch: a dictionary for parallelize_module, as Python"
    parser.add_argument("--to", required=True, choices=("transformers", "torch"), help=text)
    text = "the size to compile for, and the number of processes that run it (2)"
    parser.add_argument("--tp", type=several, default=2, metavar="N", help=text)
    text = "do not run it in the target's own code; then nothing tells that it computes the same"
    parser.add_argument("--no-run", dest="run_it", action="store_false", help=text)
    parser.add_argument("-o", "--output", metavar="FILE", help="write it to FILE instead of standard output")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    model_options(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON; the export goes to FILE alone")


def _verify(parser: Parser) -> None:
    _checking(parser, "tensor-parallel ranks; may be left out with --pp")
    parser.add_argument(
        "--processes", action="store_true", help="use real gloo processes instead of a simulation in one process"
    )
    text = "of the pipeline that runs with --pp and --processes (1f1b)"
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), help=text)
    text = "of its steps, on each data-parallel rank (twice as many as stages)"
    parser.add_argument("--micro-batches", type=micro_batches, metavar="N", help=text)
    text = (
        "also run your training step on gloo processes of the mesh and on one process, and name the first value that differs: a "
        "Python file with make(model) -> state, step(model, batches, state) -> loss and, for a pipeline with a loss of its own, "
        "loss_fn(logits, labels); runs its code"
    )
    parser.add_argument("--step", metavar="FILE", help=text)
    parser.add_argument("--all", action="store_true", help="one line for every tensor, repeated layers not folded")


def _estimate(parser: Parser) -> None:
    model_and_plan(parser)
    mesh_options(parser, help={})
    parser.add_argument("--seq-len", type=tokens, required=True, metavar="N", help="tokens of a sequence")
    text = "sequences in one forward of a data-parallel rank (1)"
    parser.add_argument("--micro-batch", type=sequences, default=1, metavar="N", help=text)
    text = "forwards and backwards before the optimizer steps (1): of a pipeline, or accumulated"
    parser.add_argument("--micro-batches", type=micro_batches, default=1, metavar="N", help=text)
    text = "the pipeline's, with pp above 1 (1f1b)"
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b", help=text)
    text = "the dtype of stored parameters, gradients and optimizer state (bf16); the plan's mixed_precision adds to it"
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), default="bf16", help=text)
    parser.add_argument("--optimizer", choices=get_args(OptimizerName), default="adamw", help=OPTIMIZER)
    text = "the busiest ep rank's share of the experts' rows over the mean (1: an even load); at most ep"
    parser.add_argument("--expert-load", type=float, default=1.0, metavar="X", help=text)
    text = "for the least time of a step: a100, b200, h100, h200, mi300x, or a JSON file that describes one"
    parser.add_argument("--device", metavar="NAME", help=text)
    sequence_parallel(parser, help=ONE)
    text = "the layout of the output head's logits; overrides the plan"
    parser.add_argument("--logits", choices=("plan", "replicated", "sharded", "fused"), default="plan", help=text)
    text = "what is recomputed in backward; overrides the plan"
    parser.add_argument(
        "--activation-checkpointing", choices=("plan", "none", "full", "selective"), default="plan", help=text
    )
    text = "gather the sequence again in backward instead of keeping it; overrides the plan"
    parser.add_argument("--regather", action="store_true", help=text)
    model_options(parser)
    parser.add_argument("--json", action="store_true", help="print the estimate as JSON")


def _fit(parser: Parser) -> None:
    model_and_plan(parser, default="auto")
    parser.add_argument("--gpus", type=ranks, required=True, metavar="N", help="how many devices")
    text = "; only these sizes, as 1,8; without it every one"
    mesh_options(parser, help={axis: AXIS_HELP[axis] + text for axis in AXES}, types=dict.fromkeys(AXES, sizes))
    text = "a100, b200, h100, h200, mi300x, or a JSON file that describes one"
    parser.add_argument("--device", required=True, metavar="NAME", help=text)
    text = "sequences of a step on all devices; micro-batches follow from it, and which mesh is best depends on it"
    parser.add_argument("--global-batch", type=sequences, required=True, metavar="N", help=text)
    parser.add_argument("--seq-len", type=tokens, required=True, metavar="N", help="tokens of a sequence")
    text = "the dtype of stored parameters, gradients and optimizer state (fp32, with products in bfloat16)"
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help=text)
    parser.add_argument("--optimizer", choices=get_args(OptimizerName), default="adamw", help=OPTIMIZER)
    parser.add_argument("--best", type=ranks, default=5, metavar="N", help="how many configurations (5)")
    parser.add_argument("--tokens", type=float, metavar="N", help="of the whole training, for its days: 1e12")
    text = "measured shares of the bound's speed, the least and the most, as 0.35,0.5: bounds become estimates"
    parser.add_argument("--efficiency", type=shares, metavar="LOW,HIGH", help=text)
    parser.add_argument("--script", metavar="FILE", help="write a training script for the first one")
    text = "draw memory against speed (.svg, .png or .pdf; needs the extra `plot`)"
    parser.add_argument("--plot", metavar="FILE", help=text)
    model_options(parser)
    parser.add_argument("--json", action="store_true", help="print the configurations as JSON")


def _show(parser: Parser) -> None:
    model_and_plan(parser)
    text = "tensor-parallel ranks; without it the smallest size that splits the model"
    mesh_options(parser, help={Axis.TP: text})
    text = "with, or without, the plan's sequence_parallel section; without the option, without, and both with --html"
    sequence_parallel(parser, help=text)
    model_options(parser)
    parser.add_argument("--all", action="store_true", help="one line for every module, repeated layers not folded")
    parser.add_argument("--json", action="store_true", help="print the same as JSON, every module by itself")
    text = "write a page instead: modules, flow, findings, proof; with --seq-len memory and communication too"
    parser.add_argument("--html", metavar="FILE", help=text)
    text = "with --html: memory and communication of a step with this many tokens in a sequence"
    parser.add_argument("--seq-len", type=tokens, metavar="N", help=text)
    _step_of_comparison(parser)
    text = "with --seq-len: forwards and backwards before the optimizer steps (1): of a pipeline, or accumulated"
    parser.add_argument("--micro-batches", type=micro_batches, default=1, metavar="N", help=text)
    text = "with --seq-len: of the pipeline, with pp above 1 (1f1b)"
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b", help=text)
    text = "with --html: leave out the numeric proof"
    parser.add_argument("--no-proof", dest="proof", action="store_false", help=text)


def _step_of_comparison(parser: Parser) -> None:
    text = "with --seq-len: sequences in one forward of a data-parallel rank (1)"
    parser.add_argument("--micro-batch", type=sequences, default=1, metavar="N", help=text)
    text = "with --seq-len: also the least time of a step on this device, as for estimate"
    parser.add_argument("--device", metavar="NAME", help=text)


def _diff(parser: Parser) -> None:
    text = "the plan as it was: a file, a built-in plan's name, `auto` or `hf`; with --save MODEL, with --against MODEL where that is code"
    parser.add_argument("old", nargs="?", metavar="OLD", help=text)
    parser.add_argument("new", nargs="?", metavar="NEW", help="the plan as it is; with --save PLAN")
    text = "write what PLAN is bound to for MODEL to this file, instead of comparing two plans"
    parser.add_argument("--save", metavar="LOCK", help=text)
    text = (
        "compare such a file with what its plan is bound to today; exit code 1 where it differs. Code that it names is run where the "
        "command line names it too (MODEL, --inputs, --reduced, --trust-remote-code)"
    )
    parser.add_argument("--against", metavar="LOCK", help=text)
    text = f"bind both plans to this model; without it their rules are compared as text. {MODEL_HELP}"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    text = "tensor-parallel ranks; without it the smallest size above 1 that the plans allow"
    mesh_options(parser, help={Axis.TP: text})
    sequence_parallel(parser, help=BOTH)
    text = "also estimate memory and communication of a step with this many tokens in a sequence"
    parser.add_argument("--seq-len", type=tokens, metavar="N", help=text)
    _step_of_comparison(parser)
    derivation(parser)
    model_options(parser)
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    parser.add_argument(
        "--markdown", action="store_true", help="print them as Markdown, for a comment of a pull request"
    )


def _lint(parser: Parser) -> None:
    text = "plan files, folders with plan files (.yaml, .yml, .json, at any depth) or built-in plans' names"
    parser.add_argument("plans", nargs="+", metavar="PLAN", help=text)
    findings_output(parser)


def _fmt(parser: Parser) -> None:
    parser.add_argument("plans", nargs="+", metavar="PLAN", help="plan files in YAML, or folders with such")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a file would change")
    parser.add_argument("--diff", action="store_true", help="as --check, and show what would change")


def _lsp(parser: Parser) -> None:
    text = f"complete, explain and check names of this model's modules; without it, the language alone. {MODEL_HELP}"
    parser.add_argument("--model", metavar="MODEL", help=text)
    model_options(parser)


def _list(parser: Parser) -> None:
    text = "print what the built-in plan for this model splits, and at which tp sizes; MODEL is as for validate"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    configuration(parser)
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def _explain(parser: Parser) -> None:
    parser.add_argument("code", metavar="CODE", help="a code as printed with a finding, such as SP301")


def _completion(parser: Parser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def _schema(parser: Parser) -> None:
    parser.add_argument("--report", action="store_true", help="the schema of what --json prints, instead of a plan's")
    text = "write the schema of plans into FOLDER/.vscode (.), and the settings with which VS Code uses it for plans/"
    parser.add_argument("--install", nargs="?", const=".", metavar="FOLDER", help=text)


COMMANDS: Table = {
    "init": (
        "Write a plan for a model, found from its structure and a run of its reduced model; validated and proven.",
        "shardplan init qwen3 -o plan.yaml --sequence-parallel",
        _init,
    ),
    "convert": (
        "Convert a plan of transformers, NeMo Automodel, NeMo-RL, torch or DeepSpeed.",
        "shardplan convert ds_config.json --model llama -o plan.yaml",
        _convert,
    ),
    "export": (
        "Write a plan in the words of transformers or torch, proven in their own code.",
        "shardplan export qwen3 auto --to transformers -o tp_plan.json",
        _export,
    ),
    "validate": (
        "Check a plan against a model.",
        "shardplan validate meta-llama/Llama-3.1-8B llama --tp 8 --sequence-parallel",
        _validate,
    ),
    "verify": (
        "Prove a plan numerically: compare a reduced model of the same architecture, sharded and unsharded.",
        "shardplan verify qwen3 plans/qwen3.yaml --dp-shard 2 --tp 2 --step train.py",
        _verify,
    ),
    "show": (
        "Show what a plan does to each module of a model: rule, placements, local shapes, collectives; or a page of all.",
        "shardplan show qwen3 auto --tp 8 --sequence-parallel",
        _show,
    ),
    "estimate": (
        "Estimate a training step on each rank: memory, communication, the least time; no GPU needed.",
        "shardplan estimate llama auto --mesh dp_shard=8,tp=8 --seq-len 8192 --sequence-parallel --device h200",
        _estimate,
    ),
    "fit": (
        "Find the best configurations of a model on a number of devices: mesh, micro-batch, checkpointing, schedule.",
        "shardplan fit qwen3 --gpus 64 --device h100 --global-batch 256 --seq-len 4096 --script train.py",
        _fit,
    ),
    "diff": (
        "Say what two plans do differently, or a plan and its lock; exit code 1 where training would differ.",
        "shardplan diff plans/llama.yaml plans/qwen3.yaml qwen3 --mesh dp_shard=8,tp=8 --seq-len 4096 --device h200",
        _diff,
    ),
    "lint": (
        "Check plans alone, without a model.",
        "shardplan lint plans/*.yaml --strict",
        _lint,
    ),
    "fmt": (
        "Write plans in one form: indentation, blanks, empty lines; words, order and comments stay.",
        "shardplan fmt plans --check",
        _fmt,
    ),
    "list": (
        "List the model types and the built-in plan for each; of one model, what its plan splits and the tp sizes.",
        "shardplan list qwen3 --set num_key_value_heads=4",
        _list,
    ),
    "explain": ("Explain a diagnostic code.", "shardplan explain SP301", _explain),
    "editor": (
        "What shells and editors ask for: completion, the JSON Schema of plans, a language server.",
        "shardplan editor schema --install",
        lambda parser: _add_commands(parser, EDITOR, dest="editor"),
    ),
}
EDITOR: Table = {
    "completion": (
        "Print what completes commands, options and plans in a shell.",
        "shardplan editor completion bash > ~/.local/share/bash-completion/completions/shardplan",
        _completion,
    ),
    "schema": (
        "Print the JSON Schema of plans, or install it for VS Code.",
        "shardplan editor schema > plan.schema.json",
        _schema,
    ),
    "lsp": (
        "Serve editors over standard input and output: findings, completion, hover (needs the extra `lsp`).",
        "shardplan editor lsp --model qwen3",
        _lsp,
    ),
}
