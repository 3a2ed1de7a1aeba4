"""TensorBoard event files, written without TensorFlow or torch."""

# Protobuf creates its classes at run time, where type checkers cannot follow.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from raylearner.errors import naming
from raylearner.observability.sinks.sink import StepRecord
from raylearner.text import encodable, encodable_values

HISTOGRAM_BUCKETS = 30
MAX_SCALAR = (2 - 2**-23) * 2.0**127
"""The largest float32, in which TensorBoard stores scalars."""


class TensorBoardFile:
    """Scalars, histograms, texts and hyperparameters in TensorBoard's format."""

    def __init__(
        self, folder: Path, *, hparams: Mapping[str, bool | int | float | str] | None = None
    ) -> None:
        """`hparams` are shown on the HPARAMS page, which compares runs."""
        self._folder = folder
        self._writer = EventFileWriter(str(folder))
        self._has_hparams = bool(hparams)
        if hparams:
            values = encodable_values(dict(hparams))  # arguments and paths may be of any bytes
            summary = hparams_pb(values, trial_id=encodable(folder.parent.name))
            self._add(event_pb2.Event(wall_time=time.time(), step=0, summary=summary))

    def write(self, record: StepRecord) -> None:
        value = summary_pb2.Summary.Value
        scalars = {tag: v for tag, v in record.scalars.items() if abs(v) <= MAX_SCALAR}
        summary = summary_pb2.Summary(
            value=[value(tag=tag, simple_value=v) for tag, v in scalars.items()]
        )
        for tag, samples in record.samples.items():
            summary.MergeFrom(histogram_pb(tag, samples, buckets=HISTOGRAM_BUCKETS))
        for tag, text in record.texts.items():
            summary.MergeFrom(text_pb(tag, text))
        self._add(event_pb2.Event(wall_time=time.time(), step=record.step, summary=summary))

    def rewind(self, step: int) -> None:
        """Make TensorBoard discard events of later steps."""
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(event_pb2.Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        if self._has_hparams:
            self._add(event_pb2.Event(wall_time=time.time(), summary=_session_end()))
        with naming(self._folder):
            self._writer.close()

    def _add(self, event: event_pb2.Event) -> None:
        with naming(self._folder):
            self._writer.add_event(event)
            self._writer.flush()


def _session_end() -> summary_pb2.Summary:
    """Return the end of a session, as the plugin does, whose function needs TensorFlow."""
    info = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
    data = plugin_data_pb2.HParamsPluginData(session_end_info=info)
    value = summary_pb2.Summary.Value(
        tag=metadata.SESSION_END_INFO_TAG,
        metadata=metadata.create_summary_metadata(data),
        tensor=metadata.NULL_TENSOR,
    )
    return summary_pb2.Summary(value=[value])
