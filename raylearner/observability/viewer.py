"""A page with the trajectories of a step: turns, images, and tokens coloured by their values.

The page contains its data and loads nothing else; `serve` provides it on localhost.
"""

import base64
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from tokenizers import Tokenizer

from raylearner.config.document import parse
from raylearner.config.problems import Where
from raylearner.errors import ConfigError
from raylearner.listening import Hosts
from raylearner.observability.jsonl import dumps, read_lines
from raylearner.observability.run_directory import FAILURES_FILE
from raylearner.observability.transcripts import IMAGES, step_file

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
CONNECTION_TIMEOUT_S = 30
"""A connection that sends nothing for so long is closed."""
MAX_STEP_DIGITS = 18
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src"
    " 'unsafe-inline'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""The page contains all that it needs; nothing is loaded, and no other page shows it."""
MARK = "<!--DATA-->"
"""Placeholder for the data in the page's template."""
MAX_FAILURES = 20
"""Maximum number of failed episodes shown, the latest ones."""
MAX_LISTED_CHARACTERS = 200
"""Maximum length of a prompt in the list of trajectories."""
STEP_FILE = re.compile(r"step_[0-9]{6,}\.jsonl")
IMAGE_NAME = re.compile(r"[0-9a-f]{32}\.png")
TOKEN_KEYS = ("token_ids", "loss_mask", "train_mask", "behavior_logprobs", "policy_versions")
"""Keys of a trajectory with a value for each token."""


def page(run_dir: Path, *, step: int | None = None) -> str:
    """Return one step as HTML, by default the last one.

    Raises `ConfigError` if the run does not have the step, or a file is damaged.
    """
    path = _choose(run_dir, step)
    steps = [_step(file) for file in _files(run_dir)]
    tokenizer = _tokenizer(run_dir)
    lines = enumerate(_lines(path), start=1)
    records = [_record(line, f"{path}:{number}") for number, line in lines]
    data = {
        "run": run_dir.name,
        "step": _step(path),
        "steps": steps,
        "images": _images(path.parent / IMAGES, records),
        "versions": sorted({v for r in records for v in r["policy_versions"] if v >= 0}),
        "trajectories": [_listed(record) for record in records],
        "failures": _failures(run_dir)[-MAX_FAILURES:],
    }
    # The list is parsed when the page opens, each trajectory when it is shown.
    parts = [_embedded("data", data)]
    for number, record in enumerate(records):
        parts.append(_embedded(f"trajectory-{number}", _with_pieces(record, tokenizer)))
    template = resources.files(__package__ or "").joinpath("viewer.html").read_text("utf-8")
    return template.replace(MARK, "\n".join(parts))


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


def serve(
    run_dir: Path, *, step: int | None = None, port: int, on_ready: Callable[[], None]
) -> None:
    """Serve the page on this machine alone until interrupted; `/?step=3` shows another step.

    Raises `ConfigError` if there is nothing to show or the port is not available.
    """
    page(run_dir, step=step)
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(run_dir, step))
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; choose another") from error
    on_ready()
    with server:
        server.serve_forever()


