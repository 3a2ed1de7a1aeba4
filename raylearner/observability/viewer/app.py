"""The endpoints of the page. All of them only read."""

import logging
import threading
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from tokenizers import Tokenizer

from raylearner.errors import ConfigError
from raylearner.listening import Guard, Hosts
from raylearner.observability.jsonl import dumps
from raylearner.observability.transcripts import IMAGES
from raylearner.observability.viewer import answers, records, sweeps
from raylearner.observability.viewer.index import FOLDERS
from raylearner.observability.viewer.query import MAX_INTEGER, Filters, Kind, Sort, Step
from raylearner.observability.viewer.runs import Library

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'"
    " data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Nothing is loaded from elsewhere, no text can become a script, and no other page shows this one."""
PAGE_SIZE = 100
MAX_PAGE_SIZE = 500
MAX_POINTS = 500
"""Maximum number of points of a curve; with more steps, a point is the mean of neighbours."""
MAX_COMPARED = 24

Offset = Annotated[int, Query(ge=0, le=MAX_INTEGER)]
Compared = Annotated[list[str], Query(max_length=MAX_COMPARED)]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE)]


class Answer(JSONResponse):
    """JSON without NaN, whatever text it holds."""

    def render(self, content: Any) -> bytes:
        return dumps(content).encode()


class Tokenizers:
    """Owns the tokenizers of runs, each loaded once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[tuple[Path, int], Tokenizer] = {}

    def of(self, run_dir: Path) -> Tokenizer | None:
        """Return a run's tokenizer, if it has one. Raises `ConfigError` if it is damaged."""
        file = records.find_tokenizer(run_dir)
        if file is None:
            return None
        key = (file, file.stat().st_mtime_ns)
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = records.load_tokenizer(file)
            return self._loaded[key]


def make_app(library: Library, host: str = HOST) -> Guard:
    """Make the application for a server bound to `host`."""
    app = FastAPI(title="raylearner viewer", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(GZipMiddleware, minimum_size=2000)
    tokenizers = Tokenizers()
    static = resources.files(__package__ or "").joinpath("static")

    @app.middleware("http")
    async def add_headers(request: Request, call_next: Any) -> Response:  # pyright: ignore[reportUnusedFunction]
        response: Response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(ConfigError)
    async def not_found(_: Request, error: ConfigError) -> Answer:  # pyright: ignore[reportUnusedFunction]
        return Answer({"error": str(error)}, status_code=404)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Answer:  # pyright: ignore[reportUnusedFunction]
        text = f"{request.url.path[:200]}: {error.detail}"
        return Answer({"error": text}, status_code=error.status_code)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Answer:  # pyright: ignore[reportUnusedFunction]
        first: Mapping[str, Any] = error.errors()[0]
        text = f"{'.'.join(map(str, first['loc'][1:]))[:80]}: {first['msg']}"
        return Answer({"error": text}, status_code=422)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Answer:  # pyright: ignore[reportUnusedFunction]
        logger.exception("%s cannot be answered", request.url.path)
        return Answer({"error": f"{type(error).__name__}: {error}"}, status_code=500)

    @app.get("/")
    def page() -> FileResponse:  # pyright: ignore[reportUnusedFunction]
        return FileResponse(str(static / "index.html"))

    _add_runs(app, library)
    _add_trajectories(app, library, tokenizers)
    app.mount("/static", StaticFiles(directory=str(static)))
    return Guard(app=app, hosts=Hosts.of(host))


def _add_runs(app: FastAPI, library: Library) -> None:
    @app.get("/api/runs")
    def list_runs(  # pyright: ignore[reportUnusedFunction]
        text: str = "", state: str = "", offset: Offset = 0, limit: Limit = 50
    ) -> Answer:
        words = text.lower().split()
        found = [r for r in library.runs().values() if all(w in r.id.lower() for w in words)]
        found.sort(key=lambda run: (run.modified_s(), run.id), reverse=True)
        rows = [run.summary() for run in found] if state else []
        rows = [row for row in rows if row["state"] == state]
        total = len(rows) if state else len(found)
        page = rows[offset:][:limit] if state else [r.summary() for r in found[offset:][:limit]]
        sweeps_found = [sweeps.summary(name, path) for name, path in library.sweeps().items()]
        return Answer({"total": total, "runs": page, "sweeps": sweeps_found})

    @app.get("/api/run")
    def show_run(run: str) -> Answer:  # pyright: ignore[reportUnusedFunction]
        return Answer(answers.describe_run(library.run(run)))

    @app.get("/api/keys")
    def list_keys(run: Compared) -> Answer:  # pyright: ignore[reportUnusedFunction]
        return Answer(answers.describe_keys([library.run(name) for name in run]))

    @app.get("/api/metrics")
    def read_metrics(  # pyright: ignore[reportUnusedFunction]
        run: Annotated[list[str], Query(max_length=1000)],
        key: Annotated[list[str], Query(max_length=200)],
        stamp: str = "",
        points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = MAX_POINTS,
    ) -> Answer:
        found = [library.run(name) for name in run]
        stamps = [f"{r.metrics.refresh()}+{r.evaluations.refresh()}" for r in found]
        now = " ".join(stamps)
        if stamp and stamp == now:
            return Answer({"stamp": now, "is_unchanged": True})
        curves = {r.id: {k: answers.curve(r, k, points) for k in key} for r in found}
        return Answer({"stamp": now, "is_unchanged": False, "curves": curves})

    @app.get("/api/configuration")
    def compare(run: Compared) -> Answer:  # pyright: ignore[reportUnusedFunction]
        return Answer(answers.compare_configurations([library.run(name) for name in run]))

    @app.get("/api/sweep")
    def show_sweep(sweep: str) -> Answer:  # pyright: ignore[reportUnusedFunction]
        path = library.sweeps().get(sweep)
        if path is None:
            raise ConfigError(f"{sweep[:200]}: no such sweep; it may have been moved or removed")
        return Answer(sweeps.read(sweep, path, library.runs()))


def _add_trajectories(app: FastAPI, library: Library, tokenizers: Tokenizers) -> None:
    @app.get("/api/trajectories")
    def list_trajectories(  # pyright: ignore[reportUnusedFunction]
        run: str,
        filters: Annotated[Filters, Depends()],
        by: Annotated[str, Query(pattern="^(groups|trajectories)$")] = "groups",
        sort: Sort = "step",
        descending: bool = True,
        offset: Offset = 0,
        limit: Limit = PAGE_SIZE,
    ) -> Answer:
        return Answer(
            answers.list_trajectories(
                library.run(run),
                filters,
                by=by,
                sort=sort,
                is_descending=descending,
                offset=offset,
                limit=limit,
            )
        )

    @app.get("/api/group")
    def show_group(run: str, step: Step, group: str, kind: Kind = "training") -> Answer:  # pyright: ignore[reportUnusedFunction]
        return Answer(answers.show_group(library.run(run), kind, step, group))

    @app.get("/api/trajectory")
    def show_trajectory(run: str, step: Step, line: Step, kind: Kind = "training") -> Answer:  # pyright: ignore[reportUnusedFunction]
        found = library.run(run)
        record = answers.load_record(found, kind, step, line)
        return Answer(records.view(record, tokenizers.of(found.path)))

    @app.get("/api/image")
    def show_image(run: str, name: str, kind: Kind = "training") -> FileResponse:  # pyright: ignore[reportUnusedFunction]
        file = library.run(run).path / FOLDERS[kind] / IMAGES / name
        if not records.is_image_name(name) or not file.is_file():
            raise ConfigError(f"{name[:80]}: no such image")
        return FileResponse(str(file), media_type="image/png")
