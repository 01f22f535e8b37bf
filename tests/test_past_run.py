"""`--report`: runs that were, from the files in their folders; and what `--tensorboard` writes."""

from __future__ import annotations

import importlib.util
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy
import pytest
from click.testing import CliRunner, Result

from pd_format.jsonfile import write_record
from pd_format.plan import Plan
from pd_format.profile import InputSpec
from pd_train.breakdown import Performance
from pd_train.cli import main
from pd_train.event_files import EventFiles
from pd_train.events import (
    EpochEnded,
    EpochMetrics,
    PipelineStatus,
    Progress,
    RunEnded,
    StageStatus,
    from_plain,
    to_plain,
)
from pd_train.past_run import read_run
from pd_train.recorder import RECEIVED
from pd_train.show_report import show_report
from pd_train.timing import Doing, Phase, Transfers, WorkerTiming
from pd_train.timing_file import lines_before, timing_line, timings_of
from pd_train.trace import trace_of
from plans import plan_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = plan_of("kit:K1", [InputSpec(name="input", shape=(4, 16), dtype="float32")], "2-1", ["1"])
    predicted = made.predicted.model_copy(update={"minibatch_ms": 5.0, "data_parallel_bytes_per_minibatch": 1e6})
    return made.model_copy(update={"predicted": predicted})


def workers() -> list[WorkerTiming]:
    """One of the two replicas, then the stage after them: a minibatch each 5 ms."""
    timings = []
    for share in (2, 2, 1):
        timing = WorkerTiming(minibatches=24 // share, steady_minibatches=20 // share, cut=Transfers(9, 2400, 0.2, 0.1))
        timing.seconds[Phase.STEADY][Doing.FORWARD] = 0.04
        timing.seconds[Phase.STEADY][Doing.BACKWARD] = 0.06
        timings.append(timing)
    return timings


def write_run(
    folder: Path, plan: Plan, accuracies: Sequence[float], *, seconds: float = 2.0, **options: object
) -> Path:
    """The folder of a run of so many epochs that has no end yet."""
    folder.mkdir()
    write_record(folder / "plan.json", plan)
    kept = {"epochs": 5, "metric": None, "target_metric": None, "target_accuracy": None, "threads": 1, **options}
    (folder / "options.json").write_text(json.dumps({"format": "pipedream-run", "version": 1, "options": kept}))
    lines = [EpochMetrics(n, seconds, 24, 48.0, 0.5, 0.2, accuracy).line() for n, accuracy in enumerate(accuracies)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    timed = [timing_line(plan, epoch, workers(), share_cores=True) + "\n" for epoch in range(len(accuracies))]
    (folder / "timing.jsonl").write_text("".join(timed))
    return folder


def rows_of(text: str) -> dict[str, str]:
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]
    return {cell[0]: cell[1] for cell in cells if len(cell) == 2}


def report(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments], env={"COLUMNS": "100"})


def refused(result: Result, text: str) -> None:
    assert result.exit_code == 1, result.output
    assert text in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[[str], object] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))


@pytest.mark.usefixtures("no_matplotlib")
def test_a_run_that_was_killed_in_its_second_epoch_is_reported(tmp_path: Path, plan: Plan) -> None:
    run = write_run(tmp_path / "run", plan, [0.75], target_accuracy=0.9)
    result = report("--report", run)
    assert result.exit_code == 0, result.output
    rows = rows_of(result.stdout)
    assert rows["state"] == "broke off in epoch 2 of 5; figures are of the 1 that are over"
    assert rows["best validation accuracy"] == "75.00 %"
    assert rows["target 90.00 %"] == "not reached"
    assert rows["throughput"] == "48.0 samples/s"
    assert rows["a minibatch, measured"] == "5.00 ms in the steady state"
    assert rows["a minibatch, planned"] == "5.00 ms; the measured time is equal"
    assert rows["sent a minibatch"] == "300 B, all workers together"
    assert "its figures are of 20 minibatches in 0.1 s" in result.stdout
    assert "Pictures take matplotlib: pip install matplotlib" in result.stdout
    assert {path.suffix for path in run.iterdir()} == {".json", ".jsonl"}


