"""The processes of a run: none outlives pd-train, however that ends; all say where they stand when asked (SIGUSR1)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_train.debug_dump import WorkerDump
from test_train_cli import _LOADING, _TRAINING, assert_end, needs_pidfd, running, write_plan

pytestmark = needs_pidfd


@contextlib.contextmanager
def fifo_at(path: Path) -> Iterator[int]:
    """A FIFO, and a descriptor that is readable once somebody has begun to write to it."""
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield descriptor
    os.close(descriptor)


def await_readable(descriptor: int) -> None:
    ready, _, _ = select.select([descriptor], [], [], 60)
    assert ready


@pytest.mark.parametrize(("data", "processes"), [("stuck_at_the_start", 0), ("stuck_in_validation", 1)])
def test_no_process_outlives_pd_train_while_data_is_read(
    data: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUCK", str(tmp_path / "fifo"))
    arguments = ["--plan", write_plan(tmp_path, "1-1", data), "--run-dir", tmp_path / "run"]
    arguments += ["--loader-workers", processes]
    with fifo_at(tmp_path / "fifo") as stuck, running(*arguments) as program:
        await_readable(stuck)
        watched = program.watch()
        assert len(watched) >= 4 + 2 * processes
        program.process.kill()
        assert_end(watched)


def test_no_process_outlives_pd_train_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    # The last layer's part is longer than what a FIFO holds.
    path = write_plan(tmp_path, "1-1", kwargs={"classes": 4096})
    with running("--plan", path, "--run-dir", tmp_path / "run") as program:
        program.wait_for("starting")
        folder = tmp_path / "run" / "checkpoints" / "epoch-0001"
        folder.mkdir(parents=True)
        with fifo_at(folder / ".stage-1.pt.tmp") as written:
            await_readable(written)
            watched = program.watch()
            program.process.kill()
            assert_end(watched)


def test_no_process_outlives_pd_train_while_it_starts(tmp_path: Path) -> None:
    with running("--plan", write_plan(tmp_path, "1-1"), "--run-dir", tmp_path / "run") as program:
        program.wait_for(_LOADING)
        watched = program.watch()
        program.process.kill()
        assert_end(watched)


def test_sigusr1_makes_every_worker_say_where_it_stands(tmp_path: Path) -> None:
    arguments = ["--plan", write_plan(tmp_path, "2-1"), "--epochs", 100_000, "--loader-workers", 1]
    with running(*arguments, "--run-dir", tmp_path / "run") as program:
        program.wait_for(_LOADING)
        os.killpg(program.process.pid, signal.SIGUSR1)  # As some batch systems do, to all processes of a job.
        program.wait_for(_TRAINING)
        watched = program.watch()
        program.process.send_signal(signal.SIGUSR1)
        program.wait_for("SIGUSR1: each worker writes where it stands to its log, ")
        logs = [tmp_path / "run" / f"worker-{rank}.log" for rank in range(3)]
        while not all("schedule: segment" in log.read_text() for log in logs):
            program.wait_for("epoch")  # It goes on.
        os.killpg(program.process.pid, signal.SIGUSR1)
        for _ in range(3):
            program.wait_for("epoch")
        ended, _, _ = select.select(watched, [], [], 0)
        assert not ended
        program.process.send_signal(signal.SIGINT)
        assert program.process.wait(60) == 130
        assert_end(watched)
    for log in logs:
        text = log.read_text()
        for expected in (
            "Current thread 0x", "of epoch", "weight versions held [", "messages to send, ", "phase: runs",
            "messages kept until they are due", "in _watch",
        ):  # fmt: skip
            assert expected in text, text


def test_a_part_that_cannot_be_looked_at_hides_no_other() -> None:
    dump = WorkerDump(is_on=False)
    dump.phase = "runs"

    def broken() -> list[str]:
        raise RuntimeError("dictionary changed size during iteration")

    dump.add(broken)
    dump.add(lambda: ["queues: 3"])
    first, second, third = dump.lines()
    assert first == "phase: runs"
    assert "RuntimeError while looking" in second
    assert third == "queues: 3"
