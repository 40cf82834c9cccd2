"""Prove expert parallelism for every configuration class whose experts transformers dispatches: `python -m tests.zoo.expert_types
[class ...] [--table reports/expert-types.md]`."""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import PreTrainedConfig  # noqa: E402

from shardplan import Model, validate  # noqa: E402
from shardplan.compiler.automatic import auto_plan  # noqa: E402
from shardplan.model import find_any  # noqa: E402
from tests.model_settings import ROPE, without_dropout  # noqa: E402
from tests.sampling import share_of  # noqa: E402

from .entry import Entry  # noqa: E402
from .experts import SIZES  # noqa: E402
from .judged_with import releases  # noqa: E402
from .table import arguments, fill, read, write  # noqa: E402

HEAD = """# Expert parallelism by configuration

Made by `python -m tests.zoo.expert_types`; do not edit. Every configuration class of transformers with
`ep_dispatch_experts` in its own plan, and what was proven of `"auto"` with the experts distributed, at tp 2 with ep 2, on a reduced
model: `validate` has no finding, and the outputs and every gradient on every rank are the unsharded model's. Types with a causal
class are proven as [model types](model-types.md) are, column "EP"; the others as the class in the column "proven as", where the
default configuration cannot be built or run with the nearest that can (tests/zoo/expert_types.py). "derived": no
built-in plan is for it, and `auto` [derives one](../docs/auto.md).

{judged}

{classes} classes: {right} right, {derived} of them with a derived plan.

"""
CLASSES = Path(transformers.__file__).parent / "models"
MODEL_TYPES = Path(__file__).parents[2] / "reports" / "model-types.md"
ROWS, LENGTH = 2, 16


def embeddings(seed: int, config: PreTrainedConfig) -> dict[str, Tensor]:
    """For a model whose forward has no table of tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {"inputs_embeds": torch.randn(ROWS, LENGTH, config.hidden_size, generator=generator)}


def both_kinds(seed: int, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Tokens of text and of images, which have experts of their own."""
    generator = torch.Generator().manual_seed(seed)
    ids, kinds = (torch.randint(low, high, (ROWS, LENGTH), generator=generator) for low, high in ((10, 100), (0, 2)))
    return {"input_ids": ids, "moe_mm_token_type_ids": kinds}


@dataclass(frozen=True)
class Case:
    """How a configuration class is proven that has no causal class, or no built-in plan for it.

    Args:
        model: the class that is built.
        settings: of the configuration.
        inputs: as for `validate`.
        plan: as for `validate`.
    """

    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[..., dict[str, Tensor]] | None = None
    plan: str = "auto"


