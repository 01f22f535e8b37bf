"""What this host, or the part of it that this program is allowed, has to offer: cores and memory."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "allow_open_files",
    "available_cores",
    "available_memory_bytes",
    "is_here",
    "is_loopback",
    "shared_memory_bytes",
]


def available_cores() -> int:
    """Those that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_here(address: str) -> bool:
    """Whether an address, or what a host name stands for, belongs to this machine. No name is looked up for one."""
    own = socket.gethostname()
    if address in (own, own.partition(".")[0], "localhost"):
        return True
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, place) for family, _, _, _, place in found)


def is_loopback(address: str) -> bool:
    """Whether an address never leaves this machine; a host name other than localhost may."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def allow_open_files(most: int = 1 << 16) -> None:
    """Let this process hold more files open than the usual 1024, if the system does: strangers' connections count too,
    until their handshake has failed, and a checkpoint must still find a place.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _can_bind(family: int, place: Any) -> bool:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.bind(place)
        return True
    return False


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that programs can still take on this host, or None where the system does not tell.

    A container or a job of a scheduler may be allowed less than the host has.

    Args:
        root: of the file system that the system tells it by.
    """
    figures = [_host_memory_bytes(root), *_cgroup_memory_bytes(root)]
    return min((figure for figure in figures if figure is not None), default=None)


def shared_memory_bytes(place: Path = Path("/dev/shm")) -> float:
    """Free memory that processes on this host can share; infinite where the system sets no limit of its own."""
    try:
        free = os.statvfs(place)
    except (OSError, AttributeError):
        return math.inf
    return free.f_bavail * free.f_frsize


def _host_memory_bytes(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _cgroup_memory_bytes(root: Path) -> Iterator[int]:
    """What each control group (version 2) that this process is in leaves to it."""
    top = root / "sys/fs/cgroup"
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    own = next((top / line[3:].lstrip("/") for line in groups if line.startswith("0::")), top)
    for group in (own, *own.parents):
        if group != top and top not in group.parents:
            return
        try:
            most = (group / "memory.max").read_text(encoding="ascii").strip()
            used = int((group / "memory.current").read_text(encoding="ascii"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):
            continue
        if most.isdigit():
            # Files in the cache give way to programs.
            yield max(0, int(most) - used + int(stat.get("inactive_file", 0)))
