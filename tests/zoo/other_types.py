"""Prove a plan for every class that is no causal decoder: `python -m tests.zoo.other_types [class ...] [--table docs/other-types.md]`.

Classes that the table has are left out unless they are named, so a run that was ended goes on where it was.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from queue import Empty

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

from tests.model_settings import CLASSES  # noqa: E402

from .entry import SIZES, Entry, at_first_size  # noqa: E402
from .table import arguments, read, write  # noqa: E402

SECONDS = 600  # for a class
COLUMNS = (f"tp{SIZES[0]}", f"sp{SIZES[0]}")
TRUNK = "MODEL_MAPPING_NAMES"
# Mapping of transformers -> family. The first that has a type says of which family it is.
FAMILIES = {
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "Audio",
    "MODEL_FOR_CTC_MAPPING_NAMES": "Audio",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES": "Audio",
    "MODEL_FOR_AUDIO_XVECTOR_MAPPING_NAMES": "Audio",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "Encoder-decoders",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "Vision",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES": "Vision",
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES": "Vision",
    "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES": "Vision",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "Encoders",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "Encoders",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "Encoders",
}
OTHER = "Other"
HEAD = """# Encoders, encoder-decoders, vision, audio

Made by `python -m tests.zoo.other_types --table docs/other-types.md` with transformers {version}; do not edit. Classes of transformers that
are no causal language models, trunks and heads apart: what was proven for the plan that `auto` finds or derives, on a reduced model of
the default configuration, at tp 2: `validate` has no finding, and the loss (of a trunk, a sum over its outputs), the outputs and every
parameter's gradient on every rank are the unsharded model's. "SP" is sequence parallelism; "none" says that no overlay was found.
"split" is the share of the parameters inside the layers that is split.

| family | trunks | right | heads | right | with SP |
|---|---|---|---|---|---|
{summary}

"""


def family(model_type: str) -> str:
    """The family of a model type."""
    return next((name for mapping, name in FAMILIES.items() if model_type in getattr(modeling_auto, mapping)), OTHER)


def is_trunk(cls: str) -> bool:
    """Whether a class is a type's model without a head."""
    return _names(getattr(modeling_auto, TRUNK).get(CLASSES[cls])) == cls


def names() -> list[str]:
    """Classes, trunks first: of types that are no causal decoder."""
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    image_text = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    both = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES | modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    own = [c for c, t in CLASSES.items() if (t not in causal or t in both) and t not in image_text]
    return sorted(own, key=lambda cls: (not is_trunk(cls), family(CLASSES[cls]) == OTHER))


def page(found: Sequence[Entry]) -> str:
    """The table as Markdown."""
    found = [e for e in found if e.name in CLASSES]
    families = [*dict.fromkeys(FAMILIES.values()), OTHER]
    groups = {name: [e for e in found if family(CLASSES[e.name]) == name] for name in families}
    rows, lines = [], []
    total = [0] * 5
    for name, group in groups.items():
        trunks = [e for e in group if is_trunk(e.name)]
        heads = [e for e in group if not is_trunk(e.name)]
        counts = [
            len(trunks),
            _right(trunks),
            len(heads),
            _right(heads),
            sum(e.has("tp") and e.has("sp") for e in group),
        ]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        rows.append(f"| {name} | {' | '.join(map(str, counts))} |")
        if group:
            lines += [f"## {name}", "", "| class | plan | TP | SP | split |", "|---|---|---|---|---|"]
            lines += [_row(e) for e in (*trunks, *heads) if e.verdicts]
            lines += [
                "",
                *(f"- {e.name}: {' '.join(e.reason.split())[:240]}" for e in (*trunks, *heads) if not e.verdicts),
                "",
            ]
    rows.append(f"| all | {' | '.join(map(str, total))} |")
    return HEAD.format(version=transformers.__version__, summary="\n".join(rows)) + "\n".join(lines).rstrip() + "\n"


def _right(entries: Sequence[Entry]) -> int:
    return sum(e.has("tp") and e.split > 0 for e in entries)


def _row(e: Entry) -> str:
    said = (e.verdicts.get(column, "none").replace("|", "\\|") for column in COLUMNS)
    plan = e.plan if e.plan == "derived" else f"[{e.plan}](../plans/{e.plan}.yaml)"
    return f"| {e.name} | {plan} | {' | '.join(said)} | {e.split:.1%} |"


def _names(value: object) -> object:
    return value[0] if isinstance(value, (tuple, list)) else value


def _alone(name: str) -> Entry:
    """The entry of a class, found out by a process of its own: one that hangs or is too large ends alone."""
    context = get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_into, args=(name, queue))
    process.start()
    try:
        return queue.get(timeout=SECONDS)
    except Empty:
        return Entry(name, reason=f"takes more than {SECONDS} s")
    finally:
        process.kill()
        process.join()


def _into(name: str, queue) -> None:
    try:
        queue.put(at_first_size(name))
    except Exception as error:  # of the modelling code
        queue.put(Entry(name, reason=f"{type(error).__name__}: {error}"))


def main(argv: list[str]) -> int:
    args = arguments("python -m tests.zoo.other_types").parse_args(argv)
    known: Mapping[str, Entry] = read(args.table)
    for name in args.types or [n for n in names() if n not in known]:
        one = _alone(name)
        print(name, one.plan, one.verdicts or one.reason[:200], one.split, file=sys.stderr, flush=True)
        if args.table is not None:
            known = {**read(args.table), name: one}
            write(args.table, known, page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
