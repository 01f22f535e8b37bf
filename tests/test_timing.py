"""Where time goes: the recorder's sums on a made-up clock, clocks that are set by another one, and the trace."""

from __future__ import annotations

import itertools
import json
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy
import pytest

from pd_format.plan import Plan
from pd_format.profile import InputSpec
from pd_train.clock import Clock, RoundTrip, best_of
from pd_train.compute import StageRunner
from pd_train.inbox import Inbox
from pd_train.pulse import Pulse, PulseBoard
from pd_train.recorder import RECEIVED, Recorder
from pd_train.timing import Doing, Phase, WorkerTiming
from pd_train.trace import trace_of
from pd_train.watch import Watch
from pd_train.wire import Message
from plans import plan_of
from test_checkpoint import options_of


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def hands() -> Hands:
    return Hands()


def train(recorder: Recorder, hands: Hands) -> None:
    """F0 F1 | B0 F2 | B1 B2 with waits; a forward pass takes 1 s, a backward pass 2 s."""
    recorder.start_segment(10)
    for b in (0, 1):
        with recorder.doing(Doing.FORWARD, b, 0):
            hands.wait(1)
    recorder.enter(Phase.STEADY)
    with recorder.doing(Doing.WAIT_GRADIENTS, 0):
        hands.wait(3)
        with recorder.doing(Doing.UPDATE):
            hands.wait(0.5)
        hands.wait(1)
    with recorder.doing(Doing.BACKWARD, 0, 0):
        hands.wait(2)
    recorder.passed(steady=True)
    with recorder.doing(Doing.FORWARD, 2, 1):
        hands.wait(1)
    recorder.enter(Phase.DRAIN)
    for b in (1, 2):
        hands.wait(0.25)
        with recorder.doing(Doing.BACKWARD, b, b):
            hands.wait(2)
        recorder.passed(steady=False)
    recorder.enter(Phase.OUTSIDE)


def test_time_counts_for_the_innermost_of_what_is_done_and_for_the_part_of_the_segment(hands: Hands) -> None:
    recorder = Recorder(hands)
    train(recorder, hands)
    timing, rows = recorder.take()
    start_up, steady, drain, outside = timing.seconds
    assert start_up[Doing.FORWARD] == 2
    assert (steady[Doing.WAIT_GRADIENTS], steady[Doing.UPDATE]) == (4, 0.5)
    assert (steady[Doing.BACKWARD], steady[Doing.FORWARD]) == (2, 1)
    assert (drain[Doing.BACKWARD], drain[Doing.OTHER]) == (4, 0.5)
    assert sum(outside) == 0
    assert (timing.minibatches, timing.steady_minibatches) == (3, 1)
    assert timing.of_phase(Phase.STEADY) == 7.5
    assert not rows, "nothing was to be traced"


def test_a_transfer_is_covered_as_far_as_the_worker_computed_meanwhile(hands: Hands) -> None:
    recorder = Recorder(hands)
    recorder.start_segment(0)
    with recorder.doing(Doing.FORWARD, 0):
        hands.wait(4)  # 100 to 104
    with recorder.doing(Doing.WAIT_GRADIENTS, 0):
        hands.wait(3)  # to 107
        recorder.arrived(Message("backward", 1, 0, 0, sent=102.0, arrived=106.5, size=1000))
        recorder.arrived(Message("gradient", 2, 0, 0, sent=105.0, arrived=107.0, size=10))
        recorder.arrived(Message("score", 2, 0, 0, sent=105.0, arrived=107.0, size=10))
        recorder.arrived(Message("gradient", 0, 0, 0))  # To oneself, over no network.
    timing, _ = recorder.take()
    assert (timing.cut.count, timing.cut.bytes, timing.cut.seconds, timing.cut.covered_seconds) == (1, 1000, 4.5, 2.0)
    assert (timing.sync.count, timing.sync.bytes, timing.sync.seconds, timing.sync.covered_seconds) == (1, 10, 2, 0)


def test_what_is_done_in_small_pieces_pushes_no_pass_out_of_those_compared(hands: Hands) -> None:
    recorder = Recorder(hands)
    recorder.start_segment(0)
    with recorder.doing(Doing.FORWARD, 0):
        for _ in range(1000):  # In pieces that follow each other.
            hands.wait(0.004)
            recorder.pulse(0, 1, ("", 0.0))
    with recorder.doing(Doing.WAIT_GRADIENTS, 0):
        for _ in range(1000):  # A look for updates after every message, which finds none.
            hands.wait(0.003)
            with recorder.doing(Doing.UPDATE):
                hands.wait(2e-6)
        recorder.arrived(Message("backward", 1, 0, 0, sent=100.0, arrived=hands.now, size=1000))
    timing, _ = recorder.take()
    assert timing.cut.covered_seconds == pytest.approx(4.0)


