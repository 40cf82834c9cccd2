"""What is known to have changed between releases, and how the list says it: `python -m tests.drift OLD NEW --known` looks for each."""

from __future__ import annotations

import re
from collections.abc import Sequence

# (older release, newer one) -> what is known -> the line of the list that says it.
KNOWN: dict[tuple[str, str], dict[str, str]] = {
    ("transformers-5.22.0", "transformers-5.23.0"): {
        "a number of Mamba 2 that its plan names": r"mamba2\.Mamba2Mixer\.norm.*group_size=",
    },
    ("transformers-5.23.0", "transformers-5.24.0"): {
        "`cache` is the argument that was `past_key_values`": r"another name everywhere: past_key_values is cache",
        "CodeGen's attention": r"~ codegen\.modeling_codegen\.CodeGenAttention\.forward.*position_embeddings",
        "Inkling 2's attention is cut into modules": r"inkling2\.\w+\.Inkling2FullAttention\.q_proj.*-> Inkling2QueryProjection",
        "routers in float32": r"TopkRouter\.weight.*dtype=torch\.float32",
        "biases of scores in float32": r"e_score_correction_bias.*dtype=torch\.float32",
        "sinks in float32": r"\.sinks.*dtype=torch\.float32",
        "decays in float32": r"\.A_log.*dtype=torch\.float32",
        **{
            f"a plan for {name}": rf"\+ models\.{name}\.\w+\.\w+\.base_model_tp_plan"
            for name in (
                "bamba",
                "codegen",
                "diffllama",
                "emu3",
                "falcon_h1",
                "gpt_oss",
                "gptj",
                "hunyuan_v1_dense",
                "lfm2",
                "lfm3",
                "qwen3_vl",
            )
        },
        **{
            f"another plan for {name}": rf"~ models\.{name}\.\w+\.\w+\.base_model_tp_plan"
            for name in ("gpt_neox", "neomme")
        },
        **{
            f"the type {name}": rf"\+ CONFIG_MAPPING_NAMES\[{name}\]"
            for name in (
                "exaone",
                "lara_mini",
                "sarvam_moe",
                "sarvam_mla",
                "inkling2_loop",
                "dory",
                "hy_v4_vl",
                "omniasr",
                "apertus1p5",
            )
        },
    },
    ("nemo_automodel-0.6.0", "nemo_automodel-0.7.0"): {
        **{
            f"`ReplicatedWithGradAllReduce` in the plan of {name}": rf"_parallelize_{name}: .*-> ReplicatedWithGradAllReduce"
            for name in ("qwen", "gemma3", "phi")
        },
        "the default `mp_policy`": r"~ .*FSDP2Config\.mp_policy: .*bfloat16",
        "`ModelParallelizer`": r"\+ .*\.ModelParallelizer: class",
        "`MeshContext` has the config": r"\+ .*MeshContext\.strategy_config",
        "`parallelize_model(model, mesh_context)`": r"\+ .*parallelize_model\(mesh_context\)",
        "the managers go in 0.8": r"FSDP2Manager: FSDP2Manager is deprecated and will be removed in 0\.8",
        "`FSDP2Manager`'s fourth argument": r"\+ .*FSDP2Manager\.__init__\(moe_config\)",
        "`parallelize` takes `reapply_trainability`": r"\+ .*FSDP2Manager\.parallelize\(reapply_trainability\)",
    },
    ("deepspeed-0.18.0", "deepspeed-0.19.8"): {
        "`expert_parallel`": r"\+ runtime\.config\.EXPERT_PARALLEL",
        **{
            f"`{field}`": rf"\+ module_inject\.autotp_config\.\w+\.{field}"
            for field in ("grad_allreduce", "strict_mode", "embedding_partition_dim", "lm_head_patterns")
        },
    },
}


def found(older: str, newer: str, lines: Sequence[str]) -> dict[str, str | None]:
    """What is known of two releases -> the first line that says it; None where none does.

    Raises:
        ValueError: nothing is known of them.
    """
    if (older, newer) not in KNOWN:
        pairs = ", ".join(f"{a} to {b}" for a, b in KNOWN)
        raise ValueError(f"nothing is known of {older} to {newer}, but of {pairs}")
    said = KNOWN[older, newer]
    return {
        what: next((line.strip() for line in lines if re.search(pattern, line)), None) for what, pattern in said.items()
    }


def table(rows: dict[str, str | None]) -> str:
    """As Markdown."""
    lines = [f"| {what} | {_cell(line)} |" for what, line in rows.items()]
    return "\n".join(["| known | the line |", "|---|---|", *lines])


def _cell(line: str | None) -> str:
    text = (line or "none").replace("|", "\\|")
    return f"`{text if len(text) <= 150 else text[:147] + '...'}`"
