"""Where numbers go besides the run's JSON lines: TensorBoard event files, without TensorFlow or torch."""

# Protobuf makes its classes at run time, out of a type checker's sight.
# pyright: reportAttributeAccessIssue=false

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardFile:
    """Scalars as TensorBoard reads them, one event per step."""

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        summary = summary_pb2.Summary(
            value=[summary_pb2.Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()]
        )
        self._add(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

    def rewind(self, step: int) -> None:
        """TensorBoard forgets what it read of later steps."""
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(event_pb2.Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        self._writer.close()

    def _add(self, event: event_pb2.Event) -> None:
        self._writer.add_event(event)
        self._writer.flush()
