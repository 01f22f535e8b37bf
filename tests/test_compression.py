"""Compression: its bytes, what it does to numbers, and what a stage's replicas make of it."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import plans
from pd_format.compression import (
    BUCKET_BYTES,
    Compression,
    crossing_bytes,
    linear_bytes,
    parse_activations,
    parse_gradients,
    stage_bytes_after,
)
from pd_format.errors import FormatError, UserError
from pd_format.jsonfile import write_record
from pd_format.plan import read_plan
from pd_format.profile import InputSpec
from pd_format.versions import Mode, stage_versions
from pd_train.check import check_compression
from pd_train.checkpoint.part import load_part
from pd_train.compressed import CompressedTraffic, unpacked
from pd_train.compressors import get_compressor
from pd_train.crossing import Crossing
from pd_train.forms import has_form, plan_problem
from pd_train.options import OptimizerOptions, RunOptions
from pd_train.routing import place_of
from pd_train.server import SegmentSize
from pd_train.sharded import ShardedServer
from pd_train.torch_engine import watch_leaves
from pd_train.weights import ParameterSets
from pd_train.wire import Message, WireError
from test_checkpoint import assert_same, go_on_from, options_of, run

SCHEMES = ["topk:0.01", "topk:0.3", "powersgd:4", "onebit"]
CPU = torch.device("cpu")
MODELS = str(plans.HERE / "training_models.py")
INPUTS = (InputSpec(name="x", shape=(4, 1, 6, 6), dtype="float32"),)


def rows(count: int, elements: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(elements, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("text", [*SCHEMES, "powersgd:1"])
@pytest.mark.parametrize("elements", [1, 7, 64, 513, 5000, 70_001])
def test_parts_take_the_bytes_that_the_format_says(text: str, elements: int) -> None:
    scheme = parse_gradients(text)
    compressor = get_compressor(scheme)
    (row,) = rows(1, elements)
    parts = compressor.encode(0, row)
    assert [(part.dtype, tuple(part.shape)) for part in parts] == compressor.forms(elements)
    size = sum(part.nbytes for part in parts)
    assert min(size, 4 * elements) == scheme.bytes_after(elements)
    decoded = compressor.decode(parts, elements, CPU)
    assert decoded.shape == row.shape
    assert (decoded - row).norm() <= row.norm()


def test_topk_sends_the_largest() -> None:
    compressor = get_compressor(parse_gradients("topk:0.4"))
    row = torch.tensor([1.0, -5.0, 0.0, 4.0, 2.0])
    decoded = compressor.decode(compressor.encode(0, row), 5, CPU)
    assert decoded.tolist() == [0.0, -5.0, 0.0, 4.0, 0.0]


def test_powersgd_finds_what_has_a_low_rank() -> None:
    a, b = torch.randn(64, 3), torch.randn(3, 64)
    row = (a @ b).view(-1)
    compressor = get_compressor(parse_gradients("powersgd:3"))
    torch.testing.assert_close(compressor.decode(compressor.encode(0, row), 4096, CPU), row, atol=1e-4, rtol=1e-4)


def test_onebit_keeps_signs_and_the_mean_magnitude_of_each_group() -> None:
    row = torch.cat([torch.full((512,), 3.0), torch.tensor([-1.0, 3.0, -2.0])])
    compressor = get_compressor(parse_gradients("onebit"))
    decoded = compressor.decode(compressor.encode(0, row), 515, CPU)
    assert torch.equal(decoded, torch.cat([torch.full((512,), 3.0), torch.tensor([-2.0, 2.0, -2.0])]))


@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_none_is_not_hidden(text: str, bad: float) -> None:
    (row,) = rows(1, 3000)
    row[1234] = bad
    compressor = get_compressor(parse_gradients(text))
    assert not compressor.decode(compressor.encode(0, row), 3000, CPU).isfinite().all()


@pytest.mark.parametrize("text", SCHEMES)
def test_what_was_sent_and_what_was_left_out_is_the_sum_of_all_gradients(text: str) -> None:
    pieces = [[torch.zeros(900), torch.zeros(2100)], [torch.zeros(64)]]
    sender = CompressedTraffic(parse_gradients(text), pieces, own=[])
    shard = CompressedTraffic(parse_gradients(text), pieces, own=[0, 1])
    sent, whole = torch.zeros(3000), torch.zeros(3000)
    for number, row in enumerate(rows(12, 3000)):
        whole += row
        found = sender.pack_gradients(0, (row[:900].clone(), row[900:].clone()), None, last=number == 11)
        assert isinstance(found, tuple if number == 11 else list)
        if isinstance(found, list):
            shard.check(0, found, is_gradient=True)
        sent += torch.cat(unpacked(shard, 0, found))
        left_out = torch.cat(sender._left_out[0])
        torch.testing.assert_close(sent + left_out, whole, atol=1e-4, rtol=1e-4)
        assert bool(left_out.any()) == (number < 11)


def test_a_parameter_without_a_gradient_has_none_at_the_shard() -> None:
    pieces = [[torch.zeros(900), torch.zeros(2100)]]
    sender, shard = (CompressedTraffic(parse_gradients("onebit"), pieces, own) for own in ([], [0]))
    assert sender.pack_gradients(0, (None, None), None, last=False) == (None, None)
    first, second = unpacked(shard, 0, sender.pack_gradients(0, (None, torch.ones(2100)), None, last=False))
    assert first is None
    assert second is not None
    # What was left out of it is a gradient from now on.
    assert unpacked(shard, 0, sender.pack_gradients(0, (torch.ones(900), None), None, False))[1] is not None


def test_schemes_are_read_and_named() -> None:
    assert [str(parse_gradients(text)) for text in ("topk:1e-2", "powersgd:04", "onebit")] == [
        "topk:0.01",
        "powersgd:4",
        "onebit",
    ]
    for text in ("", "topk", "topk:0", "topk:0.5", "topk:nan", "powersgd:0", "powersgd:2.5", "onebit:1", "gzip"):
        with pytest.raises(UserError, match="expected"):
            parse_gradients(text)
    with pytest.raises(UserError, match="bf16 or int8"):
        parse_activations("fp8")


def test_sizes_of_stages_and_cuts() -> None:
    onebit, topk, low = (parse_gradients(text) for text in ("onebit", "topk:0.01", "powersgd:4"))
    # Two replicas, 10 MiB: two buckets of 1 310 720 elements, 163 840 bytes of signs and 2560 magnitudes each.
    assert stage_bytes_after(onebit, 10 << 20, 2) == 2 * (163_840 + 4 * 2560)
    assert stage_bytes_after(topk, 10 << 20, 2) == 2 * 8 * 13_108
    # Nearly square: 1145 x 1145.
    assert stage_bytes_after(low, 10 << 20, 2) == 2 * 16 * (1145 + 1145)
    # A few numbers travel as they are.
    assert stage_bytes_after(low, 4 * 60, 2) == 4 * 60
    assert linear_bytes(low, 10 * BUCKET_BYTES) == 10 * 16 * 2048
    assert crossing_bytes("bf16", 4000, 10) == 2000
    assert crossing_bytes("int8", 4000, 10) == 1040
    assert crossing_bytes("int8", 40, 10) == 40


class TestCrossing:
    def values(self) -> tuple[object, ...]:
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
        return (x, {"ids": torch.arange(6), "mask": torch.ones(6, 5, dtype=torch.bool)}, 3, [torch.zeros(6, 2)], None)

    @pytest.mark.parametrize(("name", "close"), [("bf16", 2**-8), ("int8", 1 / 254)])
    def test_values_come_back_nearly_as_they_were(self, name: str, close: float) -> None:
        crossing = Crossing(name)
        values = self.values()
        packed = crossing.pack(values)
        assert has_form("forward", (packed, None, 0))
        assert crossing.has_form(packed)
        x, named, number, (zeros,), nothing = crossing.unpack(packed)
        assert x.requires_grad
        assert x.is_leaf
        assert not zeros.requires_grad
        most = values[0].detach().abs().amax(1, keepdim=True)
        assert ((x - values[0]).abs() <= close * most).all()
        assert not torch.equal(x, values[0])
        assert torch.equal(named["ids"], torch.arange(6))
        assert named["mask"].dtype is torch.bool
        assert (number, nothing) == (3, None)
        assert not zeros.any()

    @pytest.mark.parametrize("name", ["bf16", "int8"])
    def test_gradients_come_back_too(self, name: str) -> None:
        crossing = Crossing(name)
        gradient = torch.randn(6, 5)
        answer = crossing.pack_gradients([gradient, None, torch.tensor(2.0)])
        assert has_form("backward", answer)
        assert crossing.has_answer_form(answer)
        first, second, third = crossing.unpack_gradients(answer)
        torch.testing.assert_close(first, gradient, atol=0.02, rtol=0.02)
        assert (second, third.item()) == (None, 2.0)

    @pytest.mark.parametrize("name", ["bf16", "int8"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_numbers_that_are_none_stay_none(self, name: str, bad: float) -> None:
        x = torch.ones(3, 4)
        x[1, 2] = bad
        (found,) = Crossing(name).unpack(Crossing(name).pack((x,)))
        assert not found[1, 2].isfinite()
        assert found[0].isfinite().all()
        assert found[2].isfinite().all()

    def test_other_tensors_are_left_alone(self) -> None:
        values = (torch.ones(3, 4, dtype=torch.float64), torch.ones(3, 4).bfloat16(), torch.tensor(1.5), torch.ones(5))
        sent, packed = Crossing("int8").pack(values)
        assert packed == []
        assert all(a is b for a, b in zip(sent, values, strict=True))

    def test_rows_of_nothing_and_of_the_smallest_numbers(self) -> None:
        x = torch.stack([torch.zeros(4), torch.full((4,), 2e-43), torch.full((4,), -1e38)])
        (found,) = Crossing("int8").unpack(Crossing("int8").pack((x,)))
        torch.testing.assert_close(found, x, atol=1e-43, rtol=0.01)
        assert found[0].tolist() == [0.0] * 4

    def test_memory_order_is_kept(self) -> None:
        x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
        (found,) = Crossing("int8").unpack(Crossing("int8").pack((x,)))
        assert found.is_contiguous(memory_format=torch.channels_last)

    @pytest.mark.parametrize(
        "crossed",
        [
            (torch.ones(3, 4),),
            ((torch.ones(3, 4),), [(0, torch.ones(3), True)]),
            ((torch.ones(3, 4).to(torch.int8),), [(0, torch.ones(2), True)]),
            ((torch.ones(3, 4).to(torch.int8),), [(0, None, True)]),
            ((torch.ones(3, 4).to(torch.int8),), [(1, torch.ones(3), True)]),
            ((torch.ones(3, 4).to(torch.int8),), [(-1, torch.ones(3), True)]),
            ((torch.ones(3, 4).to(torch.int8),), [0]),
        ],
    )
    def test_another_form_is_refused_at_the_door(self, crossed: tuple[object, ...]) -> None:
        plan = plans.plan_of(f"{MODELS}:bn_dropout", INPUTS, "1-1", ["7"])
        plan = plan.model_copy(update={"compress_activations": "int8"})
        problem = plan_problem(plan, place_of(plan, 1), Message("forward", 0, 0, 0, (crossed, None, 0)))
        assert problem is not None
        assert "another form" in problem
        answer = Message("backward", 1, 0, 0, [(torch.ones(3, 4), torch.ones(3))])
        assert plan_problem(plan, place_of(plan, 0), answer) is not None


class Replicas:
    """A stage's replicas in one process, whose model is a sum of squares around a target."""

    def __init__(self, scheme: str | None, count: int = 2, mode: Mode | None = None) -> None:
        sizes = [300, 1000, 41]
        generator = torch.Generator().manual_seed(1)
        self.targets = [torch.randn(n, generator=generator) for n in sizes]
        self.scales = [torch.rand(n, generator=generator) + 0.1 for n in sizes]
        self.parameters = [[nn.Parameter(torch.zeros(n)) for n in sizes] for _ in range(count)]
        versions = stage_versions(mode or Mode(sync="bsp"), [count], [1], 0)
        self.sets = [ParameterSets(own, 1) for own in self.parameters]
        self.bytes: dict[str, int] = {"gradient": 0, "parameters": 0}
        self.messages: list[tuple[int, int, int, str, int, object]] = []
        self.servers: list[ShardedServer] = []
        options = OptimizerOptions("sgd", lr=0.05, momentum=0.5)
        for k, sets in enumerate(self.sets):
            sets.is_wanted = lambda version: False
            watch = partial(watch_leaves, sets.sets)
            compression = None if scheme is None else parse_gradients(scheme)
            send = partial(self._send, k)
            server = ShardedServer(sets, versions, watch, ["a", "b", "c"], k, options, send, compression=compression)
            self.servers.append(server)

    def _send(self, replica: int, segment: int, target: int, kind: str, index: int, body: object) -> None:
        self.bytes[kind] += sum(each.nbytes for each in body[1] if each is not None)
        self.messages.append((replica, segment, target, kind, index, body))

    def segment(self, minibatches: int, last_samples: int = 4, number: int = 0) -> None:
        for server in self.servers:
            server.start_segment(number, SegmentSize(minibatches, 4, last_samples), 0.05)
        for first in range(0, minibatches, len(self.servers)):
            for minibatch in range(first, min(first + len(self.servers), minibatches)):
                self._backward(minibatch)
            self._deliver()
        assert all(server.is_drained() for server in self.servers)

    def _backward(self, minibatch: int) -> None:
        replica = minibatch % len(self.servers)
        server, own = self.servers[replica], self.parameters[replica]
        server.start_backward(minibatch)
        noise = torch.Generator().manual_seed(minibatch)
        loss = torch.zeros(())
        for p, target, scale in zip(own, self.targets, self.scales, strict=True):
            loss = loss + (scale * (p - target - 0.1 * torch.randn(p.shape, generator=noise)) ** 2).sum()
        loss.backward()
        server.finish_backward([p.grad for p in own])
        for p in own:
            p.grad = None

    def _deliver(self) -> None:
        while True:
            for server in self.servers:
                server.advance()
            if not self.messages:
                return
            for replica, segment, target, kind, index, body in self.messages:
                server = self.servers[target]
                if kind == "gradient":
                    server.take_gradients(segment, index, replica, body)
                else:
                    server.take_parameters(segment, index, body)
            self.messages = []

    def values(self, replica: int = 0) -> torch.Tensor:
        return torch.cat([p.detach() for p in self.parameters[replica]])

    def distance(self) -> float:
        return float((self.values() - torch.cat(self.targets)).norm() / torch.cat(self.targets).norm())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_replicas_hold_the_same_bits_after_every_version(scheme: str) -> None:
    group = Replicas(scheme, 3)
    for number in range(3):  # Minibatches that leave a short last round, and a smaller last minibatch.
        group.segment(3 * 10 + 2, last_samples=3, number=number)
        for replica in (1, 2):
            assert torch.equal(group.values(replica), group.values(0))
    again = Replicas(scheme, 3)
    for number in range(3):
        again.segment(3 * 10 + 2, last_samples=3, number=number)
    assert torch.equal(again.values(), group.values())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_replicas_agree_within_a_segment(scheme: str) -> None:
    group = Replicas(scheme)
    seen = []
    advance = group._deliver

    def deliver() -> None:
        advance()
        seen.append(torch.equal(group.values(0), group.values(1)))

    group._deliver = deliver
    group.segment(40)
    assert seen == [True] * 20


