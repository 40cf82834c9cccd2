"""Whether a model can be run in chunks of the sequence: its tokens meet in causal attention, and nowhere else."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.core.context_facts import BATCH, SEQUENCE, ContextFacts, Plain, PositionTable, TableArgument
from shardplan.core.diagnostics import Code, Diagnostic, PlanError, Severity
from shardplan.model import FoundModel
from shardplan.model.config_numbers import text_config
from shardplan.model.model_findings import reason as in_words
from shardplan.model.reduced import make_reduced_model
from shardplan.model.reduced.fields import role
from shardplan.model.reduced.model_inputs import IGNORED
from shardplan.model.sequence_chunks import own_chunk_of
from shardplan.torchlib.attention import attention_replaced, misfit
from shardplan.torchlib.equality import TOLERANCE, relative_error
from shardplan.torchlib.modes import reduced_runs
from shardplan.torchlib.private import private

CHUNKS = Code("SP411")


CHUNKS_OF_A_RUN = 2
LEFT_OUT = ("labels", "attention_mask", "position_ids")
WITHOUT_CP = (
    "give the plan a section `context_parallel`, for which the model is called with whole sequences (`shardplan init --context-parallel` "
    "writes it); or use a mesh without a cp axis"
)
_leaves = private("tree_leaves")


class _OwnToken:
    """Attention in which every token sees itself alone, its query and its key too; notes what was asked for."""

    def __init__(self) -> None:
        self.ran = False
        self.masked = False
        self.misfit: str | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        self.ran = True
        self.masked |= attn_mask is not None
        self.misfit = self.misfit or misfit(query, key, attn_mask, is_causal)
        key, value = (_of_heads(x, query.shape[1])[:, :, -query.shape[2] :] for x in (key, value))
        return value * (1 + _weighed(query) + _weighed(key))


def _of_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _weighed(x: Tensor) -> Tensor:
    """A mean over the features of each token in which every feature counts differently."""
    return (x * torch.linspace(1, 2, x.shape[-1], dtype=x.dtype)).mean(-1, keepdim=True)


@dataclass(frozen=True)
class _Seen:
    """A run of the whole sequence beside one of its chunks.

    Args:
        reason: why chunks cannot be run.
        ran, masked: whether torch's attention ran, and whether it had a mask.
        logits: how far those of the chunks are from the whole sequence's.
        loss: how far the mean of the chunks' losses is; or why there is none.
        follows: whether the logits depend on the positions.
    """

    reason: str | None = None
    ran: bool = True
    masked: bool = False
    logits: float = 0.0
    loss: float | str = 0.0
    follows: bool = True
    tables: tuple[PositionTable, ...] = ()


@reduced_runs()
def context_facts(found: FoundModel) -> tuple[ContextFacts, tuple[Diagnostic, ...]]:
    """What runs of the reduced model in chunks show, and why the model cannot be run so: one finding at most."""
    try:
        seen, reason, loss = _judged(found)
    except PlanError as error:
        return ContextFacts(), tuple(error.diagnostics)
    if reason is None:
        return ContextFacts(seen.tables, loss), ()
    return ContextFacts(), (
        Diagnostic(
            code=CHUNKS,
            severity=Severity.ERROR,
            message=f"the model cannot run on chunks of the sequence: {reason}",
            help=_help(found, seen),
        ),
    )


def _judged(found: FoundModel) -> tuple[_Seen, str | None, str | None]:
    """What was seen, why chunks cannot be run, and why their losses are not the whole one's."""
    seen = _look(found, torch.float32)
    if seen.reason is not None:
        return seen, seen.reason, None
    off = [error for error in (seen.logits, seen.loss) if isinstance(error, float) and error > TOLERANCE[torch.float32]]
    exact = _look(found, torch.float64) if off else seen

    def differs(error: float, again: float | str) -> bool:
        return error > TOLERANCE[torch.float32] and not (isinstance(again, float) and again <= TOLERANCE[torch.float64])

    if differs(seen.logits, exact.logits):
        meets = "its tokens meet outside attention, or its code reads the length of the sequence"
        return (
            seen,
            meets if seen.follows else "it does not read position_ids, or its tokens meet outside attention",
            None,
        )
    if isinstance(seen.loss, str):
        return seen, None, seen.loss
    apart = "the mean of the losses of chunks is not the loss of the whole sequence"
    return seen, None, apart if differs(seen.loss, exact.loss) else None


