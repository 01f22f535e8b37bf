from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from pd_format.errors import UserError
from pd_format.layers.task import Classification
from pd_format.versions import Mode, stage_versions
from pd_train.arithmetic import TORCH_ARITHMETIC
from pd_train.asynchronous import AsynchronousServer
from pd_train.clipping import Clipping
from pd_train.options import OptimizerOptions
from pd_train.server import SegmentSize
from pd_train.sharded import ShardedServer
from pd_train.torch_engine import TorchEngine, watch_leaves
from pd_train.weights import ParameterSets
from pd_train.wire import WireError

SGD = OptimizerOptions("sgd", lr=1.0, momentum=0.0)


class Group:
    """The replicas of a stage in one process; messages wait until `deliver`."""

    def __init__(
        self,
        replicas: int,
        sizes: list[int],
        mode: Mode | None = None,
        clip: float | None = None,
        parameters: list[list[nn.Parameter]] | None = None,
    ) -> None:
        mode = mode or Mode(sync="bsp")
        self.parameters = parameters or [[nn.Parameter(torch.zeros(n)) for n in sizes] for _ in range(replicas)]
        self.sets = [ParameterSets(own, 2 if mode.sync == "asp" else 1) for own in self.parameters]
        self.messages: list[tuple[int, int, int, str, int, object]] = []
        versions = stage_versions(mode, [replicas], [1], 0)
        names = [f"p{i}" for i in range(len(self.parameters[0]))]
        self.clippings = [
            Clipping(clip, range(replicas), self._teller(k, replicas)) if clip else None for k in range(replicas)
        ]
        self.servers: list = []
        for k, sets in enumerate(self.sets):
            sets.is_wanted = lambda version: False
            watch = partial(watch_leaves, sets.sets)
            if mode.sync == "asp":
                self.servers.append(AsynchronousServer(sets, versions, watch, names, k, SGD, self._sender(k)))
            else:
                self.servers.append(
                    ShardedServer(sets, versions, watch, names, k, SGD, self._sender(k), self.clippings[k])
                )

    def _sender(self, replica: int):
        def send(segment: int, target: int, kind: str, index: int, body: object) -> None:
            self.messages.append((replica, segment, target, kind, index, body))

        return send

    def _teller(self, replica: int, replicas: int):
        def tell(segment: int, update: int, squares: float) -> None:
            self.messages += [(replica, segment, k, "norm", update, squares) for k in range(replicas)]

        return tell

    def start(self, minibatches: int, samples: int = 4, last_samples: int = 4, segment: int = 0) -> None:
        for server in self.servers:
            server.start_segment(segment, SegmentSize(minibatches, samples, last_samples), 1.0)

    def backward(self, minibatch: int, gradients: list[float | None]) -> None:
        replica = minibatch % len(self.servers)
        server, own = self.servers[replica], self.parameters[replica]
        server.before_forward()
        server.start_backward(minibatch)
        losses = [p.sum() * g for p, g in zip(own, gradients, strict=True) if g is not None]
        if losses:
            torch.stack(losses).sum().backward()
        server.finish_backward([p.grad for p in own])
        for p in own:
            p.grad = None

    def deliver(self) -> None:
        self._advance()
        while self.messages:
            replica, segment, target, kind, index, body = self.messages.pop()
            if kind == "gradient":
                self.servers[target].take_gradients(segment, index, replica, body)
            elif kind == "parameters":
                self.servers[target].take_parameters(segment, index, body)
            else:
                self.clippings[target].take(segment, index, replica, body)
            self._advance()

    def _advance(self) -> None:
        for server in self.servers:
            server.advance()

    def values(self, replica: int) -> list[float]:
        return [p.detach().unique().item() for p in self.parameters[replica]]


def test_all_replicas_get_the_mean_whatever_the_order_of_arrival() -> None:
    group = Group(3, [100, 200, 5])
    group.start(3)
    for replica, value in [(2, 6.0), (0, 1.0), (1, 2.0)]:
        group.backward(replica, [value, value, value])
    group.deliver()
    assert [group.values(k) for k in range(3)] == [[-3.0] * 3] * 3


def test_a_short_minibatch_weighs_by_its_samples() -> None:
    group = Group(2, [100, 200])
    group.start(2, samples=3, last_samples=1)
    group.backward(0, [1.0, 1.0])
    group.backward(1, [5.0, 5.0])
    group.deliver()
    assert group.values(0) == group.values(1) == [-2.0, -2.0]


def test_a_replica_without_a_gradient_counts_as_zero_and_none_at_all_leaves_the_parameter_alone() -> None:
    group = Group(2, [100, 200])
    group.start(2)
    group.backward(0, [4.0, None])
    group.backward(1, [None, None])
    group.deliver()
    assert group.values(0) == group.values(1) == [-2.0, 0.0]
    assert all(sets.complete == 1 for sets in group.sets)