def test_the_trace_is_of_the_minibatches_asked_for(hands: Hands) -> None:
    recorder = Recorder(hands, range(11, 12))
    train(recorder, hands)
    _, rows = recorder.take()
    passes = [row for row in numpy.array(rows).reshape(-1, 7).tolist() if row[0] in (Doing.FORWARD, Doing.BACKWARD)]
    assert [(Doing(int(row[0])), row[3], row[4]) for row in passes] == [(Doing.FORWARD, 11, 0), (Doing.BACKWARD, 11, 1)]


def test_sums_add_up_and_survive_a_file(hands: Hands) -> None:
    recorder = Recorder(hands)
    train(recorder, hands)
    first, _ = recorder.take()
    train(recorder, hands)
    second, _ = recorder.take()
    first.add(second)
    assert WorkerTiming.from_plain(first.plain()) == first
    assert first.minibatches == 6
    assert sum(part[Doing.BACKWARD] for part in first.seconds) == 12
    with pytest.raises(ValueError, match="seconds are expected"):
        WorkerTiming.from_plain({**first.plain(), "cut": {**first.plain()["cut"], "seconds": float("nan")}})
    with pytest.raises(ValueError, match="no timing"):
        WorkerTiming.from_plain({"minibatches": 1})


@pytest.mark.parametrize("offset", [-1e6, 0.0, 42.5])
@pytest.mark.parametrize(("out", "back"), [(0.01, 0.01), (0.05, 0.0), (0.0, 0.02)])
def test_an_offset_is_wrong_by_no_more_than_it_says(offset: float, out: float, back: float) -> None:
    clock = Clock(lambda: 7.0)
    answered = 1000.0
    trip = RoundTrip(answered - out - offset, answered, answered + 3.0, answered + 3.0 + back - offset)
    assert abs(trip.offset - offset) <= trip.error + 1e-9
    assert trip.error == pytest.approx((out + back) / 2)
    slower = RoundTrip(trip.t0 - 1.0, *trip[1:])
    assert best_of([slower, trip]) is trip
    clock.offset = trip.offset
    assert abs(clock.now() - (7.0 + offset)) <= trip.error + 1e-9


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of("kit:K1", (InputSpec(name="input", shape=(4, 16), dtype="float32"),), "2-1", ["1"])


def test_the_rows_of_a_trace_nest_and_hold_what_was_done(plan: Plan, hands: Hands) -> None:
    rows = []
    for _ in range(3):
        recorder = Recorder(hands, range(10, 13))
        start = hands.now
        train(recorder, hands)
        for sent in (0.0, 1.0, 2.0):
            recorder._phase = Phase.STEADY
            recorder.arrived(Message("backward", 2, 0, 0, sent=start + sent, arrived=start + sent + 1.5, size=7))
        rows.append(numpy.array(recorder.take()[1]).reshape(-1, 7))
    trace = trace_of(plan, rows, {0: 0.0, 1: 2e-6, 2: 3e-6})
    assert trace["metadata"]["clock_error_us"] == {"0": 0.0, "1": 2.0, "2": 3.0}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert min(event["ts"] for event in events) == 0
    for _, row in itertools.groupby(sorted(events, key=lambda e: (e["pid"], e["tid"])), lambda e: (e["pid"], e["tid"])):
        assert_nested(list(row))
    assert {event["name"] for event in events if event["tid"] == 0} >= {"F10", "B10", "F12", "update", "wait gradients"}
    received = [event for event in events if event["cat"] == "receive"]
    sent = [event for event in events if event["cat"] == "send"]
    assert len(received) == len(sent) == 9
    assert {(event["dur"], event["args"]["bytes"]) for event in received} == {(1.5e6, 7)}


def assert_nested(events: list[dict[str, float]]) -> None:
    """Of one row: each event is within another or apart from it."""
    open_until: list[float] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        while open_until and open_until[-1] <= event["ts"] + 1e-3:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 1e-3
        open_until.append(end)


def test_a_stage_is_as_busy_as_its_workers_have_been_since_their_last_pulse(plan: Plan) -> None:
    board = PulseBoard(plan)
    assert board.status(10.0).stages[0].busy is None, "no figure is made up"

    def pulse(time: float, forward: float, wait: float, sent: int, waiting: str = "") -> Pulse:
        seconds = [0.0] * len(Doing)
        seconds[Doing.FORWARD], seconds[Doing.WAIT_SYNC] = forward, wait
        doing = Doing.WAIT_SYNC if waiting else Doing.OTHER
        return Pulse(time, tuple(seconds), sent, 2, doing, waiting, 0.5 if waiting else 0.0)

    board.take(0, pulse(10, 100, 0, 5000))
    board.take(1, pulse(10, 0, 100, 0))
    board.take(0, pulse(12, 101, 1, 9000, "update 3"))
    board.take(1, pulse(11, 1, 100, 500))
    first, last = board.status(12.0).stages
    assert first.busy == pytest.approx((0.5 + 1.0) / 2)
    assert (first.waits_for, first.waited, first.versions) == ("replicas", 0.25, 2)
    assert (first.now, first.now_seconds, first.awaited) == ("waits", 0.5, "update 3")
    assert first.sent_bytes_per_second == pytest.approx(2000 + 500)
    assert last.busy is None


