"""Draw the pictures of the documentation as SVG. `make docs` writes them to docs/figures/."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
REWARD = ROOT / "benchmarks" / "results" / "quickstart.jsonl"
"""Rewards and held-out accuracy of two runs of the quickstart, one of them without learning."""

INK, MUTED, RULE, PAPER = "#1f2933", "#5b6875", "#cbd2d9", "#ffffff"
BLUE, GREEN, ORANGE, VIOLET, GREY = "#2563a8", "#2b8a56", "#c2631b", "#7048a8", "#9aa5b1"
TINTS = {BLUE: "#e6eff9", GREEN: "#e5f4eb", ORANGE: "#fcefe3", VIOLET: "#f0eaf8", GREY: "#eef1f4"}
VERSIONS = ("#a9c7e8", "#6ea3d8", "#2f77bd", "#174f8a")
"""Fill of tokens by the version that sampled them, oldest first."""


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return a picture on a light sheet, which reads the same on dark pages."""
    arrows = "".join(
        f'<marker id="to-{color[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7"'
        f' markerHeight="7" orient="auto"><path d="M0 0L10 5L0 10z" fill="{color}"/></marker>'
        for color in (BLUE, GREEN, ORANGE, VIOLET, GREY, MUTED)
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
        f"<title>{escape(title)}</title>\n<defs>{arrows}</defs>\n"
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="12" fill="{PAPER}"'
        f' stroke="{RULE}"/>\n{body}\n</svg>\n'
    )


def text(
    x: float, y: float, value: str, *, size: int = 14, color: str = INK, anchor: str = "middle",
    weight: int = 400,
) -> str:  # fmt: skip
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"'
        f' font-weight="{weight}">{escape(value)}</text>'
    )


def box(x: float, y: float, width: float, height: float, color: str, lines: Sequence[str]) -> str:
    """Return a rounded box with a bold first line and small lines below it."""
    top = y + height / 2 - 9 * (len(lines) - 1) + 5
    rows = [text(x + width / 2, top, lines[0], size=17, weight=600, color=color)]
    rows += [
        text(x + width / 2, top + 20 * number, line, size=13, color=MUTED)
        for number, line in enumerate(lines[1:], start=1)
    ]
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="10"'
        f' fill="{TINTS[color]}" stroke="{color}" stroke-width="1.5"/>' + "".join(rows)
    )


def arrow(path: str, color: str) -> str:
    return (
        f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2.2"'
        f' marker-end="url(#to-{color[1:]})"/>'
    )


def loop() -> str:
    """Return the way of the data: rollout actors, replay actor, learner, weights."""
    actors = [
        f'<rect x="{40 + 8 * n}" y="{104 - 8 * n}" width="250" height="128" rx="10"'
        f' fill="{TINTS[BLUE]}" stroke="{BLUE}" stroke-width="1.5"/>'
        for n in (2, 1)
    ]
    return picture(
        1040,
        380,
        "Rollout actors stream episodes into the replay actor, the learner takes complete groups and"
        " publishes weights to engines while they generate",
        [
            *actors,
            box(40, 104, 250, 128, BLUE,
                ["Rollout actors", "vLLM engine and environment", "tools, images, rewards",
                 "each token: version, log-probability"]),
            box(450, 104, 180, 128, GREEN,
                ["Replay actor", "ledger of samples", "buffer of groups", "staleness bound"]),
            box(770, 104, 230, 128, ORANGE,
                ["Learner", "FSDP ranks, packed rows", "corrections, loss", "version + 1"]),
            box(470, 22, 140, 44, GREY, ["Data"]),
            arrow("M540 66L540 102", MUTED),
            text(552, 90, "prompts", size=13, color=MUTED, anchor="start"),
            arrow("M448 138L310 138", GREEN),
            text(378, 128, "claim", size=13, color=GREEN),
            arrow("M292 184L448 184", BLUE),
            text(378, 204, "put: each episode", size=13, color=BLUE),
            text(378, 221, "when it ends", size=13, color=BLUE),
            arrow("M630 168L768 168", GREEN),
            text(698, 158, "take: the oldest", size=13, color=GREEN),
            text(698, 188, "complete groups", size=13, color=GREEN),
            box(450, 282, 180, 62, VIOLET, ["Publisher", "checksums and a probe"]),
            arrow("M885 232L885 313L632 313", ORANGE),
            text(758, 303, "new weights", size=13, color=ORANGE),
            arrow("M450 313L165 313L165 234", VIOLET),
            text(308, 303, "loaded during generation,", size=13, color=VIOLET),
            text(308, 333, "verified in every engine", size=13, color=VIOLET),
        ],
    )  # fmt: skip


