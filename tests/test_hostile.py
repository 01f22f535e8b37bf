"""A stranger at the workers' ports while they train, who even knows the run's marks: no number of the run changes."""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import zmq

from pd_format.plan import Host, Plan
from pd_train import forms, routing
from pd_train.admission import GREETING, Admission, Refusals
from pd_train.checkpoint.part import find_parts, load_part
from pd_train.events import Event, Progress
from pd_train.forms import has_form, plan_problem
from pd_train.inbox import Inbox
from pd_train.launch import launch
from pd_train.meeting import COMMON_MARK
from pd_train.options import RunOptions
from pd_train.routing import may_send, place_of
from pd_train.server import check_pieces
from pd_train.timing import WorkerTiming
from pd_train.wire import Message, WireError, encode
from test_checkpoint import assert_same, options_of

FLOOD = 3000


def hosts(count: int) -> tuple[Host, ...]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    found = tuple(Host(address="127.0.0.1", port=each.getsockname()[1]) for each in sockets)
    for each in sockets:
        each.close()
    return found


class Stranger:
    """Connects to every worker and sends what it should not, once, in the second epoch."""

    def __init__(self, options: RunOptions) -> None:
        self.plan = options.plan
        self.sent = 0
        self._run_dir = options.run_dir

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress) and event.phase == "training" and event.epoch == 1 and not self.sent:
            # What the messages of this start bear is no secret to who can read its checkpoints.
            mark = load_part(find_parts(self._run_dir)[0]).record.run
            for host in self.plan.hosts:
                self._announce_a_terabyte(host.port)
                self._break_off(host.port)
                with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                    dealer.setsockopt(zmq.LINGER, -1)
                    dealer.connect(f"tcp://127.0.0.1:{host.port}")
                    for frames in (*self._junk(mark), *self._junk(COMMON_MARK), *[[b"flood"]] * FLOOD):
                        dealer.send_multipart(frames)
                        self.sent += 1

    def _junk(self, mark: str) -> list[list[Any]]:
        plausible = []
        tensor = torch.full((4, 48), 7.0)
        for sender in range(self.plan.workers):
            for kind, body in (
                ("forward", ((tensor,), torch.zeros(4, dtype=torch.int64), 0)),
                ("backward", [tensor]),
                ("backward", None),
                ("gradient", (0, (tensor,), 0)),
                ("parameters", (0, (tensor,))),
                ("score", (1e9, None, 4, None)),
                ("segment", None),
                ("goodbye", None),
                (GREETING, None),
            ):
                for sequence in (0, 1, 20):
                    message = Message(kind, sender, 1, sequence, body)
                    plausible.append(list(map(bytes, encode(message, mark, sequence))))
        whole = encode(Message("forward", 0, 1, 5, ((tensor,), None, 0)), mark, 7)
        announced = [mark, "forward", 0, 7, 1, 5, 0.0, 0, "x", "float32", 1, 10**12 // 4, False, False]
        return [
            *plausible,
            *([*frames, *frames[1:]] for frames in plausible[:3]),  # A repeated frame.
            [b""],
            [b"junk", b"more"],
            list(map(bytes, encode(Message(GREETING, 1, 0, 0), "another run"))),
            [bytes(whole[0])],  # Cut short.
            [bytes(whole[0]), bytes(whole[1])[:-1]],
            [b"".join(map(msgpack.packb, announced)), b"1234"],
            [msgpack.packb(mark) + b"\xdd\xff\xff\xff\xff" * 500],
        ]

    def _break_off(self, port: int) -> None:
        """Ends within a message of several frames."""
        with self._greeted(port) as stream:
            stream.sendall(b"\x01\x05" + b"begun")

    def _greeted(self, port: int) -> socket.socket:
        """A connection that has spoken ZeroMQ's own protocol up to the first message."""
        stream = socket.create_connection(("127.0.0.1", port))
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        stream.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\x04" + bytes([len(ready)]) + ready)
        return stream

    def _announce_a_terabyte(self, port: int) -> None:
        """In the head of a frame, which libzmq reads."""
        with self._greeted(port) as stream:
            stream.sendall(b"\x02" + struct.pack(">Q", 10**12))
            stream.settimeout(10)
            while stream.recv(4096):  # Until it is closed, with no byte of the frame sent.
                pass


def test_a_stranger_changes_no_number_of_a_run(tmp_path: Path) -> None:
    alone = options_of(tmp_path / "alone", "2-1", epochs=6)
    alone.run_dir.mkdir()
    launch(alone, lambda event: None)
    plan = alone.plan.model_copy(update={"hosts": hosts(3)})
    options = dataclasses.replace(alone, run_dir=tmp_path / "attacked", plan=plan)
    stranger = Stranger(options)
    options.run_dir.mkdir()
    launch(options, stranger)
    assert stranger.sent > 3 * FLOOD
    assert_same(tmp_path / "attacked", tmp_path / "alone")
    report = json.loads((options.run_dir / "report.json").read_text())
    assert report["refused_messages"] == stranger.sent
    for rank in range(3):
        log = (options.run_dir / f"worker-{rank}.log").read_text()
        assert log.count("refused message") < 20
        assert "which has not greeted" in log or "over another connection than its own" in log


@pytest.fixture
def plan() -> Plan:
    return options_of(Path("run"), "2-1-2").plan


class TestAdmission:
    def admission(self) -> Admission:
        admission = Admission(lambda message: "odd" if message.kind == "odd" else None)
        admission.check(b"a", Message(GREETING, 1, 0, 0))
        return admission

    def test_messages_in_order_over_one_connection_are_taken(self) -> None:
        admission = self.admission()
        admission.check(b"b", Message(GREETING, 2, 0, 0))
        for sequence in (1, 2, 3):
            admission.check(b"a", Message("forward", 1, 0, 0, None, sequence))
            admission.check(b"b", Message("forward", 2, 0, 0, None, sequence))

    @pytest.mark.parametrize(
        ("connection", "message", "reason"),
        [
            (b"b", Message("forward", 1, 0, 0, None, 1), "over another connection"),
            (b"b", Message("forward", 2, 0, 0, None, 1), "has not greeted"),
            (b"a", Message("forward", 1, 0, 0, None, 0), "message 0 of worker 1 is repeated: 1 is due"),
            (b"a", Message("forward", 1, 0, 0, None, 2), "message 2 of worker 1 is too early: 1 is due"),
            (b"b", Message(GREETING, 1, 0, 0), "not the first message of both"),
            (b"a", Message(GREETING, 1, 0, 0), "not the first message of both"),
            (b"a", Message(GREETING, 2, 0, 0), "not the first message of both"),
            (b"b", Message(GREETING, 2, 0, 0, None, 1), "not the first message of both"),
        ],
    )
    def test_others_are_refused_and_change_nothing(self, connection: bytes, message: Message, reason: str) -> None:
        admission = self.admission()
        with pytest.raises(WireError, match=reason):
            admission.check(connection, message)
        admission.check(b"a", Message("forward", 1, 0, 0, None, 1))

    def test_one_odd_message_costs_no_other(self) -> None:
        admission = self.admission()
        with pytest.raises(WireError, match="odd"):
            admission.check(b"a", Message("odd", 1, 0, 0, None, 1))
        admission.check(b"a", Message("forward", 1, 0, 0, None, 2))


def test_a_flood_of_refusals_makes_few_lines() -> None:
    refusals = Refusals()
    lines = [refusals.note("why", now=number / 1000) for number in range(100_000)]
    assert refusals.count == 100_000
    said = [line for line in lines if line is not None]
    assert len(said) == 11
    assert said[-1] == "refused message 60010 that is of no use here: why"


@pytest.mark.parametrize(
    ("kind", "senders"),
    [
        ("forward", {3: {2}, 2: {0, 1}, 0: set()}),
        ("backward", {0: {2}, 2: {3, 4}, 4: set()}),
        ("gradient", {0: {1}, 2: set(), 3: {4}}),
        ("score", {0: {3, 4}, 2: set()}),
        ("segment", {0: set(), 4: {0}}),
        ("part", {0: {1, 2, 3, 4}, 1: set()}),
        ("hello", {2: {0, 1, 3, 4}}),
        ("nothing", {2: set()}),
    ],
)
def test_who_may_send_what(kind: str, senders: dict[int, set[int]], plan: Plan) -> None:
    for rank, expected in senders.items():
        place = place_of(plan, rank)
        found = {s for s in range(-1, 7) for index in range(2) if may_send(plan, place, kind, s, index)}
        assert found == expected, rank


def test_minibatches_come_from_their_own_replica(plan: Plan) -> None:
    place = place_of(plan, 2)
    assert [may_send(plan, place, "forward", 0, index) for index in range(4)] == [True, False, True, False]
    assert [may_send(plan, place, "backward", 4, index) for index in range(4)] == [False, True, False, True]


T = torch.zeros(2)
TIMING = WorkerTiming().plain()


def rows(what: float | None = None, peer: float = 0) -> torch.Tensor:
    """One row of a trace, or none."""
    return torch.tensor([] if what is None else [what, 1.0, 2.0, 3, 0, peer, 8], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("forward", [((T,), T, None), ((), None, 3)], [None, (T, T, None), ((T,), T, True), ((T,), T), [(T,), T, 0]]),
        ("backward", [None, [], [T, None], [(T, T)]], [T, (T,), [1], [[T]], [(T, None)]]),
        ("gradient", [(0, (T, None), 0), (0, [T], 0)], [(0, (T,)), (-1, (T,), 0), (0, [None], 0), (0, (1,), 0)]),
        ("parameters", [(0, (T,)), (0, [T])], [(0, (None,)), (0, T), ("0", (T,))]),
        (
            "score",
            [(0.5, None, 4, None), (0.5, 2, 4, T), (None, None, 4, None)],
            [(1, None, 4, None), (0.5, None, -4, None), 0.5],
        ),
        ("norm", [0.5], [1, None, T]),
        (
            "timing",
            [(TIMING, rows()), (TIMING, rows(0, -1)), (TIMING, torch.cat([rows(7, -1), rows(11, 4)]))],
            [
                (TIMING, None),
                (TIMING, T),
                (TIMING, rows(0, -1).float()),
                (TIMING, rows(0, -1)[:6]),
                (TIMING, rows(0, -1).reshape(1, 7)),
                (TIMING, rows(-1, -1)),
                (TIMING, rows(12, 0)),
                (TIMING, rows(0.5, -1)),
                (TIMING, rows(0, math.nan)),
                (TIMING, rows(math.inf, 0)),
                ({}, rows()),
            ],
        ),
        ("saved", [(1, 0)], [(1,), (-1, 0), (1.0, 0), None]),
        (
            "segment",
            [None, {"save": (1, 0), "whole": [(0, 3)]}],
            [{}, 1, {"save": 1, "whole": []}, {"save": (1, 0)}, {"number": 1}],
        ),
        ("order", [None, ("read", (1, 0)), ("take", ())], [("read",), ("write", (1, 0)), ("take", ((0, {}),))]),
        ("nothing", [], [None, 1]),
    ],
)
def test_what_messages_hold(kind: str, good: list[object], bad: list[object]) -> None:
    assert all(has_form(kind, body) for body in good)
    for body in bad:
        assert not has_form(kind, body), body


