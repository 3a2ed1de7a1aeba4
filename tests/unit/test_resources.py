"""What `auto` becomes: shares that fit, transports that work there, explicit numbers untouched."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from minimal import QUICKSTART

from raylearner.config import engine_count, speed
from raylearner.config.devices import Devices, Gpu
from raylearner.config.loader import load
from raylearner.config.memory import ModelSize
from raylearner.config.resources import resolve
from raylearner.config.schema import PretrainedModel, RunConfig, VllmEngine
from raylearner.errors import ConfigError


def config(**changes: Any) -> RunConfig:
    changes = {"actors__num_actors": 2} | changes
    return load(
        [QUICKSTART], [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
    )


H200 = 141 * 2**30


EPISODES = {"actors__max_concurrent_episodes": 512, "actors__engine__max_sequences": 512}


def gpus(num_bytes: int | None) -> Devices:
    return Devices(gpus=(Gpu("H200", 9.0, num_bytes),))


def sized(num_parameters: int) -> ModelSize:
    """A model of 30 blocks whose tokens keep at most 38 kB of keys and values in bfloat16."""
    return ModelSize(
        num_parameters=num_parameters,
        num_block=0,
        num_rest=0,
        num_blocks=30,
        hidden_size=576,
        intermediate_size=1536,
        attention_size=960,
        vocab_size=49_152,
        linears=(),
    )


def automatic(
    monkeypatch: pytest.MonkeyPatch,
    num_parameters: int | None,
    supply: dict[str, Any],
    **changes: Any,
) -> tuple[int, float, float]:
    """The number of actors, and the shares of a GPU and of its memory that each has."""
    size = None if num_parameters is None else sized(num_parameters)
    monkeypatch.setattr(engine_count.ModelSize, "of", lambda folder: size)
    model = {"model": "{kind: pretrained, path: some/model}", "actors__num_actors": "auto"}
    resolved = resolve(config(**model, **changes), **supply)
    actors = resolved.config.actors
    engine = actors.engine
    assert isinstance(engine, VllmEngine)
    assert isinstance(actors.num_actors, int)
    assert actors.gpus_per_actor != "auto"
    lines = [line for line in resolved.decisions if "actors.num_actors" in line]
    assert len(lines) == (0 if actors.num_actors == 2 and actors.gpus_per_actor < 1 else 1)
    return actors.num_actors, actors.gpus_per_actor, engine.memory_fraction


@pytest.mark.parametrize(
    ("num_parameters", "num_gpus", "changes", "expected"),
    [
        (135_000_000, 4, {}, (12, 0.25)),
        (1_500_000_000, 4, {}, (6, 0.5)),
        (2_300_000_000, 4, {}, (3, 1)),
        (135_000_000, 2, {}, (4, 0.25)),
        (None, 4, {}, (3, 1)),
        # The learner's GPUs are not the engines'.
        (135_000_000, 4, {"learner__num_ranks": 2}, (8, 0.25)),
        # Without GPUs beside the learner nothing is decided by them.
        (135_000_000, 1, {}, (2, 0.3)),
        (135_000_000, 0, {}, (2, 0)),
        (135_000_000, 4, {"weights__transport": "ipc", "cluster__num_cpus": 8}, (2, 0.3)),
        # An engine on several GPUs, and values that are named.
        (2_300_000_000, 5, {"actors__engine__tensor_parallel_size": 2}, (2, 2)),
        (135_000_000, 4, {"actors__gpus_per_actor": 0.5}, (6, 0.5)),
        (135_000_000, 4, {"actors__gpus_per_actor": 0}, (2, 0)),
        # Few episodes leave nothing for more engines: 2 groups of 8, none ahead.
        (135_000_000, 4, {"replay__groups_per_step": 2, "replay__max_staleness": 0}, (3, 1)),
        # 64 episodes a step, none, 4 or 8 steps ahead: at least 128 for each engine that could play more.
        (135_000_000, 2, EPISODES | {"replay__max_staleness": 0}, (1, 1)),
        (135_000_000, 2, EPISODES | {"replay__max_staleness": 5}, (3, 0.3)),
        (135_000_000, 2, EPISODES, (4, 0.25)),
        (135_000_000, 4, EPISODES, (3, 1)),
    ],
)
def test_small_models_have_several_engines_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    num_parameters: int | None,
    num_gpus: int,
    changes: dict[str, Any],
    expected: tuple[int, float],
) -> None:
    supply = {"num_gpus": num_gpus, "num_cpus": 64, "devices": gpus(H200)}
    count, share, fraction = automatic(
        monkeypatch, num_parameters, supply, **{"replay__max_staleness": 8} | changes
    )
    assert (count, share) == expected
    if 0 < share < 1:
        assert fraction / share == pytest.approx(0.85)


@pytest.mark.parametrize(
    ("supply", "expected"),
    [
        # 48 sequences of 160 tokens in float32 at 77 kB, weights and 2 GiB: 3.3 GiB an engine.
        ({"devices": gpus(8 * 2**30)}, 2),
        ({"devices": gpus(4 * 2**30)}, 1),
        ({"devices": gpus(None)}, 1),
        # Two CPUs for each engine, and one at least.
        ({"num_cpus": 13}, 2),
        ({"num_cpus": 4}, 1),
    ],
)
def test_memory_and_cpus_limit_the_engines_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, supply: dict[str, Any], expected: int
) -> None:
    given = {"num_gpus": 4, "num_cpus": 64, "devices": gpus(H200)} | supply
    count, _, _ = automatic(monkeypatch, 135_000_000, given, replay__max_staleness=8)
    assert count == 3 * expected


def shares(num_gpus: float, **changes: Any) -> tuple[float, float, str]:
    resolved = resolve(config(**changes), num_gpus=num_gpus).config
    learner, actors = resolved.learner.gpus_per_rank, resolved.actors.gpus_per_actor
    assert learner != "auto"
    assert actors != "auto"
    return learner, actors, resolved.weights.transport


@pytest.mark.parametrize(
    ("num_gpus", "changes", "expected"),
    [
        (0, {}, (0, 0, "shared_files")),
        # Enough for one each.
        (3, {}, (1, 1, "nccl")),
        (8, {}, (1, 1, "nccl")),
        # Engines share what the learner leaves, also one of several ranks.
        (2, {}, (1, 0.5, "shared_files")),
        (4, {"actors__num_actors": 7, "cluster__num_cpus": 8}, (1, 0.3, "shared_files")),
        (
            4,
            {"learner__num_ranks": 2, "actors__num_actors": 4, "cluster__num_cpus": 8},
            (1, 0.5, "shared_files"),
        ),
        # One GPU is shared in equal parts.
        (1, {}, (0.3, 0.3, "ipc")),
        # An engine on several GPUs gets them whole.
        (4, {"actors__engine__tensor_parallel_size": 2, "actors__num_actors": 1}, (1, 2, "nccl")),
        # Explicit values win.
        (4, {"actors__gpus_per_actor": 0.25}, (1, 0.25, "shared_files")),
        (4, {"learner__gpus_per_rank": 0}, (0, 1, "shared_files")),
        (4, {"weights__transport": "shared_files"}, (1, 1, "shared_files")),
    ],
)
def test_gpus_and_transport_follow_from_the_machine(
    num_gpus: int, changes: dict[str, Any], expected: tuple[float, float, str]
) -> None:
    assert shares(num_gpus, **changes) == expected


def memory_fraction(**changes: Any) -> float:
    engine = resolve(config(**changes), num_gpus=1).config.actors.engine
    assert engine.kind == "vllm"
    return engine.memory_fraction


def test_engines_share_the_memory_of_a_gpu_with_the_learner() -> None:
    assert memory_fraction() == pytest.approx(0.85 * 0.3)
    assert memory_fraction(actors__engine__memory_fraction=0.2) == 0.2
    changes = {"weights__transport": "ipc", "replay__max_staleness": 0}
    asleep = memory_fraction(**changes, actors__engine__sleep=True)
    assert asleep == pytest.approx(0.85 * 0.75 / 2, abs=1e-4)


def test_adapters_travel_alone_only_where_vllm_has_kernels_for_them() -> None:
    lora = {"learner__lora__rank": 8, "actors__engine__dtype": "float32"}
    assert shares(0, **lora)[2] == "adapter"
    assert shares(1, **lora)[2] == "ipc"
    assert shares(1, **lora | {"actors__engine__dtype": "bfloat16"})[2] == "adapter"
    with pytest.raises(ConfigError, match=r"'adapter' needs actors.engine.dtype bfloat16"):
        shares(1, **lora, weights__transport="adapter")


def test_ipc_puts_every_rank_on_a_gpu_with_its_share_of_the_engines() -> None:
    changes = {
        "weights__transport": "ipc",
        "learner__num_ranks": 2,
        "actors__num_actors": 6,
        "cluster__num_cpus": 8,
    }
    assert shares(2, **changes) == (0.25, 0.25, "ipc")
    assert shares(8, **changes) == (0.25, 0.25, "ipc")
    with pytest.raises(ConfigError, match=r"2 learner ranks .* there are 1 GPUs"):
        shares(1, **changes)
    with pytest.raises(ConfigError, match=r"1.25"):
        shares(2, **changes, learner__gpus_per_rank=0.5, actors__gpus_per_actor=0.25)


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_actors", [1, 2, 3, 5, 8, 13])
def test_what_is_decided_always_fits(num_gpus: int, num_actors: int) -> None:
    learner, actors, _ = shares(num_gpus, actors__num_actors=num_actors, cluster__num_cpus=32)
    places = num_gpus - learner if learner == 1 else num_gpus
    per_gpu = math.floor(1 / actors + 1e-9)
    tenants = num_actors + (0 if learner == 1 else 1)
    assert tenants <= places * per_gpu


def test_transports_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs learner and engines on GPUs"):
        resolve(config(weights__transport="nccl"), num_gpus=0)
    with pytest.raises(ConfigError, match="'nccl'"):
        resolve(config(weights__transport="nccl"), num_gpus=1)


def test_half_precision_loosens_the_verification() -> None:
    assert resolve(config(), num_gpus=0).config.weights.verify_tolerance == 1e-3
    weights = resolve(config(actors__engine__dtype="bfloat16"), num_gpus=3).config.weights
    assert (weights.verify_tolerance, weights.verify_statistic) == (0.25, "mean")


def test_caches_are_kept_where_engines_run_ahead_and_share_nothing_stale() -> None:
    def cache(**changes: Any) -> str:
        return resolve(config(**changes), num_gpus=0).config.weights.cache

    assert cache() == "keep"
    assert cache(replay__max_staleness=0) == "recompute"
    vision = {"model__vision": "{}", "renderer__images__max_pixels": 300_000}
    assert cache(**vision) == "recompute"
    assert cache(**vision, learner__vision_tower="frozen") == "keep"
    assert cache(weights__cache="recompute") == "recompute"
    assert cache(replay__max_staleness=0, weights__cache="keep") == "keep"


def test_caches_are_kept_for_models_of_the_hub_that_are_known_to_be_text_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    cached: dict[str, str] = {}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda id, _: cached.get(id))

    def cache(**changes: Any) -> str:
        given = config(**changes)
        model = PretrainedModel(kind="pretrained", path="owner/name")
        return resolve(given.model_copy(update={"model": model}), num_gpus=0).config.weights.cache

    assert cache() == "recompute"
    assert cache(learner__vision_tower="frozen") == "keep"
    cached["owner/name"] = str(file)
    file.write_text("{}")
    assert cache() == "keep"
    file.write_text('{"vision_config": {}}')
    assert cache() == "recompute"


def test_a_range_of_actors_needs_only_its_minimum_and_excludes_ipc() -> None:
    changes = {"actors__num_actors": "{min: 2, max: 16}", "cluster__num_cpus": 8}
    assert config(**changes).cpus_needed == 3
    assert shares(3, **changes) == (1, 1, "nccl")
    assert shares(1, **changes)[2] == "shared_files"
    with pytest.raises(ConfigError, match=r"actors\.num_actors"):
        shares(2, **changes, weights__transport="ipc")


@pytest.mark.parametrize(
    ("num_gpus", "changes", "eager", "compiles"),
    [
        (0, {}, True, False),
        (3, {}, False, False),  # a tiny model
        (3, {"actors__engine__eager": "true", "learner__compile": "true"}, True, True),
        (0, {"actors__engine__eager": "false", "learner__compile": "true"}, False, True),
    ],
)
def test_graphs_and_compilation_follow_device_and_size_and_explicit_values_stay(
    num_gpus: int, changes: dict[str, Any], eager: bool, compiles: bool
) -> None:
    resolved = resolve(config(**changes), num_gpus=num_gpus)
    engine = resolved.config.actors.engine
    assert isinstance(engine, VllmEngine)
    assert (engine.eager, resolved.config.learner.compile) == (eager, compiles)
    lines = [line for line in resolved.decisions if "compile" in line or "eager" in line]
    assert len(lines) == (2 if num_gpus else 0)


@pytest.mark.parametrize(
    ("num_steps", "num_parameters", "compiles"),
    [
        (10, None, False),
        (100, None, True),
        # 8 groups of 8 episodes of at most 160 tokens a step: 5120 tokens at half length.
        (100, 10**8, False),  # 3.1e14 operations
        (100, 2 * 10**10, True),  # 6.1e16
    ],
)
def test_a_learner_compiles_if_the_run_is_long_enough(
    monkeypatch: pytest.MonkeyPatch, num_steps: int, num_parameters: int | None, compiles: bool
) -> None:
    size = None if num_parameters is None else SimpleNamespace(num_parameters=num_parameters)
    monkeypatch.setattr(speed.ModelSize, "of", lambda folder: size)
    changes = {"model": "{kind: pretrained, path: some/model}", "run__num_steps": num_steps}
    resolved = resolve(config(**changes), num_gpus=3)
    assert resolved.config.learner.compile is compiles
    assert any("the learner" in line for line in resolved.decisions)


@pytest.mark.parametrize(
    ("num_gpus", "extra", "said", "ahead"),
    [
        (0, "{}", 0, False),
        (3, "{}", 1, True),
        (3, "{async_scheduling: true}", 1, True),
        (3, "{async_scheduling: false}", 1, False),
        (3, "{distributed_executor_backend: ray}", 1, False),
    ],
)
def test_steps_are_prepared_ahead_on_gpus_unless_the_arguments_exclude_it(
    num_gpus: int, extra: str, said: int, ahead: bool
) -> None:
    resolved = resolve(config(actors__engine__extra_arguments=extra), num_gpus=num_gpus)
    engine = resolved.config.actors.engine
    assert isinstance(engine, VllmEngine)
    assert speed.schedules_ahead(engine, is_on_gpu=num_gpus > 0) is ahead
    lines = [line for line in resolved.decisions if "prepare" in line]
    assert len(lines) == said
