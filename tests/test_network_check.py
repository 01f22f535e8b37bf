"""`pd-train --measure-network`: which links, what the figures come to, and that they are those of the network."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from click.testing import CliRunner

from namespaces import needs_namespaces, network_of
from pd_format.hosts import place_workers, read_hosts
from pd_format.jsonfile import write_record
from pd_format.plan import Host, Plan
from pd_train import network_check
from pd_train.cli import main
from pd_train.control import WorkerSetup
from pd_train.duties import Company
from pd_train.events import Event, LinkFigures, NetworkMeasured, from_plain, to_plain
from pd_train.network_check import MeasuringNetwork, network_problem
from pd_train.network_table import advice, planning_bps, print_network_table
from pd_train.plan_links import Link, links_of
from pd_train.routing import place_of
from pd_train.wire import Message
from test_checkpoint import options_of


def plan_for(folder: Path, config: str = "2-1-1", hosts: tuple[Host, ...] = (), sent: float = 8e6) -> Plan:
    """Sent a minibatch, in bytes, over its cuts alone; a replicated stage has parameters of 2 MB besides."""
    plan = options_of(folder, config).plan
    stages = []
    for stage in plan.stages:
        trainable = 2_000_000 if stage.replicas > 1 else 0
        predicted = stage.predicted.model_copy(update={"trainable_bytes": trainable})
        stages.append(stage.model_copy(update={"predicted": predicted}))
        sent += 2 * (stage.replicas - 1) / stage.replicas * trainable
    predicted = plan.predicted.model_copy(update={"bytes_per_minibatch": sent})
    return plan.model_copy(
        update={"stages": tuple(stages), "hosts": hosts, "predicted": predicted, "bandwidth_bps": 1e8}
    )


def test_the_links_are_those_of_the_plan_with_its_sizes(tmp_path: Path) -> None:
    found = {(link.sender, link.receiver): (link.what, link.size) for link in links_of(plan_for(tmp_path))}
    assert found == {
        (0, 1): ("parameters", 1_000_000), (1, 0): ("parameters", 1_000_000),
        (0, 2): ("activations", 2_000_000), (1, 2): ("activations", 2_000_000),
        (2, 0): ("gradients", 2_000_000), (2, 1): ("gradients", 2_000_000),
        (2, 3): ("activations", 2_000_000), (3, 2): ("gradients", 2_000_000),
    }  # fmt: skip
    assert {link.size for link in links_of(plan_for(tmp_path, "1-1", sent=2.0))} == {64 << 10}


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        # Two workers send to a third, whose card is full: nobody falls short of 100.
        ([(0, 2, 100, 50), (1, 2, 100, 50)], 100),
        # Two pairs that share something between them.
        ([(0, 1, 100, 30), (2, 3, 100, 30)], 30),
        # One link that is slow by itself.
        ([(0, 1, 100, 100), (1, 2, 40, 40)], 40),
    ],
)
def test_the_figure_to_plan_with(figures: list[tuple[int, int, float, float]], expected: float, tmp_path: Path) -> None:
    links = tuple(LinkFigures(a, b, "", 1, alone * 1e6, both * 1e6, 1.0) for a, b, alone, both in figures)
    assert planning_bps(NetworkMeasured(links)) == expected * 1e6


def test_the_advice_is_a_figure_that_pd_plan_takes(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, "1-1", (Host(address="a", port=1), Host(address="b", port=1)))

    def said(mbps: float) -> str:
        return advice(plan, NetworkMeasured((LinkFigures(0, 1, "", 1, mbps * 1e6, mbps * 1e6, 1.0),)))

    assert said(94.9) == "The plan's 100 Mbit/s fits: the slowest machine gets 94.9 Mbit/s through, --bandwidth 94mbps."
    assert said(943).endswith("Plan anew: pd-plan --bandwidth 940mbps")
    assert said(9.41).endswith("--bandwidth 9.4mbps")
    here = plan.model_copy(update={"hosts": ()})
    assert advice(here, NetworkMeasured((LinkFigures(0, 1, "", 1, 1.0, 1.0, 1.0),))).startswith("All workers are on")


def test_of_many_links_so_many_are_measured_alone_as_take_20_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage of 8 has 56; the table says which were not."""
    measured: list[tuple[int, float]] = []
    told: list[Event] = []

    class Conductor:
        def __init__(self, company: object, workers: int) -> None:
            pass

        def measure(self, links: Sequence[Link], seconds: float) -> list[tuple[float, float]]:
            measured.append((len(links), seconds))
            return [(8e6 if len(links) == 1 else 2e6, 0.001)] * len(links)

        def end(self) -> None:
            pass

    monkeypatch.setattr(network_check, "_Conductor", Conductor)
    plan = plan_for(tmp_path, "8")
    duty = MeasuringNetwork(
        WorkerSetup(dataclasses.replace(options_of(tmp_path, "8"), plan=plan), 0, "127.0.0.1", 0, 0, 8),
        place_of(plan, 0),
    )
    duty._lead(cast(Company, SimpleNamespace(tell=told.append)))
    assert measured == [(1, 0.5)] * 40 + [(56, 3.0)]
    note, figures = told
    assert "measuring 56 links, 40 of them alone and all at once, in about 23 s" in str(note)
    assert isinstance(figures, NetworkMeasured)
    alone = [link for link in figures.links if link.alone_bps is not None]
    assert (
        Counter(link.sender for link in alone) == Counter(link.receiver for link in alone) == dict.fromkeys(range(8), 5)
    )
    assert planning_bps(figures) == 8e6, "of which seven links share 14e6 at once"
    assert from_plain(*to_plain(figures)) == figures
    stream = io.StringIO()
    print_network_table(plan, figures, stream)
    lines = stream.getvalue().splitlines()
    assert any("16 of 56 links were not measured alone" in line for line in lines)
    assert sum(line.count(" - ") == 2 for line in lines) == 16


