"""The Ray cluster of a run: joins or starts one, and checks that it holds the run."""

import logging
import math
import os
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.job_config import JobConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylearner import job_variables
from raylearner.actors.process import prepare_process, reach_nodes_directly
from raylearner.cleanup import clean_up_now
from raylearner.config import devices, resources
from raylearner.config.checks import warnings
from raylearner.config.devices import Devices
from raylearner.config.learner import TOKEN_BUDGET
from raylearner.config.resources import Resolved, named_variables
from raylearner.config.schema import ClusterSection, RunConfig
from raylearner.errors import ConfigError, StartError, summary
from raylearner.network import check_reachable, refuse_bad_authentication
from raylearner.run import machine

logger = logging.getLogger(__name__)

NUM_STARTS = 3
"""Maximum number of tries to start a local cluster."""
START_PAUSE_S = 3.0
"""Time between two tries, and for the processes of a failed one to end."""
PROBE_TIMEOUT_S = 60.0
"""Maximum time for machines to report what their GPUs can do."""
START_LOGGERS = ("ray._private.node", "ray._private.services", "ray._private.worker")
"""Ray's loggers that report a failed start with stacks and excerpts of logs."""


def connect(config: ClusterSection, *, metadata: Mapping[str, str] | None = None) -> str:
    """Join the cluster of `RAY_ADDRESS` or `cluster.address`, or start a local one.

    The Jobs page shows `metadata`, unless this process is a submitted job, which has its own. Returns the
    `host:port` of the dashboard, empty where there is none. Raises `ConfigError` when the cluster cannot be reached.
    """
    refuse_bad_authentication()
    address = os.environ.get("RAY_ADDRESS") or config.address
    # The output of actors stays in Ray's log files; errors and metrics are returned.
    common: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.WARNING,
        "job_config": JobConfig(metadata=dict(metadata or {})),
    }
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    if address:
        try:
            check_reachable(address)
            url = ray.init(address=address, **common).dashboard_url or ""
        except Exception as error:  # Ray raises many types
            key = "RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") else "cluster.address"
            raise ConfigError(
                f"{key} {address!r} cannot be joined: {summary(error)}; start it with"
                " `ray start --head`, set RAY_AUTH_MODE=token where it asks for a token (the default),"
                " or leave the address out for a local cluster"
            ) from None
        reach_nodes_directly()
        return url
    context = _start_local(
        num_cpus=config.num_cpus,
        object_store_memory=config.object_store_bytes,
        include_dashboard=config.dashboard,
        dashboard_host="127.0.0.1",
        _node_ip_address="127.0.0.1",
        **common,
    )
    return context.dashboard_url or ""


def _start_local(**options: Any) -> Any:
    """Start a local cluster, again after a failure, since a busy machine may exceed Ray's own limits.

    Raises `StartError` after the last try. No process of a failed start is left.
    """
    variable, folder = machine.ray_temp_dir()
    before, cause = {child.pid for child in psutil.Process().children()}, ""
    for number in range(1, NUM_STARTS + 1):
        try:
            with _quiet_start():
                return ray.init(address="local", **options)
        except Exception as error:  # Ray raises many types
            _end_failed_start(before)
            cause = summary(error)
        if number < NUM_STARTS:
            logger.warning("Ray did not start, attempt %d of %d: %s", number, NUM_STARTS, cause)
            time.sleep(START_PAUSE_S)
    raise StartError(
        f"Ray did not start in {NUM_STARTS} attempts: {cause}; its logs are in"
        f" {folder}/ray/session_latest/logs ({variable}); run `python -m raylearner"
        " doctor` to check the machine"
    )


@contextmanager
def _quiet_start() -> Iterator[None]:
    """Keep Ray from printing the stack and the logs of a failed start, whose cause is reported in a line."""
    loggers = [logging.getLogger(name) for name in START_LOGGERS]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def _end_failed_start(before: Container[int]) -> None:
    """Disconnect, and end the processes that the start left: those of this one that are not in `before`."""
    with suppress(Exception):
        ray.shutdown()
    started = [child for child in psutil.Process().children() if child.pid not in before]
    processes = [*started, *(p for child in started for p in _descendants(child))]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=START_PAUSE_S)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def disconnect() -> None:
    """Leave the cluster, and end a local one. A failure here does not replace another."""
    clean_up_now(sys.exception(), ray.shutdown)


def resolve(config: RunConfig) -> RunConfig:
    """Replace every `auto` by a value for this cluster, and log each decision."""
    resolved = supply([config]).resolve(config)
    for decision in resolved.decisions:
        logger.info("%s", decision)
    for warning in warnings(resolved.config):
        logger.warning("%s", warning)
    return resolved.config


