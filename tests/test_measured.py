"""Architectures whose configurations have names that nobody knows: what their numbers shape is measured."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardplan import validate
from shardplan.core.data_files import data_folder
from shardplan.model import find_model
from shardplan.model.reduced.reduced_model import make_reduced_model


class Breit(PreTrainedConfig):
    """Grouped attention with a rotary embedding, and an MLP; a head is a share of the width."""

    model_type = "breit"

    def __init__(self, worte=32000, breite=1024, tiefe=24, koepfe=16, gruppen=4, innen=4096, **fields: Any):
        self.worte, self.breite, self.tiefe, self.koepfe, self.gruppen, self.innen = (
            worte,
            breite,
            tiefe,
            koepfe,
            gruppen,
            innen,
        )
        super().__init__(**fields)


class Fach(PreTrainedConfig):
    """As Breit, with heads of a width of their own and a stack of experts."""

    model_type = "fach"

    def __init__(
        self, worte=32000, breite=512, tiefe=12, koepfe=16, kopfbreite=64, fachleute=32, je_wort=2, innen=768, **fields
    ):
        self.worte, self.breite, self.tiefe, self.koepfe, self.gruppen = worte, breite, tiefe, koepfe, koepfe
        self.kopfbreite, self.fachleute, self.je_wort, self.innen = kopfbreite, fachleute, je_wort, innen
        super().__init__(**fields)


class Attention(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.breit = getattr(config, "kopfbreite", config.breite // config.koepfe)
        self.jede = config.koepfe // config.gruppen
        self.q = nn.Linear(config.breite, config.koepfe * self.breit, bias=False)
        self.k = nn.Linear(config.breite, config.gruppen * self.breit, bias=False)
        self.v = nn.Linear(config.breite, config.gruppen * self.breit, bias=False)
        self.o = nn.Linear(config.koepfe * self.breit, config.breite, bias=False)
        self.register_buffer("takt", 10000.0 ** -(torch.arange(0, self.breit, 2) / self.breit), persistent=False)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (-1, self.breit)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        angle = torch.arange(x.shape[1])[:, None] * self.takt
        q, k = (
            torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
            for a, b in (q.chunk(2, -1), k.chunk(2, -1))
        )
        k, v = (y.repeat_interleave(self.jede, 1) for y in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.hoch = nn.Linear(config.breite, config.innen, bias=False)
        self.herab = nn.Linear(config.innen, config.breite, bias=False)

    def forward(self, x):
        return self.herab(F.silu(self.hoch(x)))


class Experts(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.je_wort = config.je_wort
        self.wahl = nn.Linear(config.breite, config.fachleute, bias=False)
        self.hoch = nn.Parameter(torch.randn(config.fachleute, config.breite, config.innen) / 16)
        self.herab = nn.Parameter(torch.randn(config.fachleute, config.innen, config.breite) / 16)

    def forward(self, x):
        chances = self.wahl(x).softmax(-1)
        best = chances.topk(self.je_wort, -1).indices
        chances = chances * torch.zeros_like(chances).scatter(-1, best, 1.0)
        inside = F.silu(torch.einsum("bsh,ehi->bsei", x, self.hoch))
        return torch.einsum("bsei,eih,bse->bsh", inside, self.herab, chances)


class Block(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.a, self.b = nn.RMSNorm(config.breite), nn.RMSNorm(config.breite)
        self.schau = Attention(config)
        self.denk = Experts(config) if hasattr(config, "fachleute") else MLP(config)

    def forward(self, x):
        x = x + self.schau(self.a(x))
        return x + self.denk(self.b(x))


class BreitModel(PreTrainedModel):
    config_class = Breit

    def __init__(self, config: Any):
        super().__init__(config)
        self.woerter = nn.Embedding(config.worte, config.breite)
        self.bloecke = nn.ModuleList(Block(config) for _ in range(config.tiefe))
        self.norm = nn.RMSNorm(config.breite)
        self.kopf = nn.Linear(config.breite, config.worte, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.woerter

    def forward(self, input_ids=None, labels=None, **rest: Any):
        x = self.woerter(input_ids)
        for block in self.bloecke:
            x = block(x)
        logits = self.kopf(self.norm(x))
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


class FachModel(BreitModel):
    config_class = Fach


DENSE = {"bloecke.*.denk.hoch": "colwise", "bloecke.*.denk.herab": "rowwise"}
PLAN = {
    "bloecke.*.schau.q": "colwise",
    "bloecke.*.schau.k": "colwise",
    "bloecke.*.schau.v": "colwise",
    "bloecke.*.schau.o": "rowwise",
}


def built(cls: type[BreitModel], **numbers: int) -> BreitModel:
    with torch.device("meta"):
        return cls(cls.config_class(**numbers))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("cls", [BreitModel, FachModel])
def test_names_that_nobody_knows(cls, tp):
    model = built(cls)
    reduced = make_reduced_model(model, tp=tp)
    small, large = reduced.config, model.config
    assert reduced.layers == (0, 1) and small.tiefe == 2
    assert small.breite < 200 and small.worte < 200 and small.innen < 300
    assert small.koepfe < large.koepfe and small.koepfe % tp == 0 and small.koepfe % small.gruppen == 0
    if cls is FachModel:
        assert (small.fachleute, small.kopfbreite, small.je_wort) == (4, 8, 2)
    else:
        assert small.gruppen < small.koepfe
    assert (large.breite, large.attribute_map) == (cls.config_class().breite, {}), "it is not changed"
    with reduced.running():
        reduced.build()(**reduced.inputs())


def test_its_plan_is_proven():
    rules = {**PLAN, **DENSE}
    report = validate(built(BreitModel), {"version": "1", "tensor_parallel": rules}, {"tp": 2})
    assert report.ok and not report.diagnostics, report


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["exaone", "lara_mini", "sarvam_moe", "sarvam_mla"])
def test_types_of_a_newer_release(name, tp):
    """They came with transformers 5.24: no plan is theirs, and none of their fields was added anywhere."""
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"the installed transformers has no type {name}")
    assert not (data_folder("plans") / f"{name}.yaml").exists()
    found = find_model(name)
    reduced = make_reduced_model(found, tp=tp)
    small, large = reduced.config, found.build("meta").config
    assert small.hidden_size < min(300, large.hidden_size) and small.num_hidden_layers <= 4
    assert (small.num_attention_heads % tp == 0) == (large.num_attention_heads % tp == 0)
    model = reduced.build()
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    model(**reduced.inputs()).loss.backward()
    unread = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not unread, "each parameter decides the loss"


def test_a_number_of_a_head_that_this_class_lacks():
    """It shapes nothing here, but the configuration refuses another than the trunk's hidden size."""
    cls = getattr(transformers, "PocketTTSModel", None)
    if cls is None:
        pytest.skip("the installed transformers has no type pocket_tts")
    reduced = make_reduced_model(built(cls), tp=2).config
    assert reduced.hidden_size < 128 and reduced.flow_head_config.condition_dim == reduced.hidden_size


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        # Code leaves the projection to the first out where it is the hidden size, which is twice as large here.
        ("MimiModel", ["vector_quantization_hidden_dimension", "codebook_dim"]),
        # Channels that each stage doubles.
        ("PeAudioEncoder", ["encoder_hidden_size"]),
    ],
)
def test_numbers_on_which_the_size_depends(name, numbers):
    cls = getattr(transformers, name, None)
    if cls is None:
        pytest.skip(f"the installed transformers has no class {name}")
    model = built(cls)
    reduced = make_reduced_model(model, tp=2)
    small, large = (getattr(config, "dac_config", config) for config in (reduced.config, model.config))
    assert len({getattr(small, one) for one in numbers}) == 1
    assert all(getattr(small, one) < getattr(large, one) for one in numbers)
    with reduced.running():
        reduced.build()(**reduced.inputs())
