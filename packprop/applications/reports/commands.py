"""The making of commands for the command line."""

from __future__ import annotations

import argparse
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def new_command(
    commands: Commands, name: str, summary: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """Make a command whose description and epilog print as they are written.

    Args:
        commands: The commands to add it to.
        name: Its name on the command line.
        summary: One line in the list of commands.
        description: The text before its arguments in its help.
        epilog: The text after them.
    """
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
