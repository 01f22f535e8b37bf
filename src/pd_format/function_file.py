"""The file of a function that is named as `path/file.py:function`, found without importing anything."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from pd_format.errors import UserError

__all__ = ["closest", "function_file"]


def function_file(name: str) -> Path | None:
    """The file that a name such as `path/file.py:function` holds; None where it names a module instead.

    Raises:
        UserError: there is no such file; the closest names are given.
    """
    place = name.rpartition(":")[0]
    if not place.endswith(".py"):
        return None
    path = Path(place).resolve()
    if not os.path.isfile(path):  # Unlike `Path.is_file` it says no to a name that is too long.
        files = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UserError(
            f"{name}: there is no file {place} (looked for {path}).{closest(path.name, files)} "
            "A relative path starts at the working directory."
        )
    return path


def closest(name: str, names: list[str]) -> str:
    """A sentence with those of the names that are like this one, or with all if they are few."""
    close = difflib.get_close_matches(name, names, 3, 0.5)
    if close:
        return f" Did you mean {' or '.join(close)}?"
    if 0 < len(names) <= 12:
        return f" There is: {', '.join(sorted(names))}."
    return ""
