"""What `--help` says beside the options: arguments and examples of each command."""

RUN_ARGUMENTS = (
    ("CONFIG [OVERLAY..]", "YAML files; each is merged over those before it"),
    ("KEY=VALUE", "overrides over the files, such as run.num_steps=20"),
)

ARGUMENTS = {
    "train": RUN_ARGUMENTS,
    "eval": (
        *RUN_ARGUMENTS,
        ("checkpoint=DIR", "RUN_DIR/checkpoints/step_NNNNNN, not the files' model"),
        ("", "(without files, the configuration of its run is used)"),
    ),
    "check": RUN_ARGUMENTS,
    "submit": RUN_ARGUMENTS,
    "sweep": (("FILE", "sweep file, as in configs/sweeps/; with --report also its folder"),),
    "scale": (
        ("RUN", "run directory, or the name of a run in runs/"),
        ("actors=N", "number of rollout actors"),
    ),
    "view": (("DIR..", "run directories, or directories of runs; by default runs/"),),
    "init": (("FOLDER", "folder that gets them; by default the current one"),),
    "convert": (
        ("FILE", "a .yaml file, a .sh launch script, or a .py script of TRL;"),
        ("", "scripts are read as text and never run"),
        ("KEY=VALUE", "further overrides of that project, such as trainer.nnodes=2"),
    ),
}

WORDS = {
    "train": (
        ("reward", "mean reward of the episodes that the step trained on"),
        ("tok/s", "tokens that all engines sample per second"),
        ("stale", "policy versions between sampling and training, on average"),
        ("gap", "difference of log-probabilities, learner and engines, in nats"),
        ("idle A/B%", "time without work: A of the learner, B of the engines"),
        ("ETA", "remaining time at the pace of the last steps"),
    )
}
"""Words of a command's output."""

QUICKSTART = "configs/quickstart.yaml"

EXAMPLES = {
    "train": (
        ("train a tiny model on this machine, in minutes", f"train {QUICKSTART}"),
        (
            "shorter, with a directory of its own",
            f"train {QUICKSTART} run.num_steps=20 run.dir=runs/first",
        ),
        ("continue a run for more steps", "train --resume runs/first run.num_steps=200"),
        ("resume after crashes", f"train --retries 3 {QUICKSTART}"),
    ),
    "eval": (
        ("the model of the configuration", f"eval {QUICKSTART}"),
        (
            "a checkpoint of a run",
            "eval checkpoint=runs/first/checkpoints/step_000060",
        ),
    ),
    "check": (
        ("validate, and print the sizes that follow", f"check {QUICKSTART}"),
        ("also play one episode without an engine", f"check {QUICKSTART} --play"),
    ),
    "submit": (
        (
            "a run on a cluster, and its log",
            f"submit {QUICKSTART} --follow \\\n      --address http://HOST:8265",
        ),
        ("resume a run there", "submit --resume runs/first"),
        ("a sweep", "submit --sweep configs/sweeps/objective_staleness.yaml"),
        ("with a variable of this shell", f"submit {QUICKSTART} --env HF_TOKEN"),
    ),
    "sweep": (
        ("show the trials", "sweep configs/sweeps/objective_staleness.yaml --dry-run"),
        ("run them, or the rest of them", "sweep configs/sweeps/objective_staleness.yaml"),
        ("the results, also while it runs", "sweep runs/sweeps/objective_staleness --report"),
    ),
    "scale": (("from any shell that sees the cluster", "scale runs/first actors=4"),),
    "view": (
        ("all runs, in a browser", "view"),
        ("one run, as it goes", "view runs/first"),
        ("a page to send to someone", "view runs/first --step 20 --output page.html"),
    ),
    "doctor": (("before the first run on a machine", "doctor"),),
    "convert": (
        (
            "a launch script of verl, and what it could not carry",
            "convert run_grpo.sh --out my.yaml",
        ),
        ("a recipe of TRL, to standard output", "convert grpo.yaml --from trl"),
    ),
    "init": (
        ("the examples in ./configs, and the first run", "init"),
        ("", "train configs/quickstart.yaml"),
    ),
}


def help_text(name: str, summary: str) -> str:
    """Return the help of a command: its summary, then its arguments in a table."""
    arguments = ARGUMENTS.get(name, ())
    width = max((len(argument) for argument, _ in arguments), default=0)
    lines = [f"  {argument:<{width}}  {meaning}" for argument, meaning in arguments]
    return "\n".join([summary, *(["", "\b", "Arguments:", *lines] if lines else [])])


def epilog(name: str) -> str:
    """Return the examples of a command, and words of its output; `\\b` keeps click from joining lines."""
    lines = [
        line
        for meaning, command in EXAMPLES[name]
        for line in (*([f"  # {meaning}"] if meaning else []), f"  raylearner {command}")
    ]
    words = [f"  {word:<9}  {meaning}" for word, meaning in WORDS.get(name, ())]
    if words:
        words = ["", "\b", "A step's line (docs/observability.md has all metrics):", *words]
    return "\n".join(["\b", "Examples:", *lines, *words])
