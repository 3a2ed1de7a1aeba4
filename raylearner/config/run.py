"""The run as a whole and the cluster it uses."""

from raylearner.config.section import Name, NaturalInt, PositiveFloat, PositiveInt, Section, Seed


class RunSection(Section):
    """The run as a whole."""

    name: Name = "run"
    """Names the run directory; shown in logs, on the Ray dashboard and in job metadata."""
    dir: str | None = None
    """Run directory; it must not exist yet. Default: `runs/<name>-<time>`."""
    num_steps: PositiveInt = 100
    """Learner steps to commit before the run ends."""
    seed: Seed = 0
    """Seeds prompt order, model initialisation and the scripted parts; vLLM samples unseeded."""
    checkpoint_every_steps: NaturalInt = 50
    """A checkpoint is written every so many steps and at the last one; 0 keeps the last only."""
    keep_last: PositiveInt = 2
    """Checkpoints kept; older ones are removed once a newer one is whole."""
    checkpoint_async: bool = True
    """Training stands still only while state is copied to host memory, 12 bytes a trained parameter, and goes on while that is written; false waits until all is on disk."""
    watchdog_s: PositiveFloat = 600.0
    """The run ends, naming who waits for whom, after so many seconds without any progress of episodes, in a learner step, or without an answer of the replay actor."""
    deadline: str | None = None
    """When the machines are taken away: ISO 8601, or seconds since 1970. Default: RAYLEARNER_DEADLINE, or SLURM_JOB_END_TIME, of the environment."""
    deadline_margin_s: PositiveFloat = 300.0
    """So long before the deadline the run writes a checkpoint and stops."""
    max_learner_restarts: NaturalInt = 2
    """How often a learner that died is restored from the last checkpoint before the run ends."""


class ClusterSection(Section):
    """The Ray cluster the run uses."""

    address: str | None = None
    """Address of an existing cluster; empty starts a local one (RAY_ADDRESS, set by jobs, wins)."""
    num_cpus: PositiveInt | None = None
    """CPUs that a local cluster offers. Default: those of the machine."""
    object_store_bytes: PositiveInt = 400_000_000
    """Object store of a local cluster, in bytes."""
    dashboard: bool = False
    """Starts Ray's dashboard on 127.0.0.1 with a local cluster."""