@pytest.mark.usefixtures("no_matplotlib")
def test_a_run_that_never_came_to_the_end_of_an_epoch_has_no_figures(tmp_path: Path, plan: Plan) -> None:
    run = write_run(tmp_path / "run", plan, [])
    (run / "timing.jsonl").unlink()
    rows = rows_of(report("--report", run).stdout)
    assert rows["state"] == "broke off in epoch 1 of 5; figures are of the 0 that are over"
    assert rows["best validation accuracy"] == rows["sent a minibatch"] == "-"
    assert rows["throughput"] == "- samples/s"


@pytest.mark.usefixtures("no_matplotlib")
def test_runs_are_held_against_the_first(tmp_path: Path, plan: Plan) -> None:
    fast = write_run(tmp_path / "fast", plan, [0.5, 0.9], seconds=1.0)
    slow = write_run(tmp_path / "slow", plan, [0.5, 0.8, 0.91], seconds=2.0, target_accuracy=0.9)
    never = write_run(tmp_path / "never", plan, [0.5])
    result = report("--report", slow, fast, "--report", never)
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.startswith(" ")}
    assert "To validation accuracy 90.00 %" in result.stdout
    assert lines["slow"][1:] == ["2-1", "91.00", "%", "3", "6.0", "s", "48", "1.00", "x"]
    assert lines["fast"][1:] == ["2-1", "90.00", "%", "2", "2.0", "s", "48", "3.00", "x"]
    assert lines["never"][1:] == ["2-1", "50.00", "%", "never", "reached", "-", "-", "-"]
    other = report("--report", slow, fast, "--target-accuracy", 0.5)
    assert "To validation accuracy 50.00 %" in other.stdout
    assert "2.00 x" in other.stdout


@pytest.mark.usefixtures("no_matplotlib")
def test_an_emulated_run_has_times_but_no_results(tmp_path: Path, plan: Plan) -> None:
    run = write_run(tmp_path / "run", plan, [0.5])
    for name in ("metrics.jsonl", "options.json"):
        (run / name).unlink()
    figures = {
        "format": "pipedream-report",
        "version": 1,
        "emulated": {"time_scale": 10.0},
        "minibatches": 24,
        "training_bytes_sent": 2400,
        "seconds": 1.0,
    }
    (run / "report.json").write_text(json.dumps(figures))
    rows = rows_of(report("--report", run).stdout)
    assert rows["emulated"] == "no pass was computed; times are the model's, 1/10 of the clock's"
    assert rows["a minibatch, measured"] == "0.500 ms in the steady state"
    assert rows["sent a minibatch"] == "100 B, all workers together"
    assert not {"best validation accuracy", "throughput", "training time"} & rows.keys()


@pytest.mark.usefixtures("no_matplotlib")
def test_of_a_plan_that_compresses_data_parallelism_compresses_as_well(tmp_path: Path, plan: Plan) -> None:
    run = write_run(tmp_path / "run", plan.model_copy(update={"compress_gradients": "onebit"}), [0.5])
    rows = rows_of(report("--report", run).stdout)
    assert rows["data parallelism, computed"].startswith("1 MB on 3 machines, compressed likewise; this run sent ")
    plain = rows_of(report("--report", write_run(tmp_path / "plain", plan, [0.5])).stdout)
    assert plain["data parallelism, computed"].startswith("1 MB on 3 machines; this run sent ")