def _help(found: FoundModel, seen: _Seen) -> str:
    """The change with which it can be run, tried; the mesh without the axis where there is none."""
    if not seen.ran:
        return f"{WITHOUT_CP}, or attn_implementation='sdpa'"
    if not seen.masked:
        return WITHOUT_CP
    windows = [name for name in _windows(found) if _runs_without(found, name)]
    if not windows:
        return WITHOUT_CP
    return (
        f"{WITHOUT_CP}; or build the model with {windows[0]}=None, which is the same model for sequences that are not longer "
        "than the window"
    )


def _windows(found: FoundModel) -> Iterator[str]:
    """The fields of the configuration that say how many tokens a token attends to."""
    text = text_config(found.config) if found.config is not None else None
    for name, value in vars(text).items() if text is not None else ():
        if isinstance(value, int) and role(name) == "window":
            yield name


def _runs_without(found: FoundModel, window: str) -> bool:
    config = copy.deepcopy(found.config)
    try:
        setattr(text_config(config), window, None)
    except Exception:  # a configuration that checks its fields: the model cannot be without a window
        return False
    # A reduced model is made from the class and the configuration.
    model = copy.copy(found.module or found.meta or found.build("meta"))
    model.config = config  # type: ignore[assignment]  # torch's types know tensors and modules alone
    changed = replace(found, config=config, module=found.module and model, meta=model)
    try:
        return _judged(changed)[1] is None
    except PlanError:
        return False


