"""The start of a run: time to the first step, with empty caches and again with full ones, phase by phase.

Every process records a span for each phase of its start (`trace.json`); a phase of several processes is
shown from its first begin to its last end, in seconds from the start of the command.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import Result, parser
from benchmarks.gpu.training import Run
from benchmarks.stories import config, write_prompts

CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
STAGES = ("preparing the model", "starting ", "publishing the first weights")


def timeline(trace: Path, *, started_s: float) -> dict[str, tuple[float, float]]:
    """Return first begin and last end of each phase, in seconds after `started_s` (since the epoch)."""
    text = trace.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    tracks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found: dict[str, tuple[float, float]] = {}
    for event in events:
        name = event["name"]
        is_phase = name.startswith("start: ")
        if event["ph"] != "X" or not (is_phase or name.startswith(STAGES)):
            continue
        role = tracks[event["pid"]].partition("-")[0]
        begin = event["ts"] / 1e6 - started_s
        end = begin + event["dur"] / 1e6
        key = f"{role}: {name.removeprefix('start: ')}"
        first, last = found.get(key, (begin, end))
        found[key] = (round(min(first, begin), 2), round(max(last, end), 2))
    return dict(sorted(found.items(), key=lambda item: item[1]))


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--engines", type=int, default=4)
    args.add_argument("--name", default="start")
    arguments = args.parse_args()
    out: Path = arguments.out
    cpu: bool = arguments.cpu
    result = Result(out, arguments.name)
    prompts = write_prompts(
        out / f"{arguments.name}.jsonl", num_prompts=200, shortest=3, longest=10 if cpu else 60
    )
    for variable in CACHES:
        os.environ[variable] = str(out / f"{arguments.name}-caches" / variable.lower())
    for caches in ("empty", "full"):
        sections: dict[str, Any] = {"observability": {"trace": True}}
        sections |= {"cluster": {"num_cpus": 4}} if cpu else {"learner": {"compile": True}}
        found = config(
            prompts,
            model=arguments.model,
            num_steps=2,
            engines=1 if cpu else arguments.engines,
            max_staleness=1,
            groups_per_step=1 if cpu else 4,
            cpu=cpu,
            graphs=False,  # what `auto` decides
            **sections,
        )
        started_s = time.time()
        run = Run(out / f"{arguments.name}-{caches}", found, cpu=cpu)
        first_step_s: list[float] = []

        def has_stepped(
            metrics: list[dict[str, Any]],
            started_s: float = started_s,
            first_step_s: list[float] = first_step_s,
        ) -> bool:
            if metrics and not first_step_s:
                first_step_s.append(time.time() - started_s)
            return len(metrics) >= 2

        run.wait(timeout_s=240, enough=has_stepped)
        if not first_step_s:
            result.add(**{caches: {"failed": run.tail()}})
            return
        result.add(
            **{
                caches: {
                    "engines": 1 if cpu else arguments.engines,
                    "first_step_s": round(first_step_s[0], 1),
                    "phases": timeline(run.folder / "trace.json", started_s=started_s),
                }
            }
        )
    result.done()


if __name__ == "__main__":
    main()
