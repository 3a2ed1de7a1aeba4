"""A page that shows the trajectories of a step: turns, images, and tokens coloured by what is known of them.

The page holds its data and needs nothing else; `serve` offers it on localhost.
"""

import base64
import json
import logging
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer

from raylearner.config.document import Loader
from raylearner.errors import ConfigError
from raylearner.observability.jsonl import dumps, read_lines
from raylearner.observability.transcripts import IMAGES, step_file

logger = logging.getLogger(__name__)

MARK = "/*DATA*/null"
"""Where the page's template wants its data."""


def page(run_dir: Path, *, step: int | None = None) -> str:
    """One step as HTML, the last one if none is named.

    Raises `ConfigError` where the run has no such step, or a file of it is damaged.
    """
    path = _choose(run_dir, step)
    steps = [int(p.stem.removeprefix("step_")) for p in _files(run_dir)]
    tokenizer = _tokenizer(run_dir)
    lines = enumerate(read_lines(path), start=1)
    records = [_record(line, f"{path}:{number}") for number, line in lines]
    data = {
        "run": run_dir.name,
        "step": int(path.stem.removeprefix("step_")),
        "steps": steps,
        "images": _images(path.parent / IMAGES, records),
        "trajectories": [_with_pieces(record, tokenizer) for record in records],
    }
    template = resources.files(__package__ or "").joinpath("viewer.html").read_text("utf-8")
    # "</" would end the script that holds the data, wherever a completion says so.
    return template.replace(MARK, dumps(data).replace("</", "<\\/"))


def write(run_dir: Path, file: Path, *, step: int | None = None) -> None:
    """The page as a file. Raises `ConfigError` where it cannot be made or written."""
    text = page(run_dir, step=step)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {file}: cannot be written: {error.strerror}") from error


def serve(
    run_dir: Path, *, step: int | None = None, port: int, on_ready: Callable[[], None]
) -> None:
    """Until interrupted, on 127.0.0.1; `/?step=3` shows another step.

    Raises `ConfigError` where there is nothing to show or the port cannot be had.
    """
    page(run_dir, step=step)
    try:
        server = HTTPServer(("127.0.0.1", port), _handler(lambda s: page(run_dir, step=s or step)))
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; name another") from error
    on_ready()
    with server:
        server.serve_forever()


def _handler(render: Callable[[int | None], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            number = self.path.rpartition("step=")[2]
            try:
                body, code = render(int(number) if number.isdecimal() else None), 200
            except ConfigError as error:
                body, code = str(error), 404
            self.send_response(code)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug(format, *args)

    return Handler


def _files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "trajectories").glob("step_*.jsonl"))


def _choose(run_dir: Path, step: int | None) -> Path:
    files = _files(run_dir)
    if not files:
        raise ConfigError(
            f"{run_dir}: holds no trajectories; observability.trajectories_every_steps writes them"
        )
    path = files[-1] if step is None else step_file(run_dir / "trajectories", step)
    if path not in files:
        raise ConfigError(f"{run_dir}: has no step {step}; the last one is {files[-1].stem}")
    return path


def _tokenizer(run_dir: Path) -> Tokenizer | None:
    """That of the newest checkpoint, else of the model that the run began with, else none."""
    folders = [*sorted((run_dir / "checkpoints").glob("step_*/model"), reverse=True)]
    folders.append(run_dir / "model")
    saved = run_dir / "config.yaml"
    if saved.is_file():
        try:
            config = yaml.load(saved.read_text(encoding="utf-8"), Loader=Loader)
            folders.append(Path(str(config["model"].get("path", ""))))
        except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{saved}: is no run's configuration; restore it") from error
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
    return None


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON: {error}; name another step") from error


def _images(folder: Path, records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """By name as data URLs; those that are gone are left out."""
    names = sorted({name for record in records for name in record.get("images", ())})
    return {
        name: f"data:image/png;base64,{base64.b64encode((folder / name).read_bytes()).decode()}"
        for name in names
        if (folder / name).is_file()
    }


def _with_pieces(record: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The record with the text of each token; without a tokenizer, its number."""
    ids = record["token_ids"]
    if tokenizer is None:
        return {**record, "pieces": [f"[{number}]" for number in ids]}
    return {
        **record,
        "pieces": [tokenizer.decode([number], skip_special_tokens=False) for number in ids],
    }