@pytest.mark.parametrize("scheme", ["topk:0.1", "powersgd:4", "onebit"])
def test_it_still_learns(scheme: str) -> None:
    group = Replicas(scheme)
    assert group.distance() == 1
    group.segment(120)
    assert group.distance() < 0.25


@pytest.mark.parametrize("scheme", ["topk:0.01", "powersgd:4", "onebit"])
def test_bytes_between_replicas_are_those_of_the_plan(scheme: str) -> None:
    group = Replicas(scheme, 3)
    group.segment(30)
    whole = 4 * 1341
    a_round = 2 * stage_bytes_after(parse_gradients(scheme), whole, 3)
    # A word for each piece on whether it has a gradient is all that is added; the last round travels whole.
    assert group.bytes["parameters"] == pytest.approx(9 * a_round + 2 * whole, rel=0.03)
    assert group.bytes["gradient"] == pytest.approx(9 * a_round + 2 * whole, rel=0.03)
    assert group.bytes["gradient"] < 0.5 * 10 * 2 * whole


def test_two_versions_of_2bw_learn_too() -> None:
    group = Replicas("onebit", 2, Mode(weights="2bw", group=4))
    group.segment(120)
    assert torch.equal(group.values(0), group.values(1))
    assert group.distance() < 0.5


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts[:1],
        lambda parts: [],
        lambda parts: [parts[0][:1], *parts[1:]],
        lambda parts: [parts[0], parts[1] + 10_000, parts[2]],
        lambda parts: [parts[0], -1 - parts[1], parts[2]],
        lambda parts: [parts[0], parts[1], parts[2].double()],
        lambda parts: [parts[0], parts[1][:3], parts[2][:3]],
        lambda parts: [*parts, parts[1]],
    ],
)
def test_a_compressed_message_of_a_wrong_form_is_refused(change: object) -> None:
    group = Replicas("topk:0.01")
    for server in group.servers:
        server.start_segment(0, SegmentSize(8, 4, 4), 0.05)
    group._backward(0)
    ((_, segment, target, kind, index, (bucket, parts, read)),) = group.messages
    server = group.servers[target]
    with pytest.raises(WireError):
        server.take_gradients(segment, index, 0, (bucket, change(parts), read))
    with pytest.raises(WireError):
        server.take_gradients(segment, index, 0, (bucket + 1, parts, read))
    assert has_form(kind, (bucket, parts, read))
    server.take_gradients(segment, index, 0, (bucket, parts, read))
    plain = Replicas(None).servers[target]
    with pytest.raises(WireError, match="compressed"):
        plain.take_gradients(segment, index, 0, (bucket, parts, read))


