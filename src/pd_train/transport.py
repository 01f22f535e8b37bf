"""Moves messages between workers by ZeroMQ (design, section 6); `pd_train.handshakes` decides who connects.

Each worker binds one ROUTER socket, where all others' messages arrive, and connects one DEALER to each peer it
sends to. One thread owns all of them; the compute thread meets it at two queues only:

    compute thread --send()--> departures of the peer --> its DEALER  ==TCP==>  ROUTER --> inbox --receive()-->

* Where a worker computes on a GPU, what it sends is held until its bytes have come from there (`pd_train.sender`).
* Threads: this one, which runs Python between calls to libzmq, and one I/O thread of libzmq, which alone reads and
  writes the network.
* Sending never blocks: what may be under way is bounded by the protocol itself (`in_flight` activations and
  gradients, lag + 1 rounds of a stage).
* No copy is made at the sender, where a frame looks into the tensor's memory, and one at the receiver, from libzmq's
  memory to where the tensor stays. libzmq's own is no place for tensors: it lies 8 bytes off any alignment.
* Large messages travel as pieces of 1 MiB (`pd_train.departures`) and land in buffers that exist already
  (`pd_train.arrivals`). A message as one frame would be copied only when all of it is there, and encrypted by a key
  in memory that no cache holds; and heartbeats find no turn while it lasts, so a link that is slow would be taken for
  one that is dead. Smaller pieces cost more of this thread's time, larger ones win little.
* Messages to one peer arrive in the order in which they were sent, but for news of a failure, which overtakes all,
  between two pieces too. Peers take turns, so a large message to one of them holds up no other.
* libzmq holds at most 8 messages ready for a peer (more would stand before what is urgent), and reads at most 32 of a
  connection ahead. The system's own sizes of socket buffers are left alone: it adapts them to the link.
* Liveness: libzmq's own heartbeats, which run in its I/O thread whatever Python does, so a busy worker is not
  taken for a dead one. A connection that ends while the run goes on arrives as a `PeerLost`.
* With a key everything is encrypted, and only its holders connect.
* What strangers send is refused, counted and logged (`pd_train.admission`), and never reaches the inbox.

`benchmarks/transport.py` measures all this; docs/benchmarks.md has its table.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import zmq

from pd_format.errors import UserError
from pd_train.admission import GREETING, Admission, Refusals
from pd_train.arrivals import Arrival, Buffers
from pd_train.departures import URGENT, Departures
from pd_train.handshakes import Handshakes
from pd_train.keys import Key
from pd_train.packing import Frames, Region
from pd_train.wire import FRAME_BYTES, PIECE_BYTES, Message, Opened, Sealed, WireError, seal

__all__ = ["PeerLost", "Transport"]

log = logging.getLogger(__name__)

_INBOX_MESSAGES = 100_000
"""More than any plan has under way; a peer that floods the inbox is refused rather than given memory."""
_ROUTER_MESSAGES = 32
"""Of one connection that libzmq reads ahead of this thread: a flood waits at its sender."""
_SEND_MESSAGES = 8
"""Of a peer that libzmq holds ready: what is urgent waits behind these alone."""
_AT_A_TIME = 16
"""Messages to one peer, or from all, before others get their turn."""


@dataclass(frozen=True)
class PeerLost:
    """The connection to a peer has ended while the run was still going on."""

    rank: int


class Transport:
    """The sockets of one worker.

    Args:
        rank: of this worker.
        run: marks the messages of this run; others are refused and counted.
        address: IPv4, IPv6 or host name to bind, without brackets.
        port: to bind; 0 lets the system choose.
        peer_timeout: seconds of silence after which a peer counts as dead.
        problem: what is wrong with a message by the plan; see `pd_train.forms.plan_problem`.
        key: that all workers of the run hold; None to speak and listen in the open.
        now: the clock that messages are stamped by, in seconds.
        hold: is given what lets a message go, to be called, in order, once the message's bytes are there; None where
            they always are (`pd_train.sender`).
        pinned: whether messages are to land in page-locked memory, which a GPU copies from by itself.

    Raises:
        UserError: the address cannot be bound.
    """

    def __init__(
        self,
        rank: int,
        run: str,
        address: str,
        port: int = 0,
        peer_timeout: float = 10.0,
        problem: Callable[[Message], str | None] = lambda message: None,
        key: Key | None = None,
        now: Callable[[], float] = time.monotonic,
        hold: Callable[[Callable[[], None]], None] | None = None,
        pinned: bool = False,
    ) -> None:
        self.rank = rank
        self._run = run
        self._taken: tuple[str, ...] = (run,)
        self._admission = Admission(problem)
        self._now = now
        self._hold = hold
        self._pinned = pinned
        self._refusals = Refusals()
        self._refusing = threading.Lock()
        self._buffers = Buffers(pinned)
        self._arriving: dict[bytes, tuple[Opened, Arrival]] = {}
        """By connection; one at a time, and only of those that have greeted."""
        self.sent_bytes: Counter[str] = Counter()
        """Payload handed to the sockets, by kind of message; a message to oneself moves nothing."""
        self._peer_timeout_ms = int(peer_timeout * 1000)
        self._inbox: queue.SimpleQueue[Message | PeerLost | BaseException] = queue.SimpleQueue()
        self._outgoing: deque[tuple[int, Sealed]] = deque()
        self._departures: dict[int, Departures] = {}
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)
        self._stopping = False
        self._end = 0.0
        """When a transport that is stopping gives up what has not left."""
        self._context = zmq.Context(io_threads=1)
        self._peers: dict[int, zmq.Socket[bytes]] = {}
        self._handshakes = Handshakes(self._context, key, self._note_lost, lambda why: self._inbox.put(UserError(why)))
        self._router = self._context.socket(zmq.ROUTER)
        self._configure(self._router)
        self._router.setsockopt(zmq.RCVHWM, _ROUTER_MESSAGES)
        try:
            self._router.bind(_endpoint(address, port))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            raise UserError(_bind_failure(address, port, error)) from None
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = address
        self.port = int(endpoint.rpartition(":")[2])
        self._thread = threading.Thread(target=self._serve, name=f"transport-{rank}", daemon=True)

    @property
    def is_connected(self) -> bool:
        """Whether messages can be sent to peers."""
        return self._thread.is_alive()

    def set_marks(self, sent: str, taken: tuple[str, ...]) -> None:
        """Mark messages in another way from now on, and take those with any of these marks."""
        self._taken = taken
        self._run = sent

    def connect(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Connect to the peers and start the thread; called once."""
        for rank, (address, port) in addresses.items():
            if rank == self.rank:
                continue
            dealer = self._context.socket(zmq.DEALER)
            self._configure(dealer)
            self._handshakes.watch(dealer, rank)
            dealer.connect(_endpoint(address, port))
            self._peers[rank] = dealer
            self._departures[rank] = Departures()
            self._departures[rank].add(seal(Message(GREETING, self.rank, 0, 0), self._run, sent=self._now()))
        self._handshakes.watch(self._router, None)
        self._wake()
        self._thread.start()

    def send(self, rank: int, message: Message) -> None:
        """Queue a message; returns at once. Its tensors must not change until the run has moved past them."""
        if rank == self.rank:
            leave = partial(self._inbox.put, message)
        else:
            # Looks at where the bytes are, not at them: they may be on their way there.
            sealed = seal(message, self._run, sent=self._now())
            self.sent_bytes[message.kind] += sealed.size
            leave = partial(self._depart, rank, sealed)
        if self._hold is None or message.kind in URGENT:
            leave()
        else:
            self._hold(leave)

    def fail(self, error: BaseException) -> None:
        """Have `receive` raise an error; may be called from any thread."""
        self._inbox.put(error)

    @property
    def refused(self) -> int:
        """Messages that were of no use."""
        return self._refusals.count

    @property
    def has_key(self) -> bool:
        """Whether connections are encrypted, and open to those who hold the key alone."""
        return self._handshakes.has_key

    @property
    def unmet(self) -> frozenset[int]:
        """Peers that answered, but with whom no handshake has succeeded so far."""
        return self._handshakes.unmet

    def standing(self) -> list[str]:
        """Where it stands, for people; may be called from any thread."""
        unsent = len(self._outgoing) + sum(map(len, self._departures.values()))
        begun = {rank: departures.sequence for rank, departures in self._departures.items()}
        return [
            f"queues: {unsent} messages to send, {self._inbox.qsize()} to read; {self.refused} refused",
            f"connections that came to nothing: {self._handshakes.refused}",
            f"messages handed to the network so far, by worker: {begun}",
        ]

    def refuse(self, reason: str) -> None:
        """Count a message as refused, and log it unless there are too many."""
        with self._refusing:
            line = self._refusals.note(reason, time.monotonic())
        if line is not None:
            log.warning("%s", line)

    def receive(self, timeout: float | None = 0.0) -> Message | PeerLost | None:
        """The next message, or None when none came within the time.

        Args:
            timeout: seconds; 0 does not wait, None waits for ever.

        Raises:
            Exception: whatever ended the transport's thread.
        """
        try:
            item = self._inbox.get(timeout != 0.0, timeout or None)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self, linger: float = 0.0) -> None:
        """Stop the thread and close the sockets.

        Args:
            linger: seconds that queued messages may still take to leave.
        """
        self._end = time.monotonic() + linger
        self._stopping = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join()
        else:
            self._context.destroy(linger=0)
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.SNDHWM, _SEND_MESSAGES)
        # A connection that announces a longer frame is closed before any memory is taken for it.
        self._handshakes.secure(socket, FRAME_BYTES)
        socket.setsockopt(zmq.RCVHWM, 1)  # Of a DEALER, where nothing is to arrive.
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, self._peer_timeout_ms // 4))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._peer_timeout_ms)
        socket.setsockopt(zmq.HEARTBEAT_TTL, self._peer_timeout_ms)
        # Off by default in libzmq; IPv4 addresses go on working, and a system without IPv6 refuses only those.
        socket.setsockopt(zmq.IPV6, 1 if _has_ipv6() else 0)

    def _depart(self, rank: int, sealed: Sealed) -> None:
        self._outgoing.append((rank, sealed))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # A full pipe has woken the thread already.
            os.write(self._wake_writer, b"\0")

    def _serve(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._inbox.put(error)
        finally:
            for each in self._handshakes.sockets:
                each.close(linger=0)
            self._context.destroy(linger=max(0, int(1000 * (self._end - time.monotonic()))))

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        for each in self._handshakes.sockets:
            poller.register(each, zmq.POLLIN)
        ranks = {dealer: rank for rank, dealer in self._peers.items()}
        able = set(self._peers)
        """Peers whose sockets would take a message; libzmq says when another one does again."""
        while True:
            if self._stopping and (time.monotonic() >= self._end or not self._unsent()):
                return
            # There may be more to send or to read, if what is done at a time has left some.
            more = any(self._departures[rank] for rank in able)
            wait = 0 if more else max(0, int(1000 * (self._end - time.monotonic()))) if self._stopping else None
            for ready, _ in poller.poll(wait):
                if ready == self._wake_reader:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_reader, 4096)
                elif ready is self._router:
                    self._receive_waiting()
                elif ready in ranks:
                    poller.unregister(ready)
                    able.add(ranks[ready])
                else:
                    self._handshakes.handle(ready)
            while self._outgoing:
                rank, message = self._outgoing.popleft()
                self._departures[rank].add(message)
            for rank in tuple(able):
                if not self._send_some(rank):
                    # Where libzmq has given a connection up there is none to wait for, and its monitor tells.
                    able.discard(rank)
                    poller.register(self._peers[rank], zmq.POLLOUT)

    def _unsent(self) -> bool:
        return bool(self._outgoing) or any(self._departures.values())

    def _send_some(self, rank: int) -> bool:
        """Hand a peer's next messages to libzmq; says whether it would take more."""
        departures, dealer = self._departures[rank], self._peers[rank]
        for _ in range(_AT_A_TIME):
            parts = departures.next()
            if parts is None:
                break
            try:
                dealer.send_multipart(parts, flags=zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return False
            departures.sent()
        return True

    def _receive_waiting(self) -> None:
        for _ in range(_AT_A_TIME):
            try:
                connection = self._router.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                self._receive_one(connection)
            except WireError as error:
                self.refuse(str(error))
            finally:
                while self._router.getsockopt(zmq.RCVMORE):
                    self._router.recv_into(bytearray())

    def _receive_one(self, connection: bytes) -> None:
        """Read the next message from libzmq, or the next piece of one."""
        first = self._router.recv(copy=False)
        if first.more and not len(first):
            self._receive_piece(connection)
            return
        frames = [first]
        while frames[-1].more:
            frames.append(self._router.recv(copy=False))
        opened = Opened(first.buffer, self._taken)
        if opened.apart and len(frames) > 1:
            raise WireError("a header whose bytes come twice")
        if not opened.apart:
            message = opened.read(Frames([frame.buffer for frame in frames[1:]], self._pinned))
            self._admission.check(connection, message)
            self._take(message, sum(len(frame) for frame in frames))
            return
        if connection in self._arriving:
            raise WireError("a large message in the midst of another")
        self._admission.begin(connection, opened.message)
        self._arriving[connection] = opened, Arrival(self._buffers, opened.apart, len(first))

    def _receive_piece(self, connection: bytes) -> None:
        if connection not in self._arriving:
            raise WireError("a piece of no message")
        opened, arrival = self._arriving[connection]
        try:
            while self._router.getsockopt(zmq.RCVMORE):
                room = arrival.room(PIECE_BYTES)
                arrival.add(self._router.recv_into(room), len(room))
        except WireError:
            del self._arriving[connection]
            arrival.drop()
            raise
        if arrival.is_whole:
            del self._arriving[connection]
            message = opened.read(Region(arrival.end()))
            self._admission.end(message)
            self._take(message, arrival.received)

    def _take(self, message: Message, size: int) -> None:
        if message.kind == GREETING:
            return
        if self._inbox.qsize() >= _INBOX_MESSAGES:
            raise RuntimeError(f"{_INBOX_MESSAGES} messages wait to be read; a peer sends more than the plan asks")
        self._inbox.put(replace(message, arrived=self._now(), size=size))

    def _note_lost(self, rank: int) -> None:
        if not self._stopping:
            self._inbox.put(PeerLost(rank))


def _endpoint(address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address and not address.startswith("[") else address
    return f"tcp://{host}:{port if port else '*'}"


def _has_ipv6() -> bool:
    return os.path.exists("/proc/net/if_inet6") or not os.path.exists("/proc/net")


def _bind_failure(address: str, port: int, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return f"port {port} of {address} is in use by another program; end that program or give the plan another port."
    return (
        f"cannot listen on {address} port {port} ({error.strerror}); the address must belong to this machine: "
        "set `listen` of this host in the plan to one that does."
    )