def _look(found: FoundModel, dtype: torch.dtype) -> _Seen:
    """Run the reduced model whole and in chunks.

    Raises:
        PlanError: there is no reduced model, or it does not run.
    """
    experts = None if dtype == torch.float32 else "eager"  # grouped products know no float64
    reduced_model = make_reduced_model(found, tp=1, dtype=dtype, experts_implementation=experts)
    model, inputs, attention = reduced_model.build(), reduced_model.inputs(), _OwnToken()
    if (ids := inputs.get("input_ids")) is None:
        return _Seen("it is not called with token ids")
    length = ids.shape[1] - ids.shape[1] % CHUNKS_OF_A_RUN
    others = {name: x for name, x in inputs.items() if name not in (*LEFT_OUT, "input_ids")}
    if any(isinstance(x, Tensor) for x in others.values()):
        return _Seen("it is called with tensors besides token ids")
    given = {"input_ids": ids[:, :length]}
    if isinstance(inputs.get("labels"), Tensor) and inputs["labels"].shape == ids.shape:
        labels = inputs["labels"][:, :length].clone()
        labels[:, 1 : length // CHUNKS_OF_A_RUN - 1] = IGNORED  # chunks have different numbers of labels
        given["labels"] = labels
    with reduced_model.running(), attention_replaced(attention), torch.no_grad():
        whole = model(input_ids=given["input_ids"], **others, use_cache=False)
    if not attention.ran:
        return _Seen("it does not call torch's scaled_dot_product_attention", ran=False)
    if attention.misfit is not None:
        return _Seen(f"it has {attention.misfit}", masked=attention.masked)
    ids_alone = {"input_ids": given["input_ids"]}
    tables: list[PositionTable] = []
    try:
        with attention_replaced(attention), torch.no_grad(), _recorded(model, tables):
            parts = [model(**own, **others, use_cache=False) for own in _chunks(ids_alone)]
    except Exception as error:  # whatever the modelling code raises
        return _Seen(f"its forward raises there: {in_words(error)}")
    if attention.misfit is not None:
        return _Seen(f"it has {attention.misfit}", masked=attention.masked)
    logits = relative_error(torch.cat([_logits(x) for x in parts], 1), _logits(whole))
    with reduced_model.running(), torch.no_grad():
        follows = _reads_positions(model, {**others, **ids_alone})
    with attention_replaced(attention):
        loss = _loss(model, given, others)
    return _Seen(logits=logits, loss=loss, follows=follows, tables=tuple(dict.fromkeys(tables)))


def _chunks(given: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
    for rank in range(CHUNKS_OF_A_RUN):
        yield own_chunk_of(given, CHUNKS_OF_A_RUN, rank)


def _loss(model: nn.Module, given: dict[str, Tensor], others: dict[str, Any]) -> float | str:
    """How far the mean of the chunks' losses is from the loss of the whole; or why there is none."""
    if "labels" not in given:
        return "the model computes no loss of next tokens"
    try:
        with torch.no_grad():
            whole = model(**given, **others, use_cache=False).loss
            parts = [model(**own, **others, use_cache=False).loss for own in _chunks(given)]
    except Exception as error:  # whatever the modelling code raises
        return f"the model's loss cannot be computed of a chunk: {in_words(error)}"
    if not all(isinstance(x, Tensor) for x in (whole, *parts)):
        return "the model computes no loss"
    return relative_error(torch.stack(parts).mean(), whole)


def _reads_positions(model: nn.Module, inputs: dict[str, Any]) -> bool:
    """Whether the model uses the positions that it is given."""
    ids = inputs["input_ids"]
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    inputs = {**inputs, "attention_mask": torch.ones_like(ids), "use_cache": False}
    forward, backward = (_logits(model(**inputs, position_ids=p)) for p in (positions, positions.flip(1)))
    return relative_error(backward, forward) > TOLERANCE[torch.float32]


def _logits(output: Any) -> Tensor:
    return output.logits if hasattr(output, "logits") else output[0]


@contextmanager
def _recorded(model: nn.Module, tables: list[PositionTable]) -> Iterator[None]:
    """While it lasts, note the modules without parameters that make tensors from the positions which the model is given."""
    positions: list[Tensor] = []

    def given(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        positions[:] = [kwargs["position_ids"]]

    def called(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        made = any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in _leaves(output))
        table = _table(module, args, kwargs, positions[0]) if made else None
        if table is not None:
            tables.append(table)

    hooks = [model.register_forward_pre_hook(given, with_kwargs=True)]
    hooks += [
        module.register_forward_hook(called, with_kwargs=True)
        for module in model.modules()
        if next(module.parameters(), None) is None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _table(module: nn.Module, args: tuple, kwargs: dict[str, Any], positions: Tensor) -> PositionTable | None:
    """The call of a module; None where it was given no positions, or what cannot be given to it again."""
    signature = inspect.signature(module.forward)
    call = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            call |= call.pop(name, {})
    arguments = []
    for name, x in call.items():
        if isinstance(x, Tensor):
            shape = tuple(_size(size, positions) for size in x.shape)
            arguments.append(TableArgument(name, shape, _has_positions(x, positions)))
        elif isinstance(x, Plain):
            arguments.append(TableArgument(name, value=x))
        else:
            return None
    if not any(x.positions for x in arguments):
        return None
    kind = type(module)
    return PositionTable(f"{kind.__module__}.{kind.__qualname__}", tuple(arguments))


def _has_positions(x: Tensor, positions: Tensor) -> bool:
    if (
        x.is_floating_point()
        or x.shape[-1:] != positions.shape[-1:]
        or x.shape[-2:-1] not in ((), (1,), positions.shape[:1])
    ):
        return False
    return bool((x == positions).all())


def _size(size: int, positions: Tensor) -> int:
    if size == positions.shape[1]:
        return SEQUENCE
    return BATCH if size == positions.shape[0] else size
