"""What differs between the facts of two releases, and which model types that concerns."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from .facts import Facts, Table

TABLES = {
    "types": "model types of the auto classes",
    "plans": "plans of classes",
    "arguments": "arguments of forward",
    "modules": "modules, parameters and buffers that classes make",
    "fields": "fields and arguments of configurations, with their defaults",
    "names": "what modules of configurations and of ways to distribute offer",
    "notices": "what says of itself that it goes",
    "private": "private names that shardplan reads",
}
COMMON = 20  # forwards whose argument has another name, for it to be a rename everywhere
SHOWN = 12  # names of a line


@dataclass(frozen=True)
class Change:
    """A name whose value differs; None: it came, or went."""

    name: str
    before: object
    after: object

    @property
    def sign(self) -> str:
        return "+" if self.before is None else "-" if self.after is None else "~"

    @property
    def lines(self) -> tuple[str, ...]:
        """What is said of it, without its name."""
        if isinstance(self.before, dict) and isinstance(self.after, dict):
            return tuple(
                f"{key}: {self.before.get(key, 'nothing')} -> {self.after.get(key, 'nothing')}"
                for key in dict.fromkeys([*self.before, *self.after])
                if self.before.get(key) != self.after.get(key)
            )
        if isinstance(self.before, tuple) and isinstance(self.after, tuple):
            went = [name for name in self.before if name not in self.after]
            came = [name for name in self.after if name not in self.before]
            return (" ".join([*(f"-{name}" for name in went), *(f"+{name}" for name in came)]) or "in another order",)
        if self.before is None or self.after is None:
            said = self.after if self.before is None else self.before
            return (_short(said),)
        return (f"{_short(self.before)} -> {_short(self.after)}",)


def compared(before: Table, after: Table) -> list[Change]:
    """Each name whose value differs."""
    return [
        Change(name, before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


class Drift:
    """From one release to another.

    Raises:
        ValueError: they are of two packages.
    """

    def __init__(self, before: Facts, after: Facts) -> None:
        if before.package != after.package:
            raise ValueError(
                f"{before.release.path} is of {before.package}, and {after.release.path} of {after.package}"
            )
        self.before, self.after = before, after
        old, new = before.release, after.release
        old.alike = new.alike = frozenset(name for name, text in new.texts.items() if old.texts.get(name) == text)

    @cached_property
    def tables(self) -> Mapping[str, list[Change]]:
        """What differs in each table. Of a class that came or went the types, plans and fields alone are said."""
        found = {name: compared(getattr(self.before, name), getattr(self.after, name)) for name in TABLES}
        kept = _owners(self.before.modules) & _owners(self.after.modules)
        found["modules"] = [one for one in found["modules"] if one.name.rpartition(".")[0] in kept]
        found["arguments"] = [one for one in found["arguments"] if one.sign == "~"]
        return found

    @cached_property
    def renamed(self) -> Mapping[str, str]:
        """Arguments that have another name in many forwards."""
        pairs: Counter[tuple[str, str]] = Counter()
        for one in self.tables["arguments"]:
            assert isinstance(one.before, tuple) and isinstance(one.after, tuple)
            went, came = [[n for n in a if n not in b] for a, b in ((one.before, one.after), (one.after, one.before))]
            if len(went) == len(came) == 1:
                pairs[went[0], came[0]] += 1
        return {old: new for (old, new), count in pairs.items() if count >= COMMON}

    @cached_property
    def rewritten(self) -> list[str]:
        """Classes of models whose methods are other ones, new names of arguments aside."""
        words = re.compile("|".join(rf"\b{old}\b" for old in self.renamed) or "$^")

        def as_now(said: object) -> object:
            assert isinstance(said, dict)
            return {name: words.sub(lambda found: self.renamed[found[0]], text) for name, text in said.items()}

        before, after = self.before.code, self.after.code
        return [name for name in before if name in after and as_now(before[name]) != as_now(after[name])]

    @cached_property
    def model_types(self) -> list[str]:
        """The types whose plans, modules, fields or arguments differ, of those that the newer release has, and the new ones. An argument
        that all rename is no difference, and neither is code (`rewritten_types`)."""
        names = [one.name for table in ("plans", "modules", "fields") for one in self.tables[table]]
        names += [one.name for one in self.tables["arguments"] if not self._is_renamed(one)]
        new = {one.name.partition("[")[2].rstrip("]") for one in self.tables["types"] if one.after is not None}
        every = {name for names in self.after.types_of_folders.values() for name in names}
        return sorted(self._types_of(names) | (new & every))

    @cached_property
    def rewritten_types(self) -> list[str]:
        """The types whose methods alone are other ones."""
        return sorted(self._types_of(self.rewritten) - {*self.model_types})

    def _types_of(self, names: Iterable[str]) -> set[str]:
        folders = {found[1] for name in names if (found := re.match(r"models\.(\w+)\.", name))}
        return {name for folder in folders for name in self.after.types_of_folders.get(folder, ())}

    def _is_renamed(self, one: Change) -> bool:
        assert isinstance(one.before, tuple)
        return tuple(self.renamed.get(name, name) for name in one.before) == one.after

    def lines(self) -> Iterator[str]:
        """The list, as text."""
        yield f"{self.before.release.name} -> {self.after.release.name}"
        for table, title in TABLES.items():
            found = self.tables[table]
            if not found:
                continue
            signs = Counter(one.sign for one in found)
            yield f"\n{title}: {signs['+']} came, {signs['-']} went, {signs['~']} changed"
            by_text: defaultdict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
            for one in found:
                if table in ("modules", "arguments") and one.sign != "-":
                    by_text[one.sign, one.lines].append(one.name)
                else:
                    by_text[f"{one.sign} {one.name}", one.lines].append("")
            for (sign, said), names in by_text.items():
                if names == [""]:
                    yield from _listed(f"  {sign}", said)
                else:
                    yield from _listed(f"  {sign} {_named(names)}", said)
        if self.renamed:
            yield "\narguments with another name everywhere: " + ", ".join(
                f"{a} is {b}" for a, b in self.renamed.items()
            )
        if self.rewritten:
            yield f"\nclasses whose methods are other ones, these names aside: {len(self.rewritten)}"
            yield from (f"  {name}" for name in self.rewritten)
        if self.model_types:
            yield f"\nmodel types whose plans, modules, fields or arguments differ: {len(self.model_types)}\n  {' '.join(self.model_types)}"
        if self.rewritten_types:
            yield f"\nmodel types whose methods alone are other ones: {len(self.rewritten_types)}\n  {' '.join(self.rewritten_types)}"


def _owners(table: Table) -> set[str]:
    return {name.rpartition(".")[0] for name in table}


def _short(said: object) -> str:
    text = " ".join(str(said).split())
    return text if len(text) <= 160 else text[:157] + "..."


def _named(names: list[str]) -> str:
    shown = ", ".join(name.removeprefix("models.") for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _listed(head: str, said: Iterable[str]) -> Iterator[str]:
    first, *more = said
    yield f"{head}: {first}"
    yield from (f"      {line}" for line in more)
