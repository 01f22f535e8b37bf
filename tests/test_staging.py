"""Copies to and from a device: the same code on torch's CPU stand-ins and on a device that is as late as it may be."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plans
import reference
import test_equality
from late_device import LateStaging
from pd_format.layers.task import Classification
from pd_train.arrivals import Buffers
from pd_train.departures import URGENT
from pd_train.inbox import Inbox
from pd_train.packing import pack
from pd_train.sender import Sender
from pd_train.staging import Staging, open_staging
from pd_train.torch_engine import TorchEngine
from pd_train.transport import Transport
from pd_train.wire import Message
from test_equality import OPTIMIZERS

CPU = torch.device("cpu")


def test_the_cpu_has_none_and_copies_nothing() -> None:
    assert open_staging(CPU) is None


def layouts() -> Iterator[Tensor]:
    whole = torch.randn(2, 3, 4, 5)
    yield from (whole, whole.to(memory_format=torch.channels_last), whole.transpose(0, 3), whole[:, ::2])
    yield from (whole.expand(2, 3, 4, 5)[:1].expand(6, 3, 4, 5), torch.tensor(3), torch.empty(0, 4), whole > 0)
    yield from (torch.randn(3, requires_grad=True), whole.bfloat16())


@pytest.mark.parametrize("late", [False, True])
def test_a_tensor_comes_back_as_it_went(late: bool) -> None:
    staging = LateStaging() if late else Staging(CPU)
    for tensor in layouts():
        there = staging.to_device(tensor)
        here = staging.to_host(there)
        event = staging.mark()
        assert event is not None
        event.synchronize()
        for copy in (there, here):
            assert torch.equal(copy, tensor)
            assert (copy.dtype, copy.requires_grad) == (tensor.dtype, tensor.requires_grad)
            assert copy.is_leaf
            assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
        (value,) = staging.finish(there.detach())
        assert torch.equal(value, tensor)
    assert staging.mark() is None


def test_a_message_looks_into_memory_that_its_bytes_are_still_to_come_to() -> None:
    """Nothing of a tensor may be copied when the message is made, which is before it is there."""
    for tensor in layouts():
        staging = LateStaging()
        here = staging.to_host(tensor)
        _, frames = pack(here, 1 << 20)
        before = [bytes(frame) for frame in frames]
        event = staging.mark()
        assert event is not None
        event.synchronize()
        assert [bytes(frame) for frame in frames] == [bytes(frame) for frame in pack(here, 1 << 20)[1]]
        assert not tensor.is_floating_point() or not frames or before != [bytes(frame) for frame in frames]


def test_the_device_computes_with_what_has_arrived_and_sends_what_it_has_computed() -> None:
    """None of the four streams' steps are done before the last event is waited for, and then in an order that is right."""
    staging = LateStaging(eager=False)
    compute = staging.late.compute
    there = staging.to_device(torch.arange(4.0))
    compute.add(lambda: there.mul_(2))
    here = staging.to_host(there)
    compute.add(lambda: there.mul_(100))
    event = staging.mark()
    assert event is not None
    assert not event.query()
    event.synchronize()
    assert here.tolist() == [0, 2, 4, 6], "what is asked for afterwards waits for nothing, and is not waited for"
    (value,) = staging.finish(there)
    assert value.tolist() == [0, 200, 400, 600]


def test_what_has_arrived_is_looked_at_before_the_host_waits_for_the_device() -> None:
    staging = LateStaging(eager=False)
    made, seen = torch.ones(2), []
    staging.late.compute.add(lambda: made.mul_(3))
    staging.meanwhile = lambda: seen.append(made.tolist())
    (value,) = staging.finish(made)
    assert seen == [[1, 1]]
    assert value.tolist() == [3, 3]


def test_a_message_is_on_its_way_to_the_device_before_it_is_due() -> None:
    transport = Transport(0, "run", "127.0.0.1")
    inbox, brought = Inbox(transport, "worker 0", 60.0, lambda text: None), []

    def bring(message: Message) -> Message:
        brought.append(message.index)
        return dataclasses.replace(message, body="on the device")

    inbox.bring = bring
    transport.send(0, Message("forward", 0, 0, 5, "on the host"))
    inbox.sort()
    assert brought == [5]
    assert inbox.wait_for("forward", 0, 5, "it") == "on the device"
    assert brought == [5]
    transport.close()


def test_memory_of_the_host_is_kept_until_it_has_been_copied() -> None:
    staging, buffers = LateStaging(eager=False), Buffers()
    memory = buffers.new(64)
    lent = buffers.lend(memory, 64)
    arrived = torch.frombuffer(lent, dtype=torch.float32)
    arrived.fill_(7)
    there = staging.to_device(arrived)
    del lent, arrived
    gc.collect()
    assert buffers.take(64) is None, "another message would land in it"
    assert there.isnan().all()
    staging.finish()
    assert there.eq(7).all()
    staging.to_device(torch.ones(1))
    gc.collect()
    assert buffers.take(64) is not None


