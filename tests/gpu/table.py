"""The parts, in the order of what each tells."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A process.

    Args:
        name: in results.
        about: what it tells.
        seconds: after which it is killed; less where less is left for all.
        command: words; "DEVICE" is replaced by cuda or cpu.
        needs_cuda: it tells nothing without such a device.
    """

    name: str
    about: str
    seconds: float
    command: tuple[str, ...]
    needs_cuda: bool = False


def _own(name: str, about: str, seconds: float, needs_cuda: bool = False) -> Part:
    return Part(name, about, seconds, (sys.executable, "-m", f"tests.gpu.{name}", "DEVICE"), needs_cuda)


PARTS = (
    _own("versions", "what is installed; the private names of torch", 90),
    _own("several_processes", "ranks as processes that share the device, against the unsharded model", 150),
    _own("one_process", "ranks as threads of one process, against the unsharded model", 120),
    _own("device_tests", "tests/test_gpu.py", 150, needs_cuda=True),
    _own("attention", "the kernels of attention with grouped heads, without and with a mask", 60),
    _own("peaks", "the allocator's peak of a step against `estimate`, with each form of AdamW", 120),
    _own("layer_times", "a layer of Llama-3.1-8B as a rank has it, against the least time of `estimate`", 100),
    _own("host_times", "from which length on the host is hidden", 90),
    _own("benchmark", "benchmarks/gpu.py", 240, needs_cuda=True),
)
