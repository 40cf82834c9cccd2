"""How parsing, binding and checking grow with the model and with the plan: `python -m benchmarks.growth [--svg FILE]`."""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shardplan.compiler.bind import bind
from shardplan.compiler.check import check
from shardplan.core.mesh import MeshSizes
from shardplan.core.tree import ModuleInfo, ModuleTree, ParameterInfo
from shardplan.language import parse_text
from shardplan.language.globs import parse_glob

from .page import table

DOCS = Path(__file__).parents[1] / "docs"
REPEATS = 5
HIDDEN, HEADS, HEAD = 1024, 16, 64
SECTION = """## Growth

`python -m benchmarks.growth`: processor time to parse a plan, bind it to a model and run the structural checks, at tp 8,
the least of {repeats}, without imports. What each module and rule adds is counted from the smallest case of a series; the
exponent is that of a power fitted to the times and the sizes beyond that case: 1 is linear.
"""
RULES = """version: "1"
tensor_parallel:
  model.embed_tokens: embedding_rowwise
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.self_attn.o_proj: rowwise
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
  lm_head: colwise_gather_output
data_parallel:
  units: [model.layers.*]
"""
EXPERTS = RULES.replace(".mlp.", ".mlp.experts.*.")


def model(layers: int, experts: int = 0) -> ModuleTree:
    """A decoder of Llama's structure, each layer with an MLP or with unfused experts."""
    made: list[ModuleInfo] = []

    def add(name: str, kind: str, *shape: int, **numbers: int) -> None:
        parameters = (ParameterInfo("weight", shape),) if shape else ()
        made.append(ModuleInfo(name, kind, kind, parameters, numbers))  # type: ignore[arg-type]

    add("", "other")
    add("model", "other")
    add("model.embed_tokens", "embedding", 32_000, HIDDEN)
    made.append(ModuleInfo("model.layers", "ModuleList", "list"))
    for i in range(layers):
        layer = f"model.layers.{i}"
        add(layer, "other")
        add(f"{layer}.self_attn", "other", head_dim=HEAD)
        for name in "qkvo":
            add(f"{layer}.self_attn.{name}_proj", "linear", HEADS * HEAD, HIDDEN)
        add(f"{layer}.mlp", "other")
        if experts:
            made.append(ModuleInfo(f"{layer}.mlp.experts", "ModuleList", "list"))
        for mlp in [f"{layer}.mlp.experts.{e}" for e in range(experts)] or [f"{layer}.mlp"]:
            if experts:
                add(mlp, "other")
            for name, shape in (("gate", (4096, HIDDEN)), ("up", (4096, HIDDEN)), ("down", (HIDDEN, 4096))):
                add(f"{mlp}.{name}_proj", "linear", *shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"{layer}.{name}", "norm", HIDDEN)
    add("model.norm", "norm", HIDDEN)
    add("lm_head", "linear", 32_000, HIDDEN)
    numbers = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "head_dim": HEAD, "vocab_size": 32_000}
    return ModuleTree(("LlamaForCausalLM",), "llama", {one.name: one for one in made}, numbers)


def explicit(rules: int) -> str:
    """A plan that names matrices layer by layer, seven rules each."""
    lines = ['version: "1"', "tensor_parallel:"]
    names = [(f"self_attn.{n}_proj", "rowwise" if n == "o" else "colwise") for n in "qkvo"]
    names += [(f"mlp.{n}_proj", "rowwise" if n == "down" else "colwise") for n in ("gate", "up", "down")]
    for i in range(rules):
        name, style = names[i % 7]
        lines.append(f"  model.layers.{i // 7}.{name}: {style}")
    return "\n".join(lines) + "\n"


def seconds(text: str, tree: Callable[[], ModuleTree]) -> tuple[int, int, float]:
    """Modules, rules, and the least processor time of several runs, each on a new tree: its caches are part of it."""
    least = math.inf
    for _ in range(REPEATS):
        fresh = tree()
        parse_glob.cache_clear()
        gc.collect()
        gc.disable()
        start = time.process_time()
        parsed = parse_text(text)
        assert parsed.plan is not None, parsed.diagnostics
        resolved, about = bind(parsed.plan, fresh, MeshSizes(tp=8))
        wrong = [d for d in (*about, *check(resolved)) if d.is_error]
        least = min(least, time.process_time() - start)
        gc.enable()
        assert not wrong, wrong
    return len(fresh.modules), len(parsed.plan.tensor_parallel), least


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """The slope of a line through the logarithms, by least squares."""
    xs, ys = zip(*((math.log(x), math.log(y)) for x, y in points), strict=True)
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


SERIES: dict[str, list[tuple[str, Callable[[], ModuleTree]]]] = {
    "16 to 1,024 layers, 6 rules": [(RULES, lambda n=n: model(n)) for n in (16, 64, 256, 1024)],
    "10 to 1,000 rules, 144 layers": [(explicit(n), lambda: model(144)) for n in (10, 100, 300, 1000)],
    "10 to 94 layers of 128 unfused experts, 6 rules": [(EXPERTS, lambda n=n: model(n, 128)) for n in (10, 30, 60, 94)],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--svg", type=Path, default=DOCS / "growth.svg", help="where the curves are drawn, with matplotlib"
    )
    svg = parser.parse_args().svg
    seconds(RULES, lambda: model(2))  # everything is imported
    measured = {name: [seconds(text, tree) for text, tree in cases] for name, cases in SERIES.items()}
    rows = []
    for name, points in measured.items():
        first = sum(points[0][:2]), points[0][2]
        grown = exponent([(m + r - first[0], s - first[1]) for m, r, s in points[1:]])
        for i, (modules, rules, taken) in enumerate(points):
            each = f"{1e6 * (taken - first[1]) / (modules + rules - first[0]):.1f}" if i else ""
            rows.append(
                [
                    name if not i else "",
                    f"{modules:,}",
                    f"{rules:,}",
                    f"{1000 * taken:.1f}",
                    each,
                    f"{grown:.2f}" if not i else "",
                ]
            )
    print(SECTION.format(repeats=REPEATS))
    print(table(["what grows", "modules", "rules", "ms", "us per module or rule added", "exponent (goal 1.0)"], rows))
    if draw(measured, svg):
        print(f"\n![Milliseconds over modules and rules]({svg.name})")


def draw(measured: dict[str, list[tuple[int, int, float]]], svg: Path) -> bool:
    """Draw the curves, if matplotlib is there."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, points in measured.items():
        axes.loglog([m + r for m, r, _ in points], [1000 * s for *_, s in points], marker="o", label=name)
    axes.set_xlabel("modules + rules")
    axes.set_ylabel("milliseconds of processor time")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(svg, metadata={"Date": None})
    return True


if __name__ == "__main__":
    main()
