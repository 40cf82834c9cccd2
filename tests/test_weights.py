"""Reading in slices, without processes: lazy tensors, the ranges that a rank holds, folders."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model_settings import find
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, conversion_mapping, core_model_loading
from transformers.core_model_loading import WeightConverter, WeightRenaming

from shardplan.model.reduced.reduced_model import make_reduced_model
from shardplan.torchlib.packing import pack, packed_ranges
from shardplan.weights.checkpoint_names import inner_model, resolve, saved_names
from shardplan.weights.folders import begin, commit
from shardplan.weights.lazy import Lazy, leaf, read
from shardplan.weights.load import _cast
from shardplan.weights.ranges import chunk
from shardplan.weights.safetensors_folder import Reader, stored_tensors
from shardplan.weights.save import size_of

ROOT = Path(__file__).parent.parent
SIZES = (6, 8, 4)


class Source:
    """Tensors that count what is read of them."""

    def __init__(self, *shapes: tuple[int, ...]):
        self.values = [torch.randn(shape) for shape in shapes]
        self.read = 0

    def lazies(self) -> list[Lazy]:
        return [leaf(str(i), x.shape, x.dtype, self.reader(x)) for i, x in enumerate(self.values)]

    def reader(self, values: Tensor):
        def box_of(box):
            found = values[tuple(slice(*one) for one in box)]
            self.read += found.numel()
            return found

        return box_of


# (what is done to two tensors, how much is read per element that is asked for; None is any number)
OPERATIONS = {
    "stack": (lambda a, b: torch.stack([a, b], dim=1), 1),
    "cat": (lambda a, b: torch.cat([a, b, a], dim=-1), 1),
    "chunk": (lambda a, b: torch.chunk(a, 2, dim=1)[1].contiguous(), 1),
    "split": (lambda a, b: a.split([1, 5, 2], dim=1)[1], 1),
    "transpose": (lambda a, b: a.transpose(0, -1).contiguous(), 1),
    "permute": (lambda a, b: a.permute(2, 0, 1), 1),
    "matrix": (lambda a, b: a[0].T, 1),
    "index": (lambda a, b: b[2:5, -1], 1),
    "unbind": (lambda a, b: torch.stack(torch.unbind(a, 1)[::-1]), 1),
    "squeeze": (lambda a, b: a.unsqueeze(1).squeeze(1).unsqueeze(-1), 1),
    "experts": (lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=2), 1),
    "nested": (lambda a, b: torch.cat([a, b.transpose(0, 2).reshape(4, 8, 6).transpose(0, 2)], dim=1), None),
    "split heads": (lambda a, b: a.view(3, 2, 8, 4).transpose(0, 1).reshape(6, 8, 4), None),
    "flatten": (lambda a, b: a.reshape(6, -1), None),
    "every other": (lambda a, b: a[::2], None),
    "computed": (lambda a, b: (a * 2 + b).flip(1), None),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_box_of_a_lazy_tensor_has_the_values_of_the_real_one(name):
    operation, cost = OPERATIONS[name]
    source, draw = Source(SIZES, SIZES), random.Random(name)
    expected = operation(*source.values)
    made = operation(*source.lazies())
    assert isinstance(made, Lazy) and (made.shape, made.dtype) == (expected.shape, expected.dtype)
    for _ in range(20):
        box = tuple(tuple(sorted(draw.sample(range(size + 1), 2))) for size in expected.shape)
        out, source.read = torch.empty([b - a for a, b in box], dtype=torch.float64), 0
        read(made, out, box)
        assert torch.equal(out, expected[tuple(slice(*one) for one in box)].double()), box
        assert cost is None or source.read == cost * out.numel()


def test_a_reshape_reads_the_dims_that_it_leaves_alone_in_slices():
    source = Source((4, 6, 10))
    made = source.lazies()[0].view(4, 3, 2, 10).transpose(1, 2).reshape(4, 6, 10)
    read(made, torch.empty(1, 1, 2), ((1, 2), (0, 1), (4, 6)))
    assert source.read == 6 * 2


def converters() -> list[WeightConverter]:
    """One of each kind of conversion that transformers has: the same operations with the same settings are one."""
    found = {}
    mapping = conversion_mapping._build_checkpoint_conversion_mapping()
    for one in itertools.chain.from_iterable(mapping.values()):
        if isinstance(one, WeightConverter):
            settings = [(type(op).__name__, sorted(vars(op).items(), key=str)) for op in one.operations]
            counts = (len(one.source_patterns), len(one.target_patterns), "*" in "".join(one.source_patterns))
            found.setdefault(str((settings, counts)), one)
    return list(found.values())


@pytest.mark.parametrize("converter", converters(), ids=lambda one: "-".join(type(o).__name__ for o in one.operations))
def test_every_kind_of_conversion_runs_on_lazy_tensors(converter):
    """And gives what it gives on real ones, so that a new operation of transformers cannot be read wrong."""
    three = any(
        type(op).__name__ in ("Interleave", "Transpose") and max(vars(op).values()) > 1 for op in converter.operations
    )
    sizes = (4, 16, 12) if three else (48, 12)
    if any(type(op).__name__ == "Conv3dToLinear" for op in converter.operations):
        sizes = (16, 3, 2, 4, 4)
    config = SimpleNamespace(num_attention_heads=4, num_hidden_layers=2)
    config.vision_config = config.get_text_config = config
    config.get_text_config = lambda: config
    several = 4 if any("*" in pattern for pattern in converter.source_patterns) else 1

    class Sizes:
        def get_parameter(self, name: str) -> Tensor:
            return torch.empty(48 // len(converter.target_patterns), 12)

    def run(tensors):
        import copy

        one = copy.deepcopy(converter)
        for i, (pattern, _) in enumerate(itertools.product(one.source_patterns, range(several))):
            one.collected_tensors[pattern].append(tensors[i])
        return one.convert(one.target_patterns[0].replace("\\", ""), model=Sizes(), config=config)

    source = Source(*[sizes] * (several * len(converter.source_patterns)))
    expected = run(source.values)
    for name, made in run(source.lazies()).items():
        wanted = expected[name]
        made, wanted = (x[0] if isinstance(x, list) else x for x in (made, wanted))
        out = torch.empty_like(wanted)
        read(made, out)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("parts", [(8, 4, 4), (6, 6), (2, 2, 12)])
def test_ranges_are_what_packing_and_chunking_leave(parts):
    whole = torch.arange(sum(parts))
    packed = pack(whole, 0, parts, 2)
    ranges = packed_ranges(parts, 2)
    for tp, dp in itertools.product(range(2), range(5)):
        chunks = packed.chunk(2)[tp].chunk(5)
        expected = chunks[dp].tolist() if dp < len(chunks) else []
        own = chunk(chunk(ranges, 2, tp), 5, dp)
        assert [i for start, stop in own for i in range(start, stop)] == expected


def test_a_conversion_that_looks_at_values_is_named():
    class Peeking(core_model_loading.ConversionOps):
        def convert(self, input_dict, **_):
            (tensors,) = input_dict.values()
            return {"b": tensors[0] * tensors[0].sum().item()}

    config = AutoConfig.for_model("llama", hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=8)
    conversion_mapping.register_checkpoint_conversion_mapping(
        "PeekingModel", [WeightConverter("a", "b", [Peeking()])], overwrite=True
    )
    with torch.device("meta"):
        model = type("PeekingModel", (type(AutoModelForCausalLM.from_config(config)),), {})(config)
        model.b = nn.Parameter(torch.empty(2))
    (source,) = Source((2,)).lazies()
    with pytest.raises(ValueError, match="transformers' conversion of a to b fails"):
        resolve(model, {"a": source}, {"b": model.b})


def test_names_go_there_and_back():
    """Renamings and prefixes of the base model, on a model for which transformers has both."""
    config = AutoConfig.for_model(
        "mixtral", hidden_size=8, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, vocab_size=8,
        intermediate_size=8, num_local_experts=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    lazies = {n: leaf(n, p.shape, p.dtype, lambda box: None) for n, p in model.state_dict().items()}
    saved = saved_names(model, lazies)
    assert "model.layers.0.block_sparse_moe.experts.1.w3.weight" in saved
    for prefixed in (saved, {name.removeprefix("model."): one for name, one in saved.items()}):
        found = resolve(model, prefixed, model.state_dict())
        assert set(found.tensors) == set(lazies) and not found.unexpected
        assert all(found.tensors[name].shape == lazies[name].shape for name in lazies)
        assert any(isinstance(one, WeightRenaming) for one in found.conversions)


# All types that the tables have a verdict on; the others cannot be built from their default configuration.
MODEL_TYPES = [
    row["name"]
    for table in ("model-types", "image-text-types")
    for row in json.loads((ROOT / "reports" / f"{table}.json").read_text("utf-8"))
    if row["verdicts"]
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODEL_TYPES)
def test_every_model_type_is_saved_and_read_as_transformers_does(name):
    """On reduced models: what transformers saves, read through lazy tensors; and what lazy tensors save."""
    model = make_reduced_model(find(name), tp=1).build()
    state = dict(model.state_dict())
    saved = core_model_loading.revert_weight_conversion(model, dict(state))
    lazies = {
        key: leaf(key, x.shape, x.dtype, lambda box, x=x: x[tuple(slice(*b) for b in box)]) for key, x in state.items()
    }
    mine = saved_names(model, lazies)
    assert list(mine) == list(saved)
    for key, value in saved.items():
        assert torch.equal(whole(mine[key]), value), key
    stored = {
        key: leaf(key, x.shape, x.dtype, lambda box, x=x: x[tuple(slice(*b) for b in box)]) for key, x in saved.items()
    }
    found = resolve(model, stored, state)
    if found.unexpected:  # ShieldGemma 2's configuration in Gemma 3's class: transformers does not read what it saves
        _, own = type(model).from_pretrained(None, config=model.config, state_dict=saved, output_loading_info=True)
        assert len(own["unexpected_keys"]) == len(found.unexpected)
        return
    assert found.tensors.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(whole(found.tensors[key]), value), key


def test_dtypes_are_those_of_from_pretrained(tmp_path):
    """Some parameters and buffers of a transformers model stay in float32."""
    model = make_reduced_model(find("deepseek_v3"), tp=1).build()
    model.save_pretrained(tmp_path)
    expected = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    _cast(model, torch.bfloat16)
    found = {name: value.dtype for name, value in model.state_dict().items()}
    assert found == {name: value.dtype for name, value in expected.items()}
    assert set(found.values()) == {torch.float32, torch.bfloat16}


def whole(tensor: Lazy) -> Tensor:
    values = torch.empty(tensor.shape, dtype=tensor.dtype)
    read(tensor, values)
    return values


def test_a_model_with_adapters_is_refused():
    config = AutoConfig.for_model("gpt2", n_embd=8, n_head=2, n_layer=1, vocab_size=8)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=2))
    for one in (model, model.get_base_model()):
        with pytest.raises(ValueError, match="the model has adapters"):
            inner_model(one)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("100", 100), (7, 7), ("2kb", 2000)]
)
def test_sizes(text, size):
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", 0, True, "five", None, 1.5])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="max_shard_size"):
        size_of(text)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_read_as_one(tmp_path):
    folder, other = tmp_path / "it", tmp_path / "other"
    for number, place in enumerate((folder, other)):
        place.mkdir()
        save_file({"weight": torch.full((2, 2), float(number))}, place / "model.safetensors")
    tensor = stored_tensors(folder)["weight"]
    assert Reader().read(tensor, ((0, 1), (0, 2))).tolist() == [[0.0, 0.0]]
    folder.rename(tmp_path / "old")
    other.rename(folder)
    with pytest.raises(RuntimeError, match="it was replaced while it was being read: load it again"):
        Reader().read(tensor, ((0, 1), (0, 2)))


def folder_of(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "mark").write_text(text)
    return path


def test_a_folder_is_replaced_whole(tmp_path):
    folder = folder_of(tmp_path / "it", "old")
    (folder / "kept").write_text("kept")
    new = begin(folder, overwrite=True, marks=("mark",))
    (new / "mark").write_text("new")
    commit(new, folder, lambda name: name == "kept")
    assert {p.name: p.read_text() for p in folder.iterdir()} == {"mark": "new", "kept": "kept"}
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("kind", ["file", "full", "foreign", "nested"])
def test_folders_that_are_not_overwritten(kind, tmp_path):
    folder = tmp_path / "it"
    if kind == "file":
        folder.write_text("")
    else:
        folder_of(folder, "old")
    if kind == "nested":
        (folder / "below").mkdir()
    with pytest.raises(ValueError):
        begin(folder, overwrite=kind != "full", marks=("other",) if kind == "foreign" else ("mark",))
    assert kind == "file" or (folder / "mark").read_text() == "old"
