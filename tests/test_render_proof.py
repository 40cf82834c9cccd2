"""The table of a numeric proof."""

import math

from shardplan.core.mesh import MeshSizes
from shardplan.core.report import Comparison, NumericProof, VariantProof
from shardplan.report.proof_text import fold_rows, proof_text


def gradient(name: str, error: float = 1e-7, verdict: str = "equal", dtype: str = "float32") -> Comparison:
    return Comparison(name, "gradient", error, "rank 1", verdict, dtype)


ROWS = (
    Comparison("loss", "output", 1.25e-8, "rank 0", "equal"),
    Comparison("logits", "output", 3e-7, "rank 1", "equal"),
    gradient("model.layers.0.mlp.up_proj.weight", 2e-7),
    gradient("model.layers.1.mlp.up_proj.weight", 4e-7),
    gradient("model.layers.0.self_attn.q_norm.weight", 0.5, "differs", "float64"),
    gradient("model.layers.1.self_attn.q_norm.weight"),
)


def report(*proofs: VariantProof, tp: int = 2) -> NumericProof:
    return NumericProof(MeshSizes(tp=tp), proofs)


def test_the_table():
    proof = VariantProof("sequence_parallel", ROWS, parameters=1000, sharded=925)
    assert proof_text(report(proof), color=False).split("\n") == [
        "sequence parallel, tp 2 (simulated in one process)",
        "  tensor                                  worst error  where   verdict",
        "  loss                                        1.2e-08  rank 0  equal",
        "  logits                                      3.0e-07  rank 1  equal",
        "  model.layers.0-1.mlp.up_proj.weight         4.0e-07  rank 1  equal",
        "  model.layers.0.self_attn.q_norm.weight      5.0e-01  rank 1  differs (float64)",
        "  model.layers.1.self_attn.q_norm.weight      1.0e-07  rank 1  equal",
        "6 compared: 5 equal, 1 differs, worst 5.0e-01 at model.layers.0.self_attn.q_norm.weight",
        "1,000 parameters, 92.5% of them split over tp",
    ]


def test_all_rows_are_shown_on_demand():
    proof = VariantProof("tensor_parallel", ROWS, 10, 5)
    assert "layers.0-1" not in proof_text(report(proof), color=False, all_rows=True)


def test_both_variants_must_be_proven():
    good = VariantProof("tensor_parallel", ROWS[:4], 10, 5)
    bad = VariantProof("sequence_parallel", ROWS, 10, 5)
    assert report(good).ok and not report(good, bad).ok


def test_whole_copies_prove_nothing():
    copies = VariantProof("tensor_parallel", ROWS[:4], 10, 0)
    assert not report(copies).ok
    assert report(copies, tp=1).ok


def test_nothing_compared_proves_nothing():
    unproven = VariantProof("tensor_parallel", (gradient("w", 0.0, "unproven"),), 10, 5)
    assert not report(unproven).ok and not report().ok


def test_a_nan_is_the_worst_error():
    rows = (gradient("layers.0.w", 0.5, "differs"), gradient("layers.1.w", math.nan, "differs"))
    assert math.isnan(report(VariantProof("tensor_parallel", rows, 1, 1)).worst.error)
    (folded,) = fold_rows(rows)
    assert folded.name == "layers.0-1.w" and math.isnan(folded.error)


def test_sizes():
    assert MeshSizes(tp=2, dp_shard=4).shown == "dp_shard 4, tp 2"
    assert MeshSizes(tp=1).shown == "tp 1"


def test_a_pipeline_in_processes_says_what_ran():
    def title(tp: int) -> str:
        proof = VariantProof("tensor_parallel", ROWS[:4], 10, tp - 1, schedule="interleaved", micro_batches=8)
        ran = NumericProof(MeshSizes(tp=tp, pp=2), (proof,), processes=True)
        return proof_text(ran, color=False)

    assert title(1).startswith("pipeline parallel, pp 2 (real processes, schedule interleaved, 8 micro-batches)\n")
    assert title(2).startswith("tensor parallel, pp 2, tp 2 (real processes, schedule interleaved, 8 micro-batches)\n")
    assert "split over tp" not in title(1) and "10 parameters, 10.0% of them split over tp" in title(2)
