"""What every test is held to: one thread for arithmetic, the same examples each time, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Before torch is loaded: workers here compute with one thread, and bits are promised for the same number of threads.
os.environ["OMP_NUM_THREADS"] = "1"

# The same examples in every run: whoever changes nothing sees the same result. No deadline, since machines are shared.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
    # pyzmq's own thread frees sent buffers for the whole process, from the first message on.
    left = [thread for thread in left if type(thread).__name__ != "GarbageCollectorThread"]
    assert not left, f"threads left: {left}"
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    assert not children, f"processes left: {children}"
