"""Where large messages land: buffers that come back, and what strangers cannot make of them."""

from __future__ import annotations

import pytest
import torch

from pd_train.arrivals import Arrival, Buffers
from pd_train.packing import ALIGNMENT, Region
from pd_train.wire import Message, Opened, WireError, seal

RUN = "run-1"


def arrive(buffers: Buffers, *tensors: torch.Tensor, frame_bytes: int = 1024) -> tuple[torch.Tensor, ...]:
    """Tensors as they come out at the other end."""
    sealed = seal(Message("forward", 0, 0, 0, tensors), RUN, frame_bytes, most_together=0)
    opened = Opened(sealed.header(0), (RUN,))
    arrival = Arrival(buffers, opened.apart, 0)
    for frame in sealed.frames:
        room = arrival.room(frame_bytes)
        room[: len(frame)] = frame
        arrival.add(len(frame), len(room))
    assert arrival.is_whole
    return opened.read(Region(arrival.end())).body


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_tensors_in_pieces_arrive_whole_and_aligned() -> None:
    sent = (torch.randn(1000), torch.arange(5), torch.tensor(3.0), torch.ones(0), torch.randn(7, 90).t())
    found = arrive(Buffers(), *sent)
    for one, other in zip(found, sent, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    assert all(address(tensor) % ALIGNMENT == 0 for tensor in found)


def test_a_buffer_comes_back_when_no_tensor_in_it_is_left() -> None:
    buffers = Buffers()
    first, second = arrive(buffers, torch.randn(500), torch.randn(500))
    place, kept = address(first), second[3:]
    del first, second
    (other, _) = arrive(buffers, torch.randn(500), torch.randn(500))
    assert address(other) != place
    del kept
    (again, _) = arrive(buffers, torch.randn(500), torch.randn(500))
    assert address(again) == place


def test_what_autograd_has_saved_is_not_written_over() -> None:
    buffers, weight = Buffers(), torch.randn(500, requires_grad=True)
    (values,) = arrive(buffers, torch.full((500,), 2.0))
    out = (values * weight).sum()
    del values
    arrive(buffers, torch.full((500,), 3.0))
    out.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 500


def test_tensors_of_one_message_are_no_views_of_each_other() -> None:
    first, second = arrive(Buffers(), torch.randn(500).requires_grad_(), torch.randn(500))
    out = (first.exp() * second).sum()
    assert first.is_leaf
    other = arrive(Buffers(), torch.randn(500))[0]
    other.add_(1)
    assert second._version == 0
    out.backward()


def test_messages_of_the_same_sizes_take_no_new_memory() -> None:
    buffers = Buffers()
    places = set()
    for _ in range(50):
        held = [arrive(buffers, torch.randn(size))[0] for size in (3000, 400, 3000)]
        places |= {address(tensor) for tensor in held}
    assert len(places) <= 6  # Of two rounds, since one's go only when the next one's are there.


def test_buffers_nobody_asks_for_do_not_pile_up() -> None:
    buffers = Buffers()
    for size in range(1000, 60_000, 1000):
        arrive(buffers, torch.randn(size))
    buffers.take(1)
    assert sum(memory.nbytes for memory in buffers._free) <= 2 * 60_000 * 4


def test_what_is_announced_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_train.arrivals._FIRST_BYTES", 4096)
    arrival = Arrival(Buffers(), 10**12, 0)
    for _ in range(100):
        room = arrival.room(1024)
        room[:1024] = bytes([7]) * 1024
        arrival.add(1024, len(room))
        assert arrival._memory.nbytes <= 4096 + 2 * arrival.received
    assert bytes(arrival._memory[: 100 * 1024]) == bytes([7]) * 100 * 1024


@pytest.mark.parametrize("size", [0, 1025])
def test_pieces_that_do_not_fit_are_refused(size: int) -> None:
    arrival = Arrival(Buffers(), 2048, 0)
    with pytest.raises(WireError, match=f"a piece of {size} bytes where 1 to 1024"):
        arrival.add(size, len(arrival.room(1024)))


@pytest.mark.parametrize(("announced", "reason"), [(2048, "more bytes than"), (512, "512 bytes of a tensor of 1024")])
def test_a_header_that_says_two_things_is_refused(announced: int, reason: str) -> None:
    sealed = seal(Message("forward", 0, 0, 0, torch.zeros(256)), RUN, most_together=0)
    with pytest.raises(WireError, match=reason):
        Opened(sealed.header(0), (RUN,)).read(Region(memoryview(bytearray(announced))))
