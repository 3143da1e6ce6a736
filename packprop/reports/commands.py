"""Commands of the command line: how each is made."""

from __future__ import annotations

import argparse
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def new_command(
    commands: Commands, name: str, summary: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """A command whose description and epilog are printed as they are written.

    Args:
        commands: The commands that it is added to.
        name: What is typed.
        summary: One line in the list of commands.
        description: What comes before its arguments in its help.
        epilog: What comes after them.
    """
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
