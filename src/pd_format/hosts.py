"""The hosts that a plan runs on, as people write them: a host file, a list, or a pattern; and which worker goes where.

    host file, as MPI and DeepSpeed have it       list                          pattern (Kubernetes' headless services)
        node1 slots=2                             node1,node2:29700,[fe80::1]   train-{rank}.train:29600
        node2 slots=2   # a comment

Workers fill the hosts in their order, slot by slot. A host's workers listen on its port and on those that follow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pd_format.errors import UserError
from pd_format.plan import Host

__all__ = ["DEFAULT_PORT", "HostSlots", "place_workers", "read_hosts"]

DEFAULT_PORT = 29600

_HINT = "expected a host file (lines like 'node1 slots=2'), a list like node1,node2:29700, or a pattern with {rank}"


class HostSlots(NamedTuple):
    """A host, and how many workers it takes."""

    address: str
    """A host name, an IPv4 or an IPv6 address without brackets."""
    slots: int
    port: int
    """Of its first worker."""

    @property
    def is_pattern(self) -> bool:
        """Whether it stands for a host for each worker, whose name holds the worker's rank."""
        return "{rank}" in self.address


def read_hosts(text: str) -> list[HostSlots]:
    """Read what `--hosts` was given: the path of a host file, or the list itself.

    A pattern is one entry with any number of slots; see `place_workers`.

    Raises:
        UserError: it is neither, or a line of the file is wrong.
    """
    if os.path.isfile(text):  # Unlike `Path.is_file` it says no to what is too long for a file's name.
        return _read_file(Path(text))
    if "/" in text or re.search(r"\.(txt|hosts|conf|cfg|file)$", text):
        raise UserError(f"--hosts {text}: there is no such file; {_HINT}.")
    hosts = [_read_address(part.strip(), f"--hosts {text}") for part in text.split(",")]
    return _merge([HostSlots(address, 1, port) for address, port in hosts], f"--hosts {text}")


def place_workers(hosts: Sequence[HostSlots], workers: int) -> tuple[Host, ...]:
    """Where each worker of a plan listens, by rank.

    Raises:
        UserError: there are fewer slots than workers.
    """
    for host in hosts:
        if host.port + host.slots - 1 > 65535:
            raise UserError(
                f"{host.address}: {host.slots} workers from port {host.port} on would need ports beyond 65535; name a "
                "smaller port."
            )
    if hosts[0].is_pattern:
        pattern = hosts[0]
        return tuple(Host(address=pattern.address.replace("{rank}", str(r)), port=pattern.port) for r in range(workers))
    placed = [
        Host(address=host.address, port=host.port + slot, listen=None) for host in hosts for slot in range(host.slots)
    ]
    if len(placed) < workers:
        raise UserError(
            f"the hosts ({', '.join(host.address for host in hosts)}) have {len(placed)} slots, and the plan has "
            f"{workers} workers; name more hosts, give them slots=N, or plan for {len(placed)} machines."
        )
    return tuple(placed[:workers])


def _read_file(path: Path) -> list[HostSlots]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--hosts {path}: cannot be read as text ({error}); expected lines like 'node1 slots=2'."
        ) from None
    hosts = []
    for number, line in enumerate(lines, 1):
        content = line.partition("#")[0].split()
        if not content:
            continue
        place = f"{path}, line {number}"
        address, port = _read_address(content[0], place)
        slots = 1
        for word in content[1:]:
            key, _, value = word.partition("=")
            if key == "slots" and value.isascii() and value.isdigit() and int(value) > 0:
                slots = int(value)
            elif key != "max_slots":  # Open MPI's, which limits what it may start besides.
                raise UserError(f"{place}: found {word!r}; expected 'slots=N' after the host, N at least 1.")
        hosts.append(HostSlots(address, slots, port))
    if not hosts:
        raise UserError(f"--hosts {path}: names no host; expected lines like 'node1 slots=2'.")
    return _merge(hosts, str(path))


_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<name>[\w.{}-]+))(?::(?P<port>\d+))?")
_BARE_V6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.%\w]*")


def _read_address(text: str, place: str) -> tuple[str, int]:
    if _BARE_V6.fullmatch(text):
        return text, DEFAULT_PORT
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise UserError(f"{place}: found {text!r}, which is no host; {_HINT}. IPv6 with a port goes in brackets.")
    if re.search(r"[{}]", text.replace("{rank}", "")):
        raise UserError(f"{place}: found {text!r}; the only pattern is {{rank}}, as in train-{{rank}}.train:29600.")
    port = int(match["port"] or DEFAULT_PORT)
    if not 1 <= port <= 65535:
        raise UserError(f"{place}: found port {port} in {text!r}; expected 1 to 65535.")
    return match["v6"] or match["name"], port


def _merge(hosts: Sequence[HostSlots], place: str) -> list[HostSlots]:
    """A host that stands there several times takes as many workers more."""
    merged: dict[str, HostSlots] = {}
    for host in hosts:
        if host.is_pattern and len(hosts) > 1:
            raise UserError(f"{place}: a pattern with {{rank}} stands for all hosts; leave the others out.")
        before = merged.get(host.address)
        if before is None:
            merged[host.address] = host
        elif host.port == before.port or DEFAULT_PORT in (host.port, before.port):
            port = before.port if host.port == DEFAULT_PORT else host.port
            before = before._replace(port=port)
            merged[host.address] = before._replace(slots=before.slots + host.slots)
        else:
            raise UserError(
                f"{place}: {host.address} stands there with ports {before.port} and {host.port}; name it once with "
                "slots=N: its workers take the ports that follow."
            )
    return list(merged.values())
