"""Where the time went: sums of workers with known answers, and the sentence that names the bottleneck."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from pd_format.plan import Plan
from pd_format.profile import InputSpec
from pd_train.bottleneck import WORDS, Setting, find_bottleneck
from pd_train.breakdown import (
    Bottleneck,
    Breakdown,
    Performance,
    StageBreakdown,
    TimeToTarget,
    TransferBreakdown,
)
from pd_train.events import EpochMetrics
from pd_train.recorder import Recorder
from pd_train.report import break_down, performance_of, time_to_target
from pd_train.timing import Doing, Phase, Transfers, WorkerTiming
from pd_train.wire import Message
from plans import plan_of

INPUTS = [InputSpec(name="input", shape=(4, 16), dtype="float32")]


def plan(config: str = "2-1", compute: Sequence[float] = (8.0, 4.0), predicted: float = 4.0, **changes: object) -> Plan:
    """Stages that take so many milliseconds a minibatch by the plan."""
    made = plan_of("kit:K1", INPUTS, config, ["1"] if "-" in config else [])
    stages = tuple(
        stage.model_copy(update={"predicted": stage.predicted.model_copy(update={"compute_ms": ms, **changes})})
        for stage, ms in zip(made.stages, compute, strict=True)
    )
    figures = {"minibatch_ms": predicted, "bytes_per_minibatch": 900.0, "data_parallel_bytes_per_minibatch": 4000.0}
    return made.model_copy(update={"stages": stages, "predicted": made.predicted.model_copy(update=figures)})


def worker(
    minibatches: int = 12, steady: int = 10, idle_s: float = 0.0, cut: Transfers | None = None, **ms: float
) -> WorkerTiming:
    """A worker that did this in the steady state, in milliseconds a minibatch of its own."""
    timing = WorkerTiming(minibatches=minibatches, steady_minibatches=steady, cut=cut or Transfers())
    for name, each in ms.items():
        timing.seconds[Phase.STEADY][Doing[name.upper()]] = each * steady / 1e3
    timing.seconds[Phase.START_UP][Doing.WAIT_ACTIVATIONS] = idle_s / 2
    timing.seconds[Phase.DRAIN][Doing.WAIT_GRADIENTS] = idle_s / 2
    return timing


def epoch(number: int, accuracy: float | None = None, minibatches: int = 24) -> EpochMetrics:
    return EpochMetrics(number, 2.0, minibatches, 50.0, 0.5, 0.2, accuracy)


# A made-up clock


def test_the_steady_part_gives_the_time_of_a_minibatch_and_start_up_and_drain_stand_apart() -> None:
    now = 0.0
    recorder = Recorder(lambda: now)

    def spend(doing: Doing, seconds: float) -> None:
        nonlocal now
        with recorder.doing(doing):
            now += seconds

    # F0 F1, wait | B0 F2 wait B1 F3 wait | B2 B3; a forward pass takes 1 s, a backward pass 2 s, a wait 1 s.
    recorder.start_segment(0)
    spend(Doing.FORWARD, 2)
    spend(Doing.WAIT_GRADIENTS, 5)
    recorder.enter(Phase.STEADY)
    for _ in range(2):
        spend(Doing.BACKWARD, 2)
        recorder.passed(steady=True)
        spend(Doing.FORWARD, 1)
        spend(Doing.WAIT_GRADIENTS, 1)
    # Sent while it computed, for one of three seconds.
    recorder.arrived(Message("backward", 1, 0, 0, sent=now - 2, arrived=now + 1, size=100))
    recorder.enter(Phase.DRAIN)
    spend(Doing.BACKWARD, 4)
    for _ in range(2):
        recorder.passed(steady=False)
    recorder.enter(Phase.OUTSIDE)
    timing, _ = recorder.take()

    figures = break_down(plan("1", [2000.0], 2000.0), [epoch(0, minibatches=4)], [timing])
    (stage,) = figures.stages
    assert figures.minibatch_ms == 4000
    assert figures.difference == 1.0
    assert stage.steady_ms is not None
    assert {name: ms for name, ms in stage.steady_ms.items() if ms} == {
        "forward": 1000, "backward": 2000, "wait_gradients": 1000
    }  # fmt: skip
    assert (stage.utilisation, stage.compute_ms, stage.compute_difference) == (0.75, 3000, 0.5)
    assert (stage.start_up_seconds, stage.steady_seconds, stage.drain_seconds) == (7, 8, 4)
    assert figures.start_up_and_drain_idle == 5 / 19
    assert (stage.cut.seconds, stage.cut.hidden_seconds, stage.cut.exposed_seconds) == (3, 1, 2)
    assert figures.overall_minibatch_ms == 500, "what the epoch took over its minibatches"
    assert (figures.minibatches, figures.timed_minibatches, figures.steady_minibatches) == (4, 4, 2)


def test_replicas_share_the_minibatches_of_their_stage() -> None:
    # Each of the two is done with one every 8 ms, so that the stage is with one every 4 ms.
    workers = [worker(forward=3, backward=5), worker(forward=3, backward=5), worker(24, 20, forward=1, backward=3)]
    figures = break_down(plan(), [epoch(0)], workers)
    assert figures.minibatch_ms == pytest.approx(4)
    assert figures.difference == pytest.approx(0, abs=1e-9)
    assert [stage.compute_ms for stage in figures.stages] == pytest.approx([8, 4])
    assert [stage.utilisation for stage in figures.stages] == [1, 1]
    assert figures.timed_minibatches == 24


def test_bytes_are_told_apart_and_held_against_data_parallelism() -> None:
    workers = [worker(cut=Transfers(12, 1200, 0.1, 0.05)) for _ in range(3)]
    workers[0].sync = Transfers(5, 2400, 0.1, 0.2)
    figures = break_down(plan(), [epoch(0)], workers)
    assert (figures.cut_bytes_per_minibatch, figures.sync_bytes_per_minibatch) == (150, 100)
    assert figures.reduction == 1 - 250 / 4000
    assert figures.stages[0].cut.hidden == pytest.approx(0.5)
    assert figures.stages[0].sync.exposed_seconds == 0, "no more is hidden than there is"


def test_an_emulated_run_counts_in_model_time() -> None:
    workers = [worker(forward=30, backward=50) for _ in range(2)] + [worker(24, 20, forward=40)]
    figures = break_down(plan(), [], workers, time_scale=10)
    assert figures.minibatch_ms == pytest.approx(4)
    assert figures.stages[0].compute_ms == pytest.approx(8)
    assert figures.overall_minibatch_ms is None


def test_what_is_not_known_is_none() -> None:
    figures = break_down(plan(), [], [WorkerTiming() for _ in range(3)])
    assert figures.minibatch_ms is figures.difference is figures.reduction is figures.start_up_and_drain_idle is None
    assert figures.stages[0].steady_ms is figures.stages[0].utilisation is figures.stages[0].drain_seconds is None
    assert figures.stages[0].cut.hidden is figures.stages[0].peak_memory_bytes is None
    unpredicted = break_down(plan(compute=(0, 0), predicted=0), [], [worker(forward=1)] * 3)
    assert unpredicted.difference is unpredicted.stages[0].compute_difference is None


def test_the_sums_of_all_epochs_count() -> None:
    timings = [[worker(forward=4), worker(forward=4), worker(24, 20, forward=4)] for _ in range(2)]
    performance = performance_of(plan(), [epoch(0), epoch(1)], timings, Setting(), "accuracy", None, peaks=[7, 8])
    assert performance.breakdown.timed_minibatches == performance.breakdown.minibatches == 48
    assert [stage.peak_memory_bytes for stage in performance.breakdown.stages] == [7, 8]
    assert performance.target is None


def test_time_to_a_target_is_epochs_times_samples_over_throughput() -> None:
    epochs = [epoch(0, 0.5), dataclasses.replace(epoch(1, 0.9), seconds=3.0, samples_per_second=100.0), epoch(2, 0.95)]
    reached = time_to_target(epochs, "accuracy", 0.9)
    assert reached == TimeToTarget("accuracy", 0.9, 2, 5.0, 200.0, 80.0)
    assert time_to_target(epochs, "accuracy", 0.99) == TimeToTarget("accuracy", 0.99, None, None, None, None)


# The sentence: a case each


def named(
    workers: Sequence[WorkerTiming], chosen: Plan | None = None, setting: Setting | None = None, epochs: int = 25
) -> Bottleneck:
    """Of a run of many epochs that are all like this one: one alone is too short to tell."""
    chosen, sums = chosen or plan(), [WorkerTiming() for _ in workers]
    for _ in range(epochs):
        for mine, theirs in zip(sums, workers, strict=True):
            mine.add(theirs)
    return find_bottleneck(chosen, break_down(chosen, [epoch(0)], sums), setting or Setting())


FINE = worker(24, 20, forward=1, backward=2.8, wait_activations=0.2)
"""The second stage where nothing is wrong: 3.8 of 4 ms."""


def first(**ms: float) -> list[WorkerTiming]:
    """Two replicas of the first stage, whose passes take 8 ms as planned, with more in the steady state."""
    return [worker(**{"forward": 3, "backward": 5, **ms}) for _ in range(2)]


def second(total: float) -> WorkerTiming:
    """The second stage waits for the first."""
    return worker(24, 20, forward=1, backward=2.8, wait_activations=total / 2 - 3.8)


def test_nothing_timed_is_unknown() -> None:
    assert named([WorkerTiming()] * 3).case == "unknown"


def test_a_run_without_a_steady_state_is_too_short() -> None:
    found = named([worker(2, 0) for _ in range(3)])
    assert found.case == "too short"
    assert "a stage holds 4 minibatches" in found.sentence


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        (
            [worker(10, 9, forward=400), worker(10, 9, forward=400), worker(20, 20, forward=200)],
            "18 minibatches in 3.6 s of steady state",
        ),
        ([*first(forward=35), worker(24, 20, forward=20)], "20 minibatches in 0.4 s of steady state"),
        ([worker(3, 1, forward=9), worker(1, 0), worker(3, 2)], "1 minibatch in 0.0 s of steady state"),
        # Idle for most of the time, and nobody knows whether that is so in a longer run.
        ([worker(idle_s=5, forward=3) for _ in range(2)] + [FINE], "20 minibatches in 0.0 s of steady state"),
    ],
)
def test_of_too_few_minibatches_nothing_is_said(workers: Sequence[WorkerTiming], found: str) -> None:
    said = named(workers, epochs=1)
    assert (said.case, said.stage, said.share) == ("too short", None, None)
    assert f"its figures are of {found}, and mostly chance below 20 minibatches or 1 s" in said.sentence


def test_enough_minibatches_are_enough_in_a_second_or_where_passes_are_emulated() -> None:
    assert named([*first(forward=300), worker(24, 20, forward=200)], epochs=1).case == "compute"
    assert named([*first(), FINE], epochs=1, setting=Setting(emulated=True)).case == "as planned"


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        (Setting(), "an epoch has few minibatches"),
        (Setting(flush=4), "every 4 minibatches; raise --flush"),
        (Setting(checkpoint_every=6), "raise --checkpoint-every"),
    ],
)
def test_start_up_and_drain_come_first_where_they_take_much(setting: Setting, advice: str) -> None:
    workers = [worker(idle_s=0.04, forward=3, backward=5) for _ in range(2)] + [FINE]
    found = named(workers, setting=setting)
    assert (found.case, found.stage) == ("start-up and drain", None)
    assert found.share == pytest.approx(0.08 / 0.32)
    assert "idle for 25 % of the training time" in found.sentence
    assert advice in found.sentence


def test_a_run_that_keeps_to_its_plan_says_so() -> None:
    found = named([*first(), FINE])
    assert (found.case, found.stage) == ("as planned", 0)
    assert found.sentence == (
        "A minibatch takes 4 ms, 4 ms were planned: the plan is as good as it said; the computing of stage 0 sets "
        "the pace."
    )


@pytest.mark.parametrize(
    ("sync_ms", "limit"), [(12.0, "synchronisations of replicas set"), (0.0, "transfers between stages set")]
)
def test_a_plan_that_knew_of_the_network_is_as_good_as_it_said(sync_ms: float, limit: str) -> None:
    chosen = plan(predicted=6.0, sync_ms=sync_ms)
    found = named([*first(wait_sync=4), second(12)], chosen)
    assert found.case == "as planned"
    assert f"as the plan says, {limit} the pace" in found.sentence


def test_a_run_that_is_faster_than_planned_says_so() -> None:
    found = named([*first(), FINE], plan(compute=(16.0, 8.0), predicted=8.0))
    assert found.case == "faster than planned"
    assert "50 % less than the 8 ms planned" in found.sentence


def test_a_slow_stage_is_named_with_what_would_help() -> None:
    chosen = plan()
    workers = [*first(forward=4.5, backward=6), second(10.5)]
    found = named(workers, chosen)
    assert (found.case, found.stage) == ("compute", 0)
    assert found.share == pytest.approx(2.5 / 10.5)
    assert "Stage 0 sets the pace and computes 31 % slower than planned (10.5 ms a minibatch, 8 ms" in found.sentence
    assert "profile on these machines at this minibatch size (4) and plan again." in found.sentence
    together = named(workers, setting=Setting(threads=1, share_cores=True))
    assert "workers share cores with others, which no profile of one alone shows: profile with --threads 1" in (
        together.sentence
    )


def test_workers_that_take_each_other_s_cores_are_slow_in_all_that_they_do() -> None:
    workers = [*first(forward=4.5, backward=6, other=5), second(15.5)]
    assert named(workers, setting=Setting(share_cores=True)).case == "compute"
    assert named(workers).case == "messages"


def test_replicas_that_would_be_better_elsewhere_are_said() -> None:
    chosen = plan("3-1", (9.0, 3.0), 3.0)
    workers = [worker(8, 7, forward=6, wait_gradients=12) for _ in range(3)] + [worker(24, 21, backward=6)]
    found = named(workers, chosen)
    assert (found.case, found.stage) == ("compute", 1)
    assert "100 % slower than planned" in found.sentence
    assert found.sentence.endswith("or try pd-plan --config 2-2.")


def test_a_slow_replica_is_named() -> None:
    workers = [worker(forward=3, backward=5), worker(forward=6, backward=10), second(12)]
    found = named([worker(forward=3, backward=5, wait_sync=8), *workers[1:]])
    assert (found.case, found.stage) == ("slow replica", 0)
    assert "Worker 1 of stage 0 sets the pace: its passes take 16 ms, those of worker 0 8 ms" in found.sentence


@pytest.mark.parametrize(
    ("doing", "case", "text"),
    [
        ("wait_data", "data", "Stage 0 waits 33 % of the time for data; raise --loader-workers"),
        ("wait_sync", "synchronisation", "Stage 0 waits 33 % of the time for its replicas; a larger minibatch"),
        ("update", "update", "spends 33 % of the time on updates of its parameters, which the plan does not count"),
        ("other", "messages", "spends 33 % of the time on packing and sorting messages"),
    ],
)
def test_what_a_stage_does_besides_computing_is_named(doing: str, case: str, text: str) -> None:
    found = named([*first(**{doing: 4}), second(12)])
    assert (found.case, found.stage) == (case, 0)
    assert found.share == pytest.approx(1 / 3)
    assert text in found.sentence


def test_a_synchronisation_that_could_overlap_is_told_how() -> None:
    found = named([*first(wait_sync=4), second(12)], setting=Setting(sync="bsp"))
    assert "--sync overlap would hide a part of it" in found.sentence


def test_waiting_for_what_is_on_the_way_blames_the_network() -> None:
    slow = Transfers(24, 2400, 24 * 0.004, 24 * 0.001)
    workers = [*first(wait_gradients=4), second(12)]
    workers[2].cut = slow
    found = named(workers)
    assert (found.case, found.stage) == ("transfers", 0)
    assert (
        "waits 33 % of the time for gradients, and a transfer between stages takes 4 ms, 25 % of it" in found.sentence
    )
    assert "a faster network" in found.sentence


def test_waiting_while_nothing_is_on_the_way_does_not() -> None:
    found = named([*first(wait_gradients=4), second(12)])
    assert (found.case, found.stage) == ("uneven passes", 0)
    assert "though little is on the way" in found.sentence


def test_where_no_single_thing_stands_out_the_sentence_says_so() -> None:
    workers = [*first(forward=3.4, other=0.5), second(8.9)]
    found = named(workers, setting=Setting(emulated=True))
    assert (found.case, found.stage) == ("many small things", 0)
    assert "11 % more than the 4 ms planned" in found.sentence
    assert found.sentence.endswith("the largest of stage 0's time is packing messages, 6 %.")


def test_without_a_prediction_the_busiest_stage_is_named() -> None:
    found = named([*first(), FINE], plan(compute=(0, 0), predicted=0))
    assert (found.case, found.stage, found.share) == ("computing", 0, 1.0)


def test_the_page_about_the_report_names_every_figure_and_case() -> None:
    page = (Path(__file__).parent.parent / "docs" / "report.md").read_text()
    records = (Breakdown, StageBreakdown, TransferBreakdown, Bottleneck, TimeToTarget, Performance)
    names = {field.name for record in records for field in dataclasses.fields(record)}
    cases = {"as planned", "faster than planned", "start-up and drain", "many small things", "computing", "too short"}
    missing = {name for name in names | cases | set(WORDS) if name not in page}
    assert not missing
