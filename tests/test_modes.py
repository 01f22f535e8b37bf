"""Modes that do not fit a plan are refused with the reason and what works; asp keeps what can be promised of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import plans
from pd_format.errors import UserError
from pd_format.plan import Plan
from pd_format.profile import InputSpec
from pd_format.versions import Mode
from pd_train.check import check_clipping, check_memory, check_schedule, optimizer_warning, settle_mode
from pd_train.launch import launch
from pd_train.options import OptimizerOptions, RunOptions

MODELS = str(plans.HERE / "training_models.py")
INPUTS = (InputSpec(name="x", shape=(4, 1, 6, 6), dtype="float32"),)


def a_plan(config: str, in_flight: tuple[int, ...] | None = None) -> Plan:
    cuts = ["a", "b", "c"][: config.count("-")]
    return plans.plan_of(f"{MODELS}:skip", INPUTS, config, cuts, data=f"{MODELS}:samples_26", in_flight=in_flight)


@pytest.mark.parametrize(
    ("config", "mode", "reason"),
    [
        ("1-1", Mode(sync="asp"), "--sync asp needs a plan of one stage, config 1-1 has 2.*--strategy data-parallel"),
        ("2", Mode("none", "asp"), "leave out --weights and --flush"),
        ("2", Mode(sync="asp", flush=3), "leave out --weights and --flush"),
        ("1-1", Mode("none", flush=3), "--weights none means nothing with it"),
        ("1-1", Mode(group=4), "--group belongs to --weights 2bw"),
        ("1-1-1-1", Mode("2bw", group=2), "--group 2 deadlocks.* 3 minibatches.* use 4 or at least 3"),
    ],
)
def test_a_mode_that_does_not_fit_the_plan_is_refused(config: str, mode: Mode, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        settle_mode(a_plan(config), mode)


def test_asp_runs_one_minibatch_at_a_time() -> None:
    with pytest.raises(UserError, match="stage 0 of the plan has in_flight 2"):
        settle_mode(a_plan("2", in_flight=(2,)), Mode(sync="asp"))


def test_the_group_of_2bw_is_filled_in() -> None:
    assert settle_mode(a_plan("2-1-1"), Mode("2bw")).group == 4
    assert settle_mode(a_plan("2-1-1"), Mode("2bw", group=6)).group == 6


def test_depths_that_wait_for_a_round_are_no_deadlock_where_no_update_averages_rounds() -> None:
    plan = a_plan("2-1", in_flight=(2, 4))
    with pytest.raises(UserError, match="would never finish"):
        check_schedule(plan, Mode(sync="bsp"))
    check_schedule(plan, Mode(sync="bsp", flush=8))


@pytest.mark.parametrize(
    ("mode", "by_stage", "whole", "reason"),
    [
        (Mode(), None, 1.0, "--clip-grad-norm needs the gradient of the whole model at one moment.*--flush N"),
        (Mode(flush=4), 1.0, 1.0, "exclude each other"),
        (Mode(sync="asp"), 1.0, None, "which --sync asp does not wait for"),
    ],
)
def test_a_norm_that_no_moment_knows_is_refused(
    mode: Mode, by_stage: float | None, whole: float | None, reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        check_clipping(mode, by_stage, whole)


def test_memory_counts_the_sets_that_a_mode_adds() -> None:
    """At the last of four stages vertical sync holds the versions that stage 0 had: four sets instead of one."""
    plan = a_plan("1-1-1-1")
    stages = [
        stage.model_copy(update={"predicted": stage.predicted.model_copy(update={"trainable_bytes": 1_000_000})})
        for stage in plan.stages
    ]
    plan = plan.model_copy(update={"stages": tuple(stages)})
    check_memory(plan, Mode(), [3], 1_000_000)
    with pytest.raises(UserError, match="memory"):
        check_memory(plan, Mode("vertical-sync"), [3], 3_999_999)
    check_memory(plan, Mode("vertical-sync"), [3], 4_000_000)


@pytest.mark.parametrize(
    ("name", "momentum", "warned"),
    [("sgd", 0.9, None), ("sgd", 0.0, None), ("adam", 0.9, "for momentum, and adam keeps more")],
)
def test_an_optimizer_that_keeps_more_than_planned_is_told(name: str, momentum: float, warned: str | None) -> None:
    plan = a_plan("1-1")
    options = RunOptions(plan, Path("run"), "digits", 1, optimizer=OptimizerOptions(name, momentum=momentum))
    warning = optimizer_warning(options)
    assert (warning is None) == (warned is None)
    assert warned is None or warned in str(warning)


def test_asp_applies_every_gradient_and_reports_the_staleness_that_it_met(tmp_path: Path) -> None:
    """That each is applied once is tested on the server itself; here with real workers, whose order nobody knows."""
    plan = a_plan("3")
    tmp_path.joinpath("run").mkdir()
    mode = settle_mode(plan, Mode(sync="asp"))
    options = OptimizerOptions("sgd", lr=0.02, momentum=0.0)
    launch(
        RunOptions(
            plan, tmp_path / "run", plan.data, epochs=6, optimizer=options, mode=mode, device="cpu", stall_timeout=60.0
        ),
        lambda event: None,
    )
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["minibatches"] == 6 * 7
    assert 0 <= report["mean_staleness"] <= report["most_staleness"] < 6 * 7
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["train_loss"] < metrics[0]["train_loss"]
    assert all(
        torch.isfinite(value).all() for value in torch.load(tmp_path / "run" / "model.pt", weights_only=True).values()
    )


def test_asp_with_one_worker_is_the_plain_loop(tmp_path: Path) -> None:
    states = []
    for number, mode in enumerate([Mode(sync="asp"), Mode(sync="bsp")]):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        plan = a_plan("1")
        launch(
            RunOptions(plan, run_dir, plan.data, epochs=2, mode=mode, device="cpu", stall_timeout=60.0),
            lambda event: None,
        )
        states.append(torch.load(run_dir / "model.pt", weights_only=True))
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value), name
