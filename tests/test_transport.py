from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator

import msgpack
import pytest
import torch
import zmq

from pd_format.errors import UserError
from pd_train.admission import GREETING
from pd_train.transport import PeerLost, Transport
from pd_train.wire import Message, encode, seal

RUN = "run-1"


@pytest.fixture
def pair() -> Iterator[tuple[Transport, Transport]]:
    a, b = Transport(0, RUN, "127.0.0.1"), Transport(1, RUN, "127.0.0.1")
    addresses = {0: (a.address, a.port), 1: (b.address, b.port)}
    a.connect(addresses)
    b.connect(addresses)
    yield a, b
    a.close()
    b.close()


def message(index: int, body: object = None, kind: str = "forward", sender: int = 0) -> Message:
    return Message(kind, sender, 0, index, body)


def test_messages_arrive_whole_and_in_order(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    sent = [torch.randn(3, index) for index in range(50)]
    for index, tensor in enumerate(sent):
        a.send(1, message(index, (tensor, {"n": index})))
    for index, tensor in enumerate(sent):
        received = b.receive(timeout=10)
        assert isinstance(received, Message)
        assert received.index == received.body[1]["n"] == index
        assert torch.equal(received.body[0], tensor)


def test_a_large_tensor_arrives_and_its_bytes_are_counted(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    big = torch.arange(2_000_000, dtype=torch.float32)
    a.send(1, message(0, big))
    received = b.receive(timeout=10)
    assert isinstance(received, Message)
    assert torch.equal(received.body, big)
    assert 8_000_000 < a.sent_bytes["forward"] < 8_001_000


def test_large_and_small_tensors_arrive_in_order_both_ways(pair: tuple[Transport, Transport]) -> None:
    sizes = (3, 3 << 20, 100, (1 << 20) + 7, 70_000, 0)
    bodies = [[torch.randint(256, (size,), dtype=torch.uint8) for size in sizes], [torch.ones(9)]] * 3
    for one, other in (pair, pair[::-1]):
        for index, body in enumerate(bodies):
            one.send(other.rank, message(index, body, sender=one.rank))
        for index, body in enumerate(bodies):
            received = other.receive(timeout=20)
            assert isinstance(received, Message)
            assert received.index == index
            assert received.size > sum(tensor.nbytes for tensor in body)
            assert all(map(torch.equal, received.body, body))
            assert all(tensor.data_ptr() % 64 == 0 for tensor in received.body)
        assert other.receive() is None


def test_news_of_a_failure_does_not_wait_for_what_is_large(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    for index in range(3):
        a.send(1, message(index, torch.zeros(50 << 20, dtype=torch.uint8)))
    a.send(1, message(0, ("why", False), kind="failed"))
    kinds = []
    while len(kinds) < 4:
        received = b.receive(timeout=20)
        assert isinstance(received, Message)
        kinds.append(received.kind)
    assert kinds.index("failed") < 3


def test_what_is_large_fills_memory_that_is_there_already(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    places = set()
    for index in range(30):
        a.send(1, message(index, torch.zeros(2 << 20, dtype=torch.uint8)))
        received = b.receive(timeout=20)
        assert isinstance(received, Message)
        places.add(received.body.data_ptr())
        del received
    assert len(places) <= 2


def test_a_strangers_pieces_disturb_nobodys(pair: tuple[Transport, Transport]) -> None:
    """One that does not greet, and one that does so in the name of a worker that never came."""
    a, b = pair
    large = Message("forward", 2, 0, 0, torch.zeros(3 << 20, dtype=torch.uint8))
    header = seal(large, RUN).header(1)
    terabyte = seal(dataclasses.replace(large, sequence=1), RUN)
    terabyte = dataclasses.replace(terabyte, _end=terabyte._end.replace(msgpack.packb(3 << 20), msgpack.packb(10**12)))
    piece = [b"", bytes(1 << 20)]
    greeting = [bytes(each) for each in encode(Message(GREETING, 2, 0, 0), RUN)]
    dues = {
        "pieces of no message": [piece, [b"", b""], [b"", b"x", b"y"]],
        "not greeted": [[header], piece, piece],
        "a terabyte": [greeting, [terabyte.header(1)], piece, piece, [header], [b"", bytes((1 << 20) + 1)], piece],
        "twice": [greeting, [header, b"more"], [b"", b""], [b""]],
    }
    for messages in dues.values():
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = -1
            dealer.connect(f"tcp://127.0.0.1:{b.port}")
            for index in range(3):
                a.send(1, message(index, torch.full((3 << 20,), index, dtype=torch.uint8)))
                for each in messages[len(messages) * index // 3 : len(messages) * (index + 1) // 3]:
                    dealer.send_multipart(each)
        for index in range(3):
            received = b.receive(timeout=20)
            assert isinstance(received, Message)
            assert received.body.tolist()[:: 1 << 20] == [index] * 3
    while b.refused < 13:
        assert b.receive(timeout=0.01) is None
    assert b.receive(timeout=0.05) is None
    assert b.refused == 13


def test_sending_does_not_wait_for_a_peer_that_is_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        a = Transport(0, RUN, "127.0.0.1")
        a.connect({1: ("127.0.0.1", unused.getsockname()[1])})
        for index in range(100):
            a.send(1, message(index, torch.zeros(1000)))
        a.close()


def test_a_message_to_oneself_moves_nothing(pair: tuple[Transport, Transport]) -> None:
    a, _ = pair
    tensor = torch.zeros(3)
    a.send(0, message(5, tensor))
    received = a.receive(timeout=10)
    assert isinstance(received, Message)
    assert received.body is tensor
    assert not a.sent_bytes


def test_the_loss_of_a_peer_is_an_event(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    c = Transport(2, RUN, "127.0.0.1")
    c.connect({0: (a.address, a.port)})
    c.send(0, message(1, sender=2))
    assert isinstance(a.receive(timeout=10), Message)
    a.send(1, message(1))
    assert isinstance(b.receive(timeout=10), Message)
    b.close = lambda: None  # type: ignore[method-assign]
    Transport.close(b)
    assert a.receive(timeout=10) == PeerLost(1)
    c.close()


def test_foreign_messages_are_refused_and_counted_and_disturb_nothing(pair: tuple[Transport, Transport]) -> None:
    a, b = pair
    stranger = Transport(0, "run-2", "127.0.0.1")
    stranger.connect({1: (b.address, b.port)})
    stranger.send(1, message(1))
    context = zmq.Context()
    junk = context.socket(zmq.DEALER)
    junk.connect(f"tcp://127.0.0.1:{b.port}")
    junk.send_multipart([b"junk", b"more"])
    stranger.close(linger=5)
    context.destroy(linger=5000)
    a.send(1, message(7))
    received = b.receive(timeout=10)
    assert isinstance(received, Message)
    assert received.index == 7
    while b.refused < 2:
        a.send(1, message(8))
        assert b.receive(timeout=10) is not None


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} of 127\.0\.0\.1 is in use"):
            Transport(0, RUN, "127.0.0.1", port)


def test_an_address_of_another_machine_is_explained() -> None:
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1 port 0 .*`listen`"):
        Transport(0, RUN, "192.0.2.1")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6_addresses_work() -> None:
    a, b = Transport(0, RUN, "::1"), Transport(1, RUN, "[::1]")
    a.connect({1: ("[::1]", b.port)})
    b.connect({})
    a.send(1, message(3))
    received = b.receive(timeout=10)
    assert isinstance(received, Message)
    assert received.index == 3
    a.close()
    b.close()