def test_a_plan_says_what_is_compressed(tmp_path: Path) -> None:
    plan = plans.plan_of(f"{MODELS}:bn_dropout", INPUTS, "2-1", ["7"])
    path = tmp_path / "plan.json"
    write_record(path, plan.model_copy(update={"compress_gradients": "topk:0.05", "compress_activations": "bf16"}))
    read = read_plan(path)
    assert (read.compress_gradients, read.compress_activations) == ("topk:0.05", "bf16")
    path.write_text(path.read_text().replace("topk:0.05", "topk:5"))
    with pytest.raises(FormatError, match=r"compress_gradients.*topk:5"):
        read_plan(path)
    assert Compression.of("onebit", None) == (parse_gradients("onebit"), None)


def test_modes_that_it_makes_no_sense_with_are_refused() -> None:
    plan = plans.plan_of(f"{MODELS}:bn_dropout", INPUTS, "2", [])
    check_compression(plan, Mode(sync="asp"))
    squeezed = plan.model_copy(update={"compress_gradients": "onebit"})
    for mode in (Mode(sync="asp"), Mode(flush=8)):
        with pytest.raises(UserError, match="--compress-gradients"):
            check_compression(squeezed, mode)
    check_compression(squeezed, dataclasses.replace(Mode(), sync="bsp"))


# Workers of their own


def test_a_compressed_run_that_goes_on_ends_with_the_same_bits(tmp_path: Path) -> None:
    def options(name: str, **changes: object) -> RunOptions:
        made = options_of(tmp_path / name, "2-1", checkpoint_every=None, **changes)
        plan = made.plan.model_copy(update={"compress_gradients": "topk:0.1", "compress_activations": "int8"})
        return dataclasses.replace(made, plan=plan)

    run(options("whole"))
    go_on_from(tmp_path / "whole", "epoch-0001", tmp_path / "again")
    run(options("again", resume="yes"))
    assert_same(tmp_path / "again", tmp_path / "whole")
    go_on_from(tmp_path / "whole", "epoch-0001", tmp_path / "plain")
    said = run(options_of(tmp_path / "plain", "3-1", checkpoint_every=None, resume="yes"))
    assert said == ["going on from checkpoint epoch-0001"]  # Another plan, which compresses nothing, can do that too.
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "plain", tmp_path / "whole")
    for path in (tmp_path / "whole" / "checkpoints").glob("*/stage-0-replica-0.json"):
        first, second = (load_part(path.with_name(f"stage-0-replica-{k}.json")).state for k in (0, 1))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
