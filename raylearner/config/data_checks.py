"""What single keys of the data section cannot tell. Only paths that a run would open are looked at."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from raylearner.config.data import DataSource, JsonlData, ParquetData, ReasoningGymData, UserSampler
from raylearner.config.finding import Finding
from raylearner.config.kind import load_reference
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError


def check_data(config: RunConfig) -> list[Finding]:
    """Clashes of sources, files that are not there, and a sampler that cannot be imported."""
    return [*_evaluation(config), *_sources(config), *_sampler(config)]


def _evaluation(config: RunConfig) -> Iterator[Finding]:
    every = config.evaluation.every_steps
    if every > 0 and config.data.evaluation is None:
        yield Finding(
            "evaluation.every_steps",
            f"{every} needs held-out prompts in data.evaluation; add that section, or set this to 0",
        )


def _sources(config: RunConfig) -> Iterator[Finding]:
    for part, sources in (("train", config.data.train), ("evaluation", config.data.evaluation)):
        if sources == ():
            yield Finding(f"data.{part}", "is an empty list; name a source")
        counts = Counter(source.source_name for source in sources or ())
        for index, source in enumerate(sources or ()):
            key = f"data.{part}.{index}"
            if counts[source.source_name] > 1:
                yield Finding(
                    f"{key}.source",
                    f"{counts[source.source_name]} sources are reported as"
                    f" {source.source_name!r}; give each a `source` of its own",
                )
            yield from _source(key, source)


def _source(key: str, source: DataSource) -> Iterator[Finding]:
    if isinstance(source, JsonlData | ParquetData):
        if not Path(source.path).expanduser().is_file():
            yield Finding(f"{key}.path", f"no such file {source.path!r}")
    elif isinstance(source, ReasoningGymData):
        for name in ("size", "seed"):
            if name in source.parameters:
                yield Finding(
                    f"{key}.parameters.{name}",
                    f"is set by {key}.{'num_prompts' if name == 'size' else 'seed'}; remove it here",
                )


def _sampler(config: RunConfig) -> Iterator[Finding]:
    sampler = config.data.sampler
    if isinstance(sampler, UserSampler):
        try:
            load_reference(sampler.kind)
        except ConfigError as error:
            yield Finding("data.sampler.kind", str(error))
