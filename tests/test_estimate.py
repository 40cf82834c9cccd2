"""`estimate`: what a step costs, traced without memory at a small depth."""

import json
import re
from dataclasses import fields, replace
from math import comb

import jsonschema
import pytest
import torch
import torch.distributed as dist

import shardplan
from shardplan import PlanError, TrainingStep
from shardplan.cli.main import main
from shardplan.core.estimates import CATEGORIES, Device, Estimate, Traffic
from shardplan.core.mesh import APPLIED, Axis, MeshSizes
from shardplan.cost.depth import Depths, _repeating
from shardplan.cost.devices import known_devices, read_device
from shardplan.cost.fake_rank import fake_mesh, without_memory
from shardplan.cost.least_time import bound_of
from shardplan.cost.mesh_candidates import meshes_of
from shardplan.cost.meter import Meter
from shardplan.cost.overlap import ALONE, Overlap
from shardplan.cost.running_module import Places
from shardplan.report.estimate_text import estimate_text
from shardplan.report.report_schema import report_schema
from shardplan.torchlib.operators import FUNCTIONAL

HIDDEN, INNER, ROWS, SEQ, HEADS, KV = 64, 160, 96, 32, 8, 4
TINY = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "vocab_size": ROWS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
LLAMA = {**TINY, "head_dim": 8}


def estimated(model="llama", mesh=None, plan="auto", **options):
    settings = options.pop("settings", LLAMA)
    step = {one.name: options.pop(one.name) for one in fields(TrainingStep) if one.name in options}
    return shardplan.estimate(
        shardplan.Model(model, settings=settings),
        plan,
        mesh or {"dp_shard": 2, "tp": 2},
        TrainingStep(**{"seq_len": SEQ, **step}),
        **options,
    )


def costs(one):
    return one.memory, one.flops, one.traffic, one.touched, one.held


# (model, settings, options): equal layers, every second recomputed, every second of another kind, experts.
DEEP = {
    "equal layers": ("llama", LLAMA | {"num_hidden_layers": 9}, {"sequence_parallel": True}),
    "recomputed": ("llama", LLAMA | {"num_hidden_layers": 13}, {"activation_checkpointing": {"every": 2}}),
    "alternating": (
        "gemma2",
        TINY | {"head_dim": 8, "num_hidden_layers": 12, "sliding_window": 16, "query_pre_attn_scalar": 8},
        {},
    ),
    "experts": (
        "qwen3_moe",
        TINY | {"num_hidden_layers": 9, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {},
    ),
}


MARKS = {"equal layers": [], "recomputed": [pytest.mark.slow]}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, [pytest.mark.exhaustive])) for n in DEEP])
def test_what_is_extrapolated_is_what_the_whole_depth_has(name, monkeypatch):
    model, settings, options = DEEP[name]
    short = estimated(model, settings=settings, **options)
    assert len(short.traced) == 2 and max(short.traced) < short.layers == settings["num_hidden_layers"]
    monkeypatch.setattr(Depths, "traced", property(lambda depths: (depths.count,)))
    whole = estimated(model, settings=settings, **options)
    assert costs(short) == costs(whole)
    assert not dist.is_initialized()


def test_the_depths_that_are_traced():
    def traced(layers, every=1, ahead=1):
        return _repeating(("layers",), list(layers), every, ahead).traced

    assert traced("a" * 126) == (3, 4)
    assert traced("a" * 126, ahead=3) == (7, 8)
    assert traced("a" * 126, every=4) == (4 + 4 + 2, 4 + 4 + 2 + 4)
    assert traced("ab" * 20) == (4, 6)
    assert traced("b" + "a" * 60) == (4, 5)
    assert traced("aaab" * 10 + "aa") == (4 + 4 + 2, 4 + 4 + 2 + 4)
    assert traced("abcdefgh") == (8,)
    assert traced("aa") == (2,)


