"""Write docs/commands.md, the reference of the command line, from the typer application."""

import inspect
import re
from typing import Any

from typer.main import get_command

from raylearner.cli import COMMANDS, app
from raylearner.cli.examples import ARGUMENTS, EXAMPLES

HEAD = """# Command line

Generated from `raylearner/cli/` by `make docs`. `raylearner` and `python -m raylearner` are the same program; run it inside
`.venv`. `raylearner COMMAND --help` lists options and examples, and `raylearner --install-completion` lets bash, zsh and fish
complete commands, options, files and configuration keys. To use an existing cluster, set `RAY_ADDRESS=HOST:6379` for `train`
and `sweep`, and `RAY_API_SERVER_ADDRESS=http://HOST:8265` (the dashboard) for `submit`.

| command | use |
|---|---|
"""
EXIT_CODES = """
## Exit codes

| code | meaning |
|---|---|
| 0 | success |
| 1 | the run failed |
| 2 | invalid input; nothing was started |
| 130 | interrupted with Ctrl-C, or stopped before the first checkpoint |
| 143 | stopped by SIGTERM or at the deadline, with a checkpoint to resume from |
"""


def markdown() -> str:
    """Return the text of docs/commands.md."""
    group: Any = get_command(app)  # of click, or of typer's copy of it
    summaries = {name: inspect.cleandoc(made.__doc__ or "") for name, made in COMMANDS.items()}
    rows = [f"| [`{n}`](#{n}) | {' '.join(s.split())} |" for n, s in summaries.items()]
    sections = [_section(name, summaries[name], group.commands[name]) for name in COMMANDS]
    return HEAD + "\n".join(rows) + "\n" + "".join(sections) + EXIT_CODES


def _section(name: str, summary: str, command: Any) -> str:
    context = command.make_context(f"raylearner {name}", [], resilient_parsing=True)
    usage = " ".join([f"raylearner {name}", *command.collect_usage_pieces(context)])
    meanings: dict[str, str] = {}
    for argument, meaning in ARGUMENTS.get(name, ()):
        key = argument or list(meanings)[-1]  # without a name: the line above goes on
        meanings[key] = f"{meanings.get(key, '')} {meaning}".strip()
    arguments = [f"| `{argument}` | {meaning} |\n" for argument, meaning in meanings.items()]
    records = [
        parameter.get_help_record(context)
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name != "help"
    ]
    options = [f"| `{_cell(left)}` | {_cell(right)} |\n" for left, right in filter(None, records)]
    rows = "".join([*arguments, *options])
    table = f"\n| argument or option | meaning |\n|---|---|\n{rows}" if rows else ""
    examples = "\n".join(
        f"# {meaning}\n" * bool(meaning) + f"raylearner {re.sub(r' +', ' ', line)}"
        for meaning, line in ((m, e.replace("\\\n", "")) for m, e in EXAMPLES[name])
    )
    return (
        f"\n## {name}\n\n```text\n{usage}\n```\n\n{' '.join(summary.split())}\n{table}"
        f"\n```bash\n{examples}\n```\n"
    )


def _cell(value: str) -> str:
    """Return one line for a table, without typer's names of types."""
    return re.sub(r" <[a-z\[\]]+>", "", " ".join(value.split())).replace("|", "&#124;")