def _handler(run_dir: Path, first: int | None) -> type[BaseHTTPRequestHandler]:
    hosts = Hosts.of(HOST)

    class Handler(BaseHTTPRequestHandler):
        timeout = CONNECTION_TIMEOUT_S

        def do_GET(self) -> None:
            code, form = 200, "html"
            refusal = hosts.refusal(self.headers.get_all("Host", []), self.headers.get("Origin"))
            if refusal is not None:
                return self._answer(refusal[0], "plain", refusal[1])
            try:
                body = page(run_dir, step=_asked(self.path, first))
            except ConfigError as error:
                code, form, body = 404, "plain", str(error)
            except Exception as error:
                logger.exception("%s cannot be shown", self.path)
                code, form, body = 500, "plain", f"{type(error).__name__}: {error}"
            return self._answer(code, form, body)

        def _answer(self, code: int, form: str, body: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", f"text/{form}; charset=utf-8")
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug(format, *args)

    return Handler


def _asked(target: str, first: int | None) -> int | None:
    """Return the step in a request's path and query, by default `first`."""
    parts = urlsplit(target)
    if parts.path != "/":
        raise ConfigError(f"{parts.path}: not found; /?step=3 shows a step")
    values = parse_qs(parts.query, keep_blank_values=True).get("step")
    if values is None:
        return first
    is_number = values[0].isascii() and values[0].isdecimal()
    if not is_number or len(values[0]) > MAX_STEP_DIGITS:
        raise ConfigError(f"step={values[0][:80]}: is not a step")
    return int(values[0])


def _files(run_dir: Path) -> list[Path]:
    """Return the files of all steps, in order."""
    found = (run_dir / "trajectories").glob("step_*.jsonl")
    return sorted((p for p in found if STEP_FILE.fullmatch(p.name) and p.is_file()), key=_step)


def _step(file: Path) -> int:
    return int(file.stem.removeprefix("step_"))


def _choose(run_dir: Path, step: int | None) -> Path:
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such directory; give the directory of a run")
    files = _files(run_dir)
    if not files and not _has_steps(run_dir):
        raise ConfigError(_without_steps(run_dir))
    if not files:
        raise ConfigError(
            f"{run_dir}: has no trajectories, which observability.trajectories_every_steps controls"
        )
    path = files[-1] if step is None else step_file(run_dir / "trajectories", step)
    if path not in files:
        raise ConfigError(f"{run_dir}: has no step {step}; the last one is {files[-1].stem}")
    return path


def _has_steps(run_dir: Path) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.is_file() and any(line.strip() for line in _lines(metrics))


def _without_steps(run_dir: Path) -> str:
    """Return the error message for a run without steps."""
    if not (run_dir / "config.yaml").is_file():
        return f"{run_dir}: is not the directory of a run, which has a config.yaml"
    failures = _failures(run_dir)
    cause = f"; the last episode on record failed: {failures[-1]['error']}" if failures else ""
    return (
        f"{run_dir}: has no trajectories, because the run completed no step; see"
        f" {run_dir / 'log.txt'}{cause}"
    )


def _failures(run_dir: Path) -> list[dict[str, Any]]:
    """Return the recorded failed episodes, the first of each kind, without damaged lines."""
    path = run_dir / FAILURES_FILE
    found: list[dict[str, Any]] = []
    for line in _lines(path) if path.is_file() else ():
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(cast(dict[str, Any], record).get("error"), str):
            found.append(cast(dict[str, Any], record))
    return found


def _tokenizer(run_dir: Path) -> Tokenizer | None:
    """Return the tokenizer of the latest checkpoint, or of the initial model, or None."""
    folders = [*sorted((run_dir / "checkpoints").glob("step_*/model"), reverse=True)]
    folders.append(run_dir / "model")
    saved = run_dir / "config.yaml"
    if saved.is_file():
        try:
            tree, _ = parse(saved.read_text(encoding="utf-8"), Where(0, 0, str(saved)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{saved}: cannot be read ({error}); restore it") from error
        model = tree.child("model") if tree is not None else None
        if model is None:
            raise ConfigError(f"{saved}: is not the configuration of a run; restore it")
        path = model.child("path")
        folders.append(Path(str(path.value if path is not None else "")))
    for file in (os.path.join(folder, "tokenizer.json") for folder in folders):
        if os.path.isfile(file):
            try:
                return Tokenizer.from_file(file)
            except Exception as error:  # tokenizers raises no narrower type
                raise ConfigError(f"{file}: is not a tokenizer ({error}); restore it") from error
    return None


def _lines(path: Path) -> list[str]:
    try:
        return read_lines(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error}; choose another step") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON: {error}; choose another step") from error
    problem = _find_problem(record)
    if problem:
        raise ConfigError(f"{where}: is not a trajectory: {problem}; choose another step")
    return cast(dict[str, Any], record)


def _find_problem(record: Any) -> str:
    """Return why a record cannot be shown as a trajectory, or an empty string."""
    if not isinstance(record, dict):
        return f"it is of type {type(record).__name__}"
    values = cast(dict[str, Any], record)
    for key in (*TOKEN_KEYS, "turns"):
        if not isinstance(values.get(key), list):
            return f"{key} is not a list"
    num_tokens = len(values["token_ids"])
    for key in TOKEN_KEYS:
        if len(values[key]) != num_tokens:
            return f"{key} differs in length from token_ids"
    if not all(type(x) is int and 0 <= x < 2**32 for x in values["token_ids"]):
        return "token_ids are not all integers >= 0"
    if not all(isinstance(turn, dict) for turn in values["turns"]):
        return "turns are not all objects"
    images: Any = values.get("images") or []
    if not isinstance(images, list) or not all(map(_is_image_name, cast(list[Any], images))):
        return "images are not all file names as written by a run"
    return ""


def _is_image_name(value: object) -> bool:
    """Whether the value is a plain image name; a path could put any file into the page."""
    return isinstance(value, str) and IMAGE_NAME.fullmatch(value) is not None


def _images(folder: Path, records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return data URLs by name; missing images are left out."""
    names = sorted({name for record in records for name in record.get("images") or ()})
    return {
        name: f"data:image/png;base64,{base64.b64encode((folder / name).read_bytes()).decode()}"
        for name in names
        if (folder / name).is_file()
    }


def _embedded(name: str, value: object) -> str:
    """Return a block of data without `<`, so that no completion can close it."""
    text = dumps(value).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _listed(record: dict[str, Any]) -> dict[str, Any]:
    """Return the values by which the list shows and sorts trajectories."""
    pairs = zip(record.get("learner_logprobs") or (), record["behavior_logprobs"], strict=False)
    gaps = [abs(a - b) for a, b in pairs if a is not None and b is not None]
    return {
        "reward": record.get("reward"),
        "advantage": record.get("advantage"),
        "stop_reason": record.get("stop_reason"),
        "num_turns": len(record["turns"]),
        "prompt": str(record.get("prompt") or "")[:MAX_LISTED_CHARACTERS],
        "gap": max(gaps, default=0.0),
    }


def _with_pieces(record: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the record with the text of each token, or its id without a tokenizer."""
    ids = record["token_ids"]
    if tokenizer is None:
        return {**record, "pieces": [f"[{number}]" for number in ids]}
    return {
        **record,
        "pieces": [tokenizer.decode([number], skip_special_tokens=False) for number in ids],
    }
