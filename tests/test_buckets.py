from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pd_train.buckets import Piece, cut_into_buckets, whole_parameters


def test_buckets_follow_the_backward_pass() -> None:
    first, second = cut_into_buckets([100, 300], [4, 4], shards=2)
    assert (first.shard, first.pieces) == (0, (Piece(1, 0, 192),))
    assert (second.shard, second.pieces) == (1, (Piece(1, 192, 300), Piece(0, 0, 100)))


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([2, 4, 8])), max_size=8),
    st.integers(1, 5),
    st.sampled_from([256, 4096, 1 << 22]),
)
def test_every_element_is_in_one_bucket_and_cuts_are_aligned(
    sizes: list[tuple[int, int]], shards: int, bucket_bytes: int
) -> None:
    elements, element_bytes = [n for n, _ in sizes], [size for _, size in sizes]
    buckets = cut_into_buckets(elements, element_bytes, shards, bucket_bytes)
    for parameter, count in enumerate(elements):
        pieces = sorted(p for bucket in buckets for p in bucket.pieces if p.parameter == parameter)
        assert [p.start for p in pieces] == [0, *(p.stop for p in pieces)][: len(pieces)]
        assert (pieces[-1].stop if pieces else 0) == count
        assert all(p.start % 64 == 0 and p.stop > p.start for p in pieces)


def test_shards_own_about_the_same() -> None:
    elements = [1_000_003, 17, 5_000_000, 40_000]
    owned = [0] * 3
    for bucket in cut_into_buckets(elements, [4] * 4, shards=3, bucket_bytes=1 << 20):
        owned[bucket.shard] += sum(piece.stop - piece.start for piece in bucket.pieces)
    assert sum(owned) == sum(elements)
    assert max(owned) - min(owned) < 1000


def test_the_last_row_is_cut_finer_so_that_every_shard_has_a_part_in_what_comes_last() -> None:
    """Two shards, 32 MiB: rows of 4 MiB a bucket, the last one made into rows of 2, 1, 0.5 and 0.5."""
    buckets = cut_into_buckets([8 << 20], [4], shards=2)
    sizes = [sum(4 * (piece.stop - piece.start) for piece in bucket.pieces) / 2**20 for bucket in buckets]
    assert sizes == [4] * 6 + [2, 2, 1, 1, 0.5, 0.5, 0.5, 0.5]
    assert [bucket.shard for bucket in buckets] == [0, 1] * 7
    even = cut_into_buckets([8 << 20], [4], shards=2, even=True)
    assert {sum(4 * (piece.stop - piece.start) for piece in bucket.pieces) for bucket in even} == {4 << 20}


def test_a_single_worker_has_one_bucket_of_whole_parameters() -> None:
    (bucket,) = whole_parameters([5, 7])
    assert bucket.pieces == (Piece(0, 0, 5), Piece(1, 0, 7))
    assert whole_parameters([]) == []