def staleness() -> str:
    """Return three episodes whose tokens come from several versions, at the take of version 3."""
    left, width, take = 150, 640, 700
    edges = [left, left + 150, left + 310, left + 470]
    parts = [text(left, 34, "Versions of an engine over time, and the tokens of three episodes", size=15,
                  anchor="start", weight=600)]  # fmt: skip
    for number, edge in enumerate(edges):
        end = edges[number + 1] if number < 3 else left + width
        parts.append(
            f'<rect x="{edge}" y="56" width="{end - edge}" height="30" fill="{VERSIONS[number]}"/>'
        )
        parts.append(text((edge + end) / 2, 76, f"version {number}", size=13,
                          color=INK if number < 2 else PAPER, weight=600))  # fmt: skip
        if number:
            parts.append(
                f'<line x1="{edge}" y1="50" x2="{edge}" y2="236" stroke="{VIOLET}"'
                ' stroke-dasharray="4 4"/>'
            )
    parts.append(text(left - 14, 76, "engine", size=13, color=MUTED, anchor="end"))
    episodes = [(left + 20, left + 250), (left + 90, left + 520), (left + 350, left + 540)]
    for row, (start, stop) in enumerate(episodes):
        y = 108 + 42 * row
        parts.append(
            text(left - 14, y + 18, f"episode {row + 1}", size=13, color=MUTED, anchor="end")
        )
        for number, edge in enumerate(edges):
            end = edges[number + 1] if number < 3 else left + width
            begin, stop_here = max(start, edge), min(stop, end)
            if begin < stop_here:
                parts += _tokens(begin, stop_here, y, number)
    parts += [
        f'<line x1="{take}" y1="50" x2="{take}" y2="236" stroke="{ORANGE}" stroke-width="2.5"/>',
        text(take + 8, 128, "take: the learner", size=13, color=ORANGE, anchor="start"),
        text(take + 8, 146, "is at version 3", size=13, color=ORANGE, anchor="start"),
        text(left, 264, "Staleness of a token = version of the learner at training - version that sampled it.",
             anchor="start"),
        text(left, 288, "With max_staleness: 2, the tokens of version 0 are too old, by one version. They are",
             anchor="start"),
        text(left, 308, "crossed out: on_stale: mask leaves them out of the loss, and the others train.",
             anchor="start"),
    ]  # fmt: skip
    return picture(860, 332, "Staleness is a property of each token", parts)


def _tokens(start: int, stop: int, y: int, version: int) -> list[str]:
    """Return a run of tokens of one version; those of version 0 are crossed out."""
    parts = []
    for x in range(start, stop - 8, 14):
        parts.append(
            f'<rect x="{x}" y="{y}" width="11" height="26" rx="2" fill="{VERSIONS[version]}"/>'
        )
        if version == 0:
            parts.append(f'<line x1="{x}" y1="{y + 26}" x2="{x + 11}" y2="{y}" stroke="{ORANGE}"'
                         ' stroke-width="2"/>')  # fmt: skip
    return parts


def corrections() -> str:
    """Return the three policies of a step, and the weight that each correction gives to a ratio."""
    parts = [
        box(40, 30, 200, 70, BLUE, ["Behavior", "sampled the token"]),
        box(370, 30, 200, 70, GREEN, ["Proximal", "start of the step"]),
        box(700, 30, 200, 70, ORANGE, ["Current", "after some updates"]),
        arrow("M240 65L368 65", BLUE),
        arrow("M570 65L698 65", GREEN),
        text(304, 54, "w = proximal", size=13, color=BLUE),
        text(304, 84, "/ behavior", size=13, color=BLUE),
        text(634, 54, "R = current", size=13, color=GREEN),
        text(634, 84, "/ proximal", size=13, color=GREEN),
        text(304, 122, "learner.corrections weigh or reject it", size=13, color=MUTED),
        text(634, 122, "learner.loss clips it", size=13, color=MUTED),
    ]
    plots = [
        ("tis, high 2", [(0, 0), (2, 2), (6, 2)]),
        ("icepop, low 0.5, high 5", [(0, 0), (0.5, 0), (0.5, 0.5), (5, 5), (5, 0), (6, 0)]),
        ("rejection, 0.5 to 2", [(0, 0), (0.5, 0), (0.5, 1), (2, 1), (2, 0), (6, 0)]),
    ]
    for number, (name, points) in enumerate(plots):
        parts += _weights(70 + 300 * number, 160, name, points)
    return picture(940, 366, "Three policies and the corrections between them", parts)


