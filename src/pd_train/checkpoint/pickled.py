"""Looks at a file of `torch.save` before `torch.load` reads it: only what a checkpoint's own parts are made of passes.

`torch.load` with `weights_only` runs no code of a file's. It still calls what a file names among torch's own types, and
some of these take as much memory as the file asks for. Parts need none of that: plain values, and tensors whose bytes
are in the file.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from pathlib import Path

__all__ = ["check_pickle"]

_MOST_BYTES = 64 << 20
"""Of the pickle, which holds names and shapes; the tensors' bytes lie beside it."""
_OPCODES = frozenset({
    "PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS",
    "EMPTY_DICT", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL", "REDUCE",
    "BINPERSID",
})  # fmt: skip
_CALLED = frozenset({"torch._utils _rebuild_tensor_v2", "collections OrderedDict"})
_STORAGE = re.compile(r"torch \w+Storage")


def check_pickle(file: Path) -> None:
    """Make sure that a file holds nothing but plain values and tensors.

    Raises:
        ValueError: it holds something else.
        OSError, zipfile.BadZipFile: it cannot be read.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(set(names)) < len(names) or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is packed in another way")
        stated = sum(max(entry.compress_size, entry.file_size) for entry in entries)
        if stated > file.stat().st_size:
            raise ValueError(f"its entries are {stated} bytes long, by its own account")
        if len(pickles) != 1 or pickles[0].file_size > _MOST_BYTES:
            raise ValueError("its list of tensors is missing, or too long")
        _check_opcodes(archive.read(pickles[0]))


def _check_opcodes(content: bytes) -> None:
    """A storage's type may only stand before its key, as part of a tensor: so it is never called."""
    memo: dict[int, str] = {}
    last = ""
    for opcode, argument, _ in pickletools.genops(content):
        number, text = (argument if isinstance(argument, int) else -1), str(argument)
        if opcode.name not in _OPCODES:
            raise ValueError(f"it has a {opcode.name} in it")
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            memo[number] = last
            continue
        now = ""
        if opcode.name == "BINUNICODE":
            now = "text"
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            now = memo.get(number, "")
        elif opcode.name == "GLOBAL":
            if text not in _CALLED and not _STORAGE.fullmatch(text):
                raise ValueError(f"it has a {text[:60]!r} in it")
            now = "" if text in _CALLED else "storage"
        if last == "storage" and now != "text":
            raise ValueError("it has a storage outside of a tensor")
        last = now