MROPE = {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
SPARSE = {"mlp_layer_types": ["dense", *["sparse"] * 31], "num_experts_per_tok": 6, "moe_intermediate_size": 896}
CASES = {
    "DeepseekOcr2TextConfig": Case("DeepseekOcr2TextModel", SPARSE),
    "DiffusionGemmaTextConfig": Case(
        "DiffusionGemmaEncoderTextModel", {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
    ),
    "Dots3NoteVisionConfig": Case("Dots3NoteVisionModel"),
    "Ernie4_5_VLMoeTextConfig": Case(
        "Ernie4_5_VLMoeTextModel", {"rope_parameters": ROPE | {"mrope_section": [22, 22, 20]}}, both_kinds
    ),
    "Glm4vMoeTextConfig": Case("Glm4vMoeTextModel", {"head_dim": 128, "rope_parameters": ROPE | MROPE}),
    "Glm5NextTextConfig": Case("Glm5NextTextModel"),
    "InklingTextConfig": Case("InklingForCausalLM"),
    "Inkling2TextConfig": Case("Inkling2ForCausalLM"),
    "Mistral4Config": Case("Mistral4ForCausalLM"),
    "MistralLarge4TextConfig": Case("MistralLarge4TextModel"),
    "MuseSparkTextConfig": Case("MuseSparkTextModel"),
    "OpenAIPrivacyFilterConfig": Case("OpenAIPrivacyFilterForTokenClassification"),
    "Qwen3OmniMoeTalkerTextConfig": Case(
        "Qwen3OmniMoeTalkerModel", {"shared_expert_intermediate_size": 512}, embeddings
    ),
    "Qwen3OmniMoeTextConfig": Case("Qwen3OmniMoeThinkerTextModel", {"num_attention_heads": 32}),
    "Qwen3VLMoeTextConfig": Case("Qwen3VLMoeForConditionalGeneration"),
    "Step3p7TextConfig": Case("Step3p7TextModel", {"sliding_window": 512, "vocab_size": 128816}),
    "UnlimitedOcrTextConfig": Case("UnlimitedOcrTextModel"),
}


def dispatched() -> dict[str, str]:
    """The configuration classes whose own plan dispatches experts -> the folder of their type."""
    found = {}
    for file in sorted(CLASSES.glob("*/configuration_*.py")):
        for one in re.split(r"^class ", file.read_text("utf-8"), flags=re.MULTILINE):
            if '"ep_dispatch_experts"' in one:
                found[one.split("(")[0]] = file.parent.name
    return found


def model_of(name: str) -> nn.Module:
    """The model of a case, without memory."""
    case, folder = CASES[name], dispatched()[name]
    code = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    text = getattr(importlib.import_module(f"transformers.models.{folder}.configuration_{folder}"), name)
    cls = getattr(code, case.model)
    config = text(**case.settings)
    if not isinstance(config, cls.config_class):  # of a model with other parts besides
        config = cls.config_class() if not case.settings else config
    with torch.device("meta"):
        return cls(without_dropout(config))


def proven(before: Entry) -> Entry:
    """The entry of a configuration class: `name` is the class, `experts` the verdict."""
    torch.set_num_threads(1)
    case = CASES[before.name]
    try:
        model = model_of(before.name)
        plan = auto_plan(find_any(model, inputs=case.inputs).tree).plan
        report = validate(Model(model, inputs=case.inputs), case.plan, SIZES)
    except Exception as error:  # the modelling code may raise anything
        return replace(before, plan=None, experts=f"{type(error).__name__}: {error}")
    wrong = [": ".join((f"{d.code}: {d.message}", *d.notes[:1])) for d in report.diagnostics if d.is_error]
    verdict = wrong[0] if wrong else "right" if report.ok and report.proven else "not proven"
    return replace(before, plan=None if plan is None else plan.name, experts=verdict)


def copied(before: Entry) -> Entry:
    """The entry of a configuration class with a causal class: what the table of model types has."""
    folder = dispatched()[before.name]
    module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    known = read(MODEL_TYPES)[getattr(module, before.name).model_type]
    judged = {part: said for part, said in known.judged.items() if part == "experts"}
    return replace(before, plan=known.plan, experts=known.experts, judged=judged)


def page(found: Sequence[Entry]) -> str:
    """The table as Markdown."""
    folders = dispatched()
    lines = ["| configuration | proven as | plan | with the experts distributed |", "|---|---|---|---|"]
    for e in found:
        proven_as = f"`{CASES[e.name].model}`" if e.name in CASES else f"[`{folders[e.name]}`](model-types.md)"
        plan = f"[{e.plan}](../plans/{e.plan}.yaml)" if e.plan else "derived"
        said = " ".join(e.experts.split())[:400].replace("|", "\\|")
        lines.append(f"| `{e.name}` | {proven_as} | {plan if e.experts == 'right' else '-'} | {said} |")
    right = [e for e in found if e.experts == "right"]
    head = HEAD.format(
        judged=releases(found, {"experts": "Judged"}),
        classes=len(found),
        right=len(right),
        derived=sum(e.plan is None for e in right),
    )
    return head + "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    args = arguments("python -m tests.zoo.expert_types").parse_args(argv)
    known = read(args.table)
    rows = [known.get(name, Entry(name)) for name in args.types or share_of(dispatched(), args)]
    if args.table is not None:
        known |= {e.name: copied(e) for e in rows if e.name not in CASES}
        write(args.table, known, page)
    rows = [e for e in rows if e.name in CASES]
    return int(not fill(rows, proven, page, lambda e: (e.plan, e.experts), "experts", **vars(args))[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
