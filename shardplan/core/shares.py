"""Values with a share on each rank: numbers that a module's code reads, arguments and buffers of all heads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """One entry of a rule's `shares`. With only a name, it is a number of the module that is divided evenly.

    Args:
        name: the name of a number of the module (`num_heads`; `config.num_attention_heads` is one of its
            configuration); with `dim`, that of an argument of its forward or of a buffer.
        value: the number's value on a rank, if it is no quotient. It is an expression over the module's own numbers;
            those with an even share have a rank's value in it.
        groups: the number is the length of one group of a norm's features, or the number of groups; each group has its
            own mean. An expression over config numbers.
        dim: for a tensor that every rank has whole and reads its share of: the dim that has the heads or features.
        heads: for an argument with a dim [batch * heads]: the number of heads, an expression over config numbers.
        like: for a buffer: the module below whose output features the dim has; they are split alike. None: evenly.
    """

    name: str
    value: str | None = None
    groups: str | None = None
    dim: int | None = None
    heads: str | None = None
    like: str | None = None

    @property
    def even(self) -> bool:
        """Whether it is a number that is divided."""
        return self.value is None and self.dim is None

    @property
    def written(self) -> str | dict[str, str | dict[str, str | int]]:
        """As a document has it."""
        if self.value is not None:
            return {self.name: self.value}
        options = {"groups": self.groups, "dim": self.dim, "heads": self.heads, "like": self.like}
        said = {name: value for name, value in options.items() if value is not None}
        return {self.name: said} if said else self.name
