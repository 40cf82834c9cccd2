"""What is installed, the device, and every private name of torch: `python -m tests.gpu.versions cuda`."""

from __future__ import annotations

import importlib
import sys

import torch
import transformers

import shardplan
from shardplan.torchlib.private import NAMES, private
from tests.processes import LOADED

from .rows import attempt, emit


def main() -> None:
    device = sys.argv[1]
    for name in LOADED:
        importlib.import_module(name)
    emit(case="what processes that are forked have imported leaves CUDA alone", ok=not torch.cuda.is_initialized())
    found = {
        "Python": sys.version.split()[0],
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "transformers": transformers.__version__,
        "shardplan": shardplan.__version__,
    }
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        found |= {"device": card.name, "memory": card.total_memory, "multiprocessors": card.multi_processor_count}
        found |= {"cuDNN": torch.backends.cudnn.version(), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    for name, value in found.items():
        emit(case=name, value=str(value))
    for name in NAMES:
        attempt(f"torch's {name}", lambda name=name: {"ok": private(name) is not None})


if __name__ == "__main__":
    main()
