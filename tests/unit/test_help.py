"""Help of the command line, its examples, and completion by the shell."""

import shlex
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from raylearner import __version__, cli
from raylearner.cli import examples
from raylearner.cli.completion import complete_argument

ROOT = Path(__file__).parents[2]
COMMANDS = list(cli.COMMANDS)
EXAMPLES = [command for given in examples.EXAMPLES.values() for _, command in given]


def words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_80_columns_and_ends_with_examples(command: str) -> None:
    result = CliRunner().invoke(cli.app, [*command.split(), "--help"], env={"COLUMNS": "80"})
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert [line for line in lines if len(line) > 80] == []
    assert "  Examples:" in lines
    assert "..." not in result.stdout.partition("Commands:")[2], "a summary is cut off"


@pytest.mark.parametrize("command", EXAMPLES)
def test_an_example_has_valid_options_and_names_files_that_exist(command: str) -> None:
    name, *arguments = words(command)
    group = typer.main.get_command(cli.app)
    group.get_command(None, name).make_context(name, arguments)  # type: ignore[attr-defined]
    for word in arguments:
        if word.startswith("configs/"):
            assert (ROOT / word).is_file()


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(cli.app, ["--version"]).stdout == f"raylearner {__version__}\n"


def test_completion_offers_keys_and_leaves_files_to_the_shell() -> None:
    assert complete_argument("replay.group_s") == ["replay.group_size="]
    assert "learner.loss.kind=" in complete_argument("learner.lo")
    assert complete_argument("") == complete_argument("configs/") == []


def test_the_shell_completes_through_the_command() -> None:
    environment = {
        "_RAYLEARNER_COMPLETE": "complete_bash",
        "COMP_WORDS": "raylearner train replay.group_s",
        "COMP_CWORD": "2",
    }
    result = CliRunner().invoke(cli.app, [], env=environment, prog_name="raylearner")
    assert result.stdout.split() == ["replay.group_size="]
