"""Ranks of a learner as processes, forked from one that has imported what they need."""

import multiprocessing
import multiprocessing.connection
import os
import runpy
from multiprocessing import forkserver
from pathlib import Path

from raylearner.learner.model import mesh

PRELOADED = ["learners", "peft", "raylearner.tiny.vision_model"]
"""Imported once for all ranks of a test session, which is most of what a rank takes to start."""
TIMEOUT_S = 280.0


def run_ranks(script: Path, folder: Path, *, num_ranks: int) -> None:
    """Call the script's `main(folder, rank, device_mesh)` in one process a rank, which have met.

    Fails with what the first rank that failed said; none is left.
    """
    context = multiprocessing.get_context("forkserver")
    _start_server()
    port = mesh.free_port()
    ranks = [
        context.Process(target=_play, args=(script, folder, rank, num_ranks, port))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    try:
        while running := [rank.sentinel for rank in ranks if rank.is_alive()]:
            assert multiprocessing.connection.wait(running, TIMEOUT_S), "the ranks hang"
            failed = [i for i, rank in enumerate(ranks) if rank.exitcode]
            assert not failed, _errors(folder, failed[0]).read_text()[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _start_server() -> None:
    """With one thread a rank, and able to import what tests share."""
    forkserver.set_forkserver_preload(PRELOADED)
    changes = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parents[2], Path(__file__).parent))),
    }
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        forkserver.ensure_running()
    finally:
        for name in changes:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _errors(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.err"


def _play(script: Path, folder: Path, rank: int, num_ranks: int, port: int) -> None:
    with _errors(folder, rank).open("w") as errors:
        os.dup2(errors.fileno(), 2)
    device_mesh = mesh.connect(rank=rank, world_size=num_ranks, address=("127.0.0.1", port))
    runpy.run_path(str(script))["main"](folder, rank, device_mesh)
    mesh.disconnect()
    os._exit(0)  # the interpreter's own shutdown sometimes aborts in a thread of gloo
