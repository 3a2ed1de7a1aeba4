"""An index of a run's trajectories, in a temporary SQLite database: filtered, sorted and paged there.

Files are read once, in the background, the latest first; a file that is asked for is read at once.
"""

import logging
import re
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raylearner.observability.transcripts import EVALUATIONS, TRAJECTORIES
from raylearner.observability.viewer.markup import question
from raylearner.observability.viewer.query import COLUMNS, Filters, Kind
from raylearner.observability.viewer.records import Record, parse_record
from raylearner.observability.viewer.series import Series

logger = logging.getLogger(__name__)

FOLDERS = {"training": TRAJECTORIES, "evaluation": EVALUATIONS}
MAX_QUESTION_CHARACTERS = 300
MAX_TEXT_CHARACTERS = 100_000
"""Maximum length of a trajectory's text that a search looks through."""
MAX_ANSWER_CHARACTERS = 200
MAX_PROBLEMS = 50
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SCHEMA = """
CREATE TABLE files(kind TEXT, step INTEGER, stamp TEXT, PRIMARY KEY (kind, step));
CREATE TABLE problems(kind TEXT, step INTEGER, text TEXT);
CREATE TABLE rows(
    kind TEXT, step INTEGER, line INTEGER, start INTEGER, size INTEGER, group_key TEXT, sample INTEGER,
    segment INTEGER, question TEXT, reward REAL, advantage REAL, turns INTEGER, tokens INTEGER,
    sampled INTEGER, stop TEXT, error TEXT, error_kind TEXT, staleness INTEGER, source TEXT, tools TEXT,
    gap REAL, images INTEGER, answer TEXT, text TEXT);
CREATE INDEX by_place ON rows(kind, step, line);
CREATE INDEX by_group ON rows(kind, step, group_key);
"""
_INSERT = f"INSERT INTO rows VALUES ({', '.join('?' * 24)})"


