"""What a person sees of a run: plain lines, the live view, and the table at the end."""

from __future__ import annotations

import io
import re
from datetime import datetime
from pathlib import Path

import pytest

from pd_format.plan import Plan, PlanPrediction, Stage, StagePrediction
from pd_format.profile import InputSpec, ModelSpec
from pd_train.display import Display, open_display
from pd_train.events import EpochEnded, EpochMetrics, Note, Progress, RunEnded
from pd_train.run_table import print_run_table


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def progress(
    epoch: int, done: int, *, phase: str = "training", loss: float | None = 0.5, pace: float = 0.1
) -> Progress:
    return Progress(phase, epoch, 3, done, 40, done * 32, done * pace, loss)


def ended(epoch: int, accuracy: float | None = 0.97) -> EpochEnded:
    validation_loss = None if accuracy is None else 0.25
    return EpochEnded(EpochMetrics(epoch, 4.0, 40, 320.0, 0.5, validation_loss, accuracy), 3)


def plain(clock: Clock) -> tuple[Display, io.StringIO]:
    stream = io.StringIO()
    return open_display(stream=stream, clock=clock, now=lambda: datetime(2024, 5, 6, 7, 8, 9)), stream


def test_plain_lines_come_every_few_seconds_and_once_an_epoch() -> None:
    clock = Clock()
    display, stream = plain(clock)
    for done in range(1, 41):
        clock.seconds += 0.25
        display.handle(progress(0, done))
    display.handle(ended(0))
    display.close()
    assert stream.getvalue().splitlines() == [
        "07:08:09  epoch 1/3  training 20/40  320 samples/s   loss 0.5000   0:10 left",
        "07:08:09  epoch 1/3  training 40/40  320 samples/s   loss 0.5000   0:08 left",
        "07:08:09  epoch 1/3  loss 0.5000  validation 0.2500, accuracy 97.00 %  320 samples/s",
    ]


def test_what_is_not_known_is_a_dash() -> None:
    clock = Clock()
    display, stream = plain(clock)
    clock.seconds += 10
    display.handle(progress(0, 0, loss=None))
    display.handle(EpochEnded(EpochMetrics(0, 0.0, 0, 0.0, None, None, None), 3))
    assert stream.getvalue().splitlines() == [
        "07:08:09  epoch 1/3  training 0/40  - samples/s   loss -   - left",
        "07:08:09  epoch 1/3  loss -  - samples/s",
    ]


def test_time_left_counts_the_validations_to_come() -> None:
    clock = Clock()
    display, stream = plain(clock)
    display.handle(progress(0, 40))
    display.handle(progress(0, 40, phase="validation", pace=0.05))
    clock.seconds += 10
    display.handle(progress(1, 20))
    # The rest of this epoch and all of the next: 2 + 2 + 4 + 2 seconds.
    assert stream.getvalue().endswith("0:10 left\n")


def test_a_loss_that_is_no_number_is_shown_as_it_is() -> None:
    clock = Clock()
    display, stream = plain(clock)
    for loss in (float("nan"), float("inf"), 1e-7, 123456.0, 0.0):
        clock.seconds += 10
        display.handle(progress(0, 5, loss=loss))
    losses = re.findall(r"loss (\S+)", stream.getvalue())
    assert losses == ["nan", "inf", "1.00e-07", "1.23e+05", "0.0000"]


def test_notes_are_printed_as_they_are() -> None:
    display, stream = plain(Clock())
    display.handle(Note("worker 3 [stage 1] waits"))
    assert stream.getvalue() == "07:08:09  worker 3 [stage 1] waits\n"