def test_names_are_aligned_from_either_end():
    depths = Depths(("m.layers",), 126, 1, 2, 1)
    assert [depths.aligned(f"m.layers.{i}.mlp", 4) for i in range(4)] == [
        "m.layers.0.mlp",
        None,
        "m.layers.-2.mlp",
        "m.layers.-1.mlp",
    ]
    assert depths.named("m.layers.-2.mlp") == "m.layers.124.mlp"
    assert depths.named("m.layers.0.mlp") == depths.aligned("m.layers.0.mlp", 4) == "m.layers.0.mlp"
    assert depths.aligned("m.norm", 4) == depths.named("m.norm") == "m.norm"


def test_parameters_and_their_state_are_those_of_the_shapes():
    """Per layer: q, k, v, o, gate, up, down are split over tp and dp_shard, two norms over dp_shard alone."""
    one = estimated(mesh={"dp_shard": 2, "tp": 2})
    heads, kv = HEADS * 8, KV * 8
    layer = 2 * HIDDEN * heads + 2 * HIDDEN * kv + 3 * HIDDEN * INNER
    split, whole = 2 * layer + 2 * ROWS * HIDDEN, 5 * HIDDEN
    held = split // 4 + whole // 2
    tables = 2 * 8 // 2 * 4  # rotary: inv_freq and its original, float32
    assert (one.parameters, one.held) == (split + whole, held)
    assert one.memory.most["parameters"] == 2 * held + tables
    assert one.memory.most["gradients"] == 2 * held
    steps = 4 * (2 * 9 + 3)  # AdamW counts in a float32 for each parameter
    assert one.memory.most["optimizer state"] == 2 * 2 * held + steps
    assert sum(one.memory.peak.values()) == one.memory.total


def test_parameters_that_the_default_device_does_not_reach():
    """Some of DiffLlama's are drawn on the CPU; FSDP2 shards a model whose parameters are all on the meta device."""
    assert estimated("diffllama", settings=TINY).parameters > estimated(settings=TINY).parameters


def test_an_estimate_does_not_depend_on_those_before():
    """Their meshes have equal parts, on other process groups."""
    mesh = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    first = estimated(mesh=mesh, sequence_parallel=True)
    estimated(mesh={"dp_shard": 4, "tp": 2}, sequence_parallel=True)
    assert costs(estimated(mesh=mesh, sequence_parallel=True)) == costs(first)


