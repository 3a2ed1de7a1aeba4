"""A file with one step of a run: the page, its modules and its data in one, loading nothing."""

import base64
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from raylearner.errors import ConfigError
from raylearner.observability.jsonl import dumps
from raylearner.observability.transcripts import IMAGES, TRAJECTORIES
from raylearner.observability.viewer import answers, records
from raylearner.observability.viewer.query import Filters
from raylearner.observability.viewer.runs import Library, Run

MAX_POINTS = 500
MAX_ROWS = 100_000
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:;"
    " base-uri 'none'; form-action 'none'"
)
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
_LINKS = re.compile(r'^<(?:link rel="(?:icon|stylesheet)"|script type="module").*\n', re.MULTILINE)


def write(run_dir: Path, file: Path, *, step: int | None = None) -> None:
    """Write the page to a file. Raises `ConfigError` if it cannot be rendered or written."""
    if file.resolve().is_relative_to(run_dir.resolve()) and file.suffix != ".html":
        raise ConfigError(
            f"--output {file}: may be a file of the run; choose a name that ends in .html"
        )
    text = page(run_dir, step=step)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {file}: cannot be written: {error.strerror}") from error


def page(run_dir: Path, *, step: int | None = None) -> str:
    """Return one step as HTML, by default the last one.

    Raises `ConfigError` if the run does not have the step, or a file is damaged.
    """
    runs = list(Library([run_dir]).runs().values())
    if len(runs) != 1 or runs[0].path != run_dir.resolve():
        raise ConfigError(f"{run_dir}: is not the directory of one run, which --output needs")
    run = runs[0]
    try:
        return _page(run, _choose(run, step))
    finally:
        run.close()


def _choose(run: Run, step: int | None) -> int:
    steps = run.index.steps("training")
    if not steps:
        raise ConfigError(f"{run.path}: {run.without_trajectories()}")
    if step is not None and step not in steps:
        raise ConfigError(f"{run.path}: has no step {step}; the last one is {steps[-1]}")
    return steps[-1] if step is None else step


def _page(run: Run, step: int) -> str:
    file = records.find_tokenizer(run.path)
    tokenizer = records.load_tokenizer(file) if file is not None else None
    filters = Filters(step=step)
    listed: dict[str, Any] = {
        by: answers.list_trajectories(
            run, filters, by=by, sort="step", is_descending=True, offset=0, limit=MAX_ROWS
        )
        for by in ("groups", "trajectories")
    }
    if not listed["groups"]["rows"]:
        problems = listed["groups"]["problems"] or ["it is empty"]
        raise ConfigError(f"{run.path}: step {step} cannot be shown: {problems[0]}")
    keys = answers.describe_keys([run])
    lines = [row["line"] for row in listed["trajectories"]["rows"]]
    whole = {line: answers.load_record(run, "training", step, line) for line in lines}
    described = answers.describe_run(run)
    data = {
        "run": {**described, "steps": {"training": [step], "evaluation": []}, "path": ""},
        "step": step,
        "keys": keys,
        "curves": {key: answers.curve(run, key, MAX_POINTS) for key in keys},
        "configuration": answers.compare_configurations([run]),
        "images": dict(_images(run, whole.values())),
        **listed,
    }
    # The list is parsed when the page opens, each trajectory when it is shown.
    blocks = [_embedded("answers", data)]
    blocks += [
        _embedded(f"trajectory-{line}", records.view(record, tokenizer))
        for line, record in whole.items()
    ]
    icon = base64.b64encode(_read("icon.svg").encode()).decode()
    html = _LINKS.sub("", _read("index.html")).replace(
        'src="static/icon.svg"', f'src="data:image/svg+xml;base64,{icon}"'
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
    head += f"<style>\n{_read('base.css')}{_read('pages.css')}</style>\n</head>"
    tail = "\n".join([*blocks, f'<script type="module">\n{_bundle()}</script>', "</body>"])
    return html.replace("</head>", head).replace("</body>", tail)


def _images(run: Run, found: Any) -> Iterator[tuple[str, str]]:
    """Yield data URLs by name; missing images are left out."""
    for name in sorted({name for record in found for name in record.get("images") or ()}):
        path = run.path / TRAJECTORIES / IMAGES / name
        if path.is_file():
            yield name, f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _embedded(name: str, value: object) -> str:
    """Return a block of data without `<`, so that no completion can close it."""
    text = dumps(value).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _read(name: str) -> str:
    return resources.files(__package__ or "").joinpath("static", name).read_text("utf-8")


def _bundle() -> str:
    """Return the modules as one: each becomes a function that returns what it exports."""
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        text = _read(f"{name}.js")
        for _, needed in _IMPORT.findall(text):
            add(needed)
        exported = ", ".join(found[1] for found in _EXPORT.findall(text))
        body = _IMPORT.sub(r"const \1 = module_\2;", _EXPORT.sub(r"\1", text))
        done[name] = f"const module_{name} = (() => {{\n{body}return {{{exported}}};\n}})();\n"

    add("main")
    return "".join(done.values())
