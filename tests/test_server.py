from __future__ import annotations

import pytest
import torch
from torch import nn

from pd_train.options import OptimizerOptions
from pd_train.server import Contribution, ShardedServer, mean_gradients
from pd_train.weights import ParameterSets

SGD = OptimizerOptions("sgd", lr=1.0, momentum=0.0)


class Group:
    """The replicas of a stage in one process; messages wait until `deliver`."""

    def __init__(self, replicas: int, sizes: list[int], count: int = 1) -> None:
        self.parameters = [[nn.Parameter(torch.zeros(n)) for n in sizes] for _ in range(replicas)]
        self.sets = [ParameterSets(own, count) for own in self.parameters]
        self.messages: list[tuple[int, int, int, str, int, tuple]] = []
        self.servers = [
            ShardedServer(self.sets[k], [f"p{i}" for i in range(len(sizes))], k, replicas, SGD, self._sender(k))
            for k in range(replicas)
        ]
        for sets in self.sets:
            sets.want_from(99)

    def _sender(self, replica: int):
        def send(segment: int, target: int, kind: str, index: int, body: tuple) -> None:
            self.messages.append((replica, segment, target, kind, index, body))

        return send

    def start(self, minibatches: int) -> None:
        for server in self.servers:
            server.start_segment(0, minibatches, 1.0)

    def backward(self, replica: int, round: int, samples: int, gradients: list[float | None]) -> None:
        server, own = self.servers[replica], self.parameters[replica]
        server.start_backward(round, samples)
        losses = [p.sum() * g for p, g in zip(own, gradients, strict=True) if g is not None]
        if losses:
            torch.stack(losses).sum().backward()
        server.finish_backward([p.grad for p in own])
        for p in own:
            p.grad = None

    def deliver(self) -> None:
        while self.messages:
            replica, segment, target, kind, index, body = self.messages.pop()
            if kind == "gradient":
                bucket, samples, gradients = body
                self.servers[target].take_gradients(segment, index, bucket, replica, Contribution(samples, gradients))
            else:
                self.servers[target].take_parameters(segment, index, *body)
            for server in self.servers:
                server.advance()
        for server in self.servers:
            server.advance()

    def values(self, replica: int) -> list[float]:
        return [p.detach().unique().item() for p in self.parameters[replica]]


def test_all_replicas_get_the_mean_whatever_the_order_of_arrival() -> None:
    group = Group(3, [100, 200, 5])
    group.start(3)
    for replica, value in [(2, 6.0), (0, 1.0), (1, 2.0)]:
        group.backward(replica, 0, 4, [value, value, value])
    group.deliver()
    assert [group.values(k) for k in range(3)] == [[-3.0] * 3] * 3


def test_a_short_minibatch_weighs_by_its_samples() -> None:
    group = Group(2, [100, 200])
    group.start(2)
    group.backward(0, 0, 3, [1.0, 1.0])
    group.backward(1, 0, 1, [5.0, 5.0])
    group.deliver()
    assert group.values(0) == group.values(1) == [-2.0, -2.0]


def test_a_replica_without_a_gradient_counts_as_zero_and_none_at_all_leaves_the_parameter_alone() -> None:
    group = Group(2, [100, 200])
    group.start(2)
    group.backward(0, 0, 4, [4.0, None])
    group.backward(1, 0, 4, [None, None])
    group.deliver()
    assert group.values(0) == group.values(1) == [-2.0, 0.0]
    assert all(sets.complete == 1 for sets in group.sets)


def test_a_replica_without_a_minibatch_in_the_last_round_still_serves_its_shard() -> None:
    group = Group(3, [100, 200])
    group.start(2)
    group.backward(0, 0, 4, [2.0, 2.0])
    group.backward(1, 0, 4, [4.0, 4.0])
    group.deliver()
    assert [group.values(k) for k in range(3)] == [[-3.0, -3.0]] * 3


def test_a_bucket_leaves_within_the_backward_pass() -> None:
    group = Group(2, [64, 64])
    group.start(2)
    own = group.parameters[1]
    group.servers[1].start_backward(0, 4)
    own[1].sum().backward()
    assert [(kind, target) for _, _, target, kind, _, _ in group.messages] == [("gradient", 0)]
    group.servers[1].finish_backward([None, own[1].grad])


def test_no_round_is_updated_before_all_its_gradients_are_there() -> None:
    group = Group(2, [64, 64])
    group.start(2)
    group.backward(0, 0, 4, [1.0, 1.0])
    group.deliver()
    assert group.values(0) == [0.0, 0.0]
    assert group.sets[0].complete == 0


def test_what_arrives_for_the_next_segment_waits_for_it() -> None:
    group = Group(2, [64, 64])
    group.start(2)
    group.servers[0].start_segment(1, 2, 1.0)
    group.backward(0, 0, 4, [1.0, 1.0])
    segments = {segment for _, segment, _, _, _, _ in group.messages}
    assert segments == {1}
    group.deliver()
    assert group.values(1) == [0.0, 0.0]


def test_mean_gradients_by_hand() -> None:
    def one(samples: int, *values: float | None) -> Contribution:
        return Contribution(samples, tuple(None if v is None else torch.tensor([v]) for v in values))

    assert mean_gradients([one(2, 1.0, None), one(2, 2.0, None)]) == [torch.tensor([1.5]), None]
    assert mean_gradients([one(3, 1.0, 4.0), one(1, 5.0, None)]) == [torch.tensor([2.0]), torch.tensor([3.0])]
    assert mean_gradients([one(7, 1.0)]) == [torch.tensor([1.0])]


def test_a_sparse_gradient_is_refused_with_the_parameters_name() -> None:
    table = nn.Embedding(10, 64, sparse=True)
    sets = ParameterSets([table.weight], 1)
    server = ShardedServer(sets, ["table.weight"], 0, 2, SGD, lambda *_: None)
    server.start_segment(0, 2, 1.0)
    server.start_backward(0, 1)
    with pytest.raises(Exception, match=r"table\.weight has a sparse gradient"):
        table(torch.tensor([1])).sum().backward()
