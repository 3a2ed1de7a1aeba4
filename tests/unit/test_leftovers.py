import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raylearner import leftovers

MAKE = """
import sys, tempfile
from pathlib import Path
from raylearner import leftovers
folder = Path(tempfile.mkdtemp(prefix=leftovers.prefix("weights-run-1"), dir=sys.argv[1]))
(folder / "model.safetensors").write_bytes(b"x" * 1000)
print(folder, flush=True)
if len(sys.argv) > 2:
    input()
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", shared)
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(shared))


def _of_dead_process(folder: Path) -> Path:
    command = [sys.executable, "-c", MAKE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return Path(done.stdout.strip())


def test_folders_of_dead_processes_are_removed_and_those_of_running_ones_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dead = _of_dead_process(tmp_path)
    own = tmp_path / f"{leftovers.prefix('weights')}abc123"
    own.mkdir()
    command = [sys.executable, "-c", MAKE, str(tmp_path), "wait"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as living:
        assert living.stdout is not None
        other = Path(living.stdout.readline().decode().strip())
        assert [(found.path, found.num_bytes) for found in leftovers.find(tmp_path)] == [
            (dead, 1000)
        ]
        with caplog.at_level(logging.INFO):
            leftovers.sweep(tmp_path)
        assert not dead.exists()
        assert own.exists()
        assert other.exists()
        assert str(dead) in caplog.text
        living.kill()
    leftovers.sweep(tmp_path)
    assert not other.exists()
    assert own.exists()


@pytest.mark.parametrize(
    "name",
    [
        "raylearner-weights-00000000-{pid}-1-abc",  # another host or container
        "raylearner-weights-abc",  # without an owner
        "weights-{place}-{pid}-1-abc",
    ],
)
def test_names_without_an_owner_that_can_be_looked_up_are_kept(tmp_path: Path, name: str) -> None:
    path = tmp_path / name.format(pid=2**22 - 1, place=leftovers._place())
    path.mkdir()
    assert list(leftovers.find(tmp_path)) == []


def test_an_owner_whose_process_id_was_reused_counts_as_dead(tmp_path: Path) -> None:
    reused = tmp_path / leftovers.prefix("weights").replace(
        f"-{leftovers.start_time(os.getpid())}-", "-1-"
    )
    path = reused.with_name(f"{reused.name}abc")
    path.write_bytes(b"x")
    leftovers.sweep(tmp_path)
    assert not path.exists()


def test_listed_segments_are_removed_with_their_folder_and_nothing_else_is(tmp_path: Path) -> None:
    shared = leftovers.SHARED_MEMORY
    for name in ("psm_1234", "psm_other", "important", "secret"):
        (shared / name).write_bytes(b"x" * 10)
    folder = _of_dead_process(tmp_path)
    (folder / leftovers.SEGMENTS).write_text("psm_1234\nimportant\n../secret\npsm_/../important\n")
    (found,) = leftovers.find(tmp_path)
    assert found.num_bytes == 1000 + 10 + (folder / leftovers.SEGMENTS).stat().st_size
    leftovers.sweep(tmp_path)
    assert sorted(path.name for path in shared.iterdir()) == ["important", "psm_other", "secret"]


def test_segments_mapped_by_a_process_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", Path("/dev/shm"))
    from multiprocessing import shared_memory

    segment = shared_memory.SharedMemory(create=True, size=4096)
    try:
        leftovers.list_segments(tmp_path, [os.getpid()])
        assert segment.name.lstrip("/") in (tmp_path / leftovers.SEGMENTS).read_text().split()
    finally:
        segment.close()
        segment.unlink()
