"""Results of a module that are read outside of its block, where values are whole: an auxiliary loss reads the router's logits.

If the module runs on slices of the tokens, the results are gathered. Each rank's readers have all tokens, so the results' gradient is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.layout import I, R, V
from shardplan.core.mesh import Axis
from shardplan.core.module_program import OutsideReads

from .tensor_moves import move

_OURS = ("shardplan.runtime.", "shardplan.cost.", "torch.")  # modules whose hooks read nothing


@dataclass(slots=True)
class Tokens:
    """Batch and sequence length of the values in a block, on this rank. Code in the block may flatten both into one dim.

    Args:
        seq_dim: the sequence dimension.
        shape: the first two dims of what its modules read last.
    """

    seq_dim: int = 1
    shape: tuple[int, ...] = ()

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Forward pre-hook of the enclosing modules; it runs after the moves of their arguments."""
        values = (*args, *kwargs.values())
        shapes = (x.shape for x in values if isinstance(x, Tensor) and x.is_floating_point())
        shape = next(shapes, ())
        if len(shape) > 2:
            self.shape = tuple(shape[:2])

    def gather(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """Gather the slices of all ranks.

        Args:
            x: [batch, sequence, ...] of this rank, in the order of `seq_dim`, or [batch * sequence, ...].

        Raises:
            ValueError: it has neither shape.
        """
        if tuple(x.shape[:2]) == self.shape:
            return move(x, mesh, V(self.seq_dim), I)
        if x.ndim < 2 or not self.shape or x.shape[0] != self.shape[0] * self.shape[1]:
            raise ValueError(
                f"a result {list(x.shape)} is read outside of its block, and its shape does not tell which tokens it has: its module "
                f"has tokens {list(self.shape)}"
            )
        return move(x.unflatten(0, self.shape), mesh, V(self.seq_dim), I).flatten(0, 1)


def hand_out(output: Any, reads: OutsideReads, module: nn.Module, tokens: Tokens, mesh: DeviceMesh) -> Any:
    """Return a module's output, with the results that are read outside of the block moved to layout I."""
    sliced = reads.source.kind == "V"
    if reads.source == I or (sliced and reads.by_hooks and not _has_readers(module)):
        return output

    def whole(x: Tensor) -> Tensor:
        return tokens.gather(x, mesh) if sliced else move(x, mesh, reads.source, I)

    return _with(output, reads, whole)


def hand_out_over_cp(output: Any, reads: OutsideReads, module: nn.Module, length: int | None, mesh: DeviceMesh) -> Any:
    """Return a module's output, with the results that are read outside of the block made whole over cp.

    Args:
        length: the length of the whole sequence. The results are [batch, sequence, ...] or [batch * sequence, ...].
        mesh: the one-dimensional cp mesh.
    """
    if reads.by_hooks and not _has_readers(module):
        return output
    assert length is not None, "the entrance has split it"
    own, over = length // mesh.size(), R.on(Axis.CP)

    def whole(x: Tensor) -> Tensor:
        if x.ndim > 2 and x.shape[1] == own:
            return move(x, mesh, reads.source, over)
        if x.ndim < 2 or x.shape[0] % own:
            raise ValueError(
                f"a result {list(x.shape)} is read outside of its block, and its shape does not tell which tokens it has: a rank has "
                f"{own} of each row"
            )
        return move(x.unflatten(0, (-1, own)), mesh, reads.source, over).flatten(0, 1)

    return _with(output, reads, whole)


def _with(output: Any, reads: OutsideReads, whole: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(output, Tensor):
        return whole(output)
    return tuple(whole(x) if i in reads.positions and x is not None else x for i, x in enumerate(output))


def _has_readers(module: nn.Module) -> bool:
    """Whether the module has hooks that may read its results."""
    return any(
        not str(getattr(hook, "__module__", type(hook).__module__)).startswith(_OURS)
        for hook in module._forward_hooks.values()
    )
