"""Images, videos and sound for the reduced model: their arrays, by the names of forward's arguments, and the number of
tokens that they need.

A family whose images have another form is one more entry of plans/inputs.toml. The number of tokens of an image is not computed
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

from .pictures import BATCH, FORMS, arrays, facts_of, parts
from .precision import cast

Kind = Literal["image", "video", "audio"]
OPTIONS = ("placed", "reads", "tiled")


@dataclass(frozen=True)
class Recipe:
    """Arrays of one form, of plans/inputs.toml.

    Args:
        kind: the kind of the inputs.
        arrays: the arguments that it fills, of forward and of the function that returns features -> how their values are made.
        placed: whether its features replace tokens; else attention reads them.
        reads: further arguments that say which tokens read which picture, [BATCH, sequence, 1].
        tiled: for models that cut large pictures (True) or do not (False) alone.
    """

    kind: Kind
    arrays: Mapping[str, str]
    placed: bool = True
    reads: tuple[str, ...] = ()
    tiled: bool | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that it fills."""
        return tuple(self.arrays)

    def suits(self, config: PreTrainedConfig) -> bool:
        """Whether it is for models that cut large pictures, or do not, as this one."""
        return self.tiled is None or self.tiled == ("tile_rows" in facts_of(config))


def _recipe(kind: Kind, form: Mapping[str, Any]) -> Recipe:
    options = {name: form[name] for name in OPTIONS if name in form}
    return Recipe(kind, {name: text for name, text in form.items() if name not in OPTIONS}, **options)


KINDS: tuple[Kind, ...] = ("image", "video", "audio")
RECIPES = tuple(_recipe(kind, form) for kind in KINDS for form in FORMS[kind])
# Arguments of forward that mark image tokens, and the numbers that mark the kinds.
TYPES: Mapping[str, Mapping[Kind, int]] = FORMS["marks"]


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

    def arrays(self, config: PreTrainedConfig, seed: int) -> dict[str, Tensor]:
        return arrays(self.recipe.arrays, facts_of(config), seed)


def fitting(model: nn.Module, config: PreTrainedConfig, kind: Kind, tries: Callable[[Fitting], None]) -> Fitting | str:
    """The first form of images of a kind that a reduced model accepts; else the reason why none fits; "" where it accepts no
    images of this kind.

    Args:
        model: the reduced model.
        tries: runs the model on inputs with these images, and raises its exception.
    """
    accepted = inspect.signature(model.forward).parameters
    recipes = [r for r in RECIPES if r.kind == kind and {*r.names, *r.reads} <= accepted.keys() and r.suits(config)]
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
    for name in FORMS["counted"].keys() & accepted.keys():
        numbers = (getattr(config, number, None) for number in FORMS["counted"][name])
        yield from ((lambda n=n: n, None) for n in numbers if isinstance(n, int))
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
    made = {name: cast(value, dtype) for name, value in arrays(recipe.arrays, facts_of(config), 0).items()}
    given = {name: value for name, value in made.items() if loose or name in accepted}
    needed = {n for n, p in accepted.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    if needed - given.keys():
        raise ValueError(f"images need {', '.join(sorted(needed - given.keys()))}")
    with torch.no_grad():
        try:
            found = features(**given)
        except TypeError:
            if len(given) == len(made) or not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
                raise
            found = features(**made)  # it passes on arguments that it does not name
    values = getattr(found, "pooler_output", None)
    values = values if values is not None else getattr(found, "last_hidden_state", found)
    if values is None:  # all features go between the layers: (layer, features of each image)
        (_, values), *_ = found.deepstack_features
    rows = sum(part.numel() // part.shape[-1] for part in ([values] if isinstance(values, Tensor) else values))
    if rows < BATCH or rows % BATCH:
        raise ValueError(f"{rows} features for {BATCH} images")
    return rows // BATCH
