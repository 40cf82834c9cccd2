"""A training script and launch lines for a configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from shardplan.core.fits import CHECKPOINTING, Fitted
from shardplan.core.mesh import APPLIED, Axis

SCRIPT = '''"""Train {model} on {gpus} devices: {mesh}. Written by shardplan fit; `batches` is yours to replace."""

import os

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import shardplan

SEQ_LEN, MICRO_BATCH, MICRO_BATCHES = {seq_len}, {micro_batch}, {micro_batches}
STEPS = int(os.environ.get("STEPS", 1000))
PLAN = {plan!r}


def batches(vocabulary: int, seed: int):
    """Token ids [MICRO_BATCH * MICRO_BATCHES, SEQ_LEN] for this data-parallel rank, step by step: put your data here."""
    random = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(vocabulary, (MICRO_BATCH * MICRO_BATCHES, SEQ_LEN), generator=random)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group({backend} if device == "cuda" else "gloo")
    mesh = shardplan.build_mesh({sizes}, device_type=device)
    config = AutoConfig.{config}
    with torch.device("meta"):  # no rank ever holds the whole model
        model = AutoModelForCausalLM.from_config(config{dtype})
    {apply}
    torch.manual_seed(0)
    shardplan.materialize(model, {place})  # or shardplan.load_checkpoint(model, "folder"), for weights to start from
    optimizer = torch.optim.AdamW({parameters}, lr=3e-4{updated})
    group = dist.get_rank() // {inner}{replica}  # ranks of one group are fed the same tokens
    data = batches(config.get_text_config().vocab_size, seed=group)
    for step in range(1, STEPS + 1):
        ids = next(data).to(device)
{step}
        shardplan.clip_grad_norm_(model, 1.0)
        optimizer.step()
        {zero}
        if dist.get_rank() == 0:
            print(f"step {{step}}  loss {{loss.item():.4f}}", flush=True)
    dist.barrier()  # what is still under way is done before the first process ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
WHOLE = """        loss = torch.zeros((), device=device)
        for part in ids.chunk(MICRO_BATCHES):
            one = model(input_ids=part, labels=part, use_cache=False).loss / MICRO_BATCHES
            one.backward()
            loss += one.detach()"""
OVER_CP = """        loss = torch.zeros((), device=device)
        for part in ids.chunk(MICRO_BATCHES):
            with shardplan.context_parallel(model, input_ids=part, labels=part, use_cache=False) as inputs:
                one = model(**inputs).loss / MICRO_BATCHES
                one.backward()
            loss += one.detach()"""
UPDATED = {"adamw-fused": ", fused=True", "adamw-for-loop": ", foreach=False"}
STAGED = """        loss = model.step(input_ids=ids, labels=ids)"""


def script_of(row: Fitted, plan: str, *, is_type: bool, settings: Mapping[str, object]) -> str:
    """The text of a training script.

    Args:
        plan: the plan that the script applies: a name or a file.
        is_type: whether the model's word is a model type of transformers, not a folder, file or hub id.
        settings: the changed numbers of the configuration.
    """
    choice, asked = row.choice, row.estimate.asked
    sizes, wide = choice.sizes, asked.step.precision == "fp32"
    axes = (Axis.PP, *APPLIED)
    options = [
        "mesh",
        "PLAN",
        f"sequence_parallel={choice.sequence_parallel}",
        f"activation_checkpointing={CHECKPOINTING[choice.checkpointing]!r}",
        "seq_len=SEQ_LEN",
    ]
    if choice.sharded_logits:
        options.append('logits="sharded"')
    if choice.regather:
        options.append("regather=True")
    parallel: dict[str, object] = {"mixed_precision": {"param": "bfloat16", "reduce": "float32"}} if wide else {}
    if choice.offload:
        parallel["cpu_offload"] = True
    if parallel:
        options.append(f"data_parallel={json.dumps(parallel).replace('true', 'True')}")
    staged = choice.schedule is not None
    if staged:
        options.append(f'pipeline=shardplan.PipelineOptions("{choice.schedule}", micro_batches=MICRO_BATCHES)')
    lines = ",\n        ".join(("model", *options))
    call = f"{'model = ' if staged else ''}shardplan.apply_plan(\n        {lines},\n    )"
    words = ", ".join((repr(asked.model), *(f"{name}={value!r}" for name, value in settings.items())))
    inner, ranks = sizes.of(Axis.TP) * sizes.cp, sizes.dp_shard * sizes.dp_replicate
    return SCRIPT.format(
        model=asked.model,
        config=f"{'for_model' if is_type else 'from_pretrained'}({words})",
        gpus=sizes.world_size,
        mesh=sizes.text((*axes, Axis.EP)) or "1 device",
        seq_len=asked.step.seq_len,
        micro_batch=choice.micro_batch,
        micro_batches=choice.micro_batches,
        plan=plan,
        sizes=", ".join(f"{axis}={sizes.of(axis)}" for axis in (*axes, *((Axis.EP,) if sizes.ep > 1 else ()))),
        dtype="" if wide else ", dtype=torch.bfloat16",
        apply=call,
        parameters="[one for _, one in model.named_parameters()]" if staged else "model.parameters()",
        updated=UPDATED.get(asked.step.optimizer, ""),
        inner=inner,
        replica=f" % {ranks}" if staged else "",
        step=STAGED if staged else OVER_CP if sizes.cp > 1 else WHOLE,
        backend='"cpu:gloo,cuda:nccl"' if choice.offload else '"nccl"',
        place='"cpu"' if choice.offload else "device",
        zero="model.zero_grad()" if staged else "optimizer.zero_grad()",
    )


def launch_lines(row: Fitted, script: str) -> tuple[tuple[str, str], ...]:
    """(launcher, command line) for torchrun and for Slurm."""
    gpus, device = row.choice.sizes.world_size, row.estimate.device
    assert device is not None
    each = min(gpus, device.node_gpus)
    nodes = math.ceil(gpus / each)
    if nodes == 1:
        return (("torchrun", f"torchrun --nproc-per-node {each} {script}"),)
    torchrun = f"torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500 {script}"
    inner = torchrun.replace("$HEAD_NODE", "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)")
    slurm = f"sbatch --nodes {nodes} --exclusive --ntasks-per-node 1 --gpus-per-node {each} --wrap 'srun {inner}'"
    return (("torchrun, on every node", torchrun), ("slurm", slurm))
