"""The classes of transformers that are neither causal language models nor image-text models: families, trunks and heads."""

from __future__ import annotations

from collections.abc import Iterator

from transformers.models.auto import modeling_auto

from tests.model_settings import CLASSES

TRUNKS = "MODEL_MAPPING_NAMES"
# Mapping of transformers -> family. The first mapping that has a type names its family.
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
# Types whose classes come first: those that most people train.
FIRST = (
    "bert roberta deberta deberta-v2 electra modernbert nomic_bert distilbert albert xlm-roberta mpnet "
    "t5 mt5 umt5 bart mbart marian m2m_100 pegasus whisper seamless_m4t longt5 switch_transformers "
    "vit dinov2 dinov3_vit siglip siglip2 clip swin swinv2 sam deit beit "
    "wav2vec2 hubert wavlm data2vec-audio audio-spectrogram-transformer speech_to_text moonshine"
).split()


def family(model_type: str) -> str:
    """The family of a model type."""
    return next((name for mapping, name in FAMILIES.items() if model_type in getattr(modeling_auto, mapping)), OTHER)


def is_trunk(cls: str) -> bool:
    """Whether a class is a type's model without a head."""
    return cls in _classes(getattr(modeling_auto, TRUNKS).get(CLASSES[cls]))


def _classes(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def types() -> dict[str, list[str]]:
    """Model type -> its classes, the trunk first; the types that most people train first, then family by family."""
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    image_text = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    both = {
        **modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }
    found: dict[str, list[str]] = {}
    for cls, kind in CLASSES.items():
        if (kind not in causal or kind in both) and kind not in image_text:
            found.setdefault(kind, []).append(cls)
    order = [*reversed(dict.fromkeys(FAMILIES.values())), OTHER]  # those that are run quickest first

    def place(kind: str) -> tuple[int, int]:
        return (FIRST.index(kind) if kind in FIRST else len(FIRST), order.index(family(kind)))

    return {kind: sorted(found[kind], key=lambda cls: not is_trunk(cls)) for kind in sorted(found, key=place)}


def names() -> Iterator[str]:
    """The classes of `types`, in their order."""
    for classes in types().values():
        yield from classes
