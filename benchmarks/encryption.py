"""What a key costs: two workers' transports in one process over loopback, with and without one, in turn."""

from __future__ import annotations

import statistics
import time

import torch
import zmq

from pd_train.keys import Key
from pd_train.transport import Transport
from pd_train.wire import Message

SIZES = ((1, 200), (16, 20))
"""MiB of a tensor, and how many are sent, one after the other."""
ROUNDS = 5


def measure(key: Key | None, mebibytes: int, count: int) -> tuple[float, float]:
    """MiB a second, and milliseconds of all threads' processor time a MiB, both ends together."""
    workers = [Transport(rank, "run", "127.0.0.1", key=key) for rank in range(2)]
    for each in workers:
        each.connect({one.rank: (one.address, one.port) for one in workers})
    tensor = torch.randn(mebibytes << 18)
    for index in range(count + 1):
        if index == 1:  # The first one waits for the handshake.
            clock, processor = time.perf_counter(), time.process_time()
        workers[0].send(1, Message("forward", 0, 0, index, tensor))
        assert isinstance(workers[1].receive(timeout=60), Message)
    seconds, busy = time.perf_counter() - clock, time.process_time() - processor
    for each in workers:
        each.close()
    return mebibytes * count / seconds, 1000 * busy / (mebibytes * count)


def main() -> None:
    key = Key(*zmq.curve_keypair())
    for mebibytes, count in SIZES:
        pairs = [[measure(each, mebibytes, count) for each in (None, key)] for _ in range(ROUNDS)]
        for place, name in enumerate(("open", "with a key")):
            speed, busy = (statistics.median(pair[place][part] for pair in pairs) for part in (0, 1))
            print(f"{mebibytes:3} MiB {name:10}  {speed:5.0f} MiB/s  {busy:.2f} ms of processor time a MiB")


if __name__ == "__main__":
    main()
