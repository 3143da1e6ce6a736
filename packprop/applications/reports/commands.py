"""Functions that all commands use: they make a command, add its options, and print its result."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any, TypeAlias

from rich.console import Console

from packprop.applications.dataset.sources import BATCH_SIZE

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def new_command(
    commands: Commands, name: str, summary: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """Make a command whose description and epilog print as they are written.

    Args:
        commands: The commands to add the new command to.
        name: The name of the command.
        summary: One line in the list of commands.
        description: The text before the arguments in the command's help.
        epilog: The text after the arguments.
    """
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_run_options(command: argparse.ArgumentParser) -> None:
    """Add the options of commands that run a model from a factory over its data."""
    add = command.add_argument
    add(
        "--batch-size",
        type=positive,
        metavar="N",
        help="samples in a batch, for data that do not come in batches; larger batches take more memory, less "
        f"time (default: {BATCH_SIZE})",
    )
    add_switch(
        command,
        "--evaluation",
        "put the model into evaluation mode, so that dropout is off and batch normalisation does not mix "
        "samples; --no-evaluation keeps the mode of the model",
    )
    add(
        "--device",
        metavar="NAME",
        help="cpu, cuda, cuda:1, ...: the device of model, loss and batches (default: the model's)",
    )
    add(
        "--seed",
        type=int,
        metavar="N",
        default=0,
        help="seed of the random state before FACTORY runs, and of Monte Carlo draws (default: %(default)s)",
    )


def add_output_options(command: argparse.ArgumentParser, what: str) -> None:
    """Add the options of commands that print a result."""
    command.add_argument(
        "--json",
        action="store_true",
        help=f"print {what} on standard output as JSON, and everything else on standard error",
    )
    add_debug(command)


def add_debug(command: argparse.ArgumentParser) -> None:
    """Add the option that every command has."""
    command.add_argument("--debug", action="store_true", help="show errors with their tracebacks")


def add_switch(command: argparse.ArgumentParser, name: str, what: str) -> None:
    """Add an option that is on unless its ``--no-`` form is given."""
    command.add_argument(
        name, action=argparse.BooleanOptionalAction, default=True, help=f"{what} (default: yes)"
    )


def positive(text: str) -> int:
    """Read a number of at least 1."""
    with contextlib.suppress(ValueError):
        if int(text) > 0:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")


def print_result(found: Any, as_json: bool, width: int) -> None:
    """Print a result on standard output: as JSON, or as tables; on a terminal, ``width`` columns or more."""
    console = Console(file=sys.stdout)
    if as_json:
        print(found.to_json(), end="")
    elif console.is_terminal:
        Console(file=sys.stdout, width=max(console.width, width)).print(found)
    else:
        print(found)
