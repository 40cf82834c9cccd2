"""Images, videos and sound for the reduced model: which arrays, by the names of forward's arguments, and how many
tokens they need.

A family whose images have another form is one more entry of RECIPES. How many tokens stand for an image is not computed
from the configuration: the reduced model's own vision part is run, and its features are counted.
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

BATCH = 2
SOUND_TOKENS = 2  # of each row's sound, at least; the rest of its frames is padding
Kind = Literal["image", "video", "audio"]
Arrays = dict[str, Tensor]


@dataclass(frozen=True)
class Pictures:
    """What a configuration says of images, in pixels.

    Args:
        channels: of a picture.
        height, width: of a picture that the vision part accepts.
        patch: the side of a patch.
        frames: pictures that one patch reaches over.
        merge: the side, in patches, of what becomes one token.
        tiles: rows and columns of tiles of a large picture, where such are cut.
        sound: of a spectrogram: its bins, its frames, and how many of these become one token.
        generator: of the pixels.
    """

    channels: int
    height: int
    width: int
    patch: int
    frames: int
    merge: int
    tiles: tuple[int, int] | None
    sound: tuple[int, int, int]
    generator: torch.Generator

    def pixels(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    @property
    def grid(self) -> Tensor:
        """Time, rows and columns of the patches of a picture that is wider than high: [BATCH, 3]."""
        return torch.tensor([[1, 2 * self.merge, 3 * self.merge]] * BATCH)

    def squares(self, *shape: int) -> Tensor:
        return self.pixels(BATCH, *shape, self.channels, self.height, self.width)

    @property
    def sizes(self) -> Tensor:
        """Height and width of each picture: [BATCH, 2]."""
        rows, columns = self.tiles or (1, 1)
        return torch.tensor([[rows * self.height, columns * self.width]] * BATCH)

    def tiled(self) -> Tensor:
        """A picture and its tiles: [BATCH, 1 + tiles, channels, height, width]."""
        rows, columns = self.tiles or (1, 1)
        return self.squares(1 + rows * columns)

    def patches(self) -> Tensor:
        """Flat patches of all pictures: [patches, channels x frames x patch x patch]."""
        return self.pixels(int(self.grid.prod(1).sum()), self.channels * self.frames * self.patch**2)

    def square_patches(self) -> Tensor:
        """Patches of all pictures: [patches, channels, patch, patch]."""
        return self.pixels(int(self.grid.prod(1).sum()), self.channels, self.patch, self.patch)

    def flat_squares(self) -> tuple[Tensor, Tensor, Tensor]:
        """Flat patches of each picture [BATCH, patches, channels x patch x patch], which of them are real, and their
        rows and columns."""
        grid = self.grid
        count = int(grid[0].prod())
        return (
            self.pixels(BATCH, count, self.channels * self.patch**2),
            torch.ones(BATCH, count, dtype=torch.long),
            grid[:, 1:],
        )

    def spectrograms(self) -> tuple[Tensor, Tensor, Tensor]:
        """Spectrograms [BATCH, bins, frames], which of their frames are real, and which samples of the waves are."""
        bins, frames, merge = self.sound
        real = torch.zeros(BATCH, frames, dtype=torch.long)
        real[:, : SOUND_TOKENS * merge] = 1
        return self.pixels(BATCH, bins, frames), real, torch.ones(BATCH, frames, dtype=torch.long)


@dataclass(frozen=True)
class Recipe:
    """Arrays of one form.

    Args:
        kind: of the inputs.
        names: the arguments of forward, and of what gives features, that it fills.
        make: their values, in the order of the names.
    """

    kind: Kind
    names: tuple[str, ...]
    make: Callable[[Pictures], tuple[Tensor, ...]]


def _mask(pictures: Pictures) -> Tensor:
    return torch.ones(BATCH, 1, pictures.height, pictures.width, dtype=torch.bool)


RECIPES = (
    Recipe("image", ("pixel_values", "image_grid_thw"), lambda p: (p.patches(), p.grid)),
    Recipe("image", ("pixel_values", "image_grid_thw"), lambda p: (p.square_patches(), p.grid)),
    Recipe("image", ("pixel_values", "pixel_attention_mask", "spatial_shapes"), lambda p: p.flat_squares()),
    Recipe("image", ("pixel_values", "pixel_attention_mask"), lambda p: (p.squares(1), _mask(p))),
    Recipe("image", ("pixel_values", "image_sizes"), lambda p: (p.tiled() if p.tiles else p.squares(), p.sizes)),
    Recipe("image", ("pixel_values",), lambda p: (p.squares(),)),
    Recipe("image", ("pixel_values",), lambda p: (p.squares(1),)),
    Recipe("video", ("pixel_values_videos", "video_grid_thw"), lambda p: (p.patches(), p.grid)),
    Recipe("video", ("pixel_values_videos",), lambda p: (p.squares(2),)),
    Recipe("audio", ("input_features", "input_features_mask", "padding_mask"), lambda p: p.spectrograms()),
)
# Arguments of forward that mark image tokens, and the numbers for the two kinds.
TYPES: Mapping[str, Mapping[Kind, int]] = {
    "token_type_ids": {"image": 1, "video": 1},
    "mm_token_type_ids": {"image": 1, "video": 2},
}


@dataclass(frozen=True)
class Fitting:
    """Images of one form that fit a model.

    Args:
        recipe: what to make.
        token: the id that stands for a piece of an image.
        count: how many of them each row has.
        types: further arguments of forward, and the number in them that marks these tokens.
    """

    recipe: Recipe
    token: int
    count: int
    types: Mapping[str, int]

    def arrays(self, config: PreTrainedConfig, seed: int) -> Arrays:
        return _arrays(self.recipe, config, seed)


def fitting(model: nn.Module, config: PreTrainedConfig, kind: Kind, tries: Callable[[Fitting], None]) -> Fitting | str:
    """The first form of images of a kind that a reduced model accepts; or why none fits; "" where it accepts no images of
    that kind.

    Args:
        model: the reduced model.
        tries: runs the model on inputs with these images, and passes on its exception.
    """
    accepted = inspect.signature(model.forward).parameters
    recipes = [r for r in RECIPES if r.kind == kind and all(name in accepted for name in r.names)]
    token = next((t for n in _token_names(kind) if isinstance(t := getattr(config, n, None), int)), None)
    features = next((f for m in _inside(model) if (f := getattr(m, f"get_{kind}_features", None))), None)
    if not any(r.kind == kind and r.names[0] in accepted for r in RECIPES) or (kind == "audio" and not recipes):
        return ""
    if vars(config).get("vision_config", config) is None:
        return ""
    if token is None or features is None:
        return f"it has no {kind} token or no get_{kind}_features"
    why = ""
    for recipe in recipes:
        try:
            count = _count(features, recipe, config, model)
            types = {name: kinds[kind] for name, kinds in TYPES.items() if name in accepted and kind in kinds}
            found = Fitting(recipe, token, count, types)
            tries(found)
        except Exception as error:  # whatever the modelling code raises on images that it does not accept
            why = why or reason(error)
            continue
        return found
    return why or f"its forward accepts no {kind}s of a known form"


def _token_names(kind: Kind) -> tuple[str, ...]:
    return (f"{kind}_token_id", f"{kind}_token_index")


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
            found = features(**made)  # it hands on what it does not name
    given = getattr(found, "pooler_output", None)
    given = given if given is not None else getattr(found, "last_hidden_state", found)
    rows = sum(part.numel() // part.shape[-1] for part in ([given] if isinstance(given, Tensor) else given))
    if rows < BATCH or rows % BATCH:
        raise ValueError(f"{rows} features for {BATCH} images")
    return rows // BATCH


def _arrays(recipe: Recipe, config: PreTrainedConfig, seed: int) -> Arrays:
    return dict(zip(recipe.names, recipe.make(_pictures(config, seed)), strict=True))


def squares(config: PreTrainedConfig, seed: int) -> Tensor:
    """A picture for each row: [BATCH, channels, height, width]."""
    return _pictures(config, seed).squares()


def flat_patches(config: PreTrainedConfig, seed: int) -> tuple[Tensor, Tensor]:
    """What a vision tower with grids takes: flat patches of all pictures, and their rows and columns."""
    pictures = _pictures(config, seed)
    return pictures.patches(), pictures.grid


def _pictures(config: PreTrainedConfig, seed: int) -> Pictures:
    vision = getattr(config, "vision_config", None) or config

    def number(*names: str, default: int) -> int:
        return next((v for part in (vision, config) for n in names if (v := _plain(getattr(part, n, None)))), default)

    patch = number("patch_size", "spatial_patch_size", default=4)
    size = getattr(vision, "image_size", None) or 4 * patch
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    tiles = [(h // height, w // width) for h, w in getattr(config, "image_grid_pinpoints", None) or ()]
    audio = getattr(config, "audio_config", None)
    sound = (
        _plain(getattr(audio, "num_mel_bins", None)) or 80,
        2 * (_plain(getattr(audio, "max_source_positions", None)) or 4 * SOUND_TOKENS),
        2 * (_plain(getattr(config, "audio_merge_size", None)) or 1),
    )
    return Pictures(
        number("num_channels", "in_channels", "in_chans", default=3),
        height,
        width,
        patch,
        number("temporal_patch_size", default=1),
        number("spatial_merge_size", "merge_size", default=2),
        min((t for t in tiles if t != (1, 1)), key=lambda t: t[0] * t[1], default=None),
        sound,
        torch.Generator().manual_seed(seed + 1),
    )


def _plain(value: Any) -> int | None:
    """A number, or the number that all elements of a list are."""
    if isinstance(value, (list, tuple)) and value and all(item == value[0] for item in value):
        value = value[0]
    return value if isinstance(value, int) and value > 0 else None
