"""What a user did and can mend, as opposed to a fault of the program."""

from __future__ import annotations

__all__ = ["FormatError", "UserError"]


class UserError(Exception):
    """Something the user can mend; its text says what was found, what is expected and what to do.

    The programs print it without a traceback and exit with code 1.
    """


class FormatError(UserError):
    """A profile or plan file that does not follow its format."""