def test_a_replica_without_a_minibatch_in_the_last_round_still_serves_its_shard() -> None:
    group = Group(3, [100, 200])
    group.start(2)
    group.backward(0, [2.0, 2.0])
    group.backward(1, [4.0, 4.0])
    group.deliver()
    assert [group.values(k) for k in range(3)] == [[-3.0, -3.0]] * 3


def test_a_bucket_leaves_within_the_backward_pass() -> None:
    group = Group(2, [64, 64])
    group.start(2)
    own = group.parameters[1]
    group.servers[1].start_backward(1)
    own[1].sum().backward()
    assert [(kind, target) for _, _, target, kind, _, _ in group.messages] == [("gradient", 0)]
    group.servers[1].finish_backward([None, own[1].grad])


def test_an_update_lands_within_the_backward_pass_and_changes_no_gradient_of_it() -> None:
    """Replica 0, the slower one, has the second layer's next version before it has the first layer's gradient."""
    generator = torch.Generator().manual_seed(0)
    first, second, *samples = (torch.randn(64, 64, generator=generator) for _ in range(4))

    def layers() -> list[nn.Parameter]:
        return [nn.Parameter(first.clone()), nn.Parameter(second.clone())]

    def loss(parameters: list[nn.Parameter], replica: int) -> torch.Tensor:
        return (samples[replica] @ parameters[0] @ parameters[1]).pow(2).sum()

    plain = [layers(), layers()]
    for replica in (0, 1):
        loss(plain[replica], replica).backward()
    expected = [p - (p.grad + q.grad) / 2 for p, q in zip(*plain, strict=True)]

    group = Group(2, [], parameters=[layers(), layers()])
    group.start(2)
    seen: list[tuple[int, bool]] = []

    def serve(number: int, gradient: torch.Tensor) -> None:
        group.deliver()
        seen.append((number, torch.equal(group.parameters[0][1], expected[1])))

    watch_leaves(group.sets[0].sets, serve)
    for replica in (1, 0):
        sets, server, own = group.sets[replica], group.servers[replica], group.parameters[replica]
        sets.acquire(0)
        server.start_backward(replica)
        loss(own, replica).backward()
        server.finish_backward([p.grad for p in own])
        sets.release(0)
    assert seen == [(1, True), (0, True)]
    group.deliver()
    for own in group.parameters:
        assert all(map(torch.equal, own, expected))


