"""The parts of a model that can be split: matrices whose result stays inside a block up to a matrix that sums it up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.core.by_key import by_key
from shardplan.core.tree import block, element, parent

from .flow import Flow, Product


@dataclass(frozen=True, slots=True)
class Region:
    """Matrices to split by their output features, and the matrix to split by its input features.

    Args:
        columns: patterns of the first, in the order of the run.
        row: the pattern of the second.
        latent: the matrices in `columns` whose results others in `columns` read (the compressed keys and values of latent attention).
    """

    columns: tuple[str, ...]
    row: str
    latent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Regions whose rules belong together.

    Args:
        regions: one, or all that lie in `container`.
        container: the pattern of the module that takes the input of all regions and sums up their results: a block of
            experts, whose code multiplies by parameters itself. None where the region's last matrix sums up.
    """

    regions: tuple[Region, ...]
    container: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(column for region in self.regions for column in region.columns))

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(region.row for region in self.regions)

    @property
    def latent(self) -> tuple[str, ...]:
        return tuple(name for region in self.regions for name in region.latent)


def grouped(found: Sequence[Region], flow: Flow) -> Sequence[Group]:
    """The regions, grouped where they are around experts, or begin with the same matrices (joint attention)."""
    modules = {flow.tree.pattern(name) for name in flow.tree.modules}
    outer = {region: _container(flow, region) for region in found if region.row not in modules}
    containers = dict.fromkeys(container for container in outer.values() if container is not None)
    inside = {c: tuple(r for r in found if r.row.startswith(f"{c}.")) for c in containers}
    grouped = [Group(regions, container) for container, regions in inside.items()]
    taken = {region for regions in inside.values() for region in regions}
    alike = by_key((frozenset(region.columns), region) for region in found if region not in taken)
    return (*(Group(tuple(regions)) for regions in alike.values()), *grouped)


def _container(flow: Flow, region: Region) -> str | None:
    """The innermost called module around the experts that calls all matrices of the region; None where there is none."""
    called = {flow.tree.pattern(event.module) for event in flow.run.events if event.kind == "enter"}
    found = parent(parent(region.row))
    while found and not (found in called and all(one.startswith(f"{found}.") for one in region.columns)):
        found = parent(found)
    return found or None


def regions(flow: Flow) -> Sequence[Region]:
    """The regions of a model, in the order of the run; equal blocks are counted once.

    Within a block, a product whose operands all come from other products of the block ends a region, which begins with
    these products. A value from another block is the residual stream. A model without lists of blocks is one block.
    """
    found: dict[Region, None] = {}
    taken: set[str] = set()
    products = list(dict.fromkeys(flow.products.values()))
    listed = any(element(block(product.module)) for product in products)  # else the model itself is the block
    for product in reversed(products):
        feeding, complete = flow.feeding(product)
        home = block(product.module)
        apart = any(block(other.module) != home or other.name == product.name for other in feeding)
        if not feeding or not complete or apart or flow.tree.pattern(product.name) in taken:
            continue
        if listed and home == product.module and not element(home):
            continue  # outside the blocks: a transform of the last hidden state before the head
        mixed = {other for one in feeding if one.left for other in flow.feeding(one)[0]}
        region = _region(flow, product, sorted(feeding | mixed, key=products.index))
        taken.update(region.columns)
        found[region] = None
    return tuple(reversed(found))


def _region(flow: Flow, row: Product, columns: Sequence[Product]) -> Region:
    names = {flow.tree.pattern(column.name) for column in columns}
    latent = dict.fromkeys(
        flow.tree.pattern(source.name)
        for column in columns
        for source in flow.feeding(column)[0]
        if flow.tree.pattern(source.name) in names and flow.tree.pattern(source.name) != flow.tree.pattern(column.name)
    )
    return Region(
        tuple(dict.fromkeys(flow.tree.pattern(c.name) for c in columns)), flow.tree.pattern(row.name), tuple(latent)
    )
