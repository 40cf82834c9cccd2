"""What was derived for a model: a plan if no built-in one fits it, or the rules for the axis cp that such a plan lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DerivedPlan:
    """A plan derived for a model, in the way of `shardplan init`.

    Args:
        text: the plan file, YAML.
        description: the parts of the model that it splits; for a plan that extends another, the rules that it adds.
        save: the command line or call that writes it.
        split: the share (0 to 1) of the parameters inside the layers that is split over tp.
        whole: part of a layer that every rank has whole, as a pattern -> its share of the parameters inside the layers.
        kept: why it could not be kept for the next time; None if it was.
        extends: the built-in plan to which rules for the axis cp were added; None if all of it was derived.
    """

    text: str
    description: str
    save: str
    split: float
    whole: Mapping[str, float] = field(default_factory=dict)
    kept: str | None = None
    extends: str | None = None

    @property
    def lines(self) -> Iterator[str]:
        """The facts about it for a reader, one per line."""
        if self.extends is not None:
            yield f"derived for cp, as the plan {self.extends} has no section context_parallel: {self.description}"
            yield f"to keep and edit these rules: {self.save}"
            return
        description = self.description.rstrip(".")
        yield f"derived, as no built-in plan is for the model: {description[:1].lower()}{description[1:]}"
        whole = ", ".join(f"{part} ({share:.1%})" for part, share in self.whole.items()) or "no matrix"
        yield f"split inside the layers: {self.split:.1%} of the parameters; whole on every rank: {whole}"
        yield f"to keep and edit the plan: {self.save}"
        if self.kept is not None:
            yield self.kept
