"""Hosts that are Linux network namespaces, joined by a switch that is one too: real links on one machine.

    host 0 (10.77.0.1) ---veth---+
    host 1 (10.77.0.2) ---veth---+--- bridge in a namespace of its own
    host 2 ...                   +

Nothing touches the machine's own network. It needs root and iproute2. Whatever the machine's TCP is, hosts have Reno:
connections that share a link then have even shares of it. With BBR, which some machines have, four hosts that all send
to each other left receiving cards up to a third idle.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import pytest

__all__ = ["Network", "needs_namespaces", "network_of", "why_not"]


def why_not() -> str | None:
    """Why hosts cannot be built here; None where they can."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs root and iproute2 for network namespaces"
    try:
        with network_of(2, "10mbit"):
            return None
    except subprocess.CalledProcessError as error:
        return (
            f"hosts as network namespaces cannot be built here ({' '.join(map(str, error.cmd))}: {error.stderr or ''})"
        )


_NUMBERS = itertools.count()


class Network:
    """Some hosts on one switch."""

    def __init__(self, hosts: int, rate: str | None, queue: str, frame: int) -> None:
        self._name = f"pd{os.getpid()}n{next(_NUMBERS)}"
        self._hosts = hosts
        self._rate = rate
        self._queue = queue
        self._frame = str(frame)
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs another one on a host."""
        return ["ip", "netns", "exec", f"{self._name}h{host}", *command]

    def add_address(self, host: int, address: str) -> None:
        """Give a host one more address, which the others can reach where it is of their network."""
        _ip("-n", f"{self._name}h{host}", "addr", "add", f"{address}/24", "dev", "eth0")

    def cut(self, host: int) -> None:
        """Take a host's link down."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Bring it up again."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "up")

    def disturb(self, host: int, *how: str) -> str | None:
        """Delay and lose what a host sends, in tc netem's words; returns what is wrong where the kernel cannot."""
        command = ["tc", "-n", f"{self._name}h{host}", "qdisc", "add", "dev", "eth0", "root", "netem", *how]
        tried = subprocess.run(command, capture_output=True, text=True)
        return tried.stderr.strip() if tried.returncode else None

    @property
    def _switch(self) -> str:
        return f"{self._name}switch"

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host, address in enumerate(self.addresses):
            name = f"{self._name}h{host}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            reno = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
            _ip("netns", "exec", name, "sh", "-c", reno)
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{host}", "netns", self._switch)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "mtu", self._frame, "up")
            _ip("-n", self._switch, "link", "set", f"port{host}", "mtu", self._frame, "master", "bridge", "up")
            if self._rate is not None:
                shape = ("root", "tbf", "rate", self._rate, "burst", "256kb", "latency", self._queue)
                for place, device in ((name, "eth0"), (self._switch, f"port{host}")):
                    subprocess.run(
                        ["tc", "-n", place, "qdisc", "add", "dev", device, *shape], check=True, capture_output=True
                    )

    def _remove(self) -> None:
        for name in (*(f"{self._name}h{host}" for host in range(self._hosts)), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextlib.contextmanager
def network_of(hosts: int, rate: str | None = None, queue: str = "100ms", frame: int = 1500) -> Iterator[Network]:
    """Build hosts, and remove them at the end.

    Args:
        hosts: how many.
        rate: of each link, each way, as tc writes it (`1gbit`); None for no limit.
        queue: the longest that a packet waits for its turn before it is dropped.
        frame: bytes of the longest packet (MTU).
    """
    network = Network(hosts, rate, queue, frame)
    try:
        network._build()
        yield network
    finally:
        network._remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


_REASON = why_not()
needs_namespaces = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
