"""The transport against raw sockets and gloo: throughput, processor time, latency, and what compute feels of it.

Two processes, and between them, all open at once:

    raw     a socket; `sendall` from the tensor's memory, `recv_into` a buffer that exists already
    gloo    torch.distributed's send and recv, into a tensor that exists already
    own     this project: a tensor goes into `Transport.send`, and a tensor comes out of `Transport.receive`
    key     the same, encrypted by a key

In each round every way moves the same bytes, one after the other; a ratio compares neighbours within a round, and the
table shows the median of all rounds. So a busy machine disturbs all of them alike, and only ratios mean anything.
All four run in the same two processes and so with the same settings of the allocator, which workers have too.

    python benchmarks/transport.py               loopback and, as root, a link of 1 Gbit/s between two namespaces
    python benchmarks/transport.py --quick       under two minutes: few sizes, few rounds
    python benchmarks/transport.py --plain-malloc    with the system's own settings of the allocator
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent / "tests"))
SIZES_MB = (1, 4, 16, 64, 100)
WAYS = ("raw", "gloo", "own", "key")
_UNDER_WAY = 3
"""Tensors that have not been answered yet, about what a pipeline has under way to one peer."""
_RUN = "benchmark"


class Way(Protocol):
    """One way from process 0 to process 1 and back."""

    def send(self, tensors: Sequence[Any], count: int) -> None:
        """Send tensors in turns, and wait until the last one has arrived."""
        ...

    def receive(self, count: int) -> None:
        """Take what the other one sends."""
        ...


class Raw:
    """A socket each way."""

    def __init__(self, stream: socket.socket) -> None:
        import torch

        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = stream
        self._buffers: dict[int, Any] = {}
        self._empty = torch.empty(0)

    def send(self, tensors: Sequence[Any], count: int) -> None:
        for number in range(count):
            raw = memoryview(tensors[number % len(tensors)].numpy()).cast("B")
            self._stream.sendall(len(raw).to_bytes(8, "little"))
            self._stream.sendall(raw)
        assert self._stream.recv(1)

    def receive(self, count: int) -> None:
        for _ in range(count):
            size = int.from_bytes(self._exactly(memoryview(bytearray(8))), "little")
            if size not in self._buffers:
                self._buffers[size] = memoryview(self._empty.new_empty(size // 4).numpy()).cast("B")
            self._exactly(self._buffers[size])
        self._stream.sendall(b"!")

    def _exactly(self, buffer: memoryview) -> memoryview:
        filled = 0
        while filled < len(buffer):
            filled += self._stream.recv_into(buffer[filled:])
        return buffer


class Gloo:
    """torch.distributed; the size is agreed upon beforehand, as its users do."""

    def __init__(self, rank: int, address: str, port: int) -> None:
        import torch
        import torch.distributed as dist

        self._dist = dist
        self._peer = 1 - rank
        self._word = torch.zeros(1)
        self._buffers: dict[int, Any] = {}
        dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=2)

    def send(self, tensors: Sequence[Any], count: int) -> None:
        self._word[0] = tensors[0].numel()
        self._dist.send(self._word, self._peer)
        for number in range(count):
            self._dist.send(tensors[number % len(tensors)], self._peer)
        self._dist.recv(self._word, self._peer)

    def receive(self, count: int) -> None:
        self._dist.recv(self._word, self._peer)
        size = int(self._word)
        if size not in self._buffers:
            self._buffers[size] = self._word.new_empty(size)
        for _ in range(count):
            self._dist.recv(self._buffers[size], self._peer)
        self._dist.send(self._word, self._peer)


class Own:
    """`pd_train.transport`, each tensor answered by an empty message, as every minibatch is."""

    def __init__(self, transport: Any) -> None:
        from pd_train.wire import Message

        self._transport = transport
        self._message = Message
        self._peer = 1 - transport.rank

    def send(self, tensors: Sequence[Any], count: int) -> None:
        for number in range(count):
            if number >= _UNDER_WAY:
                self._receive()
            self._transport.send(self._peer, self._of("forward", number, (tensors[number % len(tensors)],)))
        for _ in range(min(count, _UNDER_WAY)):
            self._receive()

    def receive(self, count: int) -> None:
        for number in range(count):
            (tensor,) = self._receive().body
            del tensor
            self._transport.send(self._peer, self._of("backward", number, None))

    def _of(self, kind: str, index: int, body: object) -> Any:
        return self._message(kind, self._transport.rank, 0, index, body)

    def _receive(self) -> Any:
        return self._transport.receive(timeout=60.0)


def serve(rank: int, address: str) -> None:
    """One of the two processes: open all ways, then do what is asked, a line each."""
    import torch
    import zmq

    from pd_train.keys import Key
    from pd_train.transport import Transport

    torch.set_num_threads(1)
    listener = socket.create_server((address, 0))
    keys = json.loads(input())
    transports = {
        "own": Transport(rank, _RUN, address),
        "key": Transport(rank, _RUN, address, key=Key(*(half.encode() for half in keys))),
    }
    assert zmq.has("curve")
    _say({name: transport.port for name, transport in transports.items()} | {"raw": listener.getsockname()[1]})
    peer = json.loads(input())
    for name, transport in transports.items():
        transport.connect({1 - rank: (peer["address"], peer[name])})
    stream = listener.accept()[0] if rank else socket.create_connection((peer["address"], peer["raw"]))
    gloo = Gloo(rank, peer["meeting"], peer["gloo"])
    ways: dict[str, Way] = {
        "raw": Raw(stream), "gloo": gloo, "own": Own(transports["own"]), "key": Own(transports["key"]),
    }  # fmt: skip
    tensors: dict[int, list[Any]] = {}
    back: dict[str, Way] = {}
    _say("ready")
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "compute":
            _say(_compute(torch, order["seconds"]))
            continue
        size = order["bytes"] // 4
        if size not in tensors:
            tensors.clear()
            tensors[size] = [torch.randn(size) for _ in range(_UNDER_WAY + 1)]
        if order["do"] == "both":
            # Traffic each way at once while this process computes: the ways of `both` share the connections.
            _say(_compute_under_traffic(torch, ways[order["way"]], transports, order, rank, tensors[size]))
            continue
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        if order["do"] == "send":
            ways[order["way"]].send(tensors[size], order["count"])
        else:
            ways[order["way"]].receive(order["count"])
        seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        _say({"seconds": seconds, "cpu": cpu, "faults": after.ru_minflt - before.ru_minflt})
    assert not back
    for transport in transports.values():
        transport.close()
    os._exit(0)  # gloo's threads have nothing to say to each other any more.


def _compute(torch: Any, seconds: float) -> float:
    """Matrix products a second, of a size that fits into a cache."""
    left, right = torch.randn(256, 256), torch.randn(256, 256)
    done, start = 0, time.monotonic()
    while (now := time.monotonic()) < start + seconds:
        for _ in range(20):
            torch.mm(left, right)
        done += 20
    return done / (now - start)


def _compute_under_traffic(
    torch: Any, way: Way, transports: Any, order: dict[str, Any], rank: int, tensors: list[Any]
) -> dict[str, float]:
    """Process 0 computes and both send and receive at the rate of the link."""
    stop = threading.Event()
    moved = [0, 0]
    threads = []
    if order["way"] == "raw":
        assert isinstance(way, Raw)
        stream = way._stream
        raw = memoryview(tensors[0].numpy()).cast("B")
        buffer = memoryview(tensors[1].numpy()).cast("B")

        def push() -> None:
            while not stop.is_set():
                stream.sendall(raw)
                moved[0] += len(raw)

        def pull() -> None:
            while not stop.is_set():
                way._exactly(buffer)
                moved[1] += len(raw)

        threads = [threading.Thread(target=push, daemon=True), threading.Thread(target=pull, daemon=True)]
    else:
        assert isinstance(way, Own)

        def exchange() -> None:
            for number in range(_UNDER_WAY):
                way._transport.send(way._peer, way._of("forward", number, (tensors[number],)))
            number = _UNDER_WAY
            while not stop.is_set():
                message = way._receive()
                if message is None:
                    return
                moved[1] += order["bytes"]
                moved[0] += order["bytes"]
                del message
                way._transport.send(way._peer, way._of("forward", number, (tensors[number % len(tensors)],)))
                number += 1

        threads = [threading.Thread(target=exchange, daemon=True)]
    for thread in threads:
        thread.start()
    start = time.monotonic()
    rate = _compute(torch, order["seconds"]) if rank == 0 else time.sleep(order["seconds"]) or 0.0
    seconds = time.monotonic() - start
    found = {"rate": rate, "out_bps": 8 * moved[0] / seconds, "in_bps": 8 * moved[1] / seconds}
    return found


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


class Ends:
    """Both processes, seen from the program that measures."""

    def __init__(self, prefixes: Sequence[Sequence[str]], addresses: Sequence[str], device: str, plain: bool) -> None:
        import zmq

        from pd_train.launch import MALLOC

        settings = {} if plain else MALLOC
        environment = {**os.environ, **settings, "GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1"}
        self._ends = [
            subprocess.Popen(
                [*prefix, sys.executable, str(HERE), "--serve", str(rank), "--address", address],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for rank, (prefix, address) in enumerate(zip(prefixes, addresses, strict=True))
        ]  # fmt: skip
        key = [half.decode() for half in zmq.curve_keypair()]
        found = self.ask(key, key)
        meeting = {"meeting": addresses[0], "gloo": found[0]["raw"] - 1 if found[0]["raw"] > 40000 else 45678}
        said = [found[1 - rank] | {"address": addresses[1 - rank]} | meeting for rank in range(2)]
        assert self.ask(*said) == ["ready", "ready"]

    def ask(self, *orders: object) -> list[Any]:
        """Tell each process what to do, and hear what came of it."""
        for end, order in zip(self._ends, orders, strict=True):
            assert end.stdin is not None
            end.stdin.write(json.dumps(order) + "\n")
            end.stdin.flush()
        answers = []
        for end in self._ends:
            assert end.stdout is not None
            line = end.stdout.readline()
            if not line:
                raise SystemExit("a process of the measurement has ended; see above")
            answers.append(json.loads(line))
        return answers

    def move(self, way: str, size: int, count: int) -> tuple[float, float, int]:
        """Seconds on the clock, seconds of processor on both sides, and page faults at the receiver."""
        order = {"way": way, "bytes": size, "count": count}
        sender, receiver = self.ask({"do": "send", **order}, {"do": "receive", **order})
        return sender["seconds"], sender["cpu"] + receiver["cpu"], receiver["faults"]

    def close(self) -> None:
        """End both."""
        for end in self._ends:
            end.kill()
            end.communicate()


@contextlib.contextmanager
def ends_of(rate: str | None, plain: bool) -> Iterator[Ends]:
    """The two processes: on this machine's loopback, or on two hosts joined by links of a rate."""
    with contextlib.ExitStack() as stack:
        prefixes: list[Sequence[str]] = [[], []]
        addresses, device = ["127.0.0.1", "127.0.0.1"], "lo"
        if rate is not None:
            from namespaces import network_of

            network = stack.enter_context(network_of(2, rate))
            prefixes, addresses, device = [network.command(host, []) for host in range(2)], network.addresses, "eth0"
        ends = Ends(prefixes, addresses, device, plain)
        stack.callback(ends.close)
        yield ends


