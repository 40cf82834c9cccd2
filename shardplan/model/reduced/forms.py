"""The forms of arrays of sounds, pictures and series, in the order in which they are tried, and the choice of one with which a model runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardplan.model.config_numbers import config_value

from .images import RECIPES
from .outcome import results_of
from .pictures import BATCH, FORMS, arrays, parts
from .scale import hidden_size, is_size

Arrays = dict[str, Tensor]
Make = TypeVar("Make", bound=Callable[..., dict[str, Any]])  # called with a seed
Form = Callable[[int], Arrays]  # seed -> arguments of forward
KINDS: Mapping[str, str] = FORMS[
    "kinds"
]  # arguments of forward that a model may read instead of token ids -> the kind of input
TOWER: Mapping[str, Sequence[str]] = FORMS["tower"]  # the arguments' names in towers, where whole models use others
GRIDS = TOWER["image_grid_thw"]
SPOKEN = 3  # tokens of a transcript
SAMPLES = 4  # frames of a waveform's features for each token
SUBSAMPLED = 8  # the same for convolutions over a spectrogram, which leave out most of its frames
UNKNOWN_STRIDE = 400  # samples for each token, where only the code has the convolutions' strides: 25 ms at 16 kHz
FRAMES = 2  # of a film, where the configuration does not have the number
LARGER = (2, 4, 8)  # factors of a picture's side, for pyramids that halve it in each stage
MASK = "mask"


def first_running(model: nn.Module, candidates: Sequence[Make]) -> Make:
    """The first of several inputs with which a model runs and gives finite results. Where there is none, the very first, so
    that its error is reported."""
    if len(candidates) == 1:
        return candidates[0]
    return next((one for one in candidates if runs(model, one(0))), candidates[0])


def runs(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether a model runs with these inputs and gives finite results."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    given = {n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in inputs.items()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return all(bool(result.isfinite().all()) for result in results_of(model(**given)).values())
    except Exception:  # raised by the modelling code for inputs of another form
        return False


def forms_of(model: nn.Module, config: PreTrainedConfig, main: str, seq_len: int) -> list[Form]:
    """The forms in which a model may accept an argument, with the arguments that belong to it.

    Args:
        main: one of KINDS.
        seq_len: the number of positions that the model makes of it, where the configuration leaves this open.
    """
    accepted = inspect.signature(model.forward).parameters
    if KINDS[main] in ("picture", "video"):
        return _pictures(config, main, accepted)
    if main == "input_values":
        return list(_waves(config, seq_len, accepted))
    if KINDS[main] == "audio":
        return list(_spectrograms(model, config, main, seq_len, accepted))
    if main == "past_values":
        return list(_series(config, accepted))
    return list(_states(config, main, seq_len, accepted))


def code_books(config: PreTrainedConfig) -> Iterator[int]:
    """The possible numbers of codes at each position: the number of books or channels, and one more with a text token."""
    numbers = (
        config_value(part, name) for part in parts(config) for name in ("num_codebooks", "num_channels", "codebook_num")
    )
    yield from dict.fromkeys(n + more for n in numbers if is_size(n) for more in (0, 1))


def coded(config: PreTrainedConfig, ids: Tensor, books: int) -> Tensor:
    """Codes of several books at each position, [batch, sequence, books], made from token ids."""
    sizes = (
        config_value(part, n) for part in parts(config) for n in ("vocab_size", "codebook_vocab_size", "codebook_size")
    )
    rows = min((n for n in sizes if is_size(n)), default=1)
    return torch.stack([ids.roll(i, -1) % rows for i in range(books)], -1)


def boxes(ids: Tensor, seed: int) -> Tensor:
    """Each token's box on a page of 1000 steps a side: [*ids, 4] of left, top, right, bottom."""
    generator = torch.Generator().manual_seed(seed + 2)
    corner = torch.randint(800, (*ids.shape, 2), generator=generator)
    return torch.cat([corner, corner + torch.randint(1, 200, (*ids.shape, 2), generator=generator)], -1)


def shares(ids: Tensor, seed: int) -> Tensor:
    """As `boxes`, as shares of the page's sides."""
    return boxes(ids, seed) / 1000


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 1))


def _numbers(config: PreTrainedConfig, *names: str) -> list[int]:
    """The sizes under these names in a configuration and those nested in it, without repetition."""
    found = (config_value(part, name) for part in parts(config) for name in names)
    return list(dict.fromkeys(n for n in found if is_size(n)))


def _spectrograms(
    model: nn.Module, config: PreTrainedConfig, main: str, seq_len: int, accepted: Mapping[str, Any]
) -> Iterator[Form]:
    """[BATCH, bins, frames], with the length of a window or, where there is one, of the encoder's position table after its convolutions;
    [BATCH, frames, bins]; either with a mask of its frames."""
    bins, positions = config_value(config, "num_mel_bins"), config_value(config, "max_source_positions")
    frames = 2 * positions if isinstance(positions, int) else SAMPLES * seq_len
    width = config_value(config, "feature_projection_input_dim", config_value(config, "input_dim", 80))
    first = next((m.in_features for m in model.modules() if isinstance(m, nn.Linear)), None)
    widths: list[int] = [
        *_numbers(config, "num_mel_bins", "input_feat_size", "input_size", "feature_size"),
        *([] if first is None else [first]),
    ]
    shapes: list[tuple[int, ...]] = [(BATCH, bins, frames) if isinstance(bins, int) else (BATCH, seq_len, width)]
    for one in widths:
        shapes += [(BATCH, length, one) for length in (SUBSAMPLED * seq_len, seq_len)]
        shapes += [(BATCH, one, length) for length in (frames, SUBSAMPLED * seq_len)]
        shapes += [(BATCH, one, 2 * half) for half in _numbers(config, "n_window")]
        shapes += [(BATCH, 1, length, one) for length in _numbers(config, "spec_size", "max_length")]
    masks = [n for n in accepted if n.endswith(MASK) and not n.startswith(("decoder", "head", "cross"))]
    for masked in ([], masks[:1]) if masks else ([],):
        for shape in dict.fromkeys(shapes):
            length = shape[1] if shape[-1] in widths else shape[-1]

            def made(
                seed: int, shape: tuple[int, ...] = shape, length: int = length, masked: list[str] = masked
            ) -> Arrays:
                return {main: _drawn(seed, *shape)} | {n: torch.ones(BATCH, length, dtype=torch.long) for n in masked}

            yield made