def test_products_are_counted():
    """Forward once, backward twice; attention over [seq, seq], causal, and its probabilities again in backward."""
    one = estimated(mesh={"tp": 2}, data_parallel=False)
    heads, kv = HEADS * 8, KV * 8
    layer = 2 * HIDDEN * heads + 2 * HIDDEN * kv + 3 * HIDDEN * INNER
    linear = 6 * SEQ * (2 * layer + ROWS * HIDDEN)
    attention = (2 + 5) * 2 * (HEADS * SEQ * SEQ * 8 * 2) // 2
    assert one.flops == {"bfloat16": (linear + attention) // 2}


def test_communication_is_the_minimum():
    """Sequence parallel: B + 1 gathers and reductions each way, B = 2 a layer, and whole logits; FSDP2 gathers a unit twice,
    the root and the last layer once."""
    layers, n = 2, 4
    one = estimated(mesh={"dp_shard": 2, "tp": n}, sequence_parallel=True)
    found = {(t.axis, t.collective): t for t in one.traffic}
    boundary = SEQ * HIDDEN * 2 * (n - 1) // n
    assert found["tp", "reduce_scatter"].calls == 2 * (2 * layers + 1)
    assert found["tp", "reduce_scatter"].bytes == 2 * (2 * layers + 1) * boundary
    assert found["tp", "all_gather"].calls == 2 * (2 * layers + 1) + 1
    assert found["tp", "all_gather"].bytes == 2 * (2 * layers + 1) * boundary + SEQ * ROWS * 2 * (n - 1) // n
    assert found["dp_shard", "all_gather"].calls == layers + 1 + 1
    assert found["dp_shard", "reduce_scatter"].calls == layers + 1


@pytest.mark.parametrize("shards", [2, 1], ids=["with dp_shard", "alone"])
def test_ranks_with_a_share_of_the_heads_have_what_a_shorter_sequence_takes(shards):
    """Queries, outputs, keys and values are exchanged over cp, forward and backward; each rank has what as many tokens as its own take
    without cp, but for what is whole: the embedding's output, masks and tables. FSDP2 works over dp_shard and cp together."""
    layers, n, length = 2, 2, 16 * SEQ
    one = estimated(mesh={"dp_shard": shards, "cp": n}, seq_len=length)
    short = estimated(mesh={"dp_shard": shards * n}, seq_len=length // n)
    found, usual = ({(t.axis, t.collective): t for t in made.traffic} for made in (one, short))
    features = (2 * HEADS + 2 * KV) * LLAMA["head_dim"]
    assert found["cp", "all_to_all"].bytes == 2 * layers * (length // n) * features * 2 * (n - 1) // n
    for collective in ("all_gather", "reduce_scatter"):
        assert found["dp_shard", collective] == usual["dp_shard", collective]
    assert one.held == short.held and one.tokens == short.tokens
    assert one.memory.most["logits"] == short.memory.most["logits"]
    assert one.memory.most["activations"] <= 1.1 * short.memory.most["activations"]


def test_a_module_that_is_whole_over_cp_gathers_all_features():
    rules = {"model.layers.0": "split_seq_input", "model.layers.*.self_attn": "replicate_seq"}
    plan = {"version": "1", "name": "whole", "extends": "llama", "context_parallel": rules}
    layers, n = 2, 4
    found = {(t.axis, t.collective): t for t in estimated(mesh={"cp": n}, plan=plan).traffic}
    for collective in ("all_gather", "reduce_scatter"):
        assert found["cp", collective].bytes == layers * (n - 1) * (SEQ // n) * HIDDEN * 2


def test_tokens_are_sent_once_to_each_rank_with_some_of_their_experts():
    """4 q (n - 1) / n H s bytes a token, layer and step, q = n (1 - C(E - E/n, k) / C(E, k)) (docs/expert-parallel.md), and what they need of
    ids, weights and numbers of rows. Each tp rank sends its half of the tokens."""
    experts, chosen, n, layers = 8, 2, 4, 2
    settings = TINY | {"num_local_experts": experts, "num_experts_per_tok": chosen}
    whole = estimated("mixtral", {"dp_shard": 2, "tp": 2}, settings=settings)
    one = estimated("mixtral", {"dp_shard": 2, "tp": 2, "ep": n}, settings=settings)
    sent = next(t for t in one.traffic if t.axis == "ep")
    rows = round(SEQ / 2 * (1 - comb(experts - experts // n, chosen) / comb(experts, chosen)))  # to each rank
    of_a_row = 4 * HIDDEN * 2 + 2 * chosen * 4 + chosen * 4  # weights of routes are in float32
    assert (sent.collective, sent.calls) == ("all_to_all", layers * 8)
    assert sent.bytes == layers * (n - 1) * (rows * of_a_row + 4 * 8)
    assert one.flops == pytest.approx(whole.flops, rel=0.05)  # rows of whole numbers
    assert one.held == whole.held
    assert one.memory.most["gathered parameters"] < whole.memory.most["gathered parameters"]
    assert "uneven routes" in one.not_modelled[-1]


@pytest.mark.parametrize(("n", "chosen"), [(2, 2), (2, 4), pytest.param(4, 4, marks=pytest.mark.slow)])
def test_a_token_that_is_sent_once_costs_no_more_than_gathering_all_of_them(n: int, chosen: int):
    """With the sequence split, next to experts that are distributed inside tp: in rows of the hidden size. The ids and weights of a
    row come on top, which of rows as short as these are a tenth."""
    experts, layers = 8, 2
    settings = TINY | {"num_local_experts": experts, "num_experts_per_tok": chosen}
    inside = {
        "model.layers.*.mlp": {"style": "input_with_grad_allreduce", "output": "all_reduce"},
        "model.layers.*.mlp.gate": {"style": "replicated_with_grad_allreduce", "read_outside": [0]},
        "model.layers.*.mlp.experts": "ep_experts",
        "sequence_parallel": {"model.layers.*.mlp": {"style": "gather_seq_input", "output": "reduce_scatter"}},
    }
    plan, mesh = {"version": "1", "extends": "mixtral", "expert_parallel": inside}, {"tp": n, "ep": n}
    model, step = shardplan.Model("mixtral", settings), TrainingStep(SEQ)
    once, gathered = (
        sum(t.bytes for t in shardplan.estimate(model, which, mesh, step, sequence_parallel=True).traffic)
        for which in ("mixtral", plan)
    )
    rows = round(SEQ / n * _reaches(experts, n, chosen))  # to each rank
    extra = layers * (n - 1) * (rows * 3 * chosen * 4 + 4 * 8)
    assert once - extra <= gathered
    assert once < gathered or chosen > n


@pytest.mark.parametrize("exchange", ["once", "pairs"])
def test_the_busiest_rank_gets_its_share_of_the_rows(exchange):
    """load times the mean from each rank, at most all tokens where a token is sent once; its products and what it keeps follow."""
    experts, chosen, n, layers, load = 16, 2, 4, 2, 1.5
    settings = TINY | {"num_local_experts": experts, "num_experts_per_tok": chosen, "num_hidden_layers": layers}
    rule = {"model.layers.*.mlp.experts": {"style": "ep_dispatch", "exchange": exchange}}
    plan, mesh = {"version": "1", "extends": "mixtral", "expert_parallel": rule}, {"dp_shard": 2, "tp": 2, "ep": n}
    even, uneven, all_rows = (
        shardplan.estimate(
            shardplan.Model("mixtral", settings=settings), plan, mesh, shardplan.TrainingStep(SEQ, expert_load=one)
        )
        for one in (1.0, load, n)
    )
    tokens = SEQ // 2
    shares = tokens * chosen / n if exchange == "pairs" else round(tokens * _reaches(experts, n, chosen))
    counted = 8 * (4 if exchange == "once" else 2 + experts // n)  # numbers of rows and of the module, for each rank
    of_a_row = 4 * HIDDEN * 2 + (3 * chosen * 4 if exchange == "once" else 0)
    for one, factor in ((even, 1.0), (uneven, load), (all_rows, n)):
        rows = round(shares * factor) if exchange == "pairs" else min(round(shares * factor), tokens)
        sent = next(t for t in one.traffic if t.axis == "ep")
        assert sent.bytes == layers * (n - 1) * (rows * of_a_row + counted)
    product = 6 * 3 * HIDDEN * INNER * n * (tokens * chosen // n)  # of the experts of one layer with an even load
    assert uneven.flops["bfloat16"] - even.flops["bfloat16"] == round(layers * product * (load - 1))
    assert all_rows.flops["bfloat16"] - even.flops["bfloat16"] == layers * product * (n - 1)
    assert even.memory.most["activations"] < uneven.memory.most["activations"] < all_rows.memory.most["activations"]
    assert "expert load 1.5" in estimate_text(uneven, color=False) and "expert load" not in estimate_text(
        even, color=False
    )
    assert not any("uneven routes" in text for text in uneven.not_modelled)


def _reaches(experts: int, ranks: int, chosen: int) -> float:
    """The probability that a rank has some of a token's experts."""
    return 1 - comb(experts - experts // ranks, chosen) / comb(experts, chosen)


def _gathers(one: Estimate) -> int:
    return next(t.calls for t in one.traffic if (t.axis, t.collective) == ("tp", "all_gather"))


@pytest.mark.slow
def test_each_option_changes_what_it_is_about():
    plain = estimated()
    split = estimated(logits="sharded")
    again = estimated(activation_checkpointing={"mode": "full"})
    kept = estimated(data_parallel={"reshard_after_forward": False})
    gathered, shards = (estimated(sequence_parallel=True, regather=on) for on in (False, True))
    hosted = estimated(data_parallel={"cpu_offload": True}, optimizer="sgd")
    copies = estimated(mesh={"dp_replicate": 2, "dp_shard": 2, "tp": 2}, precision="fp32")
    mixed = estimated(precision="fp32", data_parallel={"mixed_precision": {"param": "bfloat16", "reduce": "float32"}})
    assert split.memory.most["logits"] < plain.memory.most["logits"]
    assert again.memory.most["activations"] < plain.memory.most["activations"]
    assert again.flops["bfloat16"] > plain.flops["bfloat16"]
    assert kept.memory.most["gathered parameters"] > plain.memory.most["gathered parameters"]
    assert shards.memory.most["activations"] < gathered.memory.most["activations"]
    assert _gathers(shards) > _gathers(gathered) and shards.flops == gathered.flops
    assert set(hosted.memory.host) == {"parameters", "gradients"} and not set(hosted.memory.host) & set(
        hosted.memory.peak
    )
    assert any("host" in text for text in hosted.not_modelled)
    assert copies.memory.most["parameters"] > plain.memory.most["parameters"]
    assert [t.collective for t in copies.traffic if t.axis == "dp_replicate"] == ["all_reduce"]
    assert copies.tokens == 4 * SEQ and list(copies.flops) == ["float32"]
    assert list(mixed.flops) == ["bfloat16"]
    assert mixed.memory.most["parameters"] == copies.memory.most["parameters"]


DEVICE = Device("d", 1000, {"bfloat16": 100.0}, 10.0, 8, 4.0, 1.0)


# Half of tp's bytes are under way while products run that take 2 seconds, or 50.
OVERLAPS = {
    name: Overlap({(Axis.TP, "all_reduce"): 20}, {"bfloat16": products})
    for name, products in (("few products", 200), ("many products", 5000))
}


def test_what_bounds_a_step():
    sizes = MeshSizes(tp=4, dp_shard=8)
    traffic = (Traffic("tp", "all_reduce", 1, 40), Traffic("dp_shard", "all_gather", 1, 8))
    bound = bound_of(DEVICE, sizes, {"bfloat16": 500}, traffic, 20, ALONE)
    # tp is within a node; of a dp_shard group, 2 ranks are in each node and share the way out.
    assert bound.terms == {"compute": 5.0, "memory": 2.0, "links in a node": 12.0, "network": 4.0}
    # The step waits for tp's 10 seconds, and computes before or after.
    assert (bound.waiting, bound.by, bound.seconds) == (10.0, "compute", 15.0)
    bounds = {
        one: bound_of(DEVICE, sizes, {"bfloat16": 500}, traffic, 20, overlap) for one, overlap in OVERLAPS.items()
    }
    assert {one: bound.waiting for one, bound in bounds.items()} == {"few products": 8.0, "many products": 5.0}
    alone = bound_of(DEVICE, MeshSizes(tp=8, dp_shard=2), {}, [Traffic("dp_shard", "all_gather", 1, 8)], 0, ALONE)
    assert alone.terms["network"] == 8.0 and alone.terms["links in a node"] == 0.0
    chunks = bound_of(
        DEVICE,
        MeshSizes(cp=4, tp=2, dp_shard=2),
        {},
        [Traffic("cp", "all_gather", 1, 8), Traffic("dp_shard", "x", 1, 8)],
        0,
        ALONE,
    )
    # 2 of the 4 cp ranks, and of the 8 that gather parameters, are in each node.
    assert chunks.terms["network"] == 2 * alone.terms["network"] / 2
    with pytest.raises(ValueError, match="has no flops for float64"):
        bound_of(DEVICE, sizes, {"float64": 1}, (), 0, ALONE)


@pytest.mark.parametrize("late", [False, True], ids=["waits at once", "waits after a product"])
def test_what_overlaps_is_read_off_the_run(late):
    """A collective and its wait, with a product between them or after both; no collective is under way during the second product."""
    with fake_mesh(MeshSizes(tp=2)) as mesh, without_memory():
        group = mesh.mesh.get_group(mesh.names["tp"]).group_name
        meter = Meter(Places(), {group: (Axis.TP, 2)}, (), 0)
        with meter.running():
            x = torch.empty(8, 8)
            meter.start()
            under_way = FUNCTIONAL.all_reduce.default(x, "sum", group)
            if late:
                x @ x
            FUNCTIONAL.wait_tensor.default(under_way)
            x @ x
    expected = {"": Overlap({(Axis.TP, "all_reduce"): 8 * 8 * 4}, {"float32": 2 * 8**3})}
    assert meter.log.overlaps == (expected if late else {})


def test_latent_attention_is_fused_as_on_a_device():
    """Its values are narrower than its keys: no kernel of the CPU takes them, and its scores would be counted in float32."""
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 16}
    experts = {"first_k_dense_replace": 2}  # no layer has any
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    few, many = (
        estimated("deepseek_v3", {"tp": 1}, settings=TINY | sizes | experts | heads, seq_len=n) for n in (SEQ, 2 * SEQ)
    )
    assert few.flops.keys() == many.flops.keys() == {"bfloat16"}
    # Products of queries and keys, and of these with values: two in forward, five in backward, causal, grow with the square.
    pairs = 2 * 7 * HEADS * SEQ * SEQ * (32 + 16) // 2
    assert many.flops["bfloat16"] - 2 * few.flops["bfloat16"] == 2 * pairs


def test_every_mesh_is_tried():
    assert len(meshes_of(8)) == 10
    assert all(sizes.world_size == 8 for sizes in meshes_of(8))
    assert [s.text((*APPLIED, "ep")) for s in meshes_of(4, (1, 4)) if s.ep > 1] == [
        "dp_shard 4 x ep 4", "dp_shard 2 x tp 2 x ep 4", "tp 4 x ep 4"
    ]  # fmt: skip
    assert [s.text() for s in meshes_of(4, pp=(1, 2), cp=(2,)) if s.pp == 1] == [
        "dp_shard 2 x cp 2", "dp_replicate 2 x cp 2", "cp 2 x tp 2"
    ]  # fmt: skip
    assert not any(s.cp > 1 for s in meshes_of(4, pp=(2,), cp=(2,)))
    with pytest.raises(ValueError, match="no mesh of 4 devices has ep 3"):
        meshes_of(4, (1, 3))


def test_devices():
    known = known_devices()
    assert {"a100", "h100", "h200", "b200", "mi300x"} <= set(known)
    assert all(device.source and device.flops["bfloat16"] > device.flops["float32"] for device in known.values())
    with pytest.raises(ValueError, match="did you mean h100"):
        read_device("h10")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": -1}, "memory must be a positive number, from 1 to 1e+24, not -1"),
        ({"flops": 5}, "flops must be an object"),
        ({"speed": 1}, "unknown field 'speed'"),
        ({"node_gpus": None}, "node_gpus must be a positive integer, not None"),
        ({"node_gpus": 0.5}, "node_gpus must be a positive integer, not 0.5"),
        ({"memory": True}, "memory must be a positive number"),
        ({"memory": 10**400}, "memory must be a positive number"),
        ({"memory_bandwidth": 1e300}, "memory_bandwidth must be a positive number"),
        ({"flops": {"bfloat16": "9"}}, "flops of bfloat16 must be a positive number"),
        ({"efficiency": [0.5, 0.2]}, "efficiency must be two shares of the bound"),
        ({"efficiency": "5"}, "efficiency must be two shares of the bound"),
        ({"efficiency": [True, True]}, "efficiency must be two shares of the bound"),
        ({"source": ["\x1b"]}, "source must be a text"),
    ],
)
def test_device_files(change, message, tmp_path):
    data = {"memory": 8e9, "flops": {"bfloat16": 1e12}, "memory_bandwidth": 1e11, "node_gpus": 1}
    data |= {"node_bandwidth": 1e9, "network_bandwidth": 1e9}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    assert read_device(str(path)).name == "mine"
    path.write_text(json.dumps(data | change))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_device(str(path))


def test_a_device_file_that_is_none(tmp_path):
    (tmp_path / "a.json").write_text("[1")
    with pytest.raises(ValueError, match="is not JSON"):
        read_device(str(tmp_path / "a.json"))
    with pytest.raises(ValueError, match="does not exist"):
        read_device(str(tmp_path / "b.json"))
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(ValueError, match="lacks 'memory'"):
        read_device(str(tmp_path / "c.json"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"tpp": 2}}, "no mesh axis 'tpp'"),
        ({"mesh": {"tp": 2, "ep": 4}}, "ep 4 does not divide"),
        ({"mesh": {"dp": 2, "fsdp": 2}}, "two sizes of the mesh mean dp_shard"),
        ({"mesh": {"tp": 0}}, "positive integer"),
        ({"micro_batch": 0}, "micro_batch must be a positive integer"),
        ({"precision": "fp8"}, "precision must be bfloat16, float16 or float32"),
        (
            {"optimizer": "adam"},
            "optimizer must be one of adamw, adamw-fused, adamw-for-loop, sgd, none, muon, whole-matrix",
        ),
        ({"expert_load": 0.5}, "expert_load must be a number from 1 on"),
        ({"expert_load": float("nan")}, "expert_load must be a number from 1 on"),
        ({"expert_load": "2"}, "expert_load must be a number from 1 on"),
        ({"expert_load": 1.5}, "expert_load is 1.5, but ep is 1"),
        ({"device": "h10"}, "did you mean h100"),
        ({"mesh": {"dp_replicate": 2}, "data_parallel": {"backend": "ddp"}}, "not ddp"),
        ({"mesh": {"dp_shard": 2, "tp": 2}, "data_parallel": False}, "no data_parallel section"),
    ],
)
def test_wrong_calls(options, message):
    with pytest.raises(ValueError, match=message):
        estimated(**options)


def test_a_model_that_looks_at_values_is_refused():
    with pytest.raises(PlanError) as error:
        shardplan.estimate(
            "tests.estimated_models:looks",
            {"version": "1", "name": "none"},
            {"tp": 1},
            shardplan.TrainingStep(SEQ, optimizer="none"),
        )
    (finding,) = error.value.diagnostics
    assert finding.code == "SP560" and "cannot be traced without values" in finding.message


def test_a_module_of_ones_own():
    one = shardplan.estimate(
        "tests.estimated_models:plain",
        {"version": "1", "name": "none"},
        {"tp": 1},
        shardplan.TrainingStep(SEQ, precision="fp32"),
    )
    assert one.traced == (1,) and not one.traffic
    assert one.memory.most["gradients"] == 4 * one.parameters == 4 * (ROWS * HIDDEN + HIDDEN * HIDDEN)


SETTINGS = [word for name, value in LLAMA.items() for word in ("--set", f"{name}={value}")]
WORDS = ["estimate", "llama", "auto", "--seq-len", str(SEQ), *SETTINGS]


def test_the_command(capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert main([*WORDS, "--mesh", "fsdp=2,tp=2", "--device", "h200", "--sequence-parallel"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    expected = estimated(device="h200", sequence_parallel=True)
    expected = replace(expected, asked=replace(expected.asked, model="llama"))
    assert printed.out.rstrip() == estimate_text(expected, color=False)
    for words in ("dp_shard 2 x tp 2", "gathered parameters", "the peak is in the", "fits h200", "tokens/s a device"):
        assert words in printed.out


def test_json_is_what_the_schema_says(capsys):
    assert main([*WORDS, "--mesh", "tp=2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(report_schema()).validate(data)
    memory = data["memory"]
    assert sum(memory["peak"].values()) == memory["total"] > 0 and data["bound"] is None
    assert memory["peak"].keys() <= memory["most"].keys() <= set(CATEGORIES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh", "tp"], "'tp' is not of the form AXIS=N"),
        (["--mesh", "tpp=2"], "there is no axis 'tpp': did you mean tp?"),
        (["--mesh", "tp=2,tp=4"], "two sizes of tp: 2 and 4"),
        (["--mesh", "tp=x"], "not a positive integer"),
        ([], "give a mesh: --tp 8, or --mesh dp_shard=8,tp=8"),
        (["--mesh", "tp=2", "--device", "nothing"], "there is no device 'nothing'"),
    ],
)
def test_wrong_command_lines(words, message, capsys):
    assert main([*WORDS, *words]) == 2
    assert message in capsys.readouterr().err


def test_findings_are_printed(capsys):
    assert main([*WORDS, "--mesh", "tp=3"]) == 1
    assert "error[SP301]" in capsys.readouterr().out


def test_a_parameter_with_two_names_counts_once():
    """Also where neither FSDP2 nor tp replaces it."""
    settings = TINY | {"tie_word_embeddings": True}
    one = estimated("qwen2", {"tp": 1}, settings=settings, data_parallel=False)
    assert one.held == one.parameters


def over_cp(plan, mixer, style, ends=("model.layers.0",)):
    section = {**dict.fromkeys(ends, "split_seq_input"), mixer: style}
    return {"version": "1", "name": f"{plan}-cp", "extends": plan, "context_parallel": section}


LATENT = {
    **TINY,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": HEADS,
    "first_k_dense_replace": 2,
}
MAMBA = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "vocab_size": ROWS,
    "num_heads": HEADS,
    "head_dim": 16,
    "n_groups": 8,
    "state_size": 4,
    "expand": 2,
    "chunk_size": 8,
}
ATTENTION = "model.layers.*.self_attn"
# (model, settings, plan, n -> elements that a rank of n receives for each of its tokens in a layer's forward)
OVER_CP = {
    "whole": ("llama", LLAMA, over_cp("llama", ATTENTION, "replicate_seq"), lambda n: (n - 1) * HIDDEN),
    "heads": (
        "llama",
        LLAMA,
        over_cp("llama", ATTENTION, "exchange_heads"),
        lambda n: (n - 1) * (2 * HEADS + 2 * max(KV, n)) * 8 // n,
    ),
    "heads of a latent": (
        "deepseek_v3",
        LATENT,
        over_cp("deepseek_v3", ATTENTION, "exchange_heads"),
        lambda n: (n - 1) * HEADS * (12 + 6) // n + (n - 1) * (16 + 4),
    ),
    "heads of a scan": (
        "mamba2",
        MAMBA,
        over_cp("mamba2", "backbone.layers.*.mixer", "exchange_heads", ["backbone.layers.0"]),
        lambda n: (n - 1) * (2 * 128 + 2 * 8 * 4 + HEADS + 128) // n,
    ),
}


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "heads")) for n in OVER_CP])
def test_over_cp_a_rank_is_sent_what_the_mixers_need_and_nothing_else(name, ranks):
    """At the process groups of a traced step: what a layer's forward receives, and its backward again."""
    model, settings, plan, elements = OVER_CP[name]
    one = estimated(
        model,
        {"cp": ranks, "dp_shard": 1, "tp": 1},
        plan,
        settings=settings,
        data_parallel={"backend": "fsdp2"},
        precision="fp32",
        seq_len=SEQ,
    )
    found = sum(traffic.bytes for traffic in one.traffic if traffic.axis == "cp")
    assert found == 2 * 4 * 2 * SEQ // ranks * elements(ranks), one.traffic


@pytest.mark.slow
def test_masks_over_all_pairs_of_tokens_are_counted_by_themselves_and_over_cp_they_are_whole():
    window = {**TINY, "head_dim": 8, "sliding_window": 64, "max_position_embeddings": 4096}
    mesh, tokens = {"cp": 4, "dp_shard": 1, "tp": 1}, 2048
    plan = over_cp("mistral", ATTENTION, "exchange_heads")
    options = {"data_parallel": {"backend": "fsdp2"}, "seq_len": tokens}
    one = estimated("mistral", mesh, plan, settings=window, **options)
    assert one.memory.most["masks and scores"] >= tokens**2, "a byte for each pair at least"
    assert "flash_attention_2 or flex_attention makes none" in estimate_text(one, color=False)
    causal = estimated("llama", mesh, over_cp("llama", ATTENTION, "exchange_heads"), settings=LLAMA, **options)
    assert not causal.memory.most.get("masks and scores")
    assert "flash_attention_2" not in estimate_text(causal, color=False)