def test_a_tensor_of_the_device_is_kept_until_it_has_been_copied() -> None:
    staging = LateStaging()
    made = torch.ones(5)
    gone = weakref.ref(made)
    here = staging.to_host(made)
    del made
    gc.collect()
    assert gone() is not None
    event = staging.mark()
    assert event is not None
    event.synchronize()
    assert here.eq(1).all()
    gc.collect()
    assert gone() is None


class Told:
    """An event that is reached when the test says so."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.awaited = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        self.awaited.set()
        assert self.reached.wait(20)


class Marks:
    """Gives the sender the events of a test."""

    def __init__(self, *events: Told | None) -> None:
        self.events = list(events)
        self.entered = threading.Event()

    def mark(self) -> Told | None:
        return self.events.pop(0)

    def enter_thread(self) -> None:
        self.entered.set()


def held_transport(sender: Sender) -> Transport:
    transport = Transport(0, "run", "127.0.0.1", hold=sender.hold)
    sender.start(transport.fail)
    return transport


def test_messages_leave_in_order_after_their_events_and_a_failure_overtakes_them() -> None:
    first, second = Told(), Told()
    sender = Sender(Marks(first, None, second, None))  # type: ignore[arg-type]
    transport = held_transport(sender)
    try:
        for index in range(4):
            transport.send(0, Message("forward", 0, 0, index))
        assert first.awaited.wait(20)
        assert transport.receive() is None
        (failed,) = URGENT
        transport.send(0, Message(failed, 0, 0, 9))
        assert transport.receive().kind == failed
        assert transport.receive() is None
        first.reached.set()
        assert [transport.receive(20).index for _ in range(2)] == [0, 1]
        assert second.awaited.wait(20)
        assert transport.receive() is None
        second.reached.set()
        assert [transport.receive(20).index for _ in range(2)] == [2, 3]
    finally:
        sender.close(20)
        transport.close()


def test_what_is_held_at_the_end_still_leaves() -> None:
    sender = Sender(Marks(*[None] * 100))  # type: ignore[arg-type]
    transport = Transport(0, "run", "127.0.0.1", hold=sender.hold)
    for index in range(100):
        transport.send(0, Message("bye", 0, 0, index))
    assert transport.receive() is None
    sender.start(transport.fail)
    sender.close(20)
    assert [transport.receive().index for _ in range(100)] == list(range(100))
    transport.close()


def test_what_is_held_when_time_is_over_does_not_leave() -> None:
    """Not into a transport that is closed already."""
    event = Told()
    sender = Sender(Marks(event))  # type: ignore[arg-type]
    transport = held_transport(sender)
    transport.send(0, Message("forward", 0, 0, 0))
    assert event.awaited.wait(20)
    sender.close(0.0)
    event.reached.set()
    sender._thread.join(20)
    assert transport.receive() is None
    transport.close()


def test_what_ends_the_sender_reaches_the_compute_thread() -> None:
    class Broken(Told):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    sender = Sender(Marks(Broken(), None))  # type: ignore[arg-type]
    transport = held_transport(sender)
    transport.send(0, Message("forward", 0, 0, 0))
    transport.send(0, Message("forward", 0, 0, 1))
    with pytest.raises(RuntimeError, match="device-side"):
        transport.receive(20)
    sender.close(20)
    assert transport.receive() is None, "nothing leaves behind it"
    transport.close()


def test_what_crosses_a_cut_is_no_memory_that_the_stage_goes_on_writing_to() -> None:
    """A stage that hands on its own buffer, which the next pass writes to before the copy is done."""
    staging = LateStaging()

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.count.add_(1)
            return x * self.weight, self.count

    module = Counts()
    engine = TorchEngine(module, [[module.weight]], Classification(), CPU, staging=staging)  # type: ignore[arg-type]
    sent = [engine.forward(b, 0, (torch.full((2,), float(b)),), 0) for b in range(3)]
    event = staging.mark()
    assert event is not None
    event.synchronize()
    assert [count.tolist() for _, count in sent] == [[1, 1], [2, 2], [3, 3]]
    assert [value.tolist() for value, _ in sent] == [[0, 0], [1, 1], [2, 2]]
    assert [value.requires_grad for value, _ in sent] == [True] * 3


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ("1", {}),
        ("1-1", {}),
        ("1-1", {"recompute": True}),
        ("1-1", {"rules": reference.Rules(weights="none")}),
        ("2-1-1", {}),
        ("1-3", {"rules": reference.Rules(sync="bsp")}),
        ("2-2", {"rules": reference.Rules(weights="2bw")}),
        ("3", {"rules": reference.Rules(flush=4, clip_norm=1e9)}),
    ],
)
def test_workers_on_a_late_device_compute_what_the_reference_computes(
    config: str, changes: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = ("skip", OPTIMIZERS["adam"]) if "2" in config else ("bn_dropout", OPTIMIZERS["sgd"])
    monkeypatch.setattr(test_equality, "MODELS", str(plans.HERE / "staged_models.py"))
    found = test_equality.run_pipeline(tmp_path / "run", model, config, optimizer, **changes)
    test_equality.assert_equal(found, test_equality.run_reference(model, config, optimizer, **changes))
    logs = [path.read_text() for path in (tmp_path / "run").rglob("*.log")]
    assert sum("the sender begins" in log for log in logs) == sum(map(int, config.split("-")))