def _waves(config: PreTrainedConfig, seq_len: int, accepted: Mapping[str, Any]) -> Iterator[Form]:
    """[BATCH, samples], from which the convolutions compute `seq_len` features; a spectrogram [BATCH, frames, bins] where the
    configuration has bins; [BATCH, channels, samples]; the hidden states of both sides where the model does not make them."""
    bins, frames = config_value(config, "num_mel_bins"), config_value(config, "max_length")
    length = UNKNOWN_STRIDE * seq_len
    strides, kernels = config_value(config, "conv_stride", ()), config_value(config, "conv_kernel", ())
    if kernels:
        length = seq_len
        for stride, kernel in zip(reversed(tuple(strides)), reversed(tuple(kernels)), strict=True):
            length = (length - 1) * stride + kernel
    ratios = next((r for n in ("upsampling_ratios", "downsampling_ratios") if (r := config_value(config, n))), ())
    if isinstance(bins, int) and isinstance(frames, int):
        yield lambda seed: {"input_values": _drawn(seed, BATCH, frames, bins)}
    yield lambda seed: {"input_values": _drawn(seed, BATCH, length)}
    samples = prod(ratios) * seq_len if ratios and all(map(is_size, ratios)) else length
    yield lambda seed: {"input_values": _drawn(seed, BATCH, 1, samples)}
    hidden = hidden_size(config)
    if hidden is not None:
        sides = [n for n in ("input_values", "decoder_input_values") if n in accepted]
        yield lambda seed: {n: _drawn(seed + i, BATCH, seq_len, hidden) for i, n in enumerate(sides)}


def _pictures(config: PreTrainedConfig, main: str, accepted: Mapping[str, Any]) -> list[Form]:
    """[BATCH, channels, height, width] of the configuration's image; flat patches with their grid; any other form of pictures that
    whole models take; films [BATCH, frames, channels, height, width]; larger pictures."""
    alone, made = FORMS["alone"], list[tuple[dict[str, str], dict[str, int]]]()
    grid = next((name for name in GRIDS if name in accepted), None)
    if grid is not None:
        made.append(({main: alone["patches"], grid: alone["grid"]}, {}))
    if main == "pixel_values":
        made.append(({main: alone["picture"]}, {}))
    for recipe in RECIPES:
        names = [next((n for n in TOWER.get(name, (name,)) if n in accepted), "") for name in recipe.names]
        if recipe.kind == "image" and names[0] == main and all(names) and not recipe.reads and recipe.suits(config):
            made.append((dict(zip(names, recipe.arrays.values(), strict=True)), {}))
    if main.startswith("pixel_values"):
        films = (*_numbers(config, "num_frames", "frames_per_clip"), FRAMES)
        made += [({main: alone["film"]}, {"film": frames}) for frames in films]
    if main == "pixel_values":
        made += [({main: alone["larger"]}, {"times": times}) for times in LARGER]
    return [partial(_arrays, config, texts, more) for texts, more in made]


def _arrays(config: PreTrainedConfig, texts: Mapping[str, str], more: Mapping[str, int], seed: int) -> Arrays:
    return arrays(texts, config, seed, **more)


def _states(config: PreTrainedConfig, main: str, seq_len: int, accepted: Mapping[str, Any]) -> Iterator[Form]:
    """[BATCH, positions, width] or [BATCH, width, positions], with the outputs of another model's encoder."""
    width = hidden_size(config) or 1
    yield lambda seed: {main: _drawn(seed, BATCH, seq_len, width)}
    yield lambda seed: {main: _drawn(seed, BATCH, width, seq_len)}
    other = "encoder_hidden_states"
    for read in _numbers(config, "encoder_hidden_size") if other in accepted else ():

        def made(seed: int, read: int = read) -> Arrays:
            return {main: _drawn(seed, BATCH, seq_len, width), other: _drawn(seed + 1, BATCH, seq_len, read)}

        yield made


def _series(config: PreTrainedConfig, accepted: Mapping[str, Any]) -> Iterator[Form]:
    """[BATCH, time, channels]; or one channel, with the known features of each time and of the times to predict."""
    length = next(iter(_numbers(config, "context_length")), 16)
    channels = next(iter(_numbers(config, "num_input_channels", "input_size")), 1)
    yield lambda seed: {"past_values": _drawn(seed, BATCH, length, channels)}
    past = length + max(config_value(config, "lags_sequence", None) or [0])
    ahead = next(iter(_numbers(config, "prediction_length")), 1)
    known = config_value(config, "num_time_features") or 0

    def made(seed: int) -> Arrays:
        return {
            "past_values": _drawn(seed, BATCH, past),
            "past_time_features": _drawn(seed + 1, BATCH, past, known),
            "past_observed_mask": torch.ones(BATCH, past),
            "future_values": _drawn(seed + 2, BATCH, ahead),
            "future_time_features": _drawn(seed + 3, BATCH, ahead, known),
        }

    if all(name in accepted for name in ("past_time_features", "future_values")):
        yield made
    yield lambda seed: {"past_values": _drawn(seed, BATCH, length)}
