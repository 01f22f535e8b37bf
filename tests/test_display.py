"""What a person sees of a run: plain lines, the live view, and the table at the end."""

from __future__ import annotations

import io
import re
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import ConsoleDimensions

from pd_format.plan import Plan, PlanPrediction, Stage, StagePrediction
from pd_format.profile import InputSpec, ModelSpec
from pd_train.display.frame import draw
from pd_train.display.opening import Display, open_display
from pd_train.display.quiet import result_line
from pd_train.display.view import View
from pd_train.events import (
    EMULATION,
    Activity,
    EpochEnded,
    EpochMetrics,
    Evaluated,
    Note,
    PipelineStatus,
    Progress,
    RunEnded,
    RunStarted,
    StageStatus,
    WorkersMet,
    WorkersStart,
    from_plain,
    to_plain,
)
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
    assert "12346 samples/s   loss 0.1000   validation accuracy 97.00 %   33:20 left" in text


def test_a_stream_that_is_no_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    display = open_display(stream=stream)
    display.handle(ended(0))
    display.close()
    print_run_table(plan(), RunEnded(None, 12.0, 3, 0.985, 0, 0, 0), [], Path("runs/a"), stream=stream)
    assert "\x1b" not in stream.getvalue()


def stage(
    busy: float | None = 0.5,
    waits_for: str = "activations",
    waited: float = 0.25,
    now: str = "",
    seconds: float = 0.0,
    awaited: str = "",
    now_for: str = "",
) -> StageStatus:
    rate = None if busy is None else 12.34e6
    return StageStatus(2, busy, waits_for, waited, now, seconds, now_for, awaited, rate, 3)  # type: ignore[arg-type]


def view_of(clock: Clock, *stages: StageStatus) -> View:
    view = View(clock)
    layers = tuple(f"features.{index}.convolution to features.{index}.norm" for index in range(len(stages)))
    view.take(RunStarted("3-1", 4, 1, "runs/a", layers))
    for event in (WorkersStart(), progress(1, 20), PipelineStatus(stages), ended(0)):
        view.take(event)
    return view


def lines_of(view: View, width: int, height: int = 24) -> list[str]:
    lines = [line.plain for line in draw(view, width, height)]
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= max(1, height - 2)
    return lines


TWO = stage(0.914), stage(0.77, "gradients", now="waits", seconds=1.0, awaited="the answer to minibatch 3")


def test_the_view_has_a_row_a_stage() -> None:
    assert lines_of(view_of(Clock(), *TWO), 80)[1:] == [
        "320 samples/s   loss 0.5000   validation accuracy 97.00 %   0:06 left",
        "",
        "stage  replicas   busy  MB/s sent  versions  waits for",
        "    0         2   91 %       12.3         3  activations 25 %",
        "    1         2   77 %       12.3         3  gradients 25 %",
    ]


def test_a_wide_view_names_layers_and_what_is_awaited() -> None:
    lines = lines_of(view_of(Clock(), *TWO), 200)
    assert "0:02 left, 0:06 in all epochs" in lines[1]
    assert "features.1.convolution to features.1.norm" in lines[5]
    assert lines[5].endswith("gradients 25 %; now the answer to minibatch 3")


@pytest.mark.parametrize(
    ("width", "heading"),
    [
        (60, "stage  replicas   busy  MB/s sent  waits for"),
        (45, "stage   busy  MB/s sent  waits for"),
        (30, "stage   busy  waits for"),
    ],
)
def test_a_narrow_view_leaves_columns_out(width: int, heading: str) -> None:
    lines = lines_of(view_of(Clock(), *TWO), width)
    assert lines[3] == heading
    assert lines[4].endswith("activations 25 %")
    assert "left" in lines[1]


@pytest.mark.parametrize("width", range(1, 30))
@pytest.mark.parametrize("height", [1, 3, 5, 8])
def test_no_terminal_is_too_small(width: int, height: int) -> None:
    view = view_of(Clock(), *TWO, *[stage(None)] * 9)
    lines_of(view, width, height)
    view.take(Activity("writing a checkpoint"))
    lines_of(view, width, height)


