"""How the program ends: with a message and an exit code, never with a traceback for what a person can mend."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import click

from pd_format.errors import UserError
from pd_format.interrupts import ending_at_once
from pd_train.farewell import Farewell
from pd_train.run_folder import has_checkpoint

__all__ = ["failures_as_messages", "way_back"]


@contextlib.contextmanager
def way_back(run_dir: Path) -> Iterator[None]:
    """Say how a run that did not come to its end goes on, where it has a checkpoint."""
    try:
        yield
    except BaseException:
        if has_checkpoint(run_dir):
            click.echo(f"To go on from its newest checkpoint: pd-train --resume {run_dir}", err=True)
        raise


@contextlib.contextmanager
def failures_as_messages(farewell: Farewell, writes: bool = True) -> Iterator[None]:
    """End with a message and an exit code.

    Args:
        farewell: says goodbye to other hosts.
        writes: whether what is done writes a run's files, which a person who stops it wonders about.
    """
    with ending_at_once():
        from pd_train.launch import Stopped

    try:
        yield
    except UserError as error:
        failure = click.ClickException(str(error))
        failure.show()
        farewell.say(str(error))
        sys.exit(failure.exit_code)
    except Stopped as error:
        _say_stopped(str(error), error.signum, writes)
    except KeyboardInterrupt:  # Before the workers started, or after they ended.
        _say_stopped("Stopped by SIGINT", signal.SIGINT, writes)


def _say_stopped(text: str, signum: int, writes: bool) -> NoReturn:
    click.echo(f"{text}; the files written so far are whole." if writes else f"{text}.", err=True)
    sys.exit(128 + signum)
