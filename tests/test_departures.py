from __future__ import annotations

import torch

from pd_train.departures import Departures
from pd_train.wire import PIECE_BYTES, Message, Opened, seal

RUN = "run-1"


def message(kind: str, *sizes: int) -> Message:
    return Message(kind, 0, 0, 0, tuple(torch.zeros(size, dtype=torch.uint8) for size in sizes))


def leave(departures: Departures) -> list[str | list[int]]:
    """What leaves, all of it: the kinds and numbers of headers, and the sizes of pieces' frames."""
    found: list[str | list[int]] = []
    while (parts := departures.next()) is not None:
        assert departures.next() is parts
        departures.sent()
        if parts[0]:
            opened = Opened(parts[0], (RUN,))
            found.append(f"{opened.message.kind} {opened.message.sequence} {opened.apart}")
        else:
            found.append([len(frame) for frame in parts[1:]])
    return found


def add(departures: Departures, *messages: Message) -> None:
    for each in messages:
        departures.add(seal(each, RUN))


def test_small_messages_leave_in_one_and_large_ones_in_pieces_in_order() -> None:
    departures = Departures()
    add(departures, message("a", 5, 7), message("b", 2 * PIECE_BYTES + 1), message("c"))
    assert len(departures) == 3
    assert leave(departures) == [
        "a 0 0", f"b 1 {2 * PIECE_BYTES + 64}", [PIECE_BYTES], [PIECE_BYTES], [1], "c 2 0",
    ]  # fmt: skip
    assert len(departures) == 0


def test_many_short_frames_share_pieces() -> None:
    departures = Departures()
    add(departures, message("a", *[100_000] * 25))
    assert leave(departures)[1:] == [[100_000] * 10, [100_000] * 10, [100_000] * 5]


def test_news_of_a_failure_overtakes_all_between_two_pieces() -> None:
    departures = Departures()
    add(departures, message("a", 2 * PIECE_BYTES), message("b"))
    for _ in range(2):
        departures.next()
        departures.sent()
    add(departures, message("failed"))
    assert leave(departures) == ["failed 1 0", [PIECE_BYTES], "b 2 0"]
