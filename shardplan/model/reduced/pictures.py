"""A configuration's facts about images and sound, and arrays in all forms that models accept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

BATCH = 2
SOUND_TOKENS = 2  # the least number for each row's sound; the rest of its frames is padding
QUESTION = 6  # the tokens that a query model reads with a picture


@dataclass(frozen=True)
class Pictures:
    """A configuration's facts about images, in pixels.

    Args:
        channels: the channels of a picture.
        height, width: the size of a picture that the vision part accepts.
        fine: the side of the pictures of a second vision part with a higher resolution.
        patch: the side of a patch.
        patch_width: the length of a flat patch.
        frames: the number of pictures that one patch covers.
        merge: the side, in patches, of the area that becomes one token.
        tiles: the rows and columns of tiles into which a large picture is cut, where this is done.
        most_tiles: the largest number of tiles, where it is fixed.
        sound: a spectrogram's bins, its frames, and the number of frames that become one token.
        words: the vocabulary of a query model, which asks about a picture.
        generator: makes the pixels.
    """

    channels: int
    height: int
    width: int
    fine: int
    patch: int
    patch_width: int
    frames: int
    merge: int
    tiles: tuple[int, int] | None
    most_tiles: int
    sound: tuple[int, int, int]
    words: int
    generator: torch.Generator

    def pixels(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    @property
    def grid(self) -> Tensor:
        """The numbers of moments, rows and columns of patches, for a picture that is wider than high: [BATCH, 3]."""
        return torch.tensor([[1, 2 * self.merge, 3 * self.merge]] * BATCH)

    @property
    def long_grid(self) -> Tensor:
        """As `grid`, for a video of two moments: [BATCH, 3]."""
        return self.grid * torch.tensor([2, 1, 1])

    @property
    def merged_grid(self) -> Tensor:
        """As `grid`, in tokens: [BATCH, 3]."""
        return self.grid // torch.tensor([1, self.merge, self.merge])

    @property
    def merges(self) -> Tensor:
        """For each picture, the side of the area that becomes one token: [BATCH]."""
        return torch.tensor([self.merge] * BATCH)

    def squares(self, *shape: int) -> Tensor:
        return self.pixels(BATCH, *shape, self.channels, self.height, self.width)

    def fine_squares(self) -> Tensor:
        """Pictures for the vision part with the higher resolution: [BATCH, channels, height, width]."""
        return self.pixels(BATCH, self.channels, self.fine, self.fine)

    @property
    def sizes(self) -> Tensor:
        """Height and width of each picture: [BATCH, 2]."""
        rows, columns = self.tiles or (1, 1)
        return torch.tensor([[rows * self.height, columns * self.width]] * BATCH)

    def tiled(self) -> Tensor:
        """A picture and its tiles: [BATCH, 1 + tiles, channels, height, width]."""
        rows, columns = self.tiles or (1, 1)
        return self.squares(1 + rows * columns)

    def padded_tiles(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tiles of one picture for each row [BATCH, 1, most tiles, channels, height, width], the number of their arrangement, and
        a mask of the real tiles, which are all."""
        tiles = self.most_tiles
        return self.squares(1, tiles), torch.ones(BATCH, 1, dtype=torch.long), torch.ones(BATCH, 1, tiles).long()

    def patches(self, *, frames: bool = True, long: bool = False) -> Tensor:
        """Flat patches of all pictures: [patches, channels x frames x patch x patch]."""
        grid = self.long_grid if long else self.grid
        return self.pixels(int(grid.prod(1).sum()), self.channels * (self.frames if frames else 1) * self.patch**2)

    def rows_of_patches(self) -> Tensor:
        """Flat patches of each picture: [BATCH, patches, channels x patch x patch]."""
        return self.pixels(BATCH, int(self.grid[0].prod()), self.channels * self.patch**2)

    def square_patches(self) -> Tensor:
        """Patches of all pictures: [patches, channels, patch, patch]."""
        return self.pixels(int(self.grid.prod(1).sum()), self.channels, self.patch, self.patch)

    def merged_patches(self) -> Tensor:
        """The areas of all pictures that become one token each: [tokens, merge x patch, merge x patch, channels]."""
        side = self.merge * self.patch
        return self.pixels(int(self.grid.prod(1).sum()) // self.merge**2, side, side, self.channels)

    def timed_patches(self) -> Tensor:
        """Patches of all pictures: [patches, frames, patch, patch, channels]."""
        return self.pixels(int(self.grid.prod(1).sum()), self.frames, self.patch, self.patch, self.channels)

    def strip(self) -> tuple[Tensor, Tensor]:
        """Patches of all pictures in one row [1, channels, patch, patches x patch], and the numbers of each picture's rows and
        columns, which can be halved several times."""
        grid = torch.tensor([[4, 8]] * BATCH)
        return self.pixels(1, self.channels, self.patch, int(grid.prod(1).sum()) * self.patch), grid

    def flat_squares(self) -> tuple[Tensor, Tensor, Tensor]:
        """Flat patches of each picture [BATCH, patches, channels x patch x patch], a mask of the real patches, and their rows
        and columns."""
        grid = self.grid
        count = int(grid[0].prod())
        return (
            self.pixels(BATCH, count, self.channels * self.patch**2),
            torch.ones(BATCH, count, dtype=torch.long),
            grid[:, 1:],
        )

    def placed_patches(self) -> Tensor:
        """Flat patches of each picture, each preceded by its row and column, which count from one: [BATCH, patches, 2 +
        channels x patch x patch]."""
        _, rows, columns = self.grid[0].tolist()
        places = torch.cartesian_prod(torch.arange(1.0, rows + 1), torch.arange(1.0, columns + 1))
        patches = self.pixels(BATCH, rows * columns, self.patch_width)
        return torch.cat([places.expand(BATCH, -1, -1), patches], -1)

    def boxes(self) -> Tensor:
        """The box of each patch of a picture, as shares of its sides: [BATCH, patches, 4] of left, top, right, bottom."""
        rows, columns = self.height // self.patch, self.width // self.patch
        corners = torch.cartesian_prod(torch.arange(rows) / rows, torch.arange(columns) / columns).flip(1)
        return torch.cat([corners, corners + torch.tensor([1 / columns, 1 / rows])], -1).expand(BATCH, -1, -1)

    def located(self, merge: int) -> tuple[Tensor, Tensor]:
        """Flat patches of each picture, or the areas of `merge` x `merge` patches that become a token
        [BATCH, patches, channels x side x side], and their columns and rows [BATCH, patches, 2]."""
        _, rows, columns = (self.grid[0] // torch.tensor([1, merge, merge])).tolist()
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        width = self.channels * (merge * self.patch) ** 2
        return self.pixels(BATCH, rows * columns, width), places.repeat(BATCH, 1, 1)

    def pooled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Flat patches of each picture [BATCH, patches, channels x patch x patch], the patches of all pictures that are pooled to each
        token [tokens, 4], and the rows and columns of tokens of each picture and of its crops [BATCH, 4]."""
        rows, columns = self.height // self.patch, self.width // self.patch
        number = torch.arange(BATCH * rows * columns).view(BATCH, rows // 2, 2, columns // 2, 2)
        grids = torch.tensor([[rows // 2, columns // 2, 0, 0]] * BATCH)
        patches = self.pixels(BATCH, rows * columns, self.channels * self.patch**2)
        return patches, number.transpose(2, 3).reshape(-1, 4), grids

    def question(self) -> Tensor:
        """Token ids of the query model: [BATCH, QUESTION]."""
        return torch.randint(self.words, (BATCH, QUESTION), generator=self.generator)

    def spectrograms(self) -> tuple[Tensor, Tensor, Tensor]:
        """Spectrograms [BATCH, bins, frames], a mask of their real frames, and a mask of the waves' real samples."""
        bins, frames, merge = self.sound
        real = torch.zeros(BATCH, frames, dtype=torch.long)
        real[:, : SOUND_TOKENS * merge] = 1
        return self.pixels(BATCH, bins, frames), real, torch.ones(BATCH, frames, dtype=torch.long)


def pictures_of(config: PreTrainedConfig, seed: int) -> Pictures:
    """The reduced configuration's facts about images."""
    vision = _vision(config)

    def number(*names: str, default: int) -> int:
        return next((v for part in (vision, config) for n in names if (v := _plain(getattr(part, n, None)))), default)

    channels = number("num_channels", "in_channels", "in_chans", default=3)
    patch = number("patch_size", "spatial_patch_size", default=4)
    size = getattr(vision, "image_size", None) or 4 * patch
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    fine = getattr(getattr(config, "high_res_vision_config", None), "image_size", None)
    tiles = [(h // height, w // width) for h, w in getattr(config, "image_grid_pinpoints", None) or ()]
    audio = getattr(config, "audio_config", None)
    sound = (
        _plain(getattr(audio, "num_mel_bins", None)) or 80,
        2 * (_plain(getattr(audio, "max_source_positions", None)) or 4 * SOUND_TOKENS),
        2 * (_plain(getattr(config, "audio_merge_size", None)) or 1),
    )
    return Pictures(
        channels,
        height,
        width,
        _plain(fine) or height,
        patch,
        number("patch_embed_hidden_size", default=channels * patch**2),
        number("temporal_patch_size", "patch_temporal", default=1),
        number("spatial_merge_size", "merge_size", "merge_kernel_size", "pooling_kernel_size", default=2),
        min((t for t in tiles if t != (1, 1)), key=prod, default=None),
        number("max_num_tiles", default=1),
        sound,
        _plain(getattr(getattr(config, "qformer_config", None), "vocab_size", None)) or 2,
        torch.Generator().manual_seed(seed + 1),
    )


def _vision(config: PreTrainedConfig) -> PreTrainedConfig:
    """The vision part of a configuration; the configuration itself where there is none."""
    named = (part for whole in parts(config) if (part := getattr(whole, "vision_config", None)) is not None)
    sized = (part for part in parts(config) if getattr(part, "image_size", None))
    return next(named, next(sized, config))


def squares(config: PreTrainedConfig, seed: int) -> Tensor:
    """A picture for each row: [BATCH, channels, height, width]."""
    return pictures_of(config, seed).squares()


def flat_patches(config: PreTrainedConfig, seed: int) -> tuple[Tensor, Tensor]:
    """The inputs of a vision tower with grids: flat patches of all pictures, and their rows and columns."""
    pictures = pictures_of(config, seed)
    return pictures.patches(), pictures.grid


def parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and those nested in it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts(value)


def _plain(value: Any) -> int | None:
    """A number, or the number that all elements of a list are."""
    if isinstance(value, (list, tuple)) and value and all(item == value[0] for item in value):
        value = value[0]
    return value if isinstance(value, int) and value > 0 else None