def test_stopped_while_it_reports_it_says_nothing_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(folder: Path, target: float | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pd_train.show_report.read_run", stop)
    result = report("--report", tmp_path)
    assert (result.exit_code, result.stderr) == (130, "Stopped by SIGINT.\n")


def test_lines_of_another_plan_are_left_out(plan: Plan) -> None:
    other = plan_of("kit:K1", [InputSpec(name="input", shape=(4, 16), dtype="float32")], "1-2", ["1"])
    lines = [timing_line(other, 0, workers(), True), timing_line(plan, 1, workers(), True)]
    assert len(timings_of(lines, plan).epochs) == 1


def test_a_folder_without_a_run_and_damaged_files_are_refused(tmp_path: Path, plan: Plan) -> None:
    refused(report("--report", tmp_path), f"{tmp_path}: holds no run")
    run = write_run(tmp_path / "run", plan, [0.5])
    (run / "metrics.jsonl").write_text('{"epoch": 0, "seconds": "long"}\n')
    refused(report("--report", run), "metrics.jsonl: is not as this program writes it (seconds: ")
    run = write_run(tmp_path / "other", plan, [0.5])
    (run / "timing.jsonl").write_text('{"epoch": 0}\n')
    refused(report("--report", run), "timing.jsonl: is not as this program writes it (line 1: format is None; ")
    ours = timing_line(plan, 0, workers(), True)
    (run / "timing.jsonl").write_text(ours.replace('"version": 1', '"version": 2') + "\n")
    refused(report("--report", run), "timing.jsonl: is not as this program writes it (line 1: version is 2; ")
    (run / "timing.jsonl").write_text(ours.replace('"seconds"', '"hours"', 1) + "\n")
    refused(report("--report", run), "timing.jsonl: is not as this program writes it (line 1: ")
    (run / "timing.jsonl").unlink()
    (run / "report.json").write_text('{"format": "pipedream-report", "version": 2}')
    refused(report("--report", run), "report.json: is not as this program writes it (version is 2; this program reads ")


def test_a_run_that_goes_on_leaves_lines_of_another_version_out(plan: Plan) -> None:
    lines = [timing_line(plan, epoch, workers(), True) for epoch in range(3)]
    other = lines[0].replace('"version": 1', '"version": 2')
    assert lines_before([other, "{half a l", "[]", *lines[1:]], 2) == lines[1:2]


def test_what_does_not_go_with_report_is_refused(tmp_path: Path, plan: Plan) -> None:
    run = write_run(tmp_path / "run", plan, [0.5])
    wrong = report("--report", run, "--plan", "plan.json")
    assert "--plan means nothing with --report, which trains nothing; leave it out." in wrong.stderr
    for result in (wrong, report(run), report("--output", tmp_path)):
        assert result.exit_code == 2
        assert "--report" in result.stderr
    refused(report("--report", run, "--target-metric", 3), "a validation's accuracy is at most 1")
    judged = write_run(tmp_path / "other", plan, [0.5], metric="loss")
    refused(report("--report", run, judged), "is judged by loss")
    refused(report("--report", judged, "--target-accuracy", 0.5), "is judged by loss; give --target-metric")


def a_trace(plan: Plan) -> dict[str, object]:
    rows = []
    for rank in range(plan.workers):
        each = [
            (what, 10 + b + part / 3, 10 + b + (part + 1) / 3, b if what < 2 else -1, 0, -1, -1)
            for b in range(30)
            for part, what in enumerate((Doing.FORWARD, Doing.BACKWARD, Doing.WAIT_ACTIVATIONS))
        ]
        if rank:
            each.append((RECEIVED["forward"], 10.0, 10.5, 0, -1, 0, 100))
        rows.append(numpy.array(each, dtype=float))
    return trace_of(plan, rows, {})


def test_pictures_are_drawn_into_the_run_s_folder(tmp_path: Path, plan: Plan) -> None:
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run", plan, [0.5, 0.9])
    (run / "trace.json").write_text(json.dumps(a_trace(plan)))
    stream = io.StringIO()
    show_report([run], target=0.8, stream=stream)
    assert "as .svg and .png: accuracy-over-epochs, accuracy-over-time, timeline" in " ".join(stream.getvalue().split())

    def texts(name: str) -> list[str]:
        assert (run / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        tree = ElementTree.parse(run / f"{name}.svg")
        return [each.text or "" for each in tree.iter("{http://www.w3.org/2000/svg}text")]

    drawn = texts("timeline")
    assert {"stage 0, replica 0", "stage 0, replica 1", "stage 1", "time, ms", "forward", "backward"} < set(drawn)
    # From the first minibatch to those that a full pipeline holds and a dozen after it, each forward and backward.
    assert drawn.count("16") == 2 * 3
    assert drawn.count("18") == 0
    assert {"training time, s", "validation accuracy, %"} < set(texts("accuracy-over-time"))
    assert {"epochs", "validation accuracy, %"} < set(texts("accuracy-over-epochs"))


def test_several_runs_are_drawn_over_each_other(tmp_path: Path, plan: Plan) -> None:
    pytest.importorskip("matplotlib")
    runs = [write_run(tmp_path / name, plan, [0.5, 0.9]) for name in ("a", "b")]
    show_report(runs, output=tmp_path / "pictures", stream=io.StringIO())
    text = (tmp_path / "pictures" / "accuracy-over-time.svg").read_text()
    assert "a (2-1)" in text
    assert "b (2-1)" in text
    assert not list(runs[0].glob("*.svg"))


def test_a_damaged_trace_is_refused(tmp_path: Path, plan: Plan) -> None:
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run", plan, [])
    (run / "trace.json").write_text('{"traceEvents": [{"name": "forward"}]}')
    refused(report("--report", run), "trace.json: is damaged")


def test_what_a_run_says_of_itself_goes_over_the_wire(tmp_path: Path, plan: Plan) -> None:
    performance = read_run(write_run(tmp_path / "run", plan, [0.5], target_accuracy=0.4)).ended.performance
    assert isinstance(performance, Performance)
    assert performance.target is not None
    assert performance.target.epochs == 1
    ended = RunEnded(True, 1.0, 1, 0.5, 1, 1, 1, performance=performance)
    assert from_plain(*to_plain(ended)) == ended


# TensorBoard


def test_without_the_package_no_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    refused(report("--tensorboard"), "--tensorboard takes the package tensorboard: pip install tensorboard")
    assert not list(tmp_path.iterdir())


def test_event_files_hold_the_figures_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = EventFiles(tmp_path)
    files.handle(Progress("training", 0, 2, 4, 8, 16, 1.0, 2.0))
    files.handle(Progress("training", 0, 2, 8, 8, 32, 3.0, 1.5))
    files.handle(Progress("validation", 0, 2, 1, 1, 4, 0.1, 9.0))
    files.handle(EpochEnded(EpochMetrics(0, 3.0, 8, 10.0, 1.5, 0.25, None, "perplexity", 1.25), 2))
    files.handle(Progress("training", 1, 2, 2, 8, 8, 1.0, 0.5))
    stages = [StageStatus(1, busy, "", 0.0, "", 0.0, "", "", None, None) for busy in (0.75, None)]
    files.handle(PipelineStatus(tuple(stages)))
    files.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    scalars = {
        tag: [(one.step, one.value) for one in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }  # fmt: skip
    assert scalars["minibatch/train_loss"] == [(4, 2.0), (8, 1.0), (10, 0.5)]
    assert scalars["minibatch/samples_per_second"] == [(4, 16.0), (8, 8.0), (10, 8.0)]
    assert scalars["epoch/validation_perplexity"] == [(1, 1.25)]
    assert scalars["busy/stage_0"] == [(10, 0.75)]
    assert not {"epoch/validation_accuracy", "busy/stage_1"} & scalars.keys()
    assert all(math.isfinite(value) for values in scalars.values() for _, value in values)
