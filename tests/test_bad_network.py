"""Delay, odd segments and cut connections between workers: the same bits, or an end that names the peer.

By a proxy of the tests (`proxy.py`), and by the kernel's netem where it has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from namespaces import needs_namespaces, network_of
from pd_train.events import Event, Progress, RunEnded
from pd_train.keys import Key, make_key
from pd_train.launch import WorkerLost
from pd_train.options import RunOptions
from pd_train.restarts import train
from pd_train.transport import PeerLost, Transport
from pd_train.wire import Message
from proxy import Proxy, proxies
from test_checkpoint import assert_same, options_of, run
from test_network import end, start, write_plan


@contextlib.contextmanager
def pair_behind(a: Proxy, b: Proxy, key: Key | None) -> Iterator[tuple[Transport, Transport]]:
    workers = [Transport(rank, "run-1", "127.0.0.2", each.host.port, key=key) for rank, each in enumerate((a, b))]
    try:
        for each in workers:
            each.connect({0: (a.host.address, a.host.port), 1: (b.host.address, b.host.port)})
        yield workers[0], workers[1]
    finally:
        for each in workers:
            each.close()


@pytest.mark.parametrize("keyed", [False, True], ids=["open", "key"])
def test_messages_arrive_whole_and_in_order_and_unread_with_a_key(keyed: bool) -> None:
    key = Key(*zmq.curve_keypair()) if keyed else None
    sizes = [0, 1, 3, 1000, 100_000, 5, 1_000_000, 2, 70_000]
    sent = [torch.randint(-128, 127, (size,), dtype=torch.int8) for size in sizes]
    with proxies(2, delay_ms=2, jitter_ms=2) as (before_a, before_b), pair_behind(before_a, before_b, key) as (a, b):
        for one, other in ((a, b), (b, a)):
            for index, tensor in enumerate(sent):
                one.send(other.rank, Message("forward", one.rank, 0, index, tensor))
        for other in (b, a):
            for index, tensor in enumerate(sent):
                received = other.receive(timeout=30)
                assert isinstance(received, Message)
                assert received.index == index
                assert torch.equal(received.body, tensor)
        assert before_b.segments > 5 * len(sizes)
        in_the_clear = all(sent[place].numpy().tobytes() in bytes(before_b.seen) for place in (3, 4, 6))
        assert in_the_clear == (not keyed)
        assert (b"forward" in before_b.seen) == (not keyed)


def test_a_cut_connection_is_a_lost_peer_and_what_reconnects_is_not_taken_for_it() -> None:
    with proxies(2) as (before_a, before_b), pair_behind(before_a, before_b, Key(*zmq.curve_keypair())) as (a, b):
        a.send(1, Message("forward", 0, 0, 0))
        assert isinstance(b.receive(timeout=20), Message)
        before_b.cut()
        assert a.receive(timeout=20) == PeerLost(1)
        a.send(1, Message("forward", 0, 0, 1))  # libzmq has connected again, but this is no greeting.
        while not b.refused:
            assert b.receive(timeout=0.05) is None


def behind(made: list[Proxy], options: RunOptions) -> RunOptions:
    plan = options.plan.model_copy(update={"hosts": tuple(each.host for each in made)})
    options.run_dir.mkdir()
    return dataclasses.replace(options, plan=plan)


def test_a_run_over_slow_links_of_odd_segments_computes_the_same_bits(tmp_path: Path) -> None:
    make_key(tmp_path / "job.key")
    run(options_of(tmp_path / "local", "2-1"))
    with proxies(3, delay_ms=10, jitter_ms=10) as made:
        train(behind(made, options_of(tmp_path / "slow", "2-1", key=tmp_path / "job.key")), 0, lambda event: None)
        assert all(each.segments for each in made)
    assert_same(tmp_path / "slow", tmp_path / "local")


class Cutter:
    """Cuts the connections to a worker once, in the second epoch."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self.has_cut = False
        self.ended: RunEnded | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progress) and event.phase == "training" and event.epoch == 1 and not self.has_cut:
            self.has_cut = True
            self._proxy.cut()
        if isinstance(event, RunEnded):
            self.ended = event


def test_a_cut_in_the_middle_ends_the_run_naming_the_peer(tmp_path: Path) -> None:
    with proxies(3) as made:
        cutter = Cutter(made[2])
        with pytest.raises(WorkerLost, match=r"lost the connection to worker 2 \(stage 1 replica 0 on 127\.0\.0\.1\)"):
            train(behind(made, options_of(tmp_path / "cut", "2-1", epochs=100_000)), 0, cutter)


def test_a_run_that_was_cut_recovers_to_the_same_bits(tmp_path: Path) -> None:
    run(options_of(tmp_path / "local", "2-1", epochs=30))
    with proxies(3, delay_ms=1, jitter_ms=2) as made:
        cutter = Cutter(made[2])
        train(behind(made, options_of(tmp_path / "cut", "2-1", epochs=30)), 1, cutter)
    assert cutter.has_cut
    assert json.loads((tmp_path / "cut/report.json").read_text())["restarts"] == 1
    assert_same(tmp_path / "cut", tmp_path / "local")


@needs_namespaces
def test_delay_and_loss_of_the_kernels_own_change_no_bit(tmp_path: Path) -> None:
    make_key(tmp_path / "job.key")
    with network_of(2) as network:
        for host in range(2):
            if (problem := network.disturb(host, "delay", "10ms", "5ms", "loss", "2%")) is not None:
                pytest.skip(f"this kernel has no netem ({problem}); the proxy does without")
        plan = write_plan(tmp_path, network, "1-1")
        trust = ("--key", str(tmp_path / "job.key"))
        programs = [start(network, host, plan, tmp_path / f"host-{host}", trust=trust) for host in range(2)]
        for code, output, errors in end(programs):
            assert code == 0, output + errors
    run(options_of(tmp_path / "local", "1-1", checkpoint_every=None))
    assert_same(tmp_path / "host-0", tmp_path / "local")
