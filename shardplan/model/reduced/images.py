"""Images, videos and sound for the reduced model: their arrays, by the names of forward's arguments, and the number of
tokens that they need.

A family whose images have another form is one more entry of RECIPES. The number of tokens of an image is not computed
from the configuration: the reduced model's own vision part runs, and its features are counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardplan.model.model_findings import reason

from .pictures import BATCH, Pictures, parts, pictures_of

Kind = Literal["image", "video", "audio"]
Arrays = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """Arrays of one form.

    Args:
        kind: the kind of the inputs.
        names: the arguments that it fills, of forward and of the function that returns features.
        make: their values, in the order of the names.
        placed: whether its features replace tokens; else attention reads them.
        reads: further arguments that say which tokens read which picture, [BATCH, sequence, 1].
    """

    kind: Kind
    names: tuple[str, ...]
    make: Callable[[Pictures], tuple[Tensor, ...]]
    placed: bool = True
    reads: tuple[str, ...] = ()


def _mask(pictures: Pictures) -> Tensor:
    return torch.ones(BATCH, 1, pictures.height, pictures.width, dtype=torch.bool)


def _real(pictures: Pictures) -> Tensor:
    return torch.ones(BATCH, 1, dtype=torch.bool)


RECIPES = (
    Recipe(
        "image", ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"), lambda p: p.padded_tiles(), placed=False
    ),
    Recipe("image", ("pixel_values", "image_grid_thw", "image_merge_sizes"), lambda p: (p.patches(), p.grid, p.merges)),
    Recipe("image", ("pixel_values", "image_grid_thw"), lambda p: (p.patches(), p.grid)),
    Recipe("image", ("pixel_values", "image_grid_thw"), lambda p: (p.square_patches(), p.grid)),
    Recipe("image", ("pixel_values", "image_grid_thw"), lambda p: (p.merged_patches(), p.merged_grid)),
    Recipe("image", ("pixel_values", "image_position_ids"), lambda p: p.located(1)),
    Recipe("image", ("pixel_values", "image_position_ids"), lambda p: p.located(p.merge)),
    Recipe("image", ("pixel_values", "image_token_pooling", "image_grids"), lambda p: p.pooled()),
    Recipe("image", ("pixel_values", "image_grid_hw"), lambda p: (p.patches(frames=False), p.grid[:, 1:])),
    Recipe("image", ("pixel_values", "target_sizes"), lambda p: p.strip()),
    Recipe("image", ("pixel_values", "pixel_attention_mask", "spatial_shapes"), lambda p: p.flat_squares()),
    Recipe("image", ("pixel_values", "pixel_attention_mask"), lambda p: (p.squares(1), _mask(p))),
    Recipe("image", ("pixel_values", "pixel_attention_mask"), lambda p: (p.squares(1), _real(p))),
    Recipe("image", ("pixel_values", "high_res_pixel_values"), lambda p: (p.squares(), p.fine_squares())),
    Recipe("image", ("pixel_values", "qformer_input_ids"), lambda p: (p.squares(), p.question())),
    Recipe("image", ("pixel_values", "qformer_input_ids"), lambda p: (p.squares(2), p.question())),
    Recipe("image", ("pixel_values", "image_sizes"), lambda p: (p.tiled() if p.tiles else p.squares(), p.sizes)),
    Recipe("image", ("pixel_values",), lambda p: (p.squares(),)),
    Recipe("image", ("pixel_values",), lambda p: (p.squares(1),)),
    Recipe("image", ("pixel_values",), lambda p: (p.timed_patches(),)),
    Recipe("image", ("pixel_values",), lambda p: (p.squares(1),), placed=False, reads=("image_attention_mask",)),
    Recipe("image", ("pixel_values", "visual_bbox"), lambda p: (p.squares(), p.boxes()), placed=False),
    Recipe("image", ("pixel_values",), lambda p: (p.rows_of_patches(),)),
    Recipe("image", ("flattened_patches",), lambda p: (p.placed_patches(),)),
    Recipe(
        "video",
        ("pixel_values_videos", "video_grid_thw", "video_merge_sizes"),
        lambda p: (p.patches(), p.grid, p.merges),
    ),
    Recipe("video", ("pixel_values_videos", "video_grid_thw"), lambda p: (p.patches(), p.grid)),
    Recipe("video", ("pixel_values_videos", "video_grid_thw"), lambda p: (p.square_patches(), p.grid)),
    Recipe("video", ("pixel_values_videos", "video_grid_thw"), lambda p: (p.patches(long=True), p.long_grid)),
    Recipe("video", ("pixel_values_videos", "target_sizes_videos"), lambda p: p.strip()),
    Recipe("video", ("pixel_values_videos",), lambda p: (p.squares(2),)),
    Recipe("video", ("pixel_values_videos",), lambda p: (p.squares(2).flatten(0, 1),)),
    Recipe("audio", ("input_features", "input_features_mask", "padding_mask"), lambda p: p.spectrograms()),
)
# Arguments of forward that mark image tokens, and the numbers that mark the two kinds.
TYPES: Mapping[str, Mapping[Kind, int]] = {
    "token_type_ids": {"image": 1, "video": 1},
    "mm_token_type_ids": {"image": 1, "video": 2},
    "image_embeds_position_mask": {"image": 1},
}
# The numbers of features where an argument of forward marks the tokens to replace, and no id does.
QUERIES = ("latent_query_num",)
MARKS = "image_embeds_position_mask"


@dataclass(frozen=True)
class Fitting:
    """Images of one form that fit a model.

    Args:
        recipe: what to make.
        token: the id that represents a piece of an image; None where there is none.
        count: how many of these tokens each row has.
        types: further arguments of forward, and the number in them that marks these tokens.
    """

    recipe: Recipe
    token: int | None
    count: int
    types: Mapping[str, int]

    def arrays(self, config: PreTrainedConfig, seed: int) -> Arrays:
        return _arrays(self.recipe, config, seed)


def fitting(model: nn.Module, config: PreTrainedConfig, kind: Kind, tries: Callable[[Fitting], None]) -> Fitting | str:
    """The first form of images of a kind that a reduced model accepts; else the reason why none fits; "" where it accepts no
    images of this kind.

    Args:
        model: the reduced model.
        tries: runs the model on inputs with these images, and raises its exception.
    """
    accepted = inspect.signature(model.forward).parameters
    recipes = [r for r in RECIPES if r.kind == kind and all(name in accepted for name in (*r.names, *r.reads))]
    if not any(r.kind == kind and r.names[0] in accepted for r in RECIPES) or (kind == "audio" and not recipes):
        return ""
    if vars(config).get("vision_config", config) is None:
        return ""
    why = "" if recipes else f"its forward accepts no {kind}s of a known form"
    for recipe in recipes:
        for count, token in _places(model, config, recipe, accepted):
            try:
                types = {name: kinds[kind] for name, kinds in TYPES.items() if name in accepted and kind in kinds}
                found = Fitting(recipe, token, count(), types)
                tries(found)
            except Exception as error:  # the modelling code may raise anything for images that it does not accept
                why = why or reason(error)
                continue
            return found
    return why or f"it has no {kind} token or no get_{kind}_features"


def _places(
    model: nn.Module, config: PreTrainedConfig, recipe: Recipe, accepted: Mapping[str, Any]
) -> Iterator[tuple[Callable[[], int], int | None]]:
    """The number of tokens that the images of a row replace, and the id of these tokens."""
    if not recipe.placed:
        yield lambda: 0, None
        return
    if MARKS in accepted:
        yield from ((lambda n=n: n, None) for name in QUERIES if isinstance(n := getattr(config, name, None), int))
        return
    asked: tuple[str, ...] = (recipe.kind, "image", "video") if recipe.kind == "video" else (recipe.kind,)
    features = next((f for k in asked for m in _inside(model) if (f := getattr(m, f"get_{k}_features", None))), None)
    if features is None and recipe.kind == "image":  # a picture is a short video
        asked = ("video",)
        features = next((f for m in _inside(model) if (f := getattr(m, "get_video_features", None))), None)
    if features is None:
        return
    for token in dict.fromkeys(
        t
        for k in asked
        for part in parts(config)
        for n in _token_names(k)
        if isinstance(t := getattr(part, n, None), int)
    ):
        yield lambda: _count(features, recipe, config, model), token


def _token_names(kind: str) -> tuple[str, ...]:
    return (f"{kind}_token_id", f"{kind}_token_index", f"{kind}_patch_id")


def _inside(model: nn.Module) -> Iterator[nn.Module]:
    yield model
    yield getattr(model, "base_model", model)


def _count(features: Callable[..., Any], recipe: Recipe, config: PreTrainedConfig, model: nn.Module) -> int:
    """How many features each row's images have."""
    accepted = inspect.signature(features).parameters
    loose = any(p.kind is p.VAR_POSITIONAL for p in accepted.values())  # a wrapper around another function
    dtype = next(model.parameters()).dtype
    made = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in _arrays(recipe, config, 0).items()
    }
    arrays = {name: value for name, value in made.items() if loose or name in accepted}
    needed = {n for n, p in accepted.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    if needed - arrays.keys():
        raise ValueError(f"images need {', '.join(sorted(needed - arrays.keys()))}")
    with torch.no_grad():
        try:
            found = features(**arrays)
        except TypeError:
            if len(arrays) == len(made) or not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
                raise
            found = features(**made)  # it passes on arguments that it does not name
    given = getattr(found, "pooler_output", None)
    given = given if given is not None else getattr(found, "last_hidden_state", found)
    if given is None:  # all features go between the layers: (layer, features of each image)
        (_, given), *_ = found.deepstack_features
    rows = sum(part.numel() // part.shape[-1] for part in ([given] if isinstance(given, Tensor) else given))
    if rows < BATCH or rows % BATCH:
        raise ValueError(f"{rows} features for {BATCH} images")
    return rows // BATCH


def _arrays(recipe: Recipe, config: PreTrainedConfig, seed: int) -> Arrays:
    return dict(zip(recipe.names, recipe.make(pictures_of(config, seed)), strict=True))