class Index:
    """Owns the index of one run directory. Safe to use from several threads."""

    def __init__(self, run_dir: Path, metrics: Series) -> None:
        """`metrics` has the policy versions from which staleness is computed."""
        self._run_dir = run_dir
        self._metrics = metrics
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._database = sqlite3.connect("", check_same_thread=False)
        self._database.executescript(_SCHEMA)
        self._background: threading.Thread | None = None
        self._num_changes = 0
        self._facets: dict[tuple[Kind, int | None], tuple[int, Record]] = {}

    def close(self) -> None:
        with self._reading, self._lock:
            self._database.close()

    def steps(self, kind: str) -> list[int]:
        """Return the steps with a file, in order."""
        return sorted(self._files(kind))

    def refresh(self, kind: str, step: int | None = None) -> tuple[int, int]:
        """Start to read what is new; return the numbers of files that are read and that exist.

        Returns after the file of `step` is read, if one is given.
        """
        files = self._files(kind)
        with self._lock:
            known = dict(
                self._database.execute("SELECT step, stamp FROM files WHERE kind = ?", (kind,))
            )
        for gone in known.keys() - files.keys():
            self._forget(kind, gone)
        pending = sorted(
            (s for s, (_, stamp) in files.items() if known.get(s) != stamp), reverse=True
        )
        if step in pending:
            self._read(kind, step, *files[step])
            pending.remove(step)
        if pending and step is None:
            self._start(kind)
        return len(files) - len(pending), len(files)

    def wait(self) -> None:
        """Wait until everything that was found is read."""
        if self._background is not None:
            self._background.join()

    def trajectories(
        self, filters: Filters, *, sort: str, is_descending: bool, offset: int, limit: int
    ) -> tuple[int, list[Record]]:
        """Return the number of trajectories that pass, and a page of them."""
        where, values = filters.condition()
        order = f"{COLUMNS[sort]} IS NULL, {COLUMNS[sort]} {'DESC' if is_descending else 'ASC'}"
        fields = (
            "step, line, group_key, sample, segment, question, reward, advantage, turns, tokens, sampled,"
            " stop, error, staleness, source, tools, gap, images, answer"
        )
        total = self._fetch(f"SELECT COUNT(*) AS n FROM rows WHERE {where}", values)[0]["n"]
        rows = self._fetch(
            f"SELECT {fields} FROM rows WHERE {where} ORDER BY {order}, step DESC, line LIMIT ? OFFSET ?",
            [*values, limit, offset],
        )
        return int(total), rows

    def groups(
        self, filters: Filters, *, sort: str, is_descending: bool, offset: int, limit: int
    ) -> tuple[int, list[Record]]:
        """Return the number of groups with a trajectory that passes, and a page of them with all members."""
        where, values = filters.condition()
        place = f"(step, group_key) IN (SELECT step, group_key FROM rows WHERE {where})"
        aggregates = {
            "step": "step",
            "reward": "AVG(reward)",
            "spread": "AVG(reward * reward) - AVG(reward) * AVG(reward)",
            "turns": "AVG(turns)",
            "tokens": "AVG(sampled)",
            "staleness": "MAX(staleness)",
            "gap": "MAX(gap)",
        }
        key = aggregates.get(sort, "step")
        order = f"{key} IS NULL, {key} {'DESC' if is_descending else 'ASC'}"
        clause = f"FROM rows WHERE kind = ? AND {place} GROUP BY step, group_key"
        total = self._fetch(
            f"SELECT COUNT(*) AS n FROM (SELECT 1 {clause})", [filters.kind, *values]
        )[0]["n"]
        found = self._fetch(
            f"SELECT step, group_key, MIN(line) AS line {clause} ORDER BY {order}, step DESC, line"
            " LIMIT ? OFFSET ?",
            [filters.kind, *values, limit, offset],
        )
        return int(total), [
            self.group(filters.kind, row["step"], row["group_key"]) for row in found
        ]

    def group(self, kind: str, step: int, group_key: str) -> Record:
        """Return a group's question, mean and spread, and its members without their text."""
        members = self._fetch(
            "SELECT line, sample, segment, question, reward, advantage, turns, tokens, sampled, stop,"
            " error, staleness, source, tools, gap, answer FROM rows WHERE kind = ? AND step = ?"
            " AND group_key = ? ORDER BY sample, segment",
            [kind, step, group_key],
        )
        # Segments of an episode carry the same reward, so the first one counts for all.
        episodes = {member["sample"]: member["reward"] for member in reversed(members)}
        rewards = [reward for reward in episodes.values() if reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else None
        spread = None
        if mean is not None:
            spread = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
        return {
            "step": step,
            "group_key": group_key,
            "question": members[0]["question"] if members else "",
            "source": members[0]["source"] if members else "",
            "mean": mean,
            "spread": spread,
            "members": members,
        }

    def facets(self, kind: Kind, step: int | None = None) -> Record:
        """Return the values of filters: stop reasons, sources, kinds of error, tools, ranges."""
        now = self._num_changes
        known = self._facets.get((kind, step))
        if known is not None and known[0] == now:
            return known[1]
        where, values = Filters(kind=kind, step=step).condition()
        found: Record = {}
        for name in ("stop", "source", "error_kind", "tools"):
            found[name] = [
                [row["value"], row["n"]]
                for row in self._fetch(
                    f"SELECT {name} AS value, COUNT(*) AS n FROM rows WHERE {where} AND {name} IS NOT NULL"
                    f" AND {name} != '' GROUP BY {name} ORDER BY n DESC LIMIT 50",
                    values,
                )
            ]
        ranges = ", ".join(
            f"MIN({column}) AS {name}_min, MAX({column}) AS {name}_max"
            for name, column in COLUMNS.items()
            if name in ("reward", "tokens", "turns", "staleness")
        )
        found |= self._fetch(f"SELECT {ranges} FROM rows WHERE {where}", values)[0]
        self._facets[kind, step] = (now, found)
        return found

    def problems(self, kind: str) -> list[str]:
        """Return why lines could not be shown."""
        found = self._fetch(
            "SELECT text FROM problems WHERE kind = ? ORDER BY step DESC LIMIT ?",
            [kind, MAX_PROBLEMS],
        )
        return [row["text"] for row in found]

    def load(self, kind: str, step: int, line: int) -> Record | None:
        """Return one trajectory's record from its file, or None if there is none."""
        self.refresh(kind, step)
        found = self._fetch(
            "SELECT start, size FROM rows WHERE kind = ? AND step = ? AND line = ?",
            [kind, step, line],
        )
        if not found:
            return None
        with self._files(kind)[step][0].open("rb") as file:
            file.seek(found[0]["start"])
            record, problem = parse_record(file.read(found[0]["size"]))
        return None if problem else record

    def _fetch(self, query: str, values: Sequence[object]) -> list[Record]:
        with self._lock:
            cursor = self._database.execute(query, values)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def _files(self, kind: str) -> Mapping[int, tuple[Path, str]]:
        """Return path and stamp of each step's file."""
        found: dict[int, tuple[Path, str]] = {}
        for path in (self._run_dir / FOLDERS[kind]).glob("step_*.jsonl"):
            number = path.stem.removeprefix("step_")
            if not (number.isascii() and number.isdecimal()) or not path.is_file():
                continue
            stat = path.stat()
            found[int(number)] = (path, f"{stat.st_mtime_ns} {stat.st_size}")
        return found

    def _start(self, kind: str) -> None:
        with self._lock:
            if self._background is not None and self._background.is_alive():
                return
            self._background = threading.Thread(target=self._read_all, args=(kind,), daemon=True)
            self._background.start()

    def _read_all(self, kind: str) -> None:
        try:
            for step, (path, stamp) in sorted(self._files(kind).items(), reverse=True):
                self._read(kind, step, path, stamp)
        except (sqlite3.ProgrammingError, OSError) as error:  # closed, or the run was removed
            logger.debug("reading %s ended: %s", self._run_dir, error)

    def _read(self, kind: str, step: int, path: Path, stamp: str) -> None:
        with self._reading:
            with self._lock:
                found = self._database.execute(
                    "SELECT 1 FROM files WHERE kind = ? AND step = ? AND stamp = ?",
                    (kind, step, stamp),
                ).fetchone()
            if found:
                return
            version = self._metrics.version_before(step) if kind == "training" else None
            rows: list[tuple[object, ...]] = []
            problems: list[tuple[object, ...]] = []
            start = 0
            content = path.read_bytes().split(b"\n")[
                :-1
            ]  # a last line without end is being written
            for number, line in enumerate(content, start=1):
                record, problem = parse_record(line)
                if problem:
                    problems.append((kind, step, f"{path.name}:{number}: {problem}"))
                else:
                    place = (kind, step, number, start, len(line))
                    rows.append((*place, *_fields(record, kind, version)))
                start += len(line) + 1
            self._forget(kind, step)
            with self._lock, self._database:
                self._num_changes += 1
                self._database.executemany(_INSERT, rows)
                self._database.executemany("INSERT INTO problems VALUES (?, ?, ?)", problems)
                self._database.execute("INSERT INTO files VALUES (?, ?, ?)", (kind, step, stamp))

    def _forget(self, kind: str, step: int) -> None:
        with self._lock, self._database:
            self._num_changes += 1
            for table in ("rows", "problems", "files"):
                self._database.execute(
                    f"DELETE FROM {table} WHERE kind = ? AND step = ?", (kind, step)
                )


def _fields(record: Record, kind: str, version: int | None) -> tuple[object, ...]:
    """Return the values of a row after its place in the file, in order."""
    prompt, turns = str(record.get("prompt") or ""), record["turns"]
    text = str(record.get("text") or "")
    key = record.get("prompt_id") if kind == "evaluation" else record.get("group_id")
    start = f"{record['evaluation_set']}/" if record.get("evaluation_set") else ""
    error = record.get("error")
    tools = sorted({str(turn["tool"]) for turn in turns if turn.get("tool")})
    return (
        f"{start}{key}",
        _integer(record.get("sample_index")),
        _integer(record.get("segment")),
        question(prompt)[:MAX_QUESTION_CHARACTERS],
        _number(record.get("reward")),
        _number(record.get("advantage")),
        len(turns),
        len(record["token_ids"]),
        sum(record["loss_mask"]),
        str(record.get("stop_reason") or ""),
        None if error is None else str(error),
        None if error is None else str(error).partition(":")[0][:80],
        _staleness(record, version),
        f"{start}{record.get('source') or ''}",
        ", ".join(tools),
        largest_gap(record),
        len(record.get("images") or ()),
        _answer(record)[:MAX_ANSWER_CHARACTERS],
        f"{prompt}\n{text}\n{error or ''}"[:MAX_TEXT_CHARACTERS],
    )


def _staleness(record: Record, version: int | None) -> int | None:
    """Return the learner's version minus the oldest version of a trained token, or of a sampled one."""
    if version is None:
        return None
    pairs = list(zip(record["policy_versions"], record["train_mask"], strict=True))
    versions: list[int] = [v for v, trains in pairs if trains and v >= 0]
    versions = versions or [v for v, _ in pairs if v >= 0]
    return version - min(versions) if versions else None


def largest_gap(record: Any) -> float | None:
    """Return the largest difference between the learner's and the engine's log-probability."""
    pairs = zip(record.get("learner_logprobs") or (), record["behavior_logprobs"], strict=False)
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=None)


def _answer(record: Record) -> str:
    """Return what an agent program or the last turn answered."""
    last = str(record["turns"][-1].get("text") or "") if record["turns"] else ""
    tagged = _ANSWER.findall(last)
    return str(record.get("given_answer") or (tagged[-1] if tagged else last)).strip()


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0
