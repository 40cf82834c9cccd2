"""Running a training script as torchrun would: one process for each rank, forked where torch and transformers are loaded.

printed = run_script(4, "examples/moe.py", "--text", "demo/text.txt")
"""

from __future__ import annotations

import gc
import os
import runpy
import socket
import sys
import tempfile
from pathlib import Path

from processes import fork_server

ROOT = Path(__file__).parent.parent
SECONDS = 600.0  # of patience with a busy machine


def run_script(ranks: int, script: str | Path, *words: str) -> str:
    """What the ranks print, in their order.

    Args:
        script: its path from the project's root.
        words: its arguments.

    Raises:
        AssertionError: a rank failed; with what it wrote.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        of_all = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
        of_all |= {"MASTER_PORT": port.getsockname()[1]}
        port.close()
        started = []
        for rank in range(ranks):
            environment = {key: str(value) for key, value in {**of_all, "RANK": rank, "LOCAL_RANK": rank}.items()}
            arguments = (environment, str(ROOT / script), words, Path(folder, str(rank)))
            started.append(context.Process(target=_rank, args=arguments))
            started[-1].start()
        for process in started:
            process.join(SECONDS)
        written = [Path(folder, f"{rank}.err").read_text("utf-8") for rank in range(ranks)]
        codes = [process.exitcode for process in started]
        for process in started:
            process.kill()
        assert codes == [0] * ranks, f"exit codes {codes}\n" + "\n".join(written)
        return "".join(Path(folder, f"{rank}.out").read_text("utf-8") for rank in range(ranks))


def _rank(environment: dict[str, str], script: str, words: tuple[str, ...], file: Path) -> None:
    import torch

    os.environ |= environment
    os.chdir(ROOT)
    for stream, end in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(file.with_suffix(end), os.O_CREAT | os.O_WRONLY), stream)
    gc.freeze()  # collections pass over what is imported
    torch.set_num_threads(1)
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
