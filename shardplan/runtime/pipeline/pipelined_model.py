"""A model in pipeline stages, and its step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardplan.compiler.check.parameter_hooks import AFTER_STEP
from shardplan.core.mesh import Axis
from shardplan.core.schedules import Schedule
from shardplan.core.stages import PipelineCut
from shardplan.core.tree import full_name
from shardplan.model.adapters import unwrapped
from shardplan.runtime.apply.applied import AppliedParts
from shardplan.runtime.apply.label_counts import predicts_next_token, tokens_of
from shardplan.runtime.apply.model_parts import Parted
from shardplan.runtime.apply.plan_mesh import PlanMesh
from shardplan.runtime.apply.same_inputs import comparing
from shardplan.torchlib.private import private

from .cut_model import Absent
from .engine import Engine, forward_only
from .hand_over import Ahead, Handing, HandOvers, Mode
from .micro_batch_inputs import Inputs, flags_of, read_inputs
from .stage_forward import Call
from .step_loss import LossFunction, StepLoss, count_by_step, zero_like_loss
from .tied_copies import compare_copies, copies_of


@dataclass(frozen=True)
class Layout:
    """The places of the stages.

    Args:
        mesh: all ranks, with a pp axis.
        owners: stage -> its rank on that axis.
        own: the stages of this rank, in order.
    """

    mesh: PlanMesh
    cut: PipelineCut
    schedule: Schedule
    owners: Mapping[int, int]
    own: tuple[int, ...]


@dataclass(frozen=True)
class Whole:
    """The known facts about the whole model.

    Args:
        state: its parameters and persistent buffers by name, without memory.
        absent: stage of this rank -> the parts that it does not have.
    """

    state: Mapping[str, Tensor]
    absent: Mapping[int, Absent]


class Pipeline(Parted):
    """A model that `apply_plan` cut into stages. It holds this rank's stages; `step` runs all stages.

    Attributes:
        parts: the stages of this rank, in the order in which a batch runs through them. Each is a model with the names of the
            whole model, without the parts of other stages.
        counts_labels: whether the `tokens` that are passed to a step equal the number of labels that the step itself would count.
    """

    counts_labels = False

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        layout: Layout,
        micro_batches: int,
        call: Call,
        loss_function: LossFunction | None,
        record: AppliedParts,
        whole: Whole,
        *,
        compare: bool,
    ):
        super().__init__()
        self.record = record
        self.state, self.absent = whole.state, whole.absent
        self.layout, self.micro_batches, self.loss_function = layout, micro_batches, loss_function
        self._called = dict(parts)  # with the wrappers of a data-parallel backend
        self.parts = list(self._called.values())
        self._call = call
        mesh = layout.mesh
        assert mesh.pp is not None
        self.group, self._rank = mesh.pp.get_group(), mesh.pp.get_local_rank()
        device = mesh.mesh.device_type
        self.device = (
            torch.device(device, torch.get_device_module(device).current_device())
            if device != "cpu"
            else torch.device("cpu")
        )
        self._hand_overs = HandOvers(layout.cut.stages, layout.owners, self._called, self.group, self.device)
        self._engine: tuple[Any, Engine] | None = None
        self._more_to_come = False
        self._failed = ""  # why it must not be used any more
        self._failures, self._trained = StepFailures(), self._trainable()
        inner = {stage: unwrapped(self.module_of(part)) for stage, part in self._called.items()}
        stages = {
            name: stage for tie in layout.cut.ties for name in tie if (stage := layout.cut.stage_of(name)) is not None
        }
        self.copies = copies_of(layout.cut.ties, stages, layout.owners, inner)
        if not any("data parallel" in part.steps for part in record.parts):
            for copies in self.copies:
                if len(copies.own) > 1:
                    copies.share()
        self._shifted = predicts_next_token(next(iter(inner.values())))
        if (
            (last := inner.get(layout.cut.stages - 1)) is not None
            and loss_function is None
            and hasattr(last, "loss_function")
        ):
            count_by_step(last, lambda: self._call.loss, shifted=self._shifted)

        self._uncompared = compare
        axes = ((Axis.PP, mesh.pp), (Axis.TP, mesh.tp)) if compare else ()
        self._compare_inputs = [comparing(one, axis) for axis, one in axes if one is not None and one.size() > 1]

    @staticmethod
    def module_of(part: nn.Module) -> nn.Module:
        """The model inside of a data-parallel wrapper."""
        return part.module if isinstance(part, nn.parallel.DistributedDataParallel) else part

    @property
    def by_stage(self) -> Mapping[int, nn.Module]:
        """The parts by the number of their stage."""
        return self._called

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the whole model's parameters, in its order."""
        prefix = next(name for name, one in self._first.named_modules() if one is unwrapped(self._first))
        return tuple(full_name(prefix, name) for name in self.record.program.resolved.tree.parameters)

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """For each parameter of the whole model with several names: these names."""
        prefix = next(name for name, one in self._first.named_modules() if one is unwrapped(self._first))
        return tuple(tuple(full_name(prefix, name) for name in tie) for tie in self.record.program.resolved.tree.tied)

    @property
    def _first(self) -> nn.Module:
        return self.module_of(self.parts[0])

    def own_state(self, part: nn.Module, state: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
        """A part's tensors in a whole state dict; a tied parameter may have any of its names there."""
        if state is None:
            return None
        other = {name: tie for tie in self.ties for name in tie}
        found = {}
        for name in part.state_dict():
            given = next((one for one in (name, *other.get(name, ())) if one in state), None)
            if given is not None:
                found[name] = state[given]
        return found

    # The interface of a model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages, under their names in the whole model."""
        for part in self.parts:
            yield from self.module_of(part).named_parameters()

    def train(self, mode: bool = True) -> Pipeline:
        """Put all parts in training mode, or in evaluation mode."""
        for part in self.parts:
            part.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Put all parts in evaluation mode."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)
        self._more_to_come = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a pipeline has no forward: call step(input_ids=..., labels=...), under torch.no_grad() to evaluate"
        )

    # The step

    def step(
        self, *, accumulate: bool = False, tokens: Tensor | int | None = None, calls: int = 1, **inputs: Any
    ) -> Tensor:
        """Forward and backward of a batch through all stages. Call it on all ranks, with the same arguments on the ranks of pp
        and tp, and different batches on each data-parallel rank.

        Args:
            inputs: arguments of the model's forward, by name: input_ids, attention_mask, labels, ... The first dim of each tensor
                is the batch, which `micro_batches` divides; or 1.
            accumulate: more calls follow before the optimizer steps. The last call is made without it, and adds the gradients of tied
                parameters.
            tokens: the divisor of the sum over tokens, over all data-parallel ranks and all calls of the optimizer step.
                None: the labels of this call that are not -100; for a loss of next tokens, without the first label of each row.
            calls: the number of calls of the optimizer step. What a model adds to its loss besides the sum over tokens is averaged
                over them.

        Returns:
            The loss, a float32 scalar on all ranks: of all tokens of this call on all data-parallel ranks, divided by
            `tokens`. Under `torch.no_grad()` only the loss is computed.

        Raises:
            ValueError: gradients of an earlier step are left; `requires_grad` of a parameter changed; a hook on a tied parameter;
                no labels; the micro-batches do not divide the batch; caches or hidden states are requested; several calls without
                `tokens`.
            RuntimeError: a stage failed, here or on another rank.
        """
        if self._failed:
            raise RuntimeError(f"an earlier step of this pipeline failed, and stages are left half-way: {self._failed}")
        train = torch.is_grad_enabled()
        if train:
            self._check_gradients(accumulate, tokens, calls)
        given = read_inputs(inputs, self.micro_batches)
        replicas = self.layout.mesh.data_parallel_ranks
        counts_labels = tokens is None or self.counts_labels
        if tokens is None:
            tokens = self._tokens(given.tensors.get("labels"))
        for look in self._compare_inputs:  # once for all stages
            look(self.parts[0], (), inputs)
        if train and self._uncompared:
            compare_copies(self.copies, self.group, self.device)
            self._uncompared = False
        self._call.constants = given.constants
        self._call.loss = StepLoss(
            tokens, self.micro_batches * calls, replicas, self.loss_function, counts_labels=counts_labels
        )
        try:
            handing, ahead = self._hand_overs.of(given, self.micro_batches, self._mode(given))
            losses = self._engine_for(handing).run(given, ahead) if train else self._evaluated(given, handing, ahead)
        except Exception as error:
            self._failed = in_words(error)
            first = self._failures.tell(error) or "If a communication failed here, another rank failed first"
            raise RuntimeError(
                f"a pipeline step failed on pp rank {self._rank}, which has the stages {', '.join(map(str, self.layout.own))}: "
                f"{in_words(error)}\n{first}. The pipeline is not to be used any more"
            ) from error
        finally:
            self._call.loss, self._call.constants = None, {}
        if train:
            self._more_to_come = accumulate
            if not accumulate:
                for copies in self.copies:
                    copies.add_gradients(self.group, self._rank)
        return self._mean(losses, replicas)

    @property
    def doubled(self) -> tuple[nn.Parameter, ...]:  # type: ignore[override]  # FSDP2 exchanges parameters
        """The copies of tied parameters that an earlier stage has too."""
        return tuple(one for copies in self.copies for one in copies.later)

    def check_finished(self) -> None:
        """Raise ValueError between the calls of an optimizer step: gradients of tied parameters are not added yet."""
        if self._more_to_come:
            raise ValueError(
                "the last call of step had accumulate=True, so the optimizer step is not complete: call step once more without it"
            )

    def _mode(self, given: Inputs) -> Mode:
        """The state that hand-overs depend on besides the shapes of the arguments: equal on all ranks."""
        shared, device = self.record.parts[0].shared, self.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        variant = shared.regime.variant if shared is not None else ""
        hooked = any(stage.hooked for stage in self._call.stages)
        config = flags_of(vars(getattr(unwrapped(self._first), "config", None) or SimpleNamespace()))
        return (
            variant,
            autocast,
            torch.is_grad_enabled(),
            self._first.training,
            hooked,
            flags_of(given.constants),
            config,
        )

    def _trainable(self) -> frozenset[str]:
        return frozenset(name for name, parameter in self.named_parameters() if parameter.requires_grad)

    def _check_gradients(self, accumulate: bool, tokens: Any, calls: int) -> None:
        if (accumulate or self._more_to_come) and (tokens is None or calls < 2):
            raise ValueError(
                "an optimizer step of several calls needs two arguments in each of them: `tokens`, the tokens of all calls together, "
                "and `calls`, the number of calls"
            )
        changed = sorted(self._trained ^ self._trainable())
        if changed:
            now = "is not trained any more" if changed[0] in self._trained else "is trained now"
            error = ValueError(
                f"{changed[0]} {now} ({len(changed)} in all), but the stages send gradients for the parameters that were trained "
                "when the model was cut. Set requires_grad before apply_plan"
            )
            self._failures.tell(error)  # ranks with other stages do not know it
            raise error
        if hooked := next(filter(None, (copies.hooked for copies in self.copies)), None):
            error = ValueError(
                f"hooks are registered on {hooked}, and another stage has a copy: each hook would see a part of the gradient. Please "
                f"{AFTER_STEP}"
            )
            self._failures.tell(error)
            raise error
        if self._more_to_come:
            return
        name = next((name for name, parameter in self.named_parameters() if parameter.grad is not None), None)
        if name is not None:
            raise ValueError(
                f"{name} has a gradient of an earlier step: call zero_grad() before step, or pass accumulate=True to all "
                "calls but the last of an optimizer step"
            )

    def shifts_labels(self) -> bool:
        """Whether the first label of a row does not count, as in a loss of next tokens.

        Raises:
            ValueError: the model has another loss.
        """
        if self.loss_function is None and not self._shifted:
            raise ValueError(
                "the model's loss is not a mean over next tokens: pass `tokens`, the number to divide the sum by"
            )
        return self.loss_function is None

    def _tokens(self, labels: Any) -> Tensor:
        if labels is None:
            raise ValueError("a pipeline step needs labels, or tokens for a loss_fn that needs none")
        if not isinstance(labels, Tensor):
            raise ValueError("the labels are not a tensor, so the step cannot count their tokens: pass `tokens`")
        count = tokens_of(labels, shifted=self.shifts_labels()).to(self.device)
        for group in self.layout.mesh.batch_groups:
            dist.all_reduce(count, group=group)
        return count

    def _engine_for(self, handing: Handing) -> Engine:
        if self._engine is None or self._engine[0] != handing:
            layout = self.layout
            engine = Engine(
                layout.schedule,
                self._called,
                layout.cut.stages,
                self.micro_batches,
                handing,
                self.group,
                self.device,
            )
            self._engine = handing, engine
        return self._engine[1]

    def _evaluated(self, given: Inputs, handing: Handing, ahead: Mapping[int, Ahead]) -> list[Tensor]:
        owners = self.layout.owners
        return forward_only(self._called, owners, given, self.micro_batches, handing, ahead, self.group, self.device)

    def _mean(self, losses: list[Tensor], replicas: int) -> Tensor:
        """The sum of the micro-batches' shares, on all ranks."""
        total = zero_like_loss(self.device)
        for loss in losses:
            total = total + loss.detach().float()
        for group in (self.group, *self.layout.mesh.batch_groups):
            dist.all_reduce(total, group=group)
        return total / replicas


# A pipeline's ranks tell each other of the first failure. Ranks that wait for the failed one cannot be interrupted: their communication
# ends when its process ends, or when the process group times out. Then they can read the reason.
MOST = 500  # characters of a message
_default_store = private("default_store")
# By the group of all ranks, as ranks that are threads share this module but not their groups.
_numbers: WeakKeyDictionary[dist.ProcessGroup, count[int]] = WeakKeyDictionary()


class StepFailures:
    """A note about the first rank that failed, readable on all ranks. Make it on all ranks in the same order."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        self.key = f"shardplan pipeline {next(_numbers.setdefault(dist.group.WORLD, count()))}"

    def tell(self, error: Exception) -> str | None:
        """Leave a note, unless there is one. Returns another rank's note, if any."""
        own = f"rank {dist.get_rank()} failed first: {in_words(error)}"[:MOST]
        try:
            first = _default_store().compare_set(self.key, "", own).decode()
        except Exception:  # the rank that holds the store is gone: nothing to read
            return None
        return first if first not in ("", own) else None


def in_words(error: BaseException) -> str:
    """An exception as text; for torch's stage error ("failed to run forward", with all arguments), its cause."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
