"""Options that mean nothing beside another one: all are refused alike, as wrong usage, with what to do."""

from __future__ import annotations

from typing import NoReturn

import click
from click.core import ParameterSource

__all__ = ["refuse_beside", "typed_options"]


def typed_options(context: click.Context) -> set[str]:
    """The names of the options that are on the command line."""
    return {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def refuse_beside(mode: str, name: str, reason: str) -> NoReturn:
    """Refuse an option of the running command.

    Args:
        mode: the option beside which it means nothing, `--report`.
        name: the refused one's, `plan_path` for `--plan`.
        reason: a clause that says why.

    Raises:
        click.UsageError: always.
    """
    options = click.get_current_context().command.params
    flag = next((option.opts[0] for option in options if option.name == name), f"--{name.replace('_', '-')}")
    raise click.UsageError(f"{flag} means nothing with {mode}, {reason}; leave it out.")