def _weights(x: float, y: float, name: str, points: Sequence[tuple[float, float]]) -> list[str]:
    """Return a plot of the weight of a token over its ratio, both from 0 to 6."""
    width, height = 220, 140
    place = [(x + width * a / 6, y + height * (1 - b / 6)) for a, b in points]
    line = " ".join(f"{a:g},{b:g}" for a, b in place)
    axes = f"M{x} {y}L{x} {y + height}L{x + width} {y + height}"
    ones = f"M{x} {y + height * 5 / 6:g}L{x + width} {y + height * 5 / 6:g}"
    return [
        f'<path d="{axes}" fill="none" stroke="{RULE}" stroke-width="1.5"/>',
        f'<path d="{ones}" stroke="{RULE}" stroke-dasharray="3 4"/>',
        f'<polyline points="{line}" fill="none" stroke="{VIOLET}" stroke-width="2.5"/>',
        text(x + width / 2, y - 8, name, weight=600),
        text(x - 8, y + height * 5 / 6 + 4, "1", size=12, color=MUTED, anchor="end"),
        text(x - 8, y + height + 4, "0", size=12, color=MUTED, anchor="end"),
        *(
            text(x + width * tick / 6, y + height + 17, str(tick), size=12, color=MUTED)
            for tick in (1, 2, 5)
        ),
        text(x + width / 2, y + height + 38, "ratio w of the token", size=12, color=MUTED),
        text(x + width - 4, y + 12, "weight", size=12, color=MUTED, anchor="end"),
    ]


def reward() -> str:
    """Return the reward by step of the quickstart, with a control that does not learn."""
    rows = [json.loads(line) for line in REWARD.read_text(encoding="utf-8").splitlines()]
    x, y, width, height = 70, 60, 600, 220
    last = max(row["step"] for row in rows)

    def at(step: float, value: float) -> str:
        return f"{x + width * step / last:.1f},{y + height * (1 - value):.1f}"

    parts = [text(x, 36, "Quickstart: reward of training episodes by learner step", size=15,
                  anchor="start", weight=600)]  # fmt: skip
    for value in (0, 0.25, 0.5, 0.75, 1):
        level = y + height * (1 - value)
        parts.append(
            f'<line x1="{x}" y1="{level:g}" x2="{x + width}" y2="{level:g}" stroke="{RULE}"/>'
        )
        parts.append(text(x - 10, level + 4, f"{value:g}", size=12, color=MUTED, anchor="end"))
    parts += [
        text(x + width * step / last, y + height + 20, str(step), size=12, color=MUTED)
        for step in range(0, last + 1, 10)
    ]
    parts.append(text(x + width / 2, y + height + 42, "learner step", size=12, color=MUTED))
    names = (("trained", BLUE, "learning rate 2e-4"), ("control", GREY, "control: learning rate 0"))
    for run, color, name in names:
        curve = [row for row in rows if row["run"] == run]
        points = " ".join(at(row["step"], row["reward"]) for row in curve if "reward" in row)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"'
            ' stroke-linejoin="round"/>'
        )
        end = (
            sum(row["reward"] for row in curve if "reward" in row and row["step"] > last - 10) / 10
        )
        parts.append(text(x + width + 12, y + height * (1 - end) + 5, f"{end:.2f}", size=14, color=color,
                          anchor="start", weight=600))  # fmt: skip
        parts.append(text(x + width + 12, y + height * (1 - end) + 23, name, size=12, color=color,
                          anchor="start"))  # fmt: skip
        for row in curve:
            if "accuracy" in row and run == "trained":
                a, b = at(row["step"], row["accuracy"]).split(",")
                parts.append(f'<circle cx="{a}" cy="{b}" r="5.5" fill="{ORANGE}"/>')
    parts.append(f'<circle cx="{x + 330}" cy="{y + height - 26}" r="5.5" fill="{ORANGE}"/>')
    parts.append(text(x + 342, y + height - 21, "held-out accuracy, before and after", size=13,
                      color=ORANGE, anchor="start"))  # fmt: skip
    return picture(860, 340, "The quickstart's reward rises", parts)


def pictures() -> dict[Path, str]:
    """Return every picture with its path."""
    folder = ROOT / "docs" / "figures"
    drawn = {"loop": loop, "staleness": staleness, "corrections": corrections, "reward": reward}
    return {folder / f"{name}.svg": draw() for name, draw in drawn.items()}
