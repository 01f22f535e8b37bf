from __future__ import annotations

import contextlib

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_format.layers.values import map_tensors, tensors_in
from pd_train.wire import Message, WireError, decode, encode

RUN = "run-1"
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip


def there_and_back(body: object, frame_bytes: int = 1 << 30) -> object:
    frames = [bytes(frame) for frame in encode(Message("forward", 1, 2, 3, body), RUN, 4, frame_bytes)]
    message = decode(frames, RUN)
    assert (message.kind, message.sender, message.sequence, message.segment, message.index) == ("forward", 1, 4, 2, 3)
    return message.body


def same(found: torch.Tensor, sent: torch.Tensor) -> bool:
    return found.dtype == sent.dtype and found.shape == sent.shape and torch.equal(found, sent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_survives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = (torch.randn(shape) * 10).to(dtype)
    assert same(there_and_back(sent), sent)


def test_nesting_and_plain_values_survive_with_their_types() -> None:
    body = (None, True, 3, -(2**70), 2.5, "a", b"b", [1, (2,)], {"k": None, 4: [False]}, ())
    found = there_and_back(body)
    assert found == body
    assert [type(item) for item in found] == [type(item) for item in body]


@pytest.mark.parametrize(
    "sent",
    [
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0).view(4, 6).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=["permuted", "transposed", "channels last"],
)
def test_a_dense_tensor_keeps_its_memory_order(sent: torch.Tensor) -> None:
    found = there_and_back(sent)
    assert same(found, sent)
    assert found.stride() == sent.stride()


@pytest.mark.parametrize("sent", [torch.arange(20.0)[::3], torch.ones(3).expand(4, 3), torch.randn(4, 6)[:, 2:5]])
def test_a_view_travels_without_its_base(sent: torch.Tensor) -> None:
    found = there_and_back(sent)
    assert same(found, sent)
    assert found.is_contiguous()


def test_who_wants_a_gradient_is_told_tensor_by_tensor() -> None:
    found = there_and_back([torch.ones(2).requires_grad_(), torch.ones(2)])
    assert [tensor.requires_grad for tensor in found] == [True, False]
    assert found[0].is_leaf


def test_a_long_tensor_travels_in_several_frames() -> None:
    sent = (torch.arange(1000.0), torch.arange(3))
    frames = encode(Message("forward", 0, 0, 0, sent), RUN, frame_bytes=1024)
    assert [len(frame) for frame in frames[1:]] == [1024, 1024, 1024, 928, 24]
    assert all(map(torch.equal, decode(frames, RUN).body, sent))


def test_sending_copies_nothing() -> None:
    sent = torch.zeros(4)
    frames = encode(Message("forward", 0, 0, 0, sent), RUN)
    sent[0] = 1.0
    assert bytes(frames[1][:4]) != bytes(4)


def test_what_cannot_travel_is_refused_by_name() -> None:
    with pytest.raises(WireError, match="a object cannot cross a cut"):
        encode(Message("forward", 0, 0, 0, object()), RUN)
    with pytest.raises(WireError, match="sparse"):
        encode(Message("forward", 0, 0, 0, torch.eye(2).to_sparse()), RUN)
    nested: object = None
    for _ in range(200):
        nested = (nested,)
    for body, reason in (
        (nested, "nested more than"),
        ({(1, 2): 3}, "a tuple as a key"),
        ({10**20: 3}, "a int as a key"),
        (10**1000, "more than 1000 digits"),
        ("\ud800", "cannot cross a cut"),
        (torch.ones((1,) * 65), "65 dimensions"),
        (["x"] * (9 << 20), "put them into a tensor"),
    ):
        with pytest.raises(WireError, match=reason):
            encode(Message("forward", 0, 0, 0, body), RUN)


def header(*body: object, run: str = RUN, start: tuple[object, ...] = ("forward", 0, 0, 0, 0, 0.0, 0)) -> bytes:
    return b"".join(map(msgpack.packb, (run, *start, *body)))


def tensor_header(
    dtype: str = "float32", shape: tuple[object, ...] = (2,), order: tuple[object, ...] = (False,), grad: object = False
) -> bytes:
    return header("x", dtype, len(shape), *shape, *order, grad)


LISTS = b"\xdd\x00\xff\xff\xff" * 1000


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "no message of this run"),
        ([b""], "no message of this run"),
        ([b"junk"], "no message of this run"),
        ([header(None, run="run-2")], "no message of this run"),
        ([header(None)[:-1]], "ends too early"),
        ([header("s", "text")[:-1]], "ends too early"),
        ([header(None) + b"\xc1"], "cannot be read"),
        ([header(b"\xc1")[:-3] + LISTS], "cannot be read"),
        ([header({"a": 1})], "cannot be read"),
        ([header([])], "a list in a header"),
        ([header(msgpack.ExtType(4, b""))], "a ExtType in a header"),
        ([header(None, start=(7, 0, 0, 0, 0, 0.0, 0))], "a int in a header where text"),
        ([header(None, start=("forward", -1, 0, 0, 0, 0.0, 0))], "a number from 0"),
        ([header(None, start=("forward", 0, True, 0, 0, 0.0, 0))], "a number from 0"),
        ([header(None, start=("forward", 0, 0, 2**48, 0, 0.0, 0))], "a number from 0"),
        ([header(None, start=("forward", 0, 0, 0, 0, 1, 0))], "where a time is expected"),
        ([header(None, start=("forward", 0, 0, 0, 0, float("nan"), 0))], "where a time is expected"),
        ([tensor_header()], "0 bytes of a tensor of 8"),
        ([tensor_header(), bytes(4)], "4 bytes of a tensor of 8"),
        ([tensor_header(), bytes(4), b"", bytes(4)], "do not add up"),
        ([tensor_header(), bytes(9)], "do not add up"),
        ([tensor_header(), bytes(8), bytes(8)], "more frames"),
        ([tensor_header(shape=(10**12,)), bytes(8)], "8 bytes of a tensor of 4000000000000"),
        ([tensor_header(shape=(-2,)), bytes(8)], "a number from 0"),
        ([tensor_header(shape=(True,)), bytes(4)], "a number from 0"),
        ([tensor_header(shape=(0, 2**40, 2**40))], "more than 281474976710656 elements"),
        ([tensor_header(shape=(1,) * 65), bytes(4)], "a number from 0 to below 65"),
        ([tensor_header("object"), bytes(8)], "unknown dtype"),
        ([tensor_header(order=(True, 1)), bytes(8)], "from 0 to below 1"),
        ([tensor_header(shape=(2, 1), order=(True, 0, 0)), bytes(8)], "impossible memory order"),
        ([tensor_header("int32", grad=True), bytes(8)], "a gradient asked for"),
        ([tensor_header(grad=1), bytes(8)], "a bool is expected"),
        ([header("q", 5)], "announces nothing"),
        ([header("t", 10**12)], "ends too early"),
        ([header("t", 1, None, None)], "goes on behind"),
        ([header("t", -1)], "a number from 0"),
        ([header(*("t", 1) * 100, None)], "nested more than"),
        ([header("d", 1, "l", 0, None)], "a list as a key"),
        ([header("d", 1, "i", "9" * 30, None)], "a int as a key"),
        ([header("d", 2, 1, None, 1, None)], "the same key twice"),
        ([header("i", "9" * 5000)], "at most 1000 digits"),
        ([header("i", "0x9")], "at most 1000 digits"),
    ],
)  # fmt: skip
def test_frames_that_are_no_message_of_this_run_are_refused(frames: list[bytes], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode(frames, RUN)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_random_frames_raise_nothing_else(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames, RUN)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_mutated_message_is_read_or_refused(data: st.DataObject) -> None:
    frames = [bytes(f) for f in encode(Message("forward", 0, 0, 0, (torch.ones(3), {"a": [1, None]})), RUN)]
    which = data.draw(st.integers(0, len(frames) - 1))
    at = data.draw(st.integers(0, len(frames[which]) - 1))
    frames[which] = frames[which][:at] + data.draw(st.binary(max_size=3)) + frames[which][at + 1 :]
    with contextlib.suppress(WireError):
        decode(frames, RUN)


def test_nestings_are_walked_in_order() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    nested = {"x": (a, [None, b]), "y": c}
    assert [t.numel() for t in tensors_in(nested)] == [1, 2, 3]
    doubled = map_tensors(lambda t: t * 2, nested)
    assert doubled["x"][1][1].tolist() == [2, 2]
    assert doubled["x"][1][0] is None
