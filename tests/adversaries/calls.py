"""Calls that users make, and that differ from the plainest one: flags, padding, embeddings, lengths; forwards that change
parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .adversary import Adversary, document, squares
from .live import llama
from .meshes import auxiliary_of, gpt_oss, mixtral, on, qwen3_moe, rows
from .parts import MLP, WIDTH, MlpBlock, Stack


def routed(seed: int) -> dict[str, Any]:
    return rows(seed, output_router_logits=True)


def switched(model: nn.Module) -> None:
    """The field is set after the plan was applied."""
    model.config.output_router_logits = True


def hidden(seed: int) -> dict[str, Any]:
    return rows(seed, output_hidden_states=True)


def in_tuple(seed: int) -> dict[str, Any]:
    return rows(seed, output_hidden_states=True, return_dict=False)


def cpmant() -> nn.Module:
    """Its encoder returns hidden states in a plain tuple, and the model cuts its prompt off them."""
    from transformers import CpmAntConfig, CpmAntForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 64}
    return CpmAntForCausalLM(CpmAntConfig(**sizes, num_hidden_layers=2, prompt_types=4, prompt_length=4, init_std=0.1))


def embedded(seed: int) -> dict[str, Any]:
    given = rows(seed)
    table = torch.randn(64, 32, generator=torch.Generator().manual_seed(99)) / 8
    return {"inputs_embeds": table[given.pop("input_ids")], **given}


def placed(seed: int) -> dict[str, Any]:
    return rows(seed, position_ids=torch.arange(3, 11)[None])


def kept(seed: int) -> dict[str, Any]:
    given = rows(seed, logits_to_keep=2)
    del given["labels"]
    return given


def everything(seed: int) -> dict[str, Any]:
    return rows(seed, "left", output_router_logits=True, output_hidden_states=True)


def bounded(norm: float, model: nn.Module | None = None) -> nn.Module:
    """Its embedding scales the rows that it looks up down to a norm, in place."""
    model = llama() if model is None else model
    model.model.embed_tokens.max_norm = norm
    return model


def logits_of(output: Any) -> Tensor:
    return squares(output.logits)


def all_of(output: Any) -> Tensor:
    return output.loss + squares(output.hidden_states) / 10


def states_in_tuple(output: Any) -> Tensor:
    return output[0] + squares(output[-1]) / 10


class Looked(Stack):
    """A table whose rows are scaled down in place."""

    def __init__(self) -> None:
        super().__init__(MlpBlock(), MlpBlock())
        self.embed = nn.Embedding(64, WIDTH, max_norm=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.trunk(self.embed(ids))


def ids(seed: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(seed))}


WHOLE: dict[str, Any] = {
    "version": "1",
    "extends": "llama",
    "tensor_parallel": {"model.embed_tokens": "none"},
    "sequence_parallel": {"model.embed_tokens": "none"},
}
GATHERED = "what is handed out of the layers is gathered"
KINDS = {"mixtral": mixtral, "qwen3_moe": qwen3_moe}
EXPERTS = ("ep", "ep_over_tp", "ep_beside_tp")
SLICED = ("ep_tp", "ep_over_tp", "ep_beside_tp")
CASES: tuple[Adversary, ...] = (
    *(on(mesh, "mixtral", mixtral, "call_routers", "right", GATHERED, inputs=routed) for mesh in EXPERTS),
    *(
        on(
            mesh,
            model,
            build,
            f"call_routers_{model}_sequence",
            "right",
            GATHERED,
            inputs=routed,
            sequence_parallel=True,
        )
        for model, build in KINDS.items()
        for mesh in SLICED[: 3 if model == "mixtral" else 1]
    ),
    *(
        on(
            mesh,
            "mixtral",
            partial(mixtral, output_router_logits=True),
            "call_field_sequence",
            "right",
            GATHERED,
            sequence_parallel=True,
        )
        for mesh in SLICED[:2]
    ),
    *(
        on(
            mesh,
            "mixtral",
            mixtral,
            "call_field_later_sequence",
            "raises",
            GATHERED,
            sequence_parallel=True,
            after=switched,
        )
        for mesh in SLICED[:2]
    ),
    *(
        on(
            mesh,
            "mixtral",
            mixtral,
            "call_routers",
            "right",
            "the routers are carried",
            inputs=routed,
            auxiliary=auxiliary_of,
        )
        for mesh in ("pp", "pp_tp", "pp_dp", "pp_ep")
    ),
    on(
        "pp_tp",
        "mixtral",
        mixtral,
        "call_routers_sequence",
        "right",
        GATHERED,
        inputs=routed,
        auxiliary=auxiliary_of,
        sequence_parallel=True,
    ),
    on(
        "dp_tp",
        "mixtral",
        mixtral,
        "call_everything_sequence",
        "right",
        GATHERED,
        inputs=everything,
        sequence_parallel=True,
    ),
    on("ep_over_tp", "mixtral", mixtral, "call_everything", "right", GATHERED, inputs=everything),
    on("ep", "gpt_oss", gpt_oss, "call_everything_gpt_oss", "right", GATHERED, inputs=everything),
    *(
        on(
            "dp_tp",
            "llama",
            llama,
            f"call_{name}{'_sequence' * both}",
            "right",
            "the same",
            inputs=inputs,
            sequence_parallel=both,
            **more,
        )
        for name, inputs, more in (
            ("hidden", hidden, {"loss": all_of}),
            ("hidden_in_a_tuple", in_tuple, {"loss": states_in_tuple}),
            ("embeddings", embedded, {}),
            ("positions", placed, {}),
            ("kept", kept, {"loss": logits_of}),
            ("left", partial(rows, padded="left"), {}),
        )
        for both in (False, True)
    ),
    *(
        on(
            "dp_tp",
            "cpmant",
            cpmant,
            f"call_hidden_cut{'_sequence' * both}",
            "right",
            "gathered in front of the cut",
            inputs=hidden,
            loss=all_of,
            sequence_parallel=both,
        )
        for both in (False, True)
    ),
    *(
        on(mesh, "llama", partial(bounded, 0.05), "call_max_norm", "wrong", "the norm of a part of a row, or of a copy")
        for mesh in ("dp_tp", "dp")
    ),
    *(
        on(
            mesh,
            WHOLE,
            partial(bounded, 0.05),
            "call_max_norm_whole",
            "wrong",
            "what a forward writes into what FSDP2 has gathered is lost",
        )
        for mesh in ("dp_tp", "dp")
    ),
    Adversary("call_max_norm_whole/tp", Looked, ids, document(MLP), "right", "every rank has the whole table"),
    Adversary(
        "call_max_norm_sharded/tp",
        Looked,
        ids,
        document({**MLP, "embed": "embedding_colwise"}),
        "wrong",
        "parts of rows",
    ),
)