def test_a_pass_that_needs_a_parameter_after_its_gradient_says_how_to_train_all_the_same() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(2))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.tanh(x @ self.weight.detach()) @ self.weight,)

    module = Twice()
    engine = TorchEngine(module, [[module.weight]], Classification(), torch.device("cpu"))  # type: ignore[arg-type]

    def land(number: int, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            module.weight.add_(1)

    engine.watch_gradients(land)
    (sent,) = engine.forward(0, 0, (torch.ones(3, 2, requires_grad=True),), seed=0)
    with pytest.raises(UserError, match="--sync overlap"):
        engine.backward(0, 0, [torch.ones_like(sent)])


def test_a_parameter_whose_gradient_comes_in_two_parts_is_refused_by_name() -> None:
    """As a reentrant checkpoint makes it: the bucket would have left with the first part."""
    group = Group(2, [64])
    group.start(2)
    (own,) = group.parameters[0]
    group.servers[0].start_backward(0)
    own.sum().backward()
    with pytest.raises(UserError, match=r"parameter p0 .* use_reentrant=False"):
        own.sum().backward()


def test_no_round_is_updated_before_all_its_gradients_are_there() -> None:
    group = Group(2, [64, 64])
    group.start(2)
    group.backward(0, [1.0, 1.0])
    group.deliver()
    assert group.values(0) == [0.0, 0.0]
    assert group.sets[0].complete == 0


def test_what_arrives_for_the_next_segment_waits_for_it() -> None:
    group = Group(2, [64, 64])
    group.start(2)
    group.servers[0].start_segment(1, SegmentSize(2, 4, 4), 1.0)
    group.backward(0, [1.0, 1.0])
    segments = {segment for _, segment, _, _, _, _ in group.messages}
    assert segments == {1}
    group.deliver()
    assert group.values(1) == [0.0, 0.0]


def test_mean_gradients_by_hand() -> None:
    def one(*values: float | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if v is None else torch.tensor([v]) for v in values)

    assert TORCH_ARITHMETIC.mean([one(1.0, None), one(2.0, None)], 2) == [torch.tensor([1.5]), None]
    assert TORCH_ARITHMETIC.mean([one(3.0, 12.0), one(5.0, None)], 4) == [torch.tensor([2.0]), torch.tensor([3.0])]
    assert TORCH_ARITHMETIC.mean([one(1.0)], 1) == [torch.tensor([1.0])]


def test_a_group_adds_up_in_a_replica_and_leaves_with_its_last_minibatch() -> None:
    group = Group(2, [64, 64], Mode("2bw", group=4))
    group.start(6, samples=4, last_samples=2)
    for b, value in enumerate([1.0, 2.0, 3.0]):
        group.backward(b, [value, value])
        assert len(group.messages) == (1 if b == 2 else 0)
    group.backward(3, [6.0, 6.0])
    group.deliver()
    assert group.values(0) == group.values(1) == [-3.0, -3.0]
    # The last group is of two minibatches of 4 and 2 samples: (4 * 3 + 2 * 6) / 6 = 4.
    group.backward(4, [3.0, 3.0])
    group.backward(5, [6.0, 6.0])
    group.deliver()
    assert group.values(0) == group.values(1) == [-7.0, -7.0]
    assert all(server.is_drained() for server in group.servers)


def test_the_norm_is_that_of_all_shards_and_waits_for_them() -> None:
    group = Group(2, [64, 64], clip=0.4)
    group.start(2)
    group.backward(0, [0.1, 0.1])
    group.backward(1, [0.1, 0.1])
    group.deliver()
    # The norm of 128 elements of 0.1 is 1.131.
    assert group.values(0) == pytest.approx([-0.1 * 0.4 / 1.131371] * 2, rel=1e-5)
    assert group.values(1) == group.values(0)


def test_without_agreement_every_gradient_is_applied_once_and_its_staleness_counted() -> None:
    group = Group(2, [64, 64], Mode(sync="asp"))
    group.start(4)
    group.backward(0, [1.0, 1.0])
    group.backward(1, [2.0, 2.0])
    group.deliver()
    group.backward(2, [4.0, 4.0])
    group.backward(3, [8.0, 8.0])
    assert not any(server.is_drained() for server in group.servers)
    group.deliver()
    assert all(server.is_drained() for server in group.servers)
    assert group.values(0) == group.values(1) == [-15.0, -15.0]
    for server in group.servers:
        assert server.staleness == {0: 2, 1: 2}


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_gradient_that_comes_before_its_segment_starts_is_kept(sync: str) -> None:
    """A fast replica's first gradients may arrive while a slow one has not been told of the segment yet."""
    group = Group(2, [64, 64], Mode(sync=sync))
    group.servers[0].start_segment(0, SegmentSize(2, 4, 4), 1.0)
    group.backward(0, [2.0, 2.0])
    group.deliver()
    group.servers[1].start_segment(0, SegmentSize(2, 4, 4), 1.0)
    group.backward(1, [2.0, 2.0])
    group.deliver()
    assert all(server.is_drained() for server in group.servers)
    expected = -2.0 if sync == "bsp" else -4.0
    assert group.values(0) == group.values(1) == [expected, expected]


def test_a_shards_version_only_grows() -> None:
    group = Group(3, [64, 64, 64], Mode(sync="asp"))
    group.start(9)
    sent: list[tuple[int, int]] = []
    for b in range(9):
        group.backward(b, [1.0] * 3)
        group._advance()
        told = [(sender, to, version) for sender, _, to, kind, version, _ in group.messages if kind == "parameters"]
        sent += [(sender, version) for sender, to, version in told if to == (sender + 1) % 3]
        group.deliver()
    for shard in range(3):
        versions = [version for sender, version in sent if sender == shard]
        assert versions == sorted(set(versions))


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_what_comes_compressed_where_nothing_is_compressed_is_refused(sync: str) -> None:
    group = Group(2, [64, 64], Mode(sync=sync))
    group.start(2)
    for bucket in (0, 1):  # One of them is this replica's.
        with pytest.raises(WireError, match=f"bucket {bucket} compressed, which such a message cannot be about"):
            group.servers[0].take_gradients(0, 0, 1, (bucket, [torch.zeros(64)], 0))
        with pytest.raises(WireError, match=f"bucket {bucket} compressed, which such a message cannot be about"):
            group.servers[0].take_parameters(0, 1, (bucket, [torch.zeros(64)]))


def test_a_sparse_gradient_is_refused_with_the_parameters_name() -> None:
    table = nn.Embedding(10, 64, sparse=True)
    sets = ParameterSets([table.weight], 1)
    versions = stage_versions(Mode(), [2], [1], 0)
    server = ShardedServer(sets, versions, partial(watch_leaves, sets.sets), ["table.weight"], 0, SGD, lambda *_: None)
    server.start_segment(0, SegmentSize(2, 1, 1), 1.0)
    server.start_backward(0)
    with pytest.raises(Exception, match=r"table\.weight has a sparse gradient"):
        table(torch.tensor([1])).sum().backward()
