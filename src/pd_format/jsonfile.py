"""Reads and writes the records that the three programs exchange, so that nobody ever reads half of one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

from pd_format.errors import FormatError, UserError

__all__ = ["Record", "Rows", "header_problem", "read_record", "read_text", "write_record", "write_text"]


class Record(BaseModel):
    """A frozen record that takes no unknown field, converts no type and knows no NaN."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants"
    )


_MOST_BYTES = 16 << 20
"""Of a file: a hundred times the largest profile so far. Reading takes up to 50 times as much memory."""
_READ_BYTES = 64 << 10
_MOST_DIGITS = 20
"""Far more than any size needs; Python itself refuses numbers of some thousand."""
_MOST_FIELDS = 1000
"""Of an object. For each that is wrong, pydantic keeps a kilobyte of explanation."""
_MOST_SHOWN = 60

RowT = TypeVar("RowT")
Rows = Annotated[tuple[RowT, ...], FailFast()]
"""Any number of the same; the first that is wrong ends the search, since a file may hold millions."""

RecordT = TypeVar("RecordT", bound=Record)


def read_text(path: Path, expected: str, encoding: str = "utf-8") -> str:
    """Read a text file of a sensible size.

    Args:
        path: of the file.
        expected: what should be in it, for the message.
        encoding: of the text.

    Raises:
        FormatError: the file cannot be read, is too large, or is not text.
    """
    content = bytearray()
    try:
        with path.open("rb") as file:
            while len(content) <= _MOST_BYTES and (block := file.read(_READ_BYTES)):
                content += block
    except OSError as error:
        raise FormatError(
            f"{path}: cannot be read ({error.strerror}); name another file, or make it readable."
        ) from None
    if len(content) > _MOST_BYTES:
        raise FormatError(f"{path}: is longer than {_MOST_BYTES >> 20} MiB; expected {expected}.")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is not text ({error}); expected {expected}.") from None


def read_record(path: Path, record: type[RecordT], format_name: str, version: int) -> RecordT:
    """Read a JSON file into a record.

    Raises:
        FormatError: the file cannot be read, is not JSON, repeats a key, is of another format or version, or a
            field is missing, unknown or ill-typed; the text holds the file's name and the path of the field.
    """
    text = read_text(path, "a JSON file")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_Refused.constant, parse_int=_whole_number)
        problem = _first_refused(value, "")
    except json.JSONDecodeError as error:
        raise FormatError(
            f"{path}: is not whole JSON (line {error.lineno}, column {error.colno}: {error.msg}); write it anew."
        ) from None
    except RecursionError:
        raise FormatError(f"{path}: is nested too deeply to be a {format_name} file; name another.") from None
    if problem is not None:
        raise FormatError(f"{path}: {problem}")
    _check_header(path, value, format_name, version)
    try:
        # Not pydantic's own JSON, which keeps a copy of all that stands around each missing field.
        return record.model_validate(_with_tuples(value))
    except ValidationError as error:
        raise FormatError(f"{path}: {_first_problem(error, value)}") from None


def write_record(path: Path, record: Record) -> None:
    """Write a record as JSON, under a temporary name first, then renamed.

    Raises:
        UserError: the folder cannot be written to.
    """
    write_text(path, json.dumps(record.model_dump(mode="json"), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str, make_folder: bool = True) -> None:
    """Replace a file's content in one step: a reader sees the old content or the new, never a part.

    Args:
        path: of the file.
        text: its new content.
        make_folder: whether to make the folder where it is missing; one that vanished is not made again in silence.

    Raises:
        UserError: the folder cannot be written to.
    """
    temporary = None
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name another place.") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


class _Refused:
    """Stands where the text holds what no record can: the parser does not know the path of the field that it reads."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    @classmethod
    def constant(cls, name: str) -> _Refused:
        return cls(f"found {name}; expected a finite number.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Refused:
    if len(pairs) > _MOST_FIELDS:
        return _Refused(f"holds {len(pairs)} fields; expected only the fields of the format.")
    result: dict[str, Any] = {}
    for key, value in pairs:
        result[key] = _Refused("stands twice in one object; keep one of them.") if key in result else value
    return result


def _whole_number(digits: str) -> int | _Refused:
    if len(digits) > _MOST_DIGITS:
        return _Refused(f"found a whole number of {len(digits)} digits; expected at most {_MOST_DIGITS}.")
    return int(digits)


def _first_refused(value: Any, path: str) -> str | None:
    """The first place that holds a `_Refused`, with the reason, as `layers[3].forward_ms: found NaN; ...`."""
    if isinstance(value, _Refused):
        return f"{path}: {value.reason}" if path else value.reason
    inside: Iterable[tuple[int | str, Any]] = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list):
        inside = enumerate(value)
    return next(filter(None, (_first_refused(each, _joined(path, part)) for part, each in inside)), None)


def _with_tuples(value: Any) -> Any:
    """A parsed file as records have it, whose rows are tuples."""
    if isinstance(value, dict):
        return {key: _with_tuples(each) for key, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _joined(path: str, part: int | str) -> str:
    """The path of a part: `layers` and 3 give `layers[3]`, that and `op` give `layers[3].op`."""
    if isinstance(part, int):
        return f"{path}[{part}]"
    # What a file calls a field is not to write to somebody's terminal whatever it likes.
    part = part if part.isprintable() and len(part) <= _MOST_SHOWN else _shown(part)
    return f"{path}.{part}" if path else part


def _shown(value: Any) -> str:
    """A value of a file, as messages show it."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _check_header(path: Path, value: Any, format_name: str, version: int) -> None:
    problem = header_problem(value, format_name, version)
    if problem is not None:
        advice = " Make the file anew." if isinstance(value, dict) and value.get("format") == format_name else ""
        raise FormatError(f"{path}: {problem}.{advice}")


def header_problem(value: Any, format_name: str, version: int) -> str | None:
    """What is wrong with the format and version that a JSON value says it has; None where nothing is."""
    if not isinstance(value, dict):
        return f"holds a {type(value).__name__}; expected an object of format {format_name!r}"
    if value.get("format") != format_name:
        return f"format is {_shown(value.get('format'))}; expected {format_name!r}"
    found = value.get("version")
    if found != version or isinstance(found, bool):
        return f"version is {_shown(found)}; this program reads version {version}"
    return None


def _first_problem(error: ValidationError, value: Any) -> str:
    """The first thing pydantic found in a value, as `layers[3].forward_ms: found -1.0, ...`, and how many there are."""
    # Without the inputs: each of many missing fields would be shown with all that stands around it.
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    # A row that was not read to its end is also said to be too short.
    problems = [each for each in problems if each["type"] != "too_short" or not _at(value, each["loc"])]
    path = reduce(_joined, first["loc"], "")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        text = f"{path}: is missing."
    elif first["type"] == "extra_forbidden":
        text = f"{path}: is unknown; expected only the fields of the format."
    elif first["type"] == "value_error":
        text = f"{path}: {message}" if path else message
    else:
        text = f"{path}: found {_shown(_at(value, first['loc']))}; {message[0].lower()}{message[1:]}."
    more = len(problems) - 1
    return text + (f" ({more} more problem{'s' if more > 1 else ''}.)" if more else "")


def _at(value: Any, location: Iterable[int | str]) -> Any:
    """What stands at a place, or around it where the last steps are names of pydantic's own."""
    for part in location:
        try:
            value = value[part]
        except (LookupError, TypeError):
            break
    return value
