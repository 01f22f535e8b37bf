"""Who may connect, and what comes of connections: the key's side of the transport's sockets, on the transport's thread.

With a key the ROUTER is a CURVE server and each DEALER a CURVE client that expects the same key at the other end.
Before libzmq takes anything from a client it asks by its ZAP protocol, over a socket within this process; no second
thread answers. What happens to connections arrives from libzmq's monitors:

    DEALER of a peer   succeeded, then disconnected   the peer is lost
                       broken off within the handshake  libzmq tries again: the peer is `unmet` until it succeeds
                       answered in another way          libzmq has given up, and so does the run
    ROUTER             failed                         a stranger, counted and logged
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from pd_train.admission import Refusals
from pd_train.keys import Key, answer_zap

__all__ = ["Handshakes"]

log = logging.getLogger(__name__)

_CURVE_BYTES = 64
"""At least what CURVE adds to a frame (33 bytes)."""
_HANDSHAKE_MS = 30_000
"""After which a connection that has not finished its handshake is closed. The thread that answers for the key starts
once all workers of its host listen, and who comes much earlier tries again."""
_BROKEN_ENOUGH = 10
"""Handshakes with a peer that broke off, one about every 0.1 s. One that is merely slow takes 30 s to do so."""
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED | zmq.EVENT_DISCONNECTED


class Handshakes:
    """The handshakes of one worker's sockets.

    Args:
        context: of the sockets.
        key: that all workers of the run hold; None to speak and listen in the open.
        lost: is told whose connection has ended.
        failed: is told why there can be none.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], key: Key | None, lost: Callable[[int], None],
        failed: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._context = context
        self._key = key
        self._lost = lost
        self._failed = failed
        self._strangers = Refusals("connection")
        self._monitors: dict[zmq.Socket[bytes], int | None] = {}
        """By whose connection they watch; None for the ROUTER."""
        self._met: set[int] = set()
        self._unmet: dict[int, int] = {}
        """The last event of each handshake that failed, by peer."""
        self._broken = Counter[int]()
        """How often a handshake broke off, by peer."""
        self._mismatches = 0
        """Of others that connected: they use a key and this worker does not, or the other way round."""
        self._given_up: set[int] = set()
        self._zap: zmq.Socket[bytes] | None = None
        if key is not None:  # Before there is a socket that somebody could connect to.
            self._zap = context.socket(zmq.REP)
            self._zap.bind(_ZAP_ENDPOINT)

    @property
    def has_key(self) -> bool:
        """Whether only holders of a key connect."""
        return self._key is not None

    @property
    def unmet(self) -> frozenset[int]:
        """Peers that answered, but with whom no handshake has succeeded so far; may be asked from any thread."""
        return frozenset(tuple(self._unmet))

    @property
    def refused(self) -> int:
        """Connections that came to nothing."""
        return self._strangers.count

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """To be polled, and given to `handle` when there is something to read."""
        return [*self._monitors, *([] if self._zap is None else [self._zap])]

    def secure(self, socket: zmq.Socket[bytes], frame_bytes: int) -> None:
        """Prepare a ROUTER or DEALER, before it binds or connects, to take frames up to a length."""
        if socket.getsockopt(zmq.TYPE) == zmq.ROUTER:
            socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        if self._key is None:
            socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes)
            return
        socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes + _CURVE_BYTES)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._key.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)
        if socket.getsockopt(zmq.TYPE) == zmq.ROUTER:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.ZAP_DOMAIN, b"pipedream")
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # No answer is a no.
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._key.public)

    def watch(self, socket: zmq.Socket[bytes], rank: int | None) -> None:
        """Be told of a socket's connections: the one to a worker, or (None) all that others make."""
        endpoint = f"inproc://events-{'of-others' if rank is None else rank}"
        socket.monitor(endpoint, _EVENTS)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)  # With a bound, libzmq's I/O thread would wait for whoever reads.
        monitor.connect(endpoint)
        self._monitors[monitor] = rank

    def handle(self, socket: zmq.Socket[bytes]) -> None:
        """Read one event or question."""
        if socket is self._zap:
            self._answer(socket)
            return
        happened = recv_monitor_message(socket)
        rank = self._monitors[socket]
        if rank is not None:
            self._note_peer(rank, happened["event"], happened["value"])
        # Of a client with another key `_answer` knows more.
        elif happened["event"] & _FAILED and happened["event"] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._mismatches += happened["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
            self._note_stranger(_reason(happened["event"], happened["value"]))

    def _answer(self, zap: zmq.Socket[bytes]) -> None:
        assert self._key is not None
        request = zap.recv_multipart()
        reply = answer_zap(request, self._key)
        zap.send_multipart(reply)
        if reply[2] != b"200":
            self._note_stranger(f"{request[3].decode(errors='replace')} holds another key")

    def _note_stranger(self, reason: str) -> None:
        line = self._strangers.note(reason, time.monotonic())
        if line is not None:
            log.warning("%s", line)

    def _note_peer(self, rank: int, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._met.add(rank)
            self._unmet.pop(rank, None)
        elif rank in self._met:
            if event == zmq.EVENT_DISCONNECTED:
                self._lost(rank)
        elif event & _FAILED:
            if rank not in self._unmet:
                log.warning("no handshake with worker %d so far: %s", rank, _reason(event, value))
            self._unmet[rank] = event
            self._broken[rank] += 1
        elif rank not in self._given_up and self._is_hopeless(rank):
            self._given_up.add(rank)
            other = "one that was given a --key" if self._key is None else "one that was given no --key"
            self._failed(
                f"what listens at the address of worker {rank} is {other}, or no pd-train at all; give all hosts the "
                "same key file, and see that nothing else uses the port."
            )

    def _is_hopeless(self, rank: int) -> bool:
        """Whether a handshake that failed would do so again.

        libzmq tries again only where the connection broke off; what answers in another way would do so again. Where
        one side uses a key and the other does not, whoever reads the other's greeting first breaks off, which is
        mostly the one that listens: it sees the mismatch, and the one that connects sees it once in many tries.
        """
        if self._unmet.get(rank) != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return True
        return self._mismatches > 0 and self._broken[rank] >= _BROKEN_ENOUGH


def _reason(event: int, value: int) -> str:
    """Why a handshake failed, for the log."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return "it broke off within the handshake, or was too slow; the key may be another one there"
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "one side uses a key, and the other does not"
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "the key is another one there"
    return "it does not follow the protocol"
