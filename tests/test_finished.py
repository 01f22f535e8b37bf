"""`--resume` of a run at whose end nothing is left to train."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pd_train.events import Event
from pd_train.finished import finished_run, say_finished
from pd_train.options import RunOptions
from pd_train.restarts import train
from test_checkpoint import options_of
from test_past_run import write_run


def ended(folder: Path, accuracies: Sequence[float], **options: Any) -> RunOptions:
    """What a run would go on with, as far as its folder says; its report is of its last epoch."""
    plain = options_of(folder, "2-1")
    write_run(folder, plain.plan, accuracies, **options)
    report = {"format": "pipedream-report", "version": 1, "epochs": len(accuracies)}
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "model.pt").touch()
    constant = dataclasses.replace(plain.optimizer, lr_schedule="constant")
    return dataclasses.replace(plain, resume="yes", epochs=2, metric="accuracy", optimizer=constant)


@pytest.mark.parametrize(
    ("changes", "why", "way"),
    [
        ({}, "2 of 2 epochs are over.", "--resume run --epochs 3"),
        (
            {"epochs": 5, "minibatches": 48},
            "the 48 minibatches that were asked for are done.",
            "--init-from run/model.pt",
        ),
        (
            {"epochs": 5, "target_metric": 0.7},
            "the target, accuracy 70.00 %, is reached.",
            "--resume run --target-metric VALUE, a harder one",
        ),
        (
            {"target_metric": 0.7},
            "2 of 2 epochs are over and the target, accuracy 70.00 %, is reached.",
            "--resume run --epochs 3 --target-metric VALUE, a harder one",
        ),
        ({"optimizer": "cosine"}, "2 of 2 epochs are over.", "--plan run/plan.json --init-from run/model.pt"),
        ({"epochs": 3}, None, ""),
        ({"epochs": 3, "target_metric": 0.9}, None, ""),
        ({"epochs": 3, "minibatches": 49}, None, ""),
    ],
)
def test_what_is_finished_and_how_to_train_longer(
    changes: dict[str, Any], why: str | None, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    options = ended(Path("run"), [0.5, 0.75], minibatches=None)
    if "optimizer" in changes:
        changes = {"optimizer": dataclasses.replace(options.optimizer, lr_schedule=changes["optimizer"])}
    options = dataclasses.replace(options, **changes)
    run = finished_run(options)
    assert (run is not None) == (why is not None)
    if run is not None and why is not None:
        say_finished(options, run, quiet=False)
        first, second, third = capsys.readouterr().out.splitlines()
        assert first == f"run: this run is finished, and nothing is left to train: {why}"
        assert second.startswith("To train longer: ")
        assert second.endswith(way)
        assert third == "Its figures: pd-train --report run"


def rewrite_report(folder: Path) -> None:
    (folder / "report.json").write_text('{"format": "pipedream-report", "version": 1, "epochs": 1}')


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "report.json").unlink(),
        lambda folder: (folder / "report.json").write_text("{"),
        lambda folder: (folder / "model.pt").unlink(),
        rewrite_report,
    ],
    ids=["no report", "damaged report", "no model", "report of an earlier end"],
)
def test_a_run_whose_end_was_not_written_is_not_finished(change: Callable[[Path], object], tmp_path: Path) -> None:
    options = ended(tmp_path / "run", [0.5, 0.75])
    assert finished_run(options) is not None
    change(tmp_path / "run")
    assert finished_run(options) is None


def test_a_finished_run_on_several_hosts_counts_no_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers meet all the same, since the other hosts' folders do not tell."""
    started = []
    monkeypatch.setattr("pd_train.restarts.launch", lambda options, show: started.append(options.ranks))

    def ignore(event: Event) -> None:
        pass

    options = dataclasses.replace(ended(tmp_path / "run", [0.5, 0.75]), ranks=(0, 1))
    train(options, 0, ignore)
    assert not (tmp_path / "run" / "restarts.jsonl").exists()
    train(dataclasses.replace(options, epochs=3), 0, ignore)
    assert len((tmp_path / "run" / "restarts.jsonl").read_text().splitlines()) == 1
    assert started == [(0, 1), (0, 1)]
