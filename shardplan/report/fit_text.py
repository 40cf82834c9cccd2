"""The best configurations as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shardplan.core.estimates import CATEGORIES, Bound
from shardplan.core.fits import BOUND_ERROR, Fit, Fitted, is_tied

from .color import Paint
from .estimate_text import WITHOUT_PAIRS, bytes_text, mesh_text, seconds_text
from .width import printable

LARGE = 0.4  # this share of the peak is worth a hint
ALL = 0.995  # an MFU that says nothing, as every bound by computing has it


def row_text(number: int, row: Fitted, *, color: bool) -> str:
    """The text of one configuration: its settings, its costs, and what limits it."""
    paint, one, choice = Paint(color), row.estimate, row.choice
    assert one.bound is not None and one.device is not None
    how = [f"micro-batch {choice.micro_batch} x {choice.micro_batches}", f"checkpointing {choice.checkpointing}"]
    how += ["sequence parallel"] if choice.sequence_parallel else []
    how += [f"logits {'sharded' if choice.sharded_logits else 'whole'}"] if row.tensor_parallel > 1 else []
    how += ["regather"] if choice.regather else []
    how += [f"schedule {choice.schedule}"] if choice.schedule else []
    how += ["cpu_offload"] if choice.offload else []
    share = one.memory.total / one.device.memory
    lines = [
        paint("strong", f"{number}. {mesh_text(choice.sizes)}: {', '.join(how)}"),
        f"   memory {bytes_text(one.memory.total)}, {share:.0%} of the device",
        f"   at least {seconds_text(one.bound.seconds)} a step, limited by: {one.bound.by} ({_terms(one.bound)})",
        f"   at most {one.tokens_per_second or 0:,.0f} tokens/s a device"
        + (f", MFU at most {row.mfu:.0%}" if row.mfu < ALL else ""),
    ]
    if one.pipeline is not None:
        blocks = ", ".join(map(str, one.pipeline.sizes))
        lines.append(f"   stages of {blocks} blocks; ranks wait {one.pipeline.bubble:.1%} of the step")
    if (hint := _hint(row)) is not None:
        lines.append(f"   hint: {hint}")
    return "\n".join(lines)


def fit_head(row: Fitted, *, default: bool = False) -> str:
    """The text of the question, above the first configuration.

    Args:
        default: the model is only a type, whose default configuration is one of its published sizes.
    """
    one = row.estimate
    step, device = one.asked.step, one.device
    assert device is not None
    rows = one.tokens // step.seq_len
    wide = step.precision == "fp32"
    states = {"sgd": "SGD", "none": "no optimizer"}.get(step.optimizer, "AdamW's states")
    kept = "float32, products in bfloat16" if wide else f"{step.precision}, products too"
    other = "--precision bf16 keeps all of it in bfloat16" if wide else "most train with float32: --precision fp32"
    size = ", its default configuration: a folder, a config.json or a hub id names another size" if default else ""
    return (
        f"{printable(one.asked.model)} ({one.parameters:,} parameters{size}), plan {printable(one.asked.plan)}, on "
        f"{one.sizes.world_size:,} {device.name}\n"
        f"{rows:,} sequences of {step.seq_len:,} tokens in a step\n"
        f"parameters, gradients and {states} in {kept} ({other})"
    )


def fit_tail(fit: Fit, numbers: Sequence[int]) -> str:
    """The text below the configurations: why each is before the next, days, and what was not searched.

    Args:
        numbers: the number with which each row was printed, the best first.
    """
    lines = [f"best first: {', '.join(map(str, numbers))}"] if list(numbers) != sorted(numbers) else []
    rows = zip(numbers, fit.rows, strict=True)
    lines += [f"{a}. is before {b}.: {why(x, y)}" for (a, x), (b, y) in pairwise(rows)]
    lines += [_tied(tied, fit.tied if numbers[0] in tied else 0) for tied in ties(fit, numbers)]
    first = fit.rows[0]
    if (days := fit.days(first)) is not None:
        lines.append(f"{fit.tokens:.3g} tokens with {numbers[0]}. take at least {days:,.1f} days")
    lines.append(_forecast(fit, first, numbers[0]))
    lines.append(
        f"{fit.screened:,} configurations compared, {fit.too_large:,} of them too large; one for each mesh is shown"
    )
    lines += [f"not searched: {what}: {printable(why_not)}" for what, why_not in fit.refused]
    return "\n".join(lines)


def _forecast(fit: Fit, row: Fitted, number: int) -> str:
    """What the steps of a row should reach, as measured or as published."""
    shares, published = fit.speeds(row), fit.forecast
    assert row.estimate.device is not None
    if shares is None:
        return (
            f"times are bounds, and no published run of such a model on {row.estimate.device.name} is known: --efficiency LOW,HIGH (measured on "
            "your devices, shares of the bound) makes estimates of them"
        )
    (low, high), speed = shares, row.estimate.tokens_per_second or 0.0
    origin = f"{low:.0%} to {high:.0%} of the bound, as measured"
    if fit.efficiency is None and published is not None:
        count = f"{published.runs} published runs" if published.runs > 1 else "one published run"
        origin = f"as {count} of {published.of} on {row.estimate.device.name} reached"
    text = (
        f"forecast of {number}., {origin}: {seconds_text(row.seconds / high)} to {seconds_text(row.seconds / low)} a step, "
        f"{speed * low:,.0f} to {speed * high:,.0f} tokens/s a device, MFU {row.mfu * low:.0%} to {row.mfu * high:.0%}"
    )
    if fit.tokens is not None:
        text += f", {fit.days(row, high):,.1f} to {fit.days(row, low):,.1f} days"
    return text


def _tied(tied: Sequence[int], meshes: int) -> str:
    more = f", with {meshes:,} of the meshes compared" if meshes > len(tied) else ""
    return (
        f"{', '.join(f'{number}.' for number in tied)} are tied{more}: their bounds differ by less than {BOUND_ERROR:.0%}, which bounds do not see; "
        "only measuring shows which is faster"
    )


def ties(fit: Fit, numbers: Sequence[int]) -> list[list[int]]:
    """The numbers of the configurations between which the bound does not decide: those that are as fast as the first of each group."""
    groups: list[tuple[float, list[int]]] = []
    for number, row in zip(numbers, fit.rows, strict=True):
        if not groups or not is_tied(row.seconds, groups[-1][0]):
            groups.append((row.seconds, []))
        groups[-1][1].append(number)
    return [group for _, group in groups if len(group) > 1]


def why(one: Fitted, other: Fitted) -> str:
    """Why a configuration is before another: the first criterion of the order in which they differ."""
    a, b, bound = one.order, other.order, other.estimate.bound
    assert bound is not None
    if a.bound < b.bound:
        return f"the other takes {other.seconds / one.seconds - 1:.1%} longer, limited by: {bound.by}"
    if a.overlapping < b.overlapping:
        return f"as fast by the bound, and {seconds_text(b.overlapping - a.overlapping)} less to overlap"
    return "as fast by the bound; it needs no more memory"


def _terms(bound: Bound) -> str:
    """The bound's terms that are at least a hundredth of it, longest first, and what the step waits for."""
    ordered = sorted(bound.terms.items(), key=lambda item: -item[1])
    terms = [f"{what} {seconds_text(seconds)}" for what, seconds in ordered if seconds >= bound.seconds / 100]
    if bound.waiting >= bound.seconds / 100:
        terms.append(f"waiting for collectives {seconds_text(bound.waiting)}")
    return ", ".join(terms)


def _hint(row: Fitted) -> str | None:
    """A change to try, where one category takes most of the peak."""
    total, choice = row.estimate.memory.total, row.choice
    category, size = row.largest
    assert category in CATEGORIES
    if size < LARGE * total:
        return None
    part = f"{category} {bytes_text(size)} of {bytes_text(total)}"
    if category == "logits":
        if row.tensor_parallel > 1 and not choice.sharded_logits:
            return f"{part}: --logits sharded"
        return f"{part}: a loss in chunks of the sequence, or a smaller micro-batch"
    if category == "masks and scores":
        return f"{part}: {WITHOUT_PAIRS}"
    if category == "activations" and choice.checkpointing == "none":
        return f"{part}: --activation-checkpointing selective, if you need the memory"
    if category == "activations" and choice.checkpointing != "full":
        return f"{part}: --activation-checkpointing full, if you need the memory"
    if category in ("parameters", "gradients", "optimizer state") and choice.sizes.dp_replicate > 1:
        return f"{part}: dp_shard in place of dp_replicate"
    return None
