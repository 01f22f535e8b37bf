"""Hostile input to everything that reads what others may have written: only the documented error, soon, in little memory."""

from __future__ import annotations

import os
import random
import resource
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzzing import Target, targets

ROOM_BYTES = 512 << 20
"""That the process may grow by, whatever it reads."""
MOST_PER_BYTE, MOST_ANYWAY = 100, 2 << 20
"""Python's own memory for an input: so many bytes for each of its bytes, besides so many in any case."""
MOST_SECONDS = 5.0
NAMES = ["messages", "plan", "profile", "text profile", "checkpoint part"]


@pytest.fixture(scope="module")
def by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return {target.name: target for target in targets(tmp_path_factory.mktemp("fuzz"))}


@pytest.fixture
def limited_memory() -> Iterator[None]:
    """No more address space than there is now, and some room."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")


@needs_proc
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("limited_memory")
@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**64))
def test_only_the_documented_error_is_raised(name: str, by_name: dict[str, Target], seed: int) -> None:
    target = by_name[name]
    target.feed(target.make(random.Random(seed)))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_reader_allocates_is_bounded_by_what_it_reads(name: str, by_name: dict[str, Target]) -> None:
    target, draw = by_name[name], random.Random(1)
    for _ in range(100):
        assert allocated(target, target.make(draw)) <= 1.0


def allocated(target: Target, given: object) -> float:
    """The most memory of Python's while an input is read, over the bound."""
    tracemalloc.start()
    try:
        target.feed(given)
        return tracemalloc.get_traced_memory()[1] / (MOST_PER_BYTE * target.size(given) + MOST_ANYWAY)
    finally:
        tracemalloc.stop()


@needs_proc
@pytest.mark.slow
@pytest.mark.usefixtures("limited_memory")
def test_hundreds_of_thousands(by_name: dict[str, Target], capsys: pytest.CaptureFixture[str]) -> None:
    """`make fuzz`."""
    most, seed = int(os.environ.get("COUNT", "400000")), int(os.environ.get("SEED", "0"))
    deadline = time.monotonic() + 60 * float(os.environ.get("MINUTES", "13"))
    draw = random.Random(seed)
    order = [target for target in by_name.values() for _ in range(target.share)]
    counts: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    slowest, fullest, done = 0.0, 0.0, 0
    start = time.monotonic()
    while done < most and time.monotonic() < deadline:
        target = order[done % len(order)]
        state = draw.getstate()
        given = target.make(draw)
        begun = time.thread_time()
        try:
            if done % 97 == 0:
                fullest = max(fullest, allocated(target, given))
            else:
                taken[target.name] += target.feed(given)
        except BaseException:
            draw.setstate(state)
            with capsys.disabled():
                print(f"\ninput {done} of {target.name}: {target.make(draw)!r:.2000}")
            raise
        slowest = max(slowest, time.thread_time() - begun)
        assert slowest < MOST_SECONDS
        assert fullest <= 1.0
        counts[target.name] += 1
        done += 1
    with capsys.disabled():
        print(f"\n{done} inputs (SEED={seed}) in {time.monotonic() - start:.0f} s; the slowest took {slowest:.3f} s")
        for name, count in counts.items():
            print(f"  {name}: {count}, of which {taken[name]} were whole and taken, the others refused")
        print(f"  memory at the fullest: {fullest:.0%} of {MOST_PER_BYTE} bytes a byte + {MOST_ANYWAY >> 20} MiB")
