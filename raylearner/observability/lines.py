"""Lines of the console, which fit into 80 columns with their time stamp."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

Metrics: TypeAlias = Mapping[str, float | None]

WIDTH = 80
STAMP_WIDTH = len("12:34:56 ")
LINE_WIDTH = WIDTH - STAMP_WIDTH
"""Maximum width of a message that stands on one line of the log."""

THOUSANDS = ("", "k", "M", "G", "T")
UNITS = ((60.0, "s"), (60.0, "m"), (24.0, "h"), (1.0, "d"))
"""Number of each unit of time in the next one."""
MAX_UNITS = 100
FIGURES_WIDTH = len("  reward 0.123  tok/s 1.2k  stale 1.2  idle 12/34%  ETA 99m")


def step_line(metrics: Metrics, *, num_steps: int, remaining_s: float | None) -> str:
    """Return one aligned line, with a dash for missing values and NaN."""
    width = len(str(num_steps))
    step = metrics.get("step")
    parts = [
        f"step {'-' if step is None else f'{step:.0f}':>{width}}/{num_steps}",
        f"reward {fixed(metrics.get('rollout/reward/mean'), 5):>5}",
        f"tok/s {amount(metrics.get('rollout/tokens_per_s')):>4}",
        f"stale {fixed(metrics.get('buffer/staleness/mean'), 3):>3}",
        f"idle {_idle(metrics)}",
        f"ETA {duration(remaining_s)}",
    ]
    is_wide = len(parts[0]) + FIGURES_WIDTH <= LINE_WIDTH
    return ("  " if is_wide else " ").join(parts)


def figures(metrics: Metrics) -> str:
    """Return the figures of the live panel."""
    learner, engines = (share(metrics.get(key)) for key in IDLE)
    parts = (
        f"reward {fixed(metrics.get('rollout/reward/mean'), 5)}",
        f"tok/s {amount(metrics.get('rollout/tokens_per_s'))}",
        f"stale {fixed(metrics.get('buffer/staleness/mean'), 3)}",
        f"gap {fixed(metrics.get('learner/logprob_gap/mean'), 5)}",
        f"idle learner {learner} engines {engines}",
    )
    return "  ".join(parts)


IDLE = ("learner/idle_fraction", "rollout/idle_fraction")


def _idle(metrics: Metrics) -> str:
    learner, engines = (_percent(metrics.get(key)) for key in IDLE)
    return f"{learner:>2}/{engines + '%':<3}"


def _percent(value: float | None) -> str:
    """Return at most two digits."""
    return "-" if not _is_number(value) else f"{min(99.0, 100 * value):.0f}"


def share(value: float | None) -> str:
    """Return a fraction in percent: `37%`."""
    return "-" if not _is_number(value) else f"{100 * value:.0f}%"


def fixed(value: float | None, width: int) -> str:
    """Return a number with as many decimals as fit into `width`, at most three."""
    if not _is_number(value):
        return "-"
    for decimals in (3, 2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= width:
            lost = value != 0 and float(text) == 0 and width > 4
            return _power(value) if lost else text
    return _power(value)


def _power(value: float) -> str:
    """`2e-7`."""
    digit, exponent = f"{value:.0e}".split("e")
    return f"{digit}e{int(exponent)}"


def amount(value: float | None) -> str:
    """Return a positive number in four characters: `614`, `1.2k`, `123k`, `1.2M`."""
    if not _is_number(value):
        return "-"
    for suffix in THOUSANDS:
        digits = f"{value:.0f}" if not suffix or value >= 9.95 else f"{value:.1f}"
        if len(digits) <= 3:
            return f"{digits}{suffix}"
        value /= 1000
    return ">1P"


def duration(seconds: float | None) -> str:
    """Return a duration in at most three characters: `59s`, `90m`, `34h`, `12d`."""
    if not _is_number(seconds):
        return "-"
    for size, unit in UNITS[:-1]:
        if round(seconds) < MAX_UNITS:
            return f"{seconds:.0f}{unit}"
        seconds /= size
    return f"{seconds:.0f}{UNITS[-1][1]}"


def clock(seconds: float) -> str:
    """`4:05` or `1:02:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number_of(count: int, noun: str) -> str:
    """`1 engine` or `8 engines`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def without_set(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of eval.jsonl with keys that do not start with the name of its set."""
    start = f"{record['set']}/" if "set" in record else ""
    return {key.removeprefix(start): value for key, value in record.items()}


def sources_of(record: Mapping[str, Any]) -> list[str]:
    """Return the data sources of a row of eval.jsonl, without the name of its set."""
    return sorted(k.removesuffix("/num_prompts") for k in record if k.endswith("/num_prompts"))


def evaluation_lines(record: Mapping[str, Any]) -> list[str]:
    """Return a line for an evaluation, and one for each data source where there are several."""
    name, record = record.get("set"), without_set(record)
    sources = sources_of(record)
    named = [("", "")] + [(s, f"{s}/") for s in sources if len(sources) > 1]
    lines: list[str] = []
    for source, prefix in named:
        reward = f"reward {fixed(record.get(f'{prefix}reward/mean'), 5)}"
        if (error := record.get(f"{prefix}reward/standard_error")) is not None:
            reward += f" ± {fixed(error, 5)}"
        parts = [reward]
        if (count := record.get(f"{prefix}num_prompts")) is not None:
            parts.append(f"on {number_of(int(count), 'prompt')}")
        if (samples := record.get(f"{prefix}samples_per_prompt")) is not None:
            parts[-1] += f", {samples} times each"
            parts += [
                f"{name} {fixed(record[key], 5)}"
                for name in (f"pass@{samples}", f"majority@{samples}")
                if (key := f"{prefix}{name}") in record
            ]
        parts += [
            f"{record[f'{prefix}{key}']:.0f} {word}"
            for key, word in (("errors", "failed"), ("unfinished", "unfinished"))
            if record.get(f"{prefix}{key}")
        ]
        of = f" of {name}" if name else ""
        head = source or f"evaluation{of} at step {record['step']}"
        lines.append(f"{head}: {', '.join([' '.join(parts[:2]), *parts[2:]])}")
    return lines


def ready_line(name: str, phases: Sequence[str], size: int) -> str:
    """Return how many of a group are ready, and what the others do: `engines 3/8 ready: 5 loading weights`."""
    line = f"{name} {size - len(phases)}/{size} ready"
    counts = Counter(phases).most_common()
    for index, (phase, count) in enumerate(counts):
        text = phase if len(counts) == 1 else f"{count} {phase}"
        longer = f"{line}{', ' if index else ': '}{text}"
        if len(longer) > LINE_WIDTH - (3 if index + 1 < len(counts) else 0):
            return f"{line}, .." if index else line
        line = longer
    return line


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
