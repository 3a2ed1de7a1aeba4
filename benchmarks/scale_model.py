"""A model of throughput and of weight distribution, printed beside measured points.

`python benchmarks/scale_model.py` prints the tables of docs/scale.md, where every symbol is defined. Times
are in seconds, sizes in bytes, rates per second.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

PEAK_FLOPS = 989e12
"""Dense bfloat16 of an H100 or H200."""
MEMORY_BYTES_S = 4.8e12
"""Memory bandwidth of an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Time of one token of one request: `base_s + request_s * r` at `r` requests on the GPU."""

    base_s: float
    request_s: float

    def token_s(self, requests: float) -> float:
        return self.base_s + self.request_s * requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Sampled tokens of an episode."""

    mean: float
    longest: float
    """Expected longest one of a group of 8, and of a batch: about the limit where it is often reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One run."""

    name: str
    mode: Literal["async", "sync"]
    rollout_gpus: float
    batch: int
    """Trajectories per step."""
    max_staleness: int
    step_s: float
    """Time of a learner step of one batch."""
    push_s: float = 0.3
    """Time of a push, for which a synchronous run waits."""
    slots: float = math.inf
    """Episodes that all engines play at once."""
    measured: float | None = None
    """Trained trajectories per second."""


def async_rate(layout: Layout, engines: Engines, lengths: Lengths) -> float:
    """Return the trajectories per second of an asynchronous run: the smallest of three limits.

    The learner's, `B / T`; that of the slots, `C / D`; and that of the trajectories admitted,
    `(S + 1) B / W`, where one stays `W = t L8 + B / 2X + T`: until its group is complete, for half a batch,
    and during the step. The engines' time of a token `t` depends on the requests in flight `X t L`, so
    that the rate is found by bisection.
    """
    low, high = 0.0, layout.batch / layout.step_s
    for _ in range(60):
        rate = (low + high) / 2
        if _is_sustained(rate, layout, engines, lengths):
            low = rate
        else:
            high = rate
    return low


def _is_sustained(rate: float, layout: Layout, engines: Engines, lengths: Lengths) -> bool:
    load = rate * lengths.mean / layout.rollout_gpus
    if engines.request_s * load >= 1:
        return False
    token_s = engines.base_s / (1 - engines.request_s * load)
    in_flight = rate * lengths.mean * token_s
    stay_s = token_s * lengths.longest + layout.batch / (2 * rate) + layout.step_s
    capacity = (layout.max_staleness + 1) * layout.batch
    return in_flight <= layout.slots and rate * stay_s <= capacity


def sync_rate(layout: Layout, engines: Engines, lengths: Lengths) -> float:
    """Return the rate of a synchronous run: one batch after another, each until its longest episode ends.

    The requests fall while episodes end, so that the engines' part is `base Lmax + request (B / G) L`.
    """
    rollout_s = engines.base_s * lengths.longest
    rollout_s += engines.request_s * layout.batch / layout.rollout_gpus * lengths.mean
    return layout.batch / (rollout_s + layout.step_s + layout.push_s)


def rate(layout: Layout, engines: Engines, lengths: Lengths) -> float:
    return (async_rate if layout.mode == "async" else sync_rate)(layout, engines, lengths)


STORIES = Lengths(mean=330, longest=990)
"""Stories of docs/benchmarks.md: 362 tokens finished, of which about 32 are the prompt; limit 1,024."""

TWO_GPUS = (
    # The time of a step is the learner's busy fraction of the time between two steps.
    Layout(
        name="asynchronous, B 128, S 4",
        mode="async",
        rollout_gpus=1,
        batch=128,
        max_staleness=4,
        step_s=0.74 * 128 / 59.1,
        slots=256,
        measured=59.1,
    ),
    Layout(
        name="asynchronous, B 64, S 4",
        mode="async",
        rollout_gpus=1,
        batch=64,
        max_staleness=4,
        step_s=0.51 * 64 / 40.2,
        slots=384,
        measured=40.2,
    ),
    Layout(
        name="synchronous, same layout",
        mode="sync",
        rollout_gpus=1,
        batch=128,
        max_staleness=0,
        step_s=0.21 * 128 / 20.5,
        measured=20.5,
    ),
    Layout(
        name="synchronous, colocated",
        mode="sync",
        rollout_gpus=2,
        batch=128,
        max_staleness=0,
        step_s=0.21 * 128 / 24.7,
        measured=24.7,
    ),
)
"""The measured points of 2 H200 in docs/benchmarks.md."""

FOUR_GPUS = (
    # The learner has one GPU as before; colocated, four ranks instead of two (1.31 and 1.09 s at 1 and 2).
    replace(TWO_GPUS[0], rollout_gpus=3, slots=768, measured=85.3),
    replace(TWO_GPUS[3], rollout_gpus=4, step_s=0.98, measured=25.4),
)
"""The runs of `benchmarks/gpu/modes.py` on 4 H200 at commit e0b76af, which docs/scale.md records. Nothing is
fitted to these."""