def test_the_reason_names_the_message(plan: Plan) -> None:
    place = place_of(plan, 2)
    assert plan_problem(plan, place, Message("forward", 1, 0, 3, ((T,), None, 0))) is None
    assert "'forward' 3 of worker 0, which the plan does not have" in str(
        plan_problem(plan, place, Message("forward", 0, 0, 3))
    )
    assert "'forward' 3 of worker 1, whose content has another form" in str(
        plan_problem(plan, place, Message("forward", 1, 0, 3))
    )


@pytest.mark.parametrize(("peer", "is_taken"), [(0, True), (4, True), (5, False), (-1, False), (0.5, False)])
def test_a_trace_names_workers_of_the_plan_as_senders(peer: float, is_taken: bool, plan: Plan) -> None:
    place = place_of(plan, 0)
    passes = rows(0, -1)  # Which have no sender.
    for known in (passes, torch.cat([passes, rows(11, peer)])):
        problem = plan_problem(plan, place, Message("timing", 1, 0, 0, (TIMING, known)))
        assert (problem is None) == (known is passes or is_taken)


def test_every_kind_of_message_has_a_sender_and_a_form() -> None:
    """A kind that is missing in one of the two tables would be refused when it is first sent."""
    of_stages = {"forward", "backward", "score"}
    kinds = routing._TO_RANK_0 | routing._FROM_RANK_0 | routing._OF_STAGE | routing._OF_ALL
    assert kinds | of_stages == forms._FORMS.keys()