def test_of_many_stages_the_most_and_the_least_busy_are_shown() -> None:
    view = view_of(Clock(), *[stage((index * 7 % 40) / 40) for index in range(40)])
    lines = lines_of(view, 80)
    assert len(lines) == 22
    shown = {int(line.split()[0]) for line in lines[4:-1]}
    by_busy = sorted(range(40), key=lambda index: index * 7 % 40)
    assert shown == {*by_busy[:8], *by_busy[-9:]}
    assert lines[-1] == "and 23 more stages, 20 % to 75 % busy"


def test_figures_that_are_not_known_are_dashes_in_the_view() -> None:
    view = View(Clock())
    view.take(progress(0, 0, loss=None))
    view.take(PipelineStatus((stage(None, "", 0.0),)))
    lines = lines_of(view, 80)
    assert lines[1] == "- samples/s   loss -   validation -   - left"
    assert lines[4].split() == ["0", "2", "-", "-", "3", "-"]


def test_what_lasts_is_shown_to_last() -> None:
    clock = Clock()
    view = view_of(
        clock,
        stage(now="computes", seconds=7.2),
        stage(now="waits", seconds=12.0, awaited="minibatch 8 from stage 0 replica 0"),
        stage(now="silent", seconds=5.0),
        stage(now="waits", seconds=4.0, awaited="the answer to minibatch 8", now_for="gradients"),
    )
    rows = [line[45:] for line in lines_of(view, 90)[3:]]
    assert rows == [
        "waits for",
        "(computing for 7 s)",
        "minibatch 8 from stage 0 replica 0, for 12 s",
        "(nothing heard for 5 s)",
        "the answer to minibatch 8, for 4 s",
    ]
    assert lines_of(view, 60)[5].endswith("(for 12 s)")
    assert lines_of(view, 60)[7].endswith("gradients for 4 s")
    clock.seconds += 20
    lines = lines_of(view, 80)
    assert "no minibatch for 20 s" in lines[1], "an old estimate of the time left is not shown any longer"
    assert lines[3].endswith("waits for (20 s ago)")
    view.take(progress(1, 40))
    clock.seconds += 20
    assert "training ended 20 s ago" in lines_of(view, 80)[1]


def test_what_happens_between_minibatches_is_shown_with_its_time() -> None:
    clock = Clock()
    view = View(clock)
    seen = []
    for event in (
        RunStarted("3-1", 4, 1, "runs/a"),
        WorkersStart(),
        Note("waiting for worker 2 at 10.0.0.2:29502", "waiting"),
        Note("waiting for worker 2 at 10.0.0.2:29502", "waiting"),
        WorkersMet(),
        progress(0, 40),
        Activity("writing a checkpoint"),
        WorkersStart(),
        WorkersStart(),
    ):
        view.take(event)
        clock.seconds += 5
        seen.append(lines_of(view, 80)[0])
    assert seen[1:5] == [
        "starting 4 workers  0:05",
        "waiting for worker 2 at 10.0.0.2:29502  0:05",
        "waiting for worker 2 at 10.0.0.2:29502  0:10",
        "preparing to run  0:05",
    ]
    assert seen[6:] == ["epoch 1/3  writing a checkpoint  0:05", *["starting 4 workers  0:05"] * 2]


def test_the_best_validation_is_told_where_it_is_not_the_last() -> None:
    view = view_of(Clock())
    view.take(ended(1, 0.9))
    assert "validation accuracy 90.00 % (best 97.00 %, epoch 1)" in lines_of(view, 120)[1]
    assert "best" not in lines_of(view, 80)[1]


def test_an_emulation_has_no_loss() -> None:
    view = View(Clock())
    view.take(progress(0, 20, phase=EMULATION, loss=None))
    assert lines_of(view, 80)[1] == "0:02 left, 0:10 in all epochs"


