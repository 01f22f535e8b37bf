"""Files of torch.save that ask for more than they hold: refused before torch.load looks at them."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from pd_train.checkpoint.pickled import check_pickle


def archive_of(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
    return path


def test_what_a_checkpoint_is_made_of_passes(tmp_path: Path) -> None:
    shared = torch.zeros(3)
    value = {
        "state": {"a": shared, "b": shared[1:], "c": torch.ones(2, 2).bfloat16(), "d": torch.tensor(True)},
        "optimizer": [{"step": torch.tensor(1.0)}, {}],
        "progress": {
            "n": None,
            "f": 0.5,
            "i": [1, -1, 300, 70_000, 2**40],
            "t": (True, False, "text"),
            "u": (1, 2, 3, 4),
        },
    }
    torch.save(value, tmp_path / "a.pt")
    check_pickle(tmp_path / "a.pt")


FLOATS = b"ctorch\nFloatStorage\n"
BILLION = b"J" + struct.pack("<i", 10**9)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x80\x02cbuiltins\nbytearray\n" + BILLION + b"\x85R.", "'builtins bytearray' in it"),
        (pickle.dumps(bytearray(3), protocol=2), "'__builtin__ bytearray' in it"),
        (b"\x80\x02ctorch\nFloatTensor\n" + BILLION + b"\x85R.", "'torch FloatTensor' in it"),
        (b"\x80\x02" + FLOATS + BILLION + b"\x85R.", "a storage outside of a tensor"),
        (b"\x80\x02" + FLOATS + b"q\x00X\x01\x00\x00\x000h\x00" + BILLION + b"\x85R.", "a storage outside of a tensor"),
        (b"\x80\x02" + FLOATS + b"X\x01\x00\x00\x00002R.", "it has a"),
        (b"\x80\x02]q\x00h\x00a0.", "it has a POP in it"),
        (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00.", "it has a FRAME in it"),
        (b"", "pickle exhausted before seeing STOP"),
    ],
)
def test_what_could_take_memory_at_will_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        check_pickle(archive_of(tmp_path / "a.pt", content))


def test_an_archive_that_is_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    packed = archive_of(tmp_path / "packed.pt", bytes(10**6), zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="packed in another way"):
        check_pickle(packed)
    plain = archive_of(tmp_path / "plain.pt", pickle.dumps(None, protocol=2))
    content = bytearray(plain.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + 20 : entry + 24] = struct.pack("<I", 2**31 - 1)
    plain.write_bytes(content)
    with pytest.raises(ValueError, match="its entries are 2147483647 bytes long, by its own account"):
        check_pickle(plain)