def test_a_message_that_a_handler_refuses_is_counted_and_disturbs_no_other() -> None:
    class Given:
        def __init__(self) -> None:
            self.messages = [Message("gradient", 1, 0, 3, "bad"), Message("gradient", 1, 0, 4, "good")]
            self.refused: list[str] = []

        def receive(self, timeout: float = 0.0) -> Message | None:
            return self.messages.pop(0) if self.messages else None

        def refuse(self, reason: str) -> None:
            self.refused.append(reason)

    taken = []

    def handler(message: Message) -> None:
        if message.body == "bad":
            raise WireError("pieces of another size")
        taken.append(message.index)

    transport = Given()
    inbox = Inbox(transport, "stage 0 replica 0", 1.0, lambda text: None)  # type: ignore[arg-type]
    inbox.handle("gradient", handler)
    inbox.poll()
    assert taken == [4]
    assert transport.refused == ["gradient 3 of worker 1: pieces of another size"]


@pytest.mark.parametrize(
    ("number", "found", "reason"),
    [
        (2, (T,), "bucket 2, which such a message cannot be about"),
        (1, (T, T), "2 pieces of bucket 1, which has 1"),
        (1, (torch.zeros(1),), r"float32 \(1,\) of bucket 1, where torch.float32 \(2,\)"),
        (1, (T.double(),), "float64"),
    ],
)
def test_pieces_that_do_not_fit_their_bucket_are_refused(
    number: int, found: tuple[torch.Tensor, ...], reason: str
) -> None:
    check_pieces(1, (T + 1,), {1: [T]})
    check_pieces(1, (None,), {1: [T]})
    with pytest.raises(WireError, match=reason):
        check_pieces(number, found, {1: [T]})
