"""A bare NCCL broadcast of as many bytes as a push sends, on two GPUs and on all of them."""

import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu.common import ROOT, Result, end, environment, parser, visible_gpus

GIB = {"2.3B": 2 * 2.26e9 / 2**30, "8B": 2 * 8.03e9 / 2**30}


def run_rank(arguments: Any) -> None:
    import torch
    import torch.distributed as dist

    from raylearner.learner.model import mesh

    device = "cpu" if arguments.cpu else "cuda"
    mesh.connect(
        rank=arguments.rank,
        world_size=arguments.world,
        address=("127.0.0.1", arguments.port),
        device=device,
    )
    size = 2**20 if arguments.cpu else 512 * 2**20
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    times = []
    for repeat in range(8):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.monotonic()
        for _ in range(1 if arguments.cpu else 8):
            dist.broadcast(buffer, 0)
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat > 1:
            times.append((time.monotonic() - started) / (1 if arguments.cpu else 8))
    if arguments.rank == 0:
        rate = size / 2**30 / min(times)
        result = Result(arguments.out, f"broadcast_{arguments.world}")
        result.add(
            ranks=arguments.world,
            gib_per_s=rate,
            seconds={name: gib / rate for name, gib in GIB.items()},
        )
        result.done()
    mesh.disconnect()


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--rank", type=int)
    args.add_argument("--world", type=int)
    args.add_argument("--port", type=int)
    arguments = args.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    from raylearner.learner.model.mesh import free_port

    result = Result(arguments.out, "broadcast")
    gpus = visible_gpus()
    codes = {}
    for world in [2] if len(gpus) < 3 else [2, len(gpus)]:
        port = free_port()
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.gpu.broadcast",
                    *sys.argv[1:],
                    *("--rank", str(rank), "--world", str(world), "--port", str(port)),
                ],
                env=environment([gpus[rank]] if gpus else None, cpu=arguments.cpu),
                cwd=ROOT,
                start_new_session=True,
            )
            for rank in range(world)
        ]
        try:
            codes[world] = [process.wait(60) for process in ranks]
        finally:
            for process in ranks:
                end(process)
    result.add(exit_codes=codes)
    result.done()


if __name__ == "__main__":
    main()
