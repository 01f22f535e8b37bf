"""The key of a job: one CURVE key pair that every worker holds, as server and as client, and so knows the others by.

The file is a certificate in pyzmq's own format (`zmq.auth.load_certificate` reads it). Nothing here opens a socket.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from pd_format.errors import UserError

__all__ = ["Key", "answer_zap", "make_key", "read_key"]

_MOST_BYTES = 64 << 10
"""Of a key file: a hundred times what one takes."""
_OTHERS = 0o077
_TEXT = """\
# Made by pd-train --make-key on {date}: a ZeroMQ CURVE certificate with its secret.
# Who holds this file can take part in the job: keep it as it is, readable by you alone.

metadata
curve
    public-key = "{public}"
    secret-key = "{secret}"
"""


@dataclass(frozen=True)
class Key:
    """A CURVE key pair, each half as 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)


def make_key(path: Path) -> None:
    """Write a new key to a file that nobody else may read, at no moment.

    Raises:
        UserError: there is such a file, it cannot be written, or libzmq was built without CURVE.
    """
    _check_curve()
    try:
        # The mode is part of the creation, and an existing file, or link, is not followed.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserError(
            f"--make-key {path}: there is such a file already; hosts that have a copy of it would be locked out. "
            "Name another one, or remove it first."
        ) from None
    except OSError as error:
        raise _cannot_write(path, error) from None
    public, secret = zmq.curve_keypair()
    text = _TEXT.format(date=time.strftime("%Y-%m-%d"), public=public.decode(), secret=secret.decode())
    try:
        with open(file, "w", encoding="ascii") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(file)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _cannot_write(path, error) from None


def read_key(path: Path) -> Key:
    """Read a key that `make_key`, or pyzmq, has written. No message shows what is in the file.

    Raises:
        UserError: it is missing, not a key with its secret, or open to others; or libzmq was built without CURVE.
    """
    _check_curve()
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise _no_key(path, "is no such file")
        if status.st_mode & _OTHERS:
            raise UserError(
                f"--key {path}: others may read or change it (mode {stat.S_IMODE(status.st_mode):04o}), and whoever "
                f"has it can join the job; expected mode 0600. Run: chmod 600 {path}"
            )
        public, secret = load_certificate(path)
    except FileNotFoundError:
        raise UserError(
            f"--key {path}: there is no such file; name the job's key, or make one with pd-train --make-key on one "
            "host and copy it to the others."
        ) from None
    except OSError as error:
        raise UserError(f"--key {path}: cannot be read ({error.strerror}); make it readable for yourself.") from None
    except (ValueError, IndexError):  # No public key, or a line without "=".
        raise _no_key(path, "holds no key") from None
    if secret is None:
        raise _no_key(path, "holds a public key alone")
    with contextlib.suppress(ValueError, zmq.ZMQError):
        if zmq.curve_public(secret) == public:
            return Key(public, secret)
    raise _no_key(path, "holds no public key and secret that belong together")


def answer_zap(request: Sequence[bytes], key: Key) -> list[bytes]:
    """What libzmq is told when it asks whether a client may connect (ZeroMQ's RFC 27): only the job's own key may.

    Args:
        request: version, request id, domain, address, identity, mechanism, then the credentials.
        key: of the job.

    Returns:
        Version, request id, status, text, user id, metadata.
    """
    version, number = request[:2]
    known = list(request[5:]) == [b"CURVE", z85.decode(key.public)]
    return [version, number, *((b"200", b"OK") if known else (b"400", b"another key")), b"", b""]


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise UserError(
            "the ZeroMQ library here was built without CURVE, its encryption; install pyzmq from its wheels "
            "(pip install --force-reinstall pyzmq), which have it."
        )


def _no_key(path: Path, found: str) -> UserError:
    return UserError(f"--key {path}: {found}; expected the file that pd-train --make-key writes, its secret included.")


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"--make-key {path}: cannot be written ({error.strerror}); name another place.")
