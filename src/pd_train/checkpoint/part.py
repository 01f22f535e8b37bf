"""One worker's part of a checkpoint: a file of tensors, and a small JSON file that says what it holds.

    runs/NAME/checkpoints/epoch-0003/stage-1.pt        {"state": {name: tensor}, "optimizer": [...], "progress": ...}
    runs/NAME/checkpoints/epoch-0003/stage-1.json      PartRecord: what is in there, how long it is, its checksum

The folder is named after what has been trained so far: three whole epochs here. Each file is written under a temporary
name, flushed to disk and renamed, the JSON file last: where it is there, the part is whole. Everything goes by the
parameters' own names and by ranges of their elements, so that workers of another plan can take what they need. Loading
runs no code from a file (`torch.load` with `weights_only`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple, cast

import torch
from pydantic import Field
from torch import Tensor

from pd_format.errors import UserError
from pd_format.jsonfile import Record, Rows, read_record, write_record
from pd_train.checkpoint.pickled import check_pickle

__all__ = [
    "FOLDER",
    "START",
    "DamagedPart",
    "Part",
    "PartRecord",
    "Position",
    "Range",
    "ShardSlice",
    "find_parts",
    "load_part",
    "position_of",
    "write_file",
    "write_part",
]

FOLDER = "checkpoints"
"""Of all checkpoints, within a run's folder."""
_READ_BYTES = 1 << 20
_LITTLE_BYTES = 1 << 20

Whole = Annotated[int, Field(ge=0)]


class Position(NamedTuple):
    """Where training goes on: minibatch m of epoch e, both from 0. A later position compares as greater."""

    epoch: int
    minibatch: int

    @property
    def folder(self) -> str:
        """What the checkpoint's folder is called."""
        within = f"-minibatch-{self.minibatch:06}" if self.minibatch else ""
        return f"epoch-{self.epoch:04}{within}"


START = Position(0, 0)


def position_of(folder: str) -> Position | None:
    """The position that a folder is named after."""
    _, epoch, *rest = folder.split("-")
    minibatch = rest[1] if len(rest) == 2 else "0"
    if not (epoch.isdecimal() and minibatch.isdecimal()):
        return None
    position = Position(int(epoch), int(minibatch))
    return position if position.folder == folder else None


class Range(NamedTuple):
    """Elements start..stop of a parameter, seen as one flat row."""

    parameter: str
    start: int
    stop: int


class ShardSlice(NamedTuple):
    """What the optimizer keeps of a range of a parameter: rows of as many elements, and single numbers."""

    range: Range
    state: dict[str, Tensor]


class PartRecord(Record):
    """What a part holds."""

    format: Literal["pipedream-checkpoint"] = "pipedream-checkpoint"
    version: Literal[1] = 1
    run: str
    """Of the start that wrote it: parts of different starts are never put together."""
    epoch: Whole
    minibatch: Whole
    stage: Whole
    replica: Whole
    rank: Whole
    state: Rows[str]
    """Names of the parameters and buffers."""
    ranges: Rows[tuple[str, Whole, Whole]]
    """Of the optimizer's shard: see `Range`."""
    has_progress: bool
    """Whether the run's own counters and metrics are in it."""
    written: float
    """When, in seconds since 1970."""
    sent_bytes: Whole
    """By this worker, from the start of the run."""
    training_bytes: Whole
    file: str
    bytes: Whole
    sha256: str

    @property
    def position(self) -> Position:
        """Where training goes on from this part."""
        return Position(self.epoch, self.minibatch)


class DamagedPart(Exception):
    """A part that cannot be used; the text names the file and what is wrong with it."""