def test_the_bar_is_of_ascii_where_the_terminal_has_no_more() -> None:
    first = draw(view_of(Clock()), 60, 24, plain_characters=True)[0].plain
    assert first.isascii()
    assert first == f"epoch 2/3  training    {'=' * 15}{' ' * 15}  20/40"


@pytest.mark.usefixtures("eighty_columns")
def test_a_terminal_made_narrower_is_cleared_of_the_rows_that_it_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    size = [80]
    monkeypatch.setattr("rich.console.Console.size", property(lambda self: ConsoleDimensions(size[0], 24)))
    stream = io.StringIO()
    display = open_display(terminal=True, stream=stream, clock=Clock())
    display.handle(progress(0, 20))
    display.handle(PipelineStatus(TWO))
    display.handle(Note("first"))
    before = len(stream.getvalue())
    size[0] = 50
    display.handle(Note("second"))
    display.close()
    # Of the six lines that were drawn, the bar, the figures, the heading and both rows took two rows each.
    cleared = stream.getvalue()[before:].partition("second")[0]
    assert cleared.count("\x1b[1A") == 5 + 5


def test_a_line_of_the_stages_follows_that_of_the_progress() -> None:
    clock = Clock()
    display, stream = plain(clock)
    display.handle(PipelineStatus((stage(0.91, "", 0.0), stage(0.77))))
    for seconds in (4, 2, 6):
        clock.seconds += seconds
        display.handle(progress(0, 20))
    assert stream.getvalue().splitlines()[1] == "07:08:09  stage 0 91 % busy, stage 1 77 % (waits for activations)"
    assert stream.getvalue().count("busy") == 1, "what is no news is not told again"
    display.handle(PipelineStatus(tuple(stage(index / 100) for index in range(100))))
    clock.seconds += 6
    display.handle(progress(0, 30))
    assert stream.getvalue().splitlines()[-1] == (
        "07:08:09  100 stages 50 % busy; most stage 99 99 % (waits for activations), "
        "least stage 0 0 % (waits for activations)"
    )
    clock.seconds += 30
    display.handle(PipelineStatus(TWO))
    assert stream.getvalue().splitlines()[-1].startswith("07:08:09  no minibatch for 30 s; stage 0 91 % busy")


def test_quiet_says_warnings_alone() -> None:
    stream = io.StringIO()
    display = open_display(quiet=True, stream=stream, now=lambda: datetime(2024, 5, 6, 7, 8, 9))
    for event in (
        RunStarted("3-1", 4, 1, "runs/a"),
        WorkersStart(),
        progress(0, 1),
        PipelineStatus(TWO),
        Note("this is worker 0", "information"),
        ended(0),
    ):
        display.handle(event)
    assert stream.getvalue() == ""
    display.handle(Note("worker 3 [stage 1] waits"))
    display.close()
    assert stream.getvalue() == "07:08:09  worker 3 [stage 1] waits\n"


def test_the_line_at_the_end_of_a_quiet_run() -> None:
    epochs = [EpochMetrics(0, 4.0, 40, 300.0, 0.5, 0.2, 0.9)]
    run = RunEnded(True, 12.0, 2, 0.985, 200_000_000, 80_000_000, 80)
    assert result_line(run, epochs, Path("runs/a"), 0.97) == (
        "runs/a: 2 epochs in 12.0 s, 300 samples/s, best validation accuracy 98.50 %, target 97.00 % reached"
    )
    evaluated = Evaluated(0.25, 0.97, "accuracy", 0.97, 100, 4, 2.0, 50.0, 1)
    assert (
        result_line(evaluated, [], Path("runs/a")) == "runs/a: validation loss 0.2500, accuracy 97.00 %, 50.0 samples/s"
    )


def test_what_other_hosts_are_told_is_what_happened() -> None:
    for event in (PipelineStatus(TWO), Activity("writing a checkpoint"), Note("a", "information"), progress(0, 1)):
        assert from_plain(*to_plain(event)) == event


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