@pytest.fixture
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.usefixtures("eighty_columns")
@pytest.mark.parametrize("no_color", ["", "1"])
def test_the_live_view_fits_eighty_columns_and_gives_the_cursor_back(
    no_color: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    stream = io.StringIO()
    display = open_display(terminal=True, stream=stream)
    display.handle(Progress("training", 997, 1000, 1, 100_000, 123, 0.01, 0.1))
    display.handle(Progress("validation", 998, 1000, 99_999, 100_000, 12_345_678, 1000.0, 0.1))
    display.handle(ended(0))
    display.handle(Note("a note [with brackets]"))
    display.close()
    display.close()
    raw = stream.getvalue()
    assert raw.count("\x1b[?25l") == raw.count("\x1b[?25h") == 1
    if no_color:
        assert not re.search(r"\x1b\[[\d;]*3[0-9][\d;]*m", raw)
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", raw).replace("\r", "\n")
    assert all(len(line) <= 80 for line in text.split("\n"))
    assert "epoch 1/3  loss 0.5000  validation 0.2500, accuracy 97.00 %  320 samples/s\n" in text
    assert "a note [with brackets]\n" in text
    assert "epoch 999/1000  validation  " in text
    assert "99999/100000\n" in text
    assert "12346 samples/s   loss 0.1000   33:20 left" in text


def test_a_stream_that_is_no_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    display = open_display(stream=stream)
    display.handle(ended(0))
    display.close()
    print_run_table(plan(), RunEnded(None, 12.0, 3, 0.985, 0, 0, 0), [], Path("runs/a"), stream=stream)
    assert "\x1b" not in stream.getvalue()


def plan() -> Plan:
    predicted = StagePrediction(compute_ms=1.0, sync_ms=0.0, memory_bytes=1)
    return Plan(
        model=ModelSpec(name="m", factory="a:b", fingerprint="f"),
        minibatch_size=32,
        inputs=(InputSpec(name="x", shape=(32, 1), dtype="float32"),),
        machines=4,
        bandwidth_bps=1e9,
        strategy="auto",
        config="3-1",
        noam=2,
        stages=(
            Stage(
                index=0,
                first_layer="a",
                last_layer="a",
                layers=1,
                replicas=3,
                workers=(0, 1, 2),
                in_flight=2,
                predicted=predicted,
            ),
            Stage(
                index=1,
                first_layer="b",
                last_layer="b",
                layers=1,
                replicas=1,
                workers=(3,),
                in_flight=1,
                predicted=predicted,
            ),
        ),
        predicted=PlanPrediction(
            minibatch_ms=1.0,
            single_machine_ms=4.0,
            data_parallel_ms=2.0,
            speedup=4.0,
            speedup_over_data_parallel=2.0,
            bytes_per_minibatch=1e6,
            data_parallel_bytes_per_minibatch=2e7,
            communication_reduction=0.95,
        ),
    )


def rows(run: RunEnded, epochs: list[EpochMetrics], target: float | None = None) -> dict[str, str]:
    stream = io.StringIO()
    print_run_table(plan(), run, epochs, Path("runs/digits"), target, stream)
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    return {cell[0]: cell[1] for cell in cells}


def test_the_table_holds_the_figures_of_the_run() -> None:
    epochs = [EpochMetrics(0, 4.0, 40, 300.0, 0.5, 0.2, 0.9), EpochMetrics(1, 8.0, 40, 600.0, 0.4, 0.1, 0.985)]
    run = RunEnded(True, 12.0, 2, 0.985, 200_000_000, 80_000_000, 80)
    assert rows(run, epochs, 0.97) == {
        "plan": "3-1 (2 stages, 4 workers)",
        "best validation accuracy": "98.50 %",
        "target 97.00 %": "reached in 12.0 s, 2 epochs",
        "training time": "12.0 s, 2 epochs",
        "throughput": "500 samples/s",
        "sent a minibatch": "1 MB, all workers together",
        "data parallelism, computed": "20 MB on 4 machines; this run sent 95 % less",
        "files": "runs/digits",
    }


def test_the_table_makes_no_number_up() -> None:
    table = rows(RunEnded(False, 0.0, 0, None, 0, 0, 0), [], 0.99)
    assert table["best validation accuracy"] == table["throughput"].split()[0] == table["sent a minibatch"] == "-"
    assert table["target 99.00 %"] == "not reached"
    assert table["data parallelism, computed"] == "20 MB on 4 machines"


def test_updates_that_were_left_out_are_counted() -> None:
    table = rows(RunEnded(None, 1.0, 1, None, 0, 0, 5, skipped_updates=3, skipped_by_stage=(2, 3), loss_scale=8.0), [])
    assert table["updates left out"] == "3, gradients not finite; by stage 2, 3"


def test_a_run_that_sends_more_than_data_parallelism_says_so() -> None:
    table = rows(RunEnded(None, 10.0, 1, None, 0, 30_000_000, 1), [])
    assert table["data parallelism, computed"] == "20 MB on 4 machines; this run sent 50 % more"