def compare(ends: Ends, sizes: Sequence[int], rounds: int, round_bytes: int, ways: Sequence[str]) -> None:
    """Throughput of all ways at each size."""
    print(f"{'':<8}{'raw':>9}" + "".join(f"{f'{way}/raw':>22}" for way in ways[1:]) + "   cpu ms/100 MB, faults/MB")
    print(f"{'':<8}{'MB/s':>9}" + f"{'median (min to max)':>22}" * (len(ways) - 1) + "   " + " | ".join(ways))
    for megabytes in sizes:
        size, count = megabytes * 10**6, max(4, round_bytes // (megabytes * 10**6))
        for way in ways:
            ends.move(way, size, 4)  # Warms up: buffers, windows of TCP.
        runs: list[dict[str, tuple[float, float, int]]] = []
        for number in range(rounds):
            order = ways if number % 2 else ways[::-1]
            runs.append({way: ends.move(way, size, count) for way in order})
        ratios = {way: [one["raw"][0] / one[way][0] for one in runs] for way in ways[1:]}
        raw = statistics.median(size * count / one["raw"][0] for one in runs) / 1e6
        cells = "".join(
            f"{f'{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})':>22}"
            for found in ratios.values()
        )
        share = 1e8 / (size * count)
        cpu = " | ".join(
            f"{1000 * share * statistics.median(one[way][1] for one in runs):.0f}, "
            f"{share / 100 * statistics.median(one[way][2] for one in runs):.1f}"
            for way in ways
        )
        print(f"{f'{megabytes} MB':<8}{raw:>9.0f}{cells}   {cpu}", flush=True)


def latency(ends: Ends, rounds: int, ways: Sequence[str]) -> None:
    """The way there and back of a few bytes, with one message at a time."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            count = 30
            found[way].append(
                statistics.median(ends.move(way, 4096, 1)[0] for _ in range(count))  # A message and its answer.
            )
    cells = ", ".join(f"{way} {1e6 * statistics.median(times):.0f}" for way, times in found.items())
    print(f"4 kB and its answer, microseconds: {cells}", flush=True)


def compute_share(ends: Ends, rounds: int, seconds: float) -> None:
    """What a thread that computes loses while a link of 1 Gbit/s is full both ways."""
    kept: list[float] = []
    rates: list[dict[str, float]] = []
    for _ in range(rounds):
        quiet = ends.ask({"do": "compute", "seconds": seconds}, {"do": "compute", "seconds": 0.0})[0]
        order = {"do": "both", "way": "own", "bytes": 16 * 10**6, "seconds": seconds}
        busy = ends.ask(order, order)[0]
        rates.append(busy)
        kept.append(busy["rate"] / quiet)
    print(kept, rates)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="The transport against raw sockets and gloo, as ratios within one run."
    )
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds, under two minutes")
    parser.add_argument("--rounds", type=int, help="of each size (default 9; quick: 3)")
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], help="MB (1,4,16,64,100)")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help="raw first")
    parser.add_argument("--link", choices=("loopback", "1gbit"), help="one of the two")
    parser.add_argument("--plain-malloc", action="store_true", help="leave the allocator's settings alone")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve is not None:
        serve(asked.serve, asked.address)
        return
    rounds = asked.rounds or (3 if asked.quick else 9)
    for link, rate in (("loopback", None), ("1gbit", "1gbit")):
        if asked.link not in (None, link):
            continue
        with ends_of(rate, asked.plain_malloc) as ends:
            print(f"\n{link}")
            compare(ends, asked.sizes or SIZES_MB, rounds, 200 * 10**6, asked.ways)
            latency(ends, 3, asked.ways)


if __name__ == "__main__":
    main()