def find_devices() -> Devices:
    """Return what the cluster's machines with GPUs can do, as far as all of them answer in time."""
    nodes = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("GPU")]
    probe: Any = _probe
    calls = [
        probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(n, soft=False)).remote()
        for n in nodes
    ]
    try:
        found = ray.get(calls, timeout=PROBE_TIMEOUT_S)
        return devices.merge(found) if found else devices.UNKNOWN
    except RayError as error:  # a timeout is one
        logger.warning("the GPUs of the cluster were not examined: %s", summary(error))
        return devices.UNKNOWN


@ray.remote(num_cpus=0)
def _probe() -> Devices:
    return devices.probe()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSupply:
    """What `auto` is resolved for."""

    num_gpus: float
    num_cpus: float
    devices: Devices

    def resolve(self, config: RunConfig) -> Resolved:
        return resources.resolve(
            config,
            num_gpus=self.num_gpus,
            num_cpus=self.num_cpus,
            devices=self.devices,
        )


def supply(configs: Sequence[RunConfig]) -> ClusterSupply:
    """Return the resources of the cluster, in use or not, that decide what `auto` is in these configurations."""
    amounts = ray.cluster_resources()
    num_gpus = amounts.get("GPU", 0.0)
    found = find_devices() if num_gpus else devices.UNKNOWN
    is_auto = any(
        "auto" in (config.actors.num_actors, config.learner.max_tokens_per_micro_batch)
        for config in configs
    )
    if num_gpus >= 1 and is_auto and found.min_bytes is None:
        logger.warning(
            "the memory of the GPUs is unknown: one engine on each and micro-batches of %d tokens,"
            " unless configured",
            TOKEN_BUDGET,
        )
    return ClusterSupply(num_gpus=num_gpus, num_cpus=amounts.get("CPU", 0.0), devices=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """Resources that a run reserves."""

    cpus: float
    gpus: float
    num_actors: int
    num_ranks: int


def run_size(config: RunConfig, supply: ClusterSupply, *, min_cpus: float = 0.0) -> RunSize:
    """Return the resources of a run alone on a cluster with this supply."""
    config = supply.resolve(config).config
    return RunSize(
        cpus=max(config.cpus_needed, min_cpus),
        gpus=config.gpus_needed,
        num_actors=config.actors.min_actors,
        num_ranks=config.learner.num_ranks,
    )


def check_supply(config: RunConfig) -> None:
    """Raise `ConfigError` with demand and supply when the cluster cannot hold the run."""
    gpus = ray.cluster_resources().get("GPU", 0.0)
    check_fits(
        run_size(config, ClusterSupply(num_gpus=gpus, num_cpus=math.inf, devices=devices.UNKNOWN))
    )


def check_variables(config: RunConfig) -> None:
    """Raise `ConfigError` where a configured environment variable is not set on a joined cluster.

    A local cluster has the variables of this process.
    """
    named = dict(named_variables(config))
    if not named or not (os.environ.get("RAY_ADDRESS") or config.cluster.address):
        return
    find_unset: Any = _find_unset
    unset = set(ray.get(find_unset.remote(list(named.values()))))
    problems = [
        f"{key}: the environment variable {variable} is not set on the cluster's machines; submit the run"
        f" with {job_variables.OPTION} {variable}, or set it where `ray start` runs"
        for key, variable in named.items()
        if variable in unset
    ]
    if problems:
        raise ConfigError("\n".join([*problems, "nothing was started."]))


@ray.remote(num_cpus=0)
def _find_unset(names: list[str]) -> list[str]:
    """Return the variables that are not set in a worker's process."""
    prepare_process()
    return [name for name in names if not os.environ.get(name)]


def check_fits(size: RunSize, *, name: str = "") -> None:
    """Raise `ConfigError` where the whole cluster has less; `name` is that of the run."""
    supply = ray.cluster_resources()
    problems: list[str] = []
    for resource, needed, keys in (
        ("CPU", size.cpus, "actors.cpus_per_actor, learner.cpus_per_rank, reward models' cpus"),
        ("GPU", size.gpus, "actors.gpus_per_actor, learner.gpus_per_rank, reward models' gpus"),
    ):
        has = supply.get(resource, 0.0)
        if needed > has:
            problems.append(
                f"{name + ': ' if name else ''}{needed:g} {resource}s are needed"
                f" ({size.num_actors} rollout actors and {size.num_ranks} learner ranks), the"
                f" cluster has {has:g}; lower actors.num_actors, learner.num_ranks, {keys}, or add"
                " nodes"
            )
    if problems:
        raise ConfigError("\n".join([*problems, "nothing was started."]))
