"""The command `eval`: engines play the held-out prompts of a configuration, without training.

It evaluates a checkpoint of a run, or the model of the configuration.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from raylearner import leftovers
from raylearner.actors.reward_actor import RewardActors
from raylearner.cleanup import clean_up
from raylearner.config.image_checks import check_vision_support
from raylearner.config.report import job_metadata
from raylearner.config.schema import RunConfig, TinyModel
from raylearner.environments.catalogue import wait_for_services
from raylearner.errors import ConfigError
from raylearner.learner.checkpoint.directory import MANIFEST, find_damage
from raylearner.observability import run_directory
from raylearner.observability.lines import number_of
from raylearner.observability.recorder import Recorder
from raylearner.rewards.catalogue import check_rows
from raylearner.rewards.judge import check_judges
from raylearner.rewards.scorer import Scorer
from raylearner.run import cluster, machine, prompt_checks
from raylearner.run.evaluation import HeldOutPrompts, make_evaluators
from raylearner.run.evaluation_tables import make_tables
from raylearner.run.fleet import RolloutFleet
from raylearner.run.model import RunModel
from raylearner.run.start_view import follow
from raylearner.tokenization.template_checks import check_template
from raylearner.types import PolicyVersion

logger = logging.getLogger(__name__)


def evaluate(config: RunConfig, *, checkpoint: Path | None) -> None:
    """Play `evaluation.num_prompts` prompts, print tables, and write `eval.jsonl`.

    Raises `ConfigError` for a configuration without held-out prompts and for a directory that is not a
    complete checkpoint, and the cause of a failure.
    """
    if config.evaluation is None:
        raise ConfigError("evaluation: must not be null for eval")
    if not config.held_out:
        raise ConfigError("data.evaluation: required, since eval plays its prompts")
    logger.info("run directory: %s", config.run.dir)
    held_out = [(part, prompt_checks.load_rows(config, part.sources)) for part in config.held_out]
    prompts = [prompt for _, rows in held_out for prompt in rows]
    model, step, version = _model(config, checkpoint)
    Scorer(config.rewards)
    check_rows(config.rewards, prompts)
    asyncio.run(wait_for_services(config.environment))
    asyncio.run(check_judges(config.rewards))
    renderer = prompt_checks.make_renderer(config, model=model)
    assert renderer is not None, "a model directory has a tokenizer"
    if renderer.vision is None:
        check_vision_support(config)
    check_template(renderer, config.environment, prompts)
    held_out = [
        (part, prompt_checks.select_fitting(config, rows, renderer, key=part.data_key))
        for part, rows in held_out
    ]
    assert config.run.dir is not None, "the command line names a directory"
    folder = Path(config.run.dir).absolute()
    machine.check_socket_paths(config)
    leftovers.sweep(config.weights.folder)
    machine.check_disk_space(folder)
    with run_directory.lock(folder, is_new=True):
        try:
            cluster.connect(config.cluster, metadata=job_metadata(config))
            config = cluster.resolve(config)
            cluster.check_variables(config)
            records = asyncio.run(
                _evaluate(config, folder, held_out, model=model, step=step, version=version)
            )
        finally:
            cluster.disconnect()
    console = Console()
    for record in records:
        for table in make_tables(record):
            console.print(table)


def _model(config: RunConfig, checkpoint: Path | None) -> tuple[str, int, PolicyVersion]:
    """Return directory or hub id, learner step and policy version of the evaluated model."""
    if checkpoint is None:
        if isinstance(config.model, TinyModel):
            raise ConfigError(
                "model.kind: a 'tiny' model is created by its run; name a checkpoint of that run with "
                "checkpoint=RUN_DIR/checkpoints/step_NNNNNN"
            )
        return config.model.path, 0, 0
    if not checkpoint.is_dir():
        raise ConfigError(f"checkpoint: no such directory {str(checkpoint)!r}")
    if (damage := find_damage(checkpoint)) is not None:
        raise ConfigError(f"checkpoint: {checkpoint} is not complete: {damage}")
    step = json.loads((checkpoint / MANIFEST).read_text())["step"]
    progress = json.loads((checkpoint / "learner" / "progress.json").read_text())
    return str((checkpoint / "model").absolute()), int(step), int(progress["policy_version"])


async def _evaluate(
    config: RunConfig,
    folder: Path,
    held_out: Sequence[HeldOutPrompts],
    *,
    model: str,
    step: int,
    version: PolicyVersion,
) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    started = RunModel(model)
    rewards = RewardActors(config.run.name, config.rewards)
    fleet = RolloutFleet(
        config=config.model_copy(
            update={
                "weights": config.weights.model_copy(update={"transport": "shared_files"}),
                "observability": config.recorded.model_copy(update={"trace": False}),
            }
        ),
        model=started,
        replay=None,
        on_loss=_no_loss,
        on_join=_no_join,
    )
    with Recorder.of_run(config, folder, num_steps=max(step, 1)) as recorder:
        try:
            engines = number_of(config.actors.min_actors, "engine")
            with recorder.stage(f"starting {engines}") as stage:
                following = asyncio.create_task(follow(started, {"engines": fleet}, stage.wait_for))
                try:
                    await asyncio.gather(rewards.start(), fleet.start())
                finally:
                    following.cancel()
            # Engines start at version 0: they loaded these weights, and none are pushed.
            for evaluator in make_evaluators(config, held_out, recorder.evaluation_trajectories):
                with recorder.stage(f"evaluating {number_of(evaluator.num_prompts, 'prompt')}"):
                    record = await evaluator.evaluate(fleet.evaluators, step=step, policy_version=0)
                records.append(record | {"policy_version": version})
                recorder.evaluation(records[-1])
        finally:
            await clean_up(sys.exception(), fleet.stop, rewards.close)
    return records


async def _no_loss(actor_id: str, *, is_failure: bool) -> None:
    """Do nothing: evaluation claims nothing."""


async def _no_join(actor_id: str, receive: object) -> None:
    """Do nothing: a replacement loads the same weights itself."""
