"""Programs that try to get into a job whose key they do not hold, though all of them know its public half.

As a program of its own (`python strangers.py ADDRESS PORT PUBLIC`) it tries all ways again and again until it is ended,
and says `round 1` and so on.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

__all__ = ["GARBAGE", "SIGNATURE", "WAYS", "ask", "throw"]

_WAIT_MS = 10_000

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GARBAGE = {
    "nothing": b"",
    "half a signature": SIGNATURE[:5],
    "http": b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.2\r\n",
    "pickle": b"\x80\x04\x95" + bytes(range(256)) * 40,
    "zeros": bytes(100_000),
    "ones": b"\xff" * 100_000,
    "no mechanism": SIGNATURE + b"\x03\x01" + b"NOTHING".ljust(20, b"\0") + bytes(32),
    "an empty hello": SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO" + bytes(194),
    "a terabyte of hello": SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + b"\x00" * 2 + b"\xff" * 6,
}  # fmt: skip
"""What it sends over a bare connection."""


def _open(dealer: zmq.Socket[bytes], public: bytes) -> None:
    """As pd-train without a key does."""


def _other_pair(dealer: zmq.Socket[bytes], public: bytes) -> None:
    """A key pair of its own, and the public half of the job's."""
    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.curve_serverkey = public


def _other_job(dealer: zmq.Socket[bytes], public: bytes) -> None:
    """As pd-train with another key does."""
    other, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.curve_publickey = dealer.curve_serverkey = other


def _claimed(dealer: zmq.Socket[bytes], public: bytes) -> None:
    """The job's public half without its secret, and another secret in its place."""
    dealer.curve_publickey, dealer.curve_secretkey = public, zmq.curve_keypair()[1]
    dealer.curve_serverkey = public


def _password(dealer: zmq.Socket[bytes], public: bytes) -> None:
    """The PLAIN mechanism."""
    dealer.plain_username, dealer.plain_password = b"admin", b"admin"


WAYS: dict[str, Callable[[zmq.Socket[bytes], bytes], None]] = {
    "open": _open, "other pair": _other_pair, "other job": _other_job, "claimed": _claimed, "password": _password,
}  # fmt: skip


def ask(address: str, port: int, way: str, public: bytes, messages: list[list[bytes]]) -> tuple[str, list[bytes]]:
    """Try to send messages in one of the ways, and to receive something.

    Returns:
        How the handshake ended, `HANDSHAKE_FAILED_PROTOCOL` or so, and what was received.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        WAYS[way](dealer, public)
        with dealer.get_monitor_socket() as monitor:
            dealer.connect(f"tcp://{address}:{port}")
            for frames in messages:
                dealer.send_multipart(frames)
            ended = "nothing"
            while "HANDSHAKE" not in ended and monitor.poll(_WAIT_MS):
                ended = zmq.Event(recv_monitor_message(monitor)["event"]).name
            received = dealer.recv_multipart() if dealer.poll(100 if "SUCCEEDED" in ended else 0) else []
            dealer.disable_monitor()
        return ended, received


def throw(address: str, port: int, content: bytes) -> socket.socket:
    """Connect, send this and leave the connection open."""
    stream = socket.create_connection((address, port))
    with contextlib.suppress(ConnectionError):  # It may be closed before all of it is sent.
        stream.sendall(content)
    return stream


def main() -> None:
    address, port, public = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
    tried = 0
    while True:
        try:
            held = [throw(address, port, content) for content in GARBAGE.values() for _ in range(5)]
        except ConnectionRefusedError:  # Not there yet, or not any more.
            time.sleep(0.1)
            continue
        for way in WAYS:
            ended, received = ask(address, port, way, public, [[b"junk"], [b"more", b"junk"]])
            if "SUCCEEDED" in ended or received:
                print(f"{way}: {ended} {received!r}", flush=True)
        for each in held:
            each.close()
        tried += 1
        print(f"round {tried}", flush=True)


if __name__ == "__main__":
    main()
