"""Train with Megatron-FSDP. Not run: it needs several CUDA devices and the package megatron-fsdp.

torchrun --nproc-per-node 4 examples/megatron_fsdp.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

import shardplan

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
config = AutoConfig.from_pretrained(Path(__file__).parent / "tiny-qwen3.json")
model = AutoModelForCausalLM.from_config(config).cuda()
mesh = init_device_mesh("cuda", (dist.get_world_size(), 1), mesh_dim_names=("dp_shard", "tp"))
backend = {"backend": "megatron_fsdp", "megatron_fsdp": {"zero_dp_strategy": 3, "grad_reduce_in_fp32": True}}
model = shardplan.apply_plan(model, mesh, "auto", data_parallel=backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = shardplan.applied(model).wrap_optimizer(optimizer)
torch.manual_seed(dist.get_rank())  # each rank has batches of its own
for step in range(10):
    ids = torch.randint(config.vocab_size, (2, 64), device="cuda")
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
