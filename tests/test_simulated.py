"""The plan that simulates fastest."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from pd_format.errors import UserError
from pd_format.jsonfile import write_record
from pd_format.plan import read_plan
from pd_plan.cli import main
from pd_plan.planner import decide
from pd_plan.report import print_report
from pd_plan.simulated import fastest_simulated
from plan_oracles import Layer, profile_of

MB = 10**6
#: By the cost models two machines take 50 ms either way; yet half of a synchronous round's transfers, 32 ms, come
#: after its passes.
EVEN = [Layer(50, 1000, 4 * MB), Layer(50, 0, 4 * MB)]


def test_what_a_synchronous_round_leaves_exposed_counts() -> None:
    profile = profile_of(EVEN)
    by_model = decide(profile, 2, 1e9, cost_model="duplex")
    assert by_model.plan.config == "2"
    chosen = fastest_simulated(profile, 2, 1e9)
    assert chosen.plan.config == "1-1"
    assert chosen.depths.simulated_ms == pytest.approx(50, rel=0.01)
    assert by_model.depths.simulated_ms is not None
    assert by_model.depths.simulated_ms > 60


@pytest.mark.parametrize("bandwidth", [1e7, 1e8, 1e9, 1e11])
@pytest.mark.parametrize("machines", [1, 2, 4, 7])
def test_nothing_that_was_tried_simulates_faster(machines: int, bandwidth: float) -> None:
    layers = [Layer(30, 2 * MB, 10_000), Layer(20, 2 * MB, 10_000), Layer(30, MB // 8, 10_000), Layer(25, 0, 20 * MB)]
    profile = profile_of(layers)
    chosen = fastest_simulated(profile, machines, bandwidth, links="shared")
    assert chosen.depths.simulated_ms is not None
    for strategy, cost_model in (
        ("auto", "paper"),
        ("auto", "duplex"),
        ("data-parallel", "duplex"),
        ("single", "paper"),
    ):
        other = decide(profile, machines, bandwidth, strategy, cost_model=cost_model, links="shared")  # type: ignore[arg-type]
        assert other.depths.simulated_ms is not None
        assert chosen.depths.simulated_ms <= other.depths.simulated_ms * 1.1
        if other.depths.simulated_ms <= chosen.depths.simulated_ms:
            assert chosen.plan.predicted.bytes_per_minibatch <= other.plan.predicted.bytes_per_minibatch


def test_the_reason_is_told_where_no_plan_is_possible() -> None:
    with pytest.raises(UserError, match=r"memory|needs"):
        fastest_simulated(profile_of(EVEN), 2, 1e9, memory_bytes=1000)


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "profiles" / "tiny.json", profile_of(EVEN))
    network = ("--machines", "2", "--bandwidth", "1gbps")
    result = CliRunner().invoke(main, [*network, "--strategy", "simulated"])
    assert result.exit_code == 0, result.output
    plan = read_plan(tmp_path / "plan.json")
    assert (plan.config, plan.strategy) == ("1-1", "simulated")
    assert "Strategy  simulated: the fastest plan by the paper cost model\n" in result.stdout
    result = CliRunner().invoke(main, [*network, "--strategy", "simulated", "--cost-model", "duplex"])
    assert result.exit_code == 2
    assert "tries both cost models" in result.stderr


def test_the_report_says_what_won_and_why_machines_idle() -> None:
    profile = profile_of([Layer(50, 0, 4 * MB), Layer(50, 0, 4 * MB)])
    found = fastest_simulated(profile, 3, 1e3)
    assert (found.plan.config, found.plan.strategy, found.winner) == ("1-1", "simulated", "auto")
    stream = io.StringIO()
    print_report(Console(file=stream, width=80), profile, found._replace(winner="straight"))
    assert "Strategy  simulated: the straight pipeline\n" in stream.getvalue()
    idle = (
        "2 of 3 machines are used: of the plans that were tried none simulates clearly faster, so one more would idle."
    )
    assert idle in " ".join(stream.getvalue().split())