def write_part(
    run_dir: Path,
    record: Mapping[str, Any],
    name: str,
    state: Mapping[str, Tensor],
    shard: Sequence[ShardSlice],
    progress: object,
) -> Path:
    """Write a worker's part.

    Args:
        run_dir: of the run, on this host.
        record: the fields of `PartRecord` that are not found here.
        name: of the files, without an ending.
        state: parameters and buffers, on the CPU.
        shard: what this worker's optimizer keeps.
        progress: of the run, a nesting of plain values and tensors; None but at rank 0.

    Returns:
        The JSON file.

    Raises:
        UserError: the disk is full, or the folder cannot be written to.
    """
    folder = run_dir / FOLDER / Position(record["epoch"], record["minibatch"]).folder
    file = folder / f"{name}.pt"
    try:
        # Only the run's folder must be there: one that vanished is not made again in silence.
        (run_dir / FOLDER).mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        digest, size = write_file(
            file, {"state": dict(state), "optimizer": [one.state for one in shard], "progress": progress}
        )
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{file}: the checkpoint cannot be written ({_reason(error, folder)}); training stops rather than go on "
            "unsaved. Checkpoints that were whole before still are: mend that, then go on with --resume."
        ) from None
    whole = PartRecord(
        **record,
        state=tuple(state),
        ranges=tuple((one.range.parameter, one.range.start, one.range.stop) for one in shard),
        has_progress=progress is not None,
        file=file.name,
        bytes=size,
        sha256=digest,
    )
    write_record(folder / f"{name}.json", whole)
    return folder / f"{name}.json"


def find_parts(run_dir: Path) -> list[Path]:
    """The JSON files of all parts in a run's folder, in a fixed order."""
    return sorted((run_dir / FOLDER).glob("epoch-*/stage-*.json"))


@dataclass(frozen=True)
class Part:
    """A part that was found whole; its tensors are read from disk when they are used."""

    record: PartRecord
    state: dict[str, Tensor]
    shard: tuple[ShardSlice, ...]
    progress: Any


def load_part(path: Path) -> Part:
    """Read a part's JSON file and compare the tensors' file with it, byte for byte.

    Raises:
        DamagedPart: one of them is missing, cut short, changed, or of another format.
    """
    try:
        record = read_record(path, PartRecord, "pipedream-checkpoint", 1)
    except UserError as error:
        raise DamagedPart(str(error)) from None
    if record.position.folder != path.parent.name or record.file != f"{path.stem}.pt":
        raise DamagedPart(f"{path}: belongs to {record.position.folder}/{record.file}")
    file = path.with_name(record.file)
    try:
        size = file.stat().st_size
        if size != record.bytes:
            raise DamagedPart(f"{file}: has {size} bytes instead of {record.bytes}")
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise DamagedPart(f"{file}: cannot be read ({error.strerror})") from None
    if digest.hexdigest() != record.sha256:
        raise DamagedPart(f"{file}: its checksum is not the one that was written with it")
    try:
        check_pickle(file)
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        state, optimizer, progress = content["state"], content["optimizer"], content["progress"]
        shard = tuple(ShardSlice(Range(*r), kept) for r, kept in zip(record.ranges, optimizer, strict=True))
        if set(state) != set(record.state) or record.has_progress != (progress is not None):
            raise ValueError("it holds something else than its record says")
        _check_tensors(state, None)
        for each in shard:
            _check_tensors(each.state, each.range.stop - each.range.start)
        if not isinstance(progress, dict | None):
            raise ValueError("its progress has another form")
    except Exception as error:  # A file may be made by anyone: whatever torch objects to is damage.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DamagedPart(f"{file}: cannot be read ({reason[:200]})") from None
    return Part(record, state, shard, progress)


def _check_tensors(found: Any, elements: int | None) -> None:
    """Tensors by name, each as long as its bytes in the file; single numbers, or rows of so many elements."""
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__} where named tensors are expected")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"it holds a {type(tensor).__name__} where a tensor is expected")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name} is longer than its bytes")
        if elements is not None and tensor.dim() and tensor.shape != (elements,):
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, expected ({elements},)")


def write_file(path: Path, value: object) -> tuple[str, int]:
    """Save a value for `torch.load` under a temporary name, flush it to disk, then rename it.

    Returns:
        Its SHA-256 checksum and its length in bytes.

    Raises:
        OSError, RuntimeError: the folder cannot be written to, or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            hashing = _HashingWriter(file)
            torch.save(value, cast(IO[bytes], hashing))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return hashing.digest.hexdigest(), hashing.size


class _HashingWriter:
    """A file to write to that keeps the checksum of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _flush_folder(folder: Path) -> None:
    """A rename is on disk once the folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception, folder: Path) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    with contextlib.suppress(OSError):  # torch says in its own words that it could not write on.
        if shutil.disk_usage(folder).free < _LITTLE_BYTES:
            return "the disk is full"
    return str(error).splitlines()[0]