def test_what_no_measurement_has_is_refused(tmp_path: Path) -> None:
    plan = plan_for(tmp_path)
    place = place_of(plan, 1)
    good = [
        Message("probe", 2, 0, 0, torch.zeros(4)), Message("probed", 2, 0, 0, (5, 0.1)),
        Message("measure", 0, 0, 0, (1.0, ((2, 100),))), Message("measure", 0, 0, 1), Message("joined", 0, 0, 0),
    ]  # fmt: skip
    bad = [
        Message("probe", 7, 0, 0), Message("probe", 1, 0, 0), Message("probe", 2, 0, 0, "x"),
        Message("probed", 2, 0, 0, (5, "x")), Message("measure", 2, 0, 0), Message("measure", 0, 0, 0, (1.0, ((2, 1.5),))),
        Message("measured", 2, 0, 0, ()), Message("joined", 0, 0, 0, "x"),
    ]  # fmt: skip
    assert [network_problem(plan, place, message) for message in good[:-1]] == [None] * 4
    assert all(network_problem(plan, place, message) is not None for message in bad)


def test_what_trains_nothing_takes_no_option_of_training(tmp_path: Path) -> None:
    write_record(tmp_path / "plan.json", plan_for(tmp_path))
    command = ["--plan", str(tmp_path / "plan.json"), "--measure-network"]
    result = CliRunner().invoke(main, [*command, "--epochs", "2"])
    assert result.exit_code == 2
    assert "--epochs means nothing with --measure-network" in result.output
    write_record(tmp_path / "plan.json", options_of(tmp_path, "1").plan)
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert "has one worker, and no link to measure" in result.output


@needs_namespaces
def test_the_figures_are_those_of_the_network(tmp_path: Path) -> None:
    """Links of 40 Mbit/s each way, which a busy machine keeps up with: two that send to a third share its link."""
    code = "from pd_train.cli import main; main()"
    with network_of(3, "40mbit") as network:
        hosts = place_workers(read_hosts(",".join(network.addresses)), 3)
        write_record(tmp_path / "plan.json", plan_for(tmp_path, "2-1", hosts, sent=2e6))
        command = [sys.executable, "-c", code, "--plan", str(tmp_path / "plan.json"), "--measure-network", "--insecure"]
        programs = [
            subprocess.Popen(
                network.command(host, command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, "COLUMNS": "200"},
            )
            for host in range(3)
        ]  # fmt: skip
        try:
            outputs = [program.communicate(timeout=120)[0] for program in programs]
        finally:
            for program in programs:
                program.kill()
                program.communicate()
    for program, output in zip(programs, outputs, strict=True):
        assert program.returncode == 0, output
        rows = re.findall(r"(\d) 10\.77\S+ +. (\d) 10\.77\S+ .*?([\d.]+) Mbit/s +. +([\d.]+) Mbit/s", output)
        assert [(row[0], row[1]) for row in rows] == [
            ("0", "1"), ("1", "0"), ("0", "2"), ("1", "2"), ("2", "0"), ("2", "1"),
        ]  # fmt: skip
        for _, _, alone, _ in rows:
            assert 20 < float(alone) < 48, output
        at_once = {(a, b): float(rate) for a, b, _, rate in rows}
        assert 20 < at_once["0", "2"] + at_once["1", "2"] < 48, output
        assert re.search(r"--bandwidth [\d.]+mbps", output)