@pytest.mark.parametrize(
    ("doing", "waiting", "age", "now", "busy"),
    [
        (Doing.FORWARD, "", 2.0, "computes", 0.5),
        (Doing.BACKWARD, "", 10.0, "computes", 0.75),  # It has computed ever since.
        (Doing.WAIT_DATA, "", 10.0, "waits", 0.25),
        (Doing.WAIT_SYNC, "update 3", 1.0, "waits", 0.5),
        (Doing.WAIT_SYNC, "update 3", 10.0, "silent", 0.5),  # Whoever waits would have told of it.
        (Doing.OTHER, "", 10.0, "silent", 0.5),
        (Doing.OTHER, "", 1.0, "", 0.5),
    ],
)
def test_a_worker_that_tells_nothing_is_said_to_do_what_it_must_be_doing(
    plan: Plan, doing: Doing, waiting: str, age: float, now: str, busy: float
) -> None:
    board = PulseBoard(plan)
    for time in (0.0, 10.0):
        seconds = [0.0] * len(Doing)
        seconds[Doing.FORWARD] = time / 2
        board.take(2, Pulse(time, tuple(seconds), 0, 1, doing, waiting, 4.0 if waiting else 0.0))
    last = board.status(10.0 + age).stages[1]
    assert last.now == now
    assert last.busy == pytest.approx(busy)
    assert last.now_for == {Doing.WAIT_DATA: "data", Doing.WAIT_SYNC: "replicas"}.get(doing, "") * (now == "waits")
    assert last.now_seconds == age + (4.0 if now == "waits" and waiting else 0.0)


def test_figures_are_of_the_last_ten_seconds(plan: Plan) -> None:
    board = PulseBoard(plan)
    for time in range(61):
        seconds = [0.0] * len(Doing)
        seconds[Doing.FORWARD] = float(min(time, 55))
        board.take(2, Pulse(float(time), tuple(seconds), time * 100, 1, Doing.OTHER, "", 0.0))
    last = board.status(60.0).stages[1]
    assert last.busy == pytest.approx(0.5)
    assert last.sent_bytes_per_second == pytest.approx(100)


def test_a_pulse_is_known_by_its_form_and_nothing_else_is_taken_for_one() -> None:
    pulse = Pulse(1.0, (0.5,) * len(Doing), 2, 3, Doing.FORWARD.value, "", 0.0)
    assert Pulse.has_form(tuple(pulse))
    for changed in ({"doing": len(Doing)}, {"waited": float("nan")}, {"seconds": (1.0,)}, {"waiting": None}):
        assert not Pulse.has_form(tuple(pulse._replace(**changed)))


def test_a_trace_is_written_when_something_was_added_to_it(tmp_path: Path) -> None:
    """And then holds all so far."""
    options = options_of(tmp_path, "1")
    runner = cast(StageRunner, SimpleNamespace())
    inbox = cast(Inbox, SimpleNamespace(handle=lambda *what: None, wait_until=lambda *what: None))
    watch = Watch(options, runner, inbox, {0: 0.0}, lambda event: None, "cpu")
    trace = tmp_path / "trace.json"

    def run_epoch(epoch: int, rows: list[float]) -> list[str]:
        """Names of what the file shows after it."""
        trace.unlink(missing_ok=True)
        watch.count_segment()
        runner.tell_timing(WorkerTiming(), array("d", rows))
        watch.finish_epoch(epoch)
        events = json.loads(trace.read_text())["traceEvents"] if trace.exists() else []
        return [event["name"] for event in events if event["ph"] == "X"]

    assert run_epoch(0, []) == []
    assert run_epoch(1, [Doing.FORWARD, 1.0, 2.0, 3, 0, -1, -1]) == ["F3"]
    assert run_epoch(2, []) == []
    assert run_epoch(3, [Doing.BACKWARD, 2.0, 3.0, 3, 0, -1, -1]) == ["F3", "B3"]


def test_kinds_of_messages_in_the_trace_do_not_collide_with_what_is_done() -> None:
    assert not {int(doing) for doing in Doing} & set(RECEIVED.values())
