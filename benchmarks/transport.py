"""The transport against raw sockets and gloo: throughput, processor time, latency, and what compute feels of it.

Two processes, and between them, all open at once:

    raw     a socket; `sendall` from the tensor's memory, `recv_into` a buffer that exists already
    gloo    torch.distributed's send and recv, into a tensor that exists already
    own     this project: a tensor goes into `Transport.send`, and a tensor comes out of `Transport.receive`
    key     the same, encrypted by a key

In each round every way moves the same bytes, one after the other; a ratio compares neighbours within a round, and the
table shows the median of all rounds. So a busy machine disturbs all of them alike. Processor time, of all threads at
both ends, stands beside; on a busy machine it means more than the clock, which then tells who has fewer threads.
All ways run in the same two processes and so with the same settings of the allocator, which workers have too.

    python benchmarks/transport.py               loopback and, as root, links between two network namespaces
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

    def push(self, tensor: Any, count: int) -> None:
        """Send only."""
        for _ in range(count):
            self._stream.sendall(memoryview(tensor.numpy()).cast("B"))

    def pull(self, tensor: Any, count: int) -> None:
        """Receive only."""
        for _ in range(count):
            self._exactly(memoryview(tensor.numpy()).cast("B"))

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

    def exchange(self, tensors: Sequence[Any], count: int) -> None:
        """Send tensors and take as many."""
        for number in range(count + _UNDER_WAY):
            if number >= _UNDER_WAY:
                self._receive()
            if number < count:
                self._transport.send(self._peer, self._of("forward", number, (tensors[number % len(tensors)],)))

    def _of(self, kind: str, index: int, body: object) -> Any:
        return self._message(kind, self._transport.rank, 0, index, body)

    def _receive(self) -> Any:
        return self._transport.receive(timeout=60.0)


def serve(rank: int, address: str) -> None:
    """One of the two processes: open all ways, then do what is asked, a line each."""
    import torch

    from pd_train.keys import Key
    from pd_train.transport import Transport

    torch.set_num_threads(1)
    listener = socket.create_server((address, 0))
    with socket.create_server((address, 0)) as free:
        meeting = free.getsockname()[1]
    keys = json.loads(input())
    transports = {
        "own": Transport(rank, _RUN, address),
        "key": Transport(rank, _RUN, address, key=Key(*(half.encode() for half in keys))),
    }
    _say(
        {name: transport.port for name, transport in transports.items()}
        | {"raw": listener.getsockname()[1], "gloo": meeting}
    )
    peer = json.loads(input())
    for name, transport in transports.items():
        transport.connect({1 - rank: (peer["address"], peer[name])})
    stream = listener.accept()[0] if rank else socket.create_connection((peer["address"], peer["raw"]))
    gloo = Gloo(rank, peer["meeting"], peer["gloo"])
    ways: dict[str, Way] = {
        "raw": Raw(stream), "gloo": gloo, "own": Own(transports["own"]), "key": Own(transports["key"]),
    }  # fmt: skip
    tensors: dict[int, list[Any]] = {}
    _say("ready")
    for line in sys.stdin:
        order = json.loads(line)
        size, count = order["bytes"] // 4, order["count"]
        if size not in tensors:
            tensors.clear()
            tensors[size] = [torch.randn(size) for _ in range(_UNDER_WAY + 1)]
        way = ways.get(order["way"])
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        found: dict[str, float] = {}
        if order["do"] == "send" and way is not None:
            way.send(tensors[size], count)
        elif order["do"] == "receive" and way is not None:
            way.receive(count)
        else:
            found = _compute_while(torch, way, tensors[size], count, order["do"] == "compute", order["own_core"])
        seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        _say({"seconds": seconds, "cpu": cpu, "faults": after.ru_minflt - before.ru_minflt, **found})
    for transport in transports.values():
        transport.close()
    os._exit(0)  # gloo's threads have nothing to say to each other any more.


def _compute_while(
    torch: Any, way: Way | None, tensors: list[Any], count: int, compute: bool, own_core: bool
) -> dict[str, float]:
    """Compute, if this process is the one that does, while as many tensors go out as come in; else for three seconds.

    Args:
        own_core: whether the thread that computes has the last core to itself, and all others of both processes the
            rest, as far as this program can say.

    Returns:
        Matrix products, of a size that fits into a cache, a second by the clock and by the thread's processor time.
    """
    *others, last = cores = sorted(os.sched_getaffinity(os.getpid()))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), others if own_core else cores)
    threads = []
    if way is not None:
        if isinstance(way, Raw):
            threads = [threading.Thread(target=way.push, args=(tensors[0], count))]
            threads.append(threading.Thread(target=way.pull, args=(tensors[1], count)))
        elif isinstance(way, Own):
            threads = [threading.Thread(target=way.exchange, args=(tensors, count))]
    left, right = torch.randn(256, 256), torch.randn(256, 256)
    for thread in threads:
        thread.start()  # With the cores of this thread, before it gets its own.
    if own_core and compute:
        os.sched_setaffinity(threading.get_native_id(), {last})
    done, start, cpu_start = 0, time.monotonic(), time.thread_time()
    while compute and (any(each.is_alive() for each in threads) if threads else time.monotonic() < start + 3):
        for _ in range(20):
            torch.mm(left, right)
        done += 20
    seconds, cpu = time.monotonic() - start, time.thread_time() - cpu_start
    for thread in threads:
        thread.join()
    os.sched_setaffinity(threading.get_native_id(), cores)
    return {"per_second": done / seconds if compute else 0.0, "per_cpu": done / cpu if compute else 0.0}


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


class Ends:
    """Both processes, seen from the program that measures."""

    def __init__(self, prefixes: Sequence[Sequence[str]], addresses: Sequence[str], device: str, plain: bool) -> None:
        import zmq

        from pd_train.launch import MALLOC

        settings = {} if plain else MALLOC
        environment = {**os.environ, **settings, "GLOO_SOCKET_IFNAME": device, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._ends = [
            subprocess.Popen(
                [*prefix, sys.executable, str(HERE), "--serve", str(rank), "--address", address],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for rank, (prefix, address) in enumerate(zip(prefixes, addresses, strict=True))
        ]  # fmt: skip
        key = [half.decode() for half in zmq.curve_keypair()]
        found = self.ask(key, key)
        meeting = {"meeting": addresses[0], "gloo": found[0]["gloo"]}
        said = [{**found[1 - rank], "address": addresses[1 - rank], **meeting} for rank in range(2)]
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
        size, count = megabytes * 10**6, max(2, round_bytes // (megabytes * 10**6))
        for way in ways:
            ends.move(way, size, 4 if megabytes < 32 else 2)  # Warms up: buffers, windows of TCP.
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
            found[way].append(statistics.median(ends.move(way, 4096, 1)[0] for _ in range(30)))
    cells = ", ".join(f"{way} {1e6 * statistics.median(times):.0f}" for way, times in found.items())
    print(f"4 kB and its answer, microseconds: {cells}", flush=True)


def compute_share(ends: Ends, rounds: int, ways: Sequence[str], own_core: bool) -> None:
    """What a thread that computes keeps of its speed while the link is full both ways."""
    megabytes, count = 16, 25
    where = "on a core of its own" if own_core else "on any core"
    kept: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways if way != "gloo"}
    for _ in range(rounds):
        for way, found in kept.items():
            quiet = {"do": "compute", "way": None, "bytes": 4096, "count": 0, "own_core": own_core}
            alone, _ = ends.ask(quiet, {**quiet, "do": "wait"})
            busy = {**quiet, "way": way, "bytes": megabytes * 10**6, "count": count}
            beside, _ = ends.ask(busy, {**busy, "do": "wait"})
            rate = megabytes * count / beside["seconds"]
            found.append((beside["per_second"] / alone["per_second"], beside["per_cpu"] / alone["per_cpu"], rate))
    for way, found in kept.items():
        clock, cpu, rate = (statistics.median(column) for column in zip(*found, strict=True))
        print(
            f"compute {where} beside {way:<5} {rate:.0f} MB/s each way: keeps {clock:.3f} of its speed by the clock, "
            f"{cpu:.3f} by its thread's processor time",
            flush=True,
        )


def links_here(asked: str | None) -> list[tuple[str, str | None]]:
    """Names and rates of the links that can be tried here."""
    from namespaces import why_not

    links: list[tuple[str, str | None]] = [("loopback", None)]
    reason = why_not()
    if reason is None:
        links += [("1 Gbit/s", "1gbit"), ("10 Gbit/s", "10gbit")]
    else:
        print(f"Links with a rate are left out: {reason}")
    return [each for each in links if asked in (None, each[1] or each[0])]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="The transport against raw sockets and gloo, as ratios within one run."
    )
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds, under two minutes")
    parser.add_argument("--rounds", type=int, help="of each size (default 9; quick: 3)")
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], help="MB (1,4,16,64,100)")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help="raw first")
    parser.add_argument("--link", choices=("loopback", "1gbit", "10gbit"), help="one of them")
    parser.add_argument("--plain-malloc", action="store_true", help="leave the allocator's settings alone")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve is not None:
        serve(asked.serve, asked.address)
        return
    rounds = asked.rounds or (3 if asked.quick else 9)
    sizes = asked.sizes or ((1, 16, 100) if asked.quick else SIZES_MB)
    for name, rate in links_here(asked.link):
        if asked.quick and rate == "10gbit" and asked.link is None:
            continue
        with ends_of(rate, asked.plain_malloc) as ends:
            print(f"\n{name}")
            compare(ends, sizes, rounds, 100 * 10**6 if asked.quick else 200 * 10**6, asked.ways)
            latency(ends, rounds, asked.ways)
            if rate == "1gbit":
                for own_core in (False, True):
                    compute_share(ends, rounds, asked.ways, own_core)


if __name__ == "__main__":
    main()
