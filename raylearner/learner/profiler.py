"""Profiles of chosen learner steps, by torch's own profiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from raylearner.config.schema import ProfileSection


class StepProfiler:
    """Writes `step_NNNNNN_rank_R.json.gz`, a Chrome trace of every kernel, for each chosen step.

    Other steps cost nothing.
    """

    def __init__(self, config: ProfileSection | None, folder: Path, *, rank: int) -> None:
        self._config = config
        self._folder = folder
        self._rank = rank

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profiles the block where `step` is a chosen one."""
        if self._config is None or step not in self._config.steps:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(
            activities=activities,
            profile_memory=self._config.record_memory,
            with_stack=self._config.record_stacks,
            record_shapes=True,
        ) as profiler:
            yield
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"step_{step:06d}_rank_{self._rank}.json.gz"
        profiler.export_chrome_trace(str(self._folder / name))