def fit(layouts: Sequence[Layout], lengths: Lengths) -> Engines:
    """Return the engines' two parameters with the least squared relative error over `layouts`."""

    def error(engines: Engines) -> float:
        return sum(
            (rate(layout, engines, lengths) / layout.measured - 1) ** 2
            for layout in layouts
            if layout.measured is not None
        )

    grid = (
        Engines(base_s=base * 1e-4, request_s=request * 1e-6)
        for base in range(20, 61)
        for request in range(2, 61)
    )
    return min(grid, key=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A dense model: parameters, bytes of keys and values of a token, GPUs of one engine."""

    name: str
    parameters: float
    kv_bytes: float
    tensor_parallel: int


MODELS = (
    Model(name="8B", parameters=8.0e9, kv_bytes=131_072, tensor_parallel=1),
    Model(name="32B", parameters=32.8e9, kv_bytes=262_144, tensor_parallel=2),
    Model(name="70B", parameters=70.6e9, kv_bytes=327_680, tensor_parallel=4),
)
"""Llama-3.1-8B, Qwen2.5-32B, Llama-3.1-70B; keys and values from layers, heads and their size, bfloat16."""

HOST_BASE_S = 3.3e-3
"""Time of an engine's step beside reading the weights, that of SmolLM2 in the fit."""
HOST_REQUEST_S = 14e-6
"""The part of a request: 31,000 tokens/s of 2.3 B at 256 requests, less `HOST_BASE_S` and the weights."""
MEMORY_EFFICIENCY = 0.7
"""Assumed fraction of the memory's bandwidth."""
MFU = 0.4
"""Of the learner, 1.5 B on one H200 in docs/benchmarks.md."""


def engine_of(model: Model, context: float) -> Engines:
    """Return the token time of an engine, weights and cache read at the memory's bandwidth."""
    bytes_s = MEMORY_BYTES_S * MEMORY_EFFICIENCY * model.tensor_parallel
    return Engines(
        base_s=HOST_BASE_S + 2 * model.parameters / bytes_s,
        request_s=HOST_REQUEST_S + model.kv_bytes * context / bytes_s,
    )


def learner_tokens_s(model: Model) -> float:
    """Return the trained tokens per second of one learner GPU: 6 FLOP per parameter and token, 2 to score."""
    return PEAK_FLOPS * MFU / (8 * model.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A balanced cluster."""

    model: str
    gpus: int
    learner_gpus: float
    trajectories_s: float
    in_flight: float
    """Episodes played at once."""
    min_batch: float
    """Trajectories per step below which `max_staleness` would limit the rate."""


def plan(
    model: Model, gpus: int, *, requests: float, tokens: float, sampled: float, staleness: int
) -> Plan:
    """Return the split at which engines and learner are equally fast.

    `requests` are those of one engine, `tokens` the length of a trajectory, of which `sampled` are sampled.
    """
    token_s = engine_of(model, tokens / 2).token_s(requests)
    engine_rate = requests / (token_s * sampled)
    rollout_rate = engine_rate / model.tensor_parallel
    learner_rate = learner_tokens_s(model) / tokens
    learner_gpus = gpus * rollout_rate / (rollout_rate + learner_rate)
    total = learner_gpus * learner_rate
    # (S + 1) B >= X W with W = 3 L t, the longest of a group, half a step of waiting, and a step B / X.
    min_batch = total * 3 * sampled * token_s / (staleness - 0.5)
    return Plan(
        model=model.name,
        gpus=gpus,
        learner_gpus=learner_gpus,
        trajectories_s=total,
        in_flight=total * sampled * token_s,
        min_batch=min_batch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Bytes per second: of a node in each direction, of the learner's node or a relay, of a storage in all."""

    name: str
    node_bytes_s: float
    server_bytes_s: float
    storage_bytes_s: float
    latency_s: float


NETWORKS = (
    Network(
        name="8 x 400 Gb/s",
        node_bytes_s=400e9,
        server_bytes_s=400e9,
        storage_bytes_s=200e9,
        latency_s=5e-6,
    ),
    Network(
        name="100 Gb/s",
        node_bytes_s=12.5e9,
        server_bytes_s=12.5e9,
        storage_bytes_s=50e9,
        latency_s=5e-5,
    ),
    Network(
        name="internet, 1 Gb/s",
        node_bytes_s=0.125e9,
        server_bytes_s=1.25e9,
        storage_bytes_s=10e9,
        latency_s=0.05,
    ),
)
"""Assumed: InfiniBand of eight adapters, one Ethernet port, internet with 10 Gb/s at the learner and relays."""
CHUNK_BYTES = 8e6
NUM_RELAYS = 8
DELTA_FRACTION = 0.02
"""Bytes of a lossless delta relative to all weights: 20 to 35 MB of 1.2 GB (TRL), 108 MB of 14 GB (PULSE)."""


def one_by_one(size: float, nodes: int, network: Network) -> float:
    """One sender, one copy for each node."""
    return max(nodes * size / network.server_bytes_s, size / network.node_bytes_s)


def broadcast(size: float, nodes: int, network: Network) -> float:
    """A pipelined ring: everyone passes chunks on, `S / b` and one chunk for each hop."""
    hop_s = min(CHUNK_BYTES, size) / network.node_bytes_s + network.latency_s
    return size / network.node_bytes_s + (nodes - 1) * hop_s


def tree(size: float, nodes: int, network: Network, fan_out: int = 2) -> float:
    """A pipelined tree: each node sends every chunk `k` times, over `log_k n` levels."""
    depth = math.ceil(math.log(nodes * (fan_out - 1) + 1, fan_out))
    hop_s = fan_out * min(CHUNK_BYTES, size) / network.node_bytes_s + network.latency_s
    return fan_out * size / network.node_bytes_s + (depth - 1) * hop_s


def storage(size: float, nodes: int, network: Network) -> float:
    """One writes to shared storage, then all read: the storage's rate, or each node's own."""
    read_s = max(nodes * size / network.storage_bytes_s, size / network.node_bytes_s)
    return size / min(network.server_bytes_s, network.storage_bytes_s) + read_s


def relays(size: float, nodes: int, network: Network) -> float:
    """One sends to each relay, which serve equal parts of the nodes as chunks arrive."""
    busiest = max(NUM_RELAYS, nodes / NUM_RELAYS) * size / network.server_bytes_s
    hop_s = min(CHUNK_BYTES, size) / network.node_bytes_s + network.latency_s
    return max(busiest, size / network.node_bytes_s) + 2 * hop_s


SCHEMES = {
    "one by one": one_by_one,
    "ring broadcast": broadcast,
    "tree of 2": tree,
    "storage": storage,
    f"{NUM_RELAYS} relays": relays,
}


def throughput_table() -> Iterator[str]:
    engines = fit(TWO_GPUS, STORIES)
    yield f"Fitted: {1e3 * engines.base_s:.1f} ms and {1e6 * engines.request_s:.0f} us per request."
    yield ""
    yield "| run | GPUs | measured, trajectories/s | model | error |"
    yield "|---|---:|---:|---:|---:|"
    for gpus, layouts in ((2, TWO_GPUS), (4, FOUR_GPUS)):
        for layout in layouts:
            assert layout.measured is not None
            found = rate(layout, engines, STORIES)
            error = found / layout.measured - 1
            yield f"| {layout.name} | {gpus} | {layout.measured} | {found:.1f} | {round(100 * error):+d}% |"


def staleness_table() -> Iterator[str]:
    engines = fit(TWO_GPUS, STORIES)
    yield "| `max_staleness` | 1 | 2 | 4 | 8 |"
    yield "|---|---:|---:|---:|---:|"
    for layout, gpus in ((TWO_GPUS[0], 2), (FOUR_GPUS[0], 4)):
        rates = [rate(replace(layout, max_staleness=s), engines, STORIES) for s in (1, 2, 4, 8)]
        yield f"| {gpus} GPUs | " + " | ".join(f"{x:.0f}" for x in rates) + " |"


def plan_table() -> Iterator[str]:
    yield "| model | GPUs | learner GPUs | trajectories/s | in flight | smallest batch at S = 4 |"
    yield "|---|---:|---:|---:|---:|---:|"
    for model in MODELS:
        for gpus in (64, 256, 1024):
            p = plan(model, gpus, requests=128, tokens=4000, sampled=2000, staleness=4)
            yield (
                f"| {p.model} | {p.gpus:,} | {p.learner_gpus:,.0f} | {p.trajectories_s:,.0f} "
                f"| {p.in_flight:,.0f} | {p.min_batch:,.0f} |"
            )


def distribution_table(nodes: int = 100) -> Iterator[str]:
    yield "| model | network | " + " | ".join(SCHEMES) + " | tree, delta | relays, delta |"
    yield "|---|---|" + "---:|" * (len(SCHEMES) + 2)
    for model in MODELS:
        size = 2 * model.parameters
        for network in NETWORKS:
            times = [scheme(size, nodes, network) for scheme in SCHEMES.values()]
            times += [scheme(DELTA_FRACTION * size, nodes, network) for scheme in (tree, relays)]
            cells = " | ".join(_seconds(time_s) for time_s in times)
            yield f"| {model.name} | {network.name} | {cells} |"


def _seconds(time_s: float) -> str:
    if time_s < 1:
        return f"{time_s:.2f} s"
    return f"{time_s:.0f} s" if time_s < 600 else f"{time_s / 60:,.0f} min"


def main() -> None:
    for lines in (throughput_table(), staleness_table(), plan_table(), distribution_table()):
        sys.stdout.write("\n".join(lines) + "\n\n")


if __name__ == "__main__":
    main()
