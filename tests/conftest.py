"""What every test is held to: one thread for arithmetic, and no thread or process left behind."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator

import pytest

# Threads of libraries that serve the whole process from their first use on.
_LIBRARY_THREADS = ("pymp-", "QueueFeeder", "zmq", "Thread-garbage", "asyncio")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    left = [thread for thread in left if "garbage" not in type(thread).__name__.lower()]
    assert not left, f"threads left: {left}"
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    assert not children, f"processes left: {children}"
