"""Ctrl-C where a program has nothing to put in order: it ends at once, without a word, with the code that shells use.

By Python's default Ctrl-C becomes an exception wherever the program happens to be. Within imports that is a traceback
through other people's modules, or nothing at all, where it lands in a callback that swallows it. So a program takes it

    while its modules load, and its command line is read    by ending at once
    in the command's body                                   as KeyboardInterrupt, which the body makes a message of
    while the body loads modules                            by ending at once, `with ending_at_once()`
    while the interpreter ends                              by ending at once

Who started the program may have chosen another way, such as to ignore it (a shell's background jobs): that stays.
This module is the first that a program loads, and loads next to nothing itself.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # Even `typing` takes milliseconds.
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

__all__ = ["Program", "ending_at_once"]


class ending_at_once:
    """A context manager: within it, Ctrl-C ends the program at once, unless somebody chose another way for it."""

    def __enter__(self) -> None:
        self._changed = _change(signal.default_int_handler, _end)

    def __exit__(self, *failure: object) -> None:
        if self._changed:
            _change(_end, signal.default_int_handler)


class Program:
    """Mixed into a click command: takes Ctrl-C as above where it is called as a program."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run the command; what comes after is the interpreter's end."""
        if options.get("standalone_mode", True):
            _change(signal.default_int_handler, _end)
        try:
            return super().__call__(*args, **options)  # type: ignore[misc]
        finally:
            # What ends at once writes nothing more.
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()

    def invoke(self, context: Any) -> Any:
        """Run the command's body."""
        changed = False
        try:
            changed = _change(_end, signal.default_int_handler)
            return super().invoke(context)  # type: ignore[misc]
        except KeyboardInterrupt:  # Not within what the body watches over: there is nothing to say.
            raise SystemExit(128 + signal.SIGINT) from None
        finally:
            if changed:
                _change(signal.default_int_handler, _end)


def _change(before: Any, after: Any) -> bool:
    """Take Ctrl-C in another way, where it is taken as expected; says whether that is so."""
    if signal.getsignal(signal.SIGINT) is not before:
        return False
    try:
        signal.signal(signal.SIGINT, after)
    except ValueError:  # Only a process's first thread may.
        return False
    return True


def _end(signum: int, frame: FrameType | None) -> None:
    os._exit(128 + signum)
