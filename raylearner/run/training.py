"""A complete run: the checks before Ray starts, then the controller.

Waits for services, for a cluster that holds the run, and for the controller; a stop is requested by
SIGTERM or a deadline.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from raylearner import leftovers
from raylearner.cleanup import clean_up
from raylearner.config.image_checks import check_adapter_transport, check_vision_support
from raylearner.config.report import job_metadata
from raylearner.config.schema import RunConfig, TinyModel
from raylearner.environments.catalogue import wait_for_services
from raylearner.errors import RunStopped, causes, summary
from raylearner.learner.checkpoint.directory import Checkpoint
from raylearner.observability import run_directory
from raylearner.observability.display import Display
from raylearner.observability.recorder import Recorder
from raylearner.replay.sampler import make_sampler
from raylearner.replay.snapshot import refuse_other_data
from raylearner.rewards.catalogue import check_rows
from raylearner.rewards.judge import check_judges
from raylearner.rewards.scorer import GroupScorer, Scorer
from raylearner.run import checkpointing, cluster, machine, prompt_checks
from raylearner.run.closing_summary import summarized
from raylearner.run.controller import Controller
from raylearner.run.evaluation import HeldOutPrompts
from raylearner.run.stopping import StopRequest
from raylearner.tokenization.template_checks import check_template
from raylearner.types import Prompt

logger = logging.getLogger(__name__)


def run(
    config: RunConfig, *, resume: Path | None = None, restart_if_no_checkpoint: bool = False
) -> None:
    """Train to `run.num_steps`. Raises the cause of a failure; no child process is left on return.

    `resume` is the run directory to resume; without a complete checkpoint there, `restart_if_no_checkpoint` sets
    it aside, and `ConfigError` is raised otherwise.
    """
    assert config.run.dir is not None, "the command line names a directory"
    stop = StopRequest(Path(config.run.dir).absolute())
    with summarized(config), stop.handled(), Display(num_steps=config.run.num_steps) as display:
        _run(
            config, stop, display, resume=resume, restart_if_no_checkpoint=restart_if_no_checkpoint
        )


def _run(
    config: RunConfig,
    stop: StopRequest,
    display: Display,
    *,
    resume: Path | None,
    restart_if_no_checkpoint: bool,
) -> None:
    if resume is not None and checkpointing.is_finished(resume, num_steps=config.run.num_steps):
        logger.info(
            "nothing is left to do: all %d steps of %s are done; raise run.num_steps to continue",
            *(config.run.num_steps, resume),
        )
        return
    logger.info("run directory: %s", config.run.dir)
    machine.check_socket_paths(config)
    machine.stop_time_s(config.run, os.environ)
    with display.stage("reading data"):
        training, held_out = _prepare_data(config)
    asyncio.run(wait_for_services(config.environment))
    asyncio.run(check_judges(config.rewards))
    assert config.run.dir is not None, "the command line names a directory"
    folder = Path(config.run.dir).absolute()
    leftovers.sweep(config.weights.folder)
    machine.check_disk_space(folder)
    changed: Sequence[str] = ()
    with ExitStack() as stack:
        if resume is not None:
            latest = stack.enter_context(
                checkpointing.locked_checkpoint(
                    folder, restart_if_no_checkpoint=restart_if_no_checkpoint
                )
            )
            if latest is not None:
                changed = list(
                    checkpointing.format_changes(checkpointing.changed_keys(folder, config))
                )
                refuse_other_data(latest.folder / "replay", training)
        else:
            latest = stack.enter_context(run_directory.lock(folder, is_new=True))
        with display.stage("connecting to Ray"):
            cluster.connect(config.cluster, metadata=job_metadata(config))
        stack.callback(cluster.disconnect)
        stop.handle()
        config = cluster.resolve(config)
        cluster.check_supply(config)
        cluster.check_variables(config)
        asyncio.run(
            _train(
                config,
                folder,
                training,
                held_out,
                latest=latest,
                stop=stop,
                display=display,
                changed=changed,
            )
        )


def _prepare_data(config: RunConfig) -> tuple[list[Prompt], list[HeldOutPrompts]]:
    """Return the prompts for training and for evaluation that fit; raise what would fail with them."""
    training = prompt_checks.load_rows(config, config.data.train)
    held_out = [(part, prompt_checks.load_rows(config, part.sources)) for part in config.held_out]
    Scorer(config.rewards)
    GroupScorer(config.rewards)
    everything = [*training, *(prompt for _, prompts in held_out for prompt in prompts)]
    check_rows(config.rewards, everything)
    renderer = prompt_checks.make_renderer(config)
    if renderer is not None:
        if not isinstance(config.model, TinyModel):
            refuse = check_vision_support if renderer.vision is None else check_adapter_transport
            refuse(config)
            check_template(renderer, config.environment, everything)
        training = prompt_checks.select_fitting(config, training, renderer, key="data.train")
        held_out = [
            (part, prompt_checks.select_fitting(config, prompts, renderer, key=part.data_key))
            for part, prompts in held_out
        ]
    make_sampler(config.data.sampler, training, seed=config.run.seed, weights=config.data.weights)
    return training, held_out


async def _train(
    config: RunConfig,
    folder: Path,
    training: list[Prompt],
    held_out: list[HeldOutPrompts],
    *,
    latest: Checkpoint | None,
    stop: StopRequest,
    display: Display,
    changed: Sequence[str] = (),
) -> None:
    """Train from the checkpoint `latest`, or from the start; `changed` is logged first."""
    stop.listen(machine.stop_time_s(config.run, os.environ))
    recorder = Recorder.of_run(config, folder, num_steps=config.run.num_steps, display=display)
    for line in changed:
        logger.info("%s", line)
    try:
        controller = await _start(config, folder, recorder, training, held_out, latest, stop.event)
        await controller.run()
    finally:
        await clean_up(sys.exception(), recorder.close)


async def _start(
    config: RunConfig,
    folder: Path,
    recorder: Recorder,
    training: list[Prompt],
    held_out: list[HeldOutPrompts],
    latest: Checkpoint | None,
    stop: asyncio.Event,
) -> Controller:
    try:
        return await Controller.start(
            config, folder, recorder, training, held_out, latest=latest, stop=stop
        )
    except Exception as error:
        cause = next(causes(error))
        if not isinstance(cause, RunStopped):
            logger.error("the run did not start: %s", summary(cause))
        raise cause from cause.__cause__
