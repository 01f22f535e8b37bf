"""Answers to "what if": fewer machines, and figures that are off; as tables and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pd_format.jsonfile import write_record
from pd_format.plan import read_plan
from pd_plan.cli import main
from pd_plan.cluster import Cluster
from pd_plan.cost import Chain, Partition, minibatch_ms
from pd_plan.limits import Limit, Sizes
from pd_plan.partition import best_partition
from pd_plan.what_if import shaken_bandwidth, shaken_profile, sweep
from plan_oracles import Layer, layer_profiles, profile_of

MB = 10**6
HYBRID = [Layer(30, 2 * MB, 10_000), Layer(30, 2 * MB, 10_000), Layer(30, MB // 8, 10_000), Layer(30, 0, 100 * MB)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with one profile."""
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "profiles" / "tiny.json", profile_of(HYBRID))
    return tmp_path


def succeed(*arguments: str) -> str:
    result = CliRunner().invoke(main, [*arguments, "--bandwidth", "1gbps"])
    assert result.exit_code == 0, result.output
    return result.stdout


def chain_of(layers: list[Layer]) -> Chain:
    return Chain.of(layer_profiles(layers))


def test_a_sweep_has_the_best_plan_of_every_number_of_machines() -> None:
    chain = chain_of(HYBRID)

    found = sweep(chain, 5, 1e9)

    assert [row.machines for row in found.rows] == [1, 2, 3, 4, 5]
    for row in found.rows:
        park = Cluster(row.machines, 1e9)
        assert row.partition == best_partition(chain, park)
        assert row.minibatch_ms == minibatch_ms(chain, row.partition, park)
        assert row.speedup == 120 / row.minibatch_ms
        assert row.efficiency == row.speedup / row.machines
    assert found.rows[3].partition == Partition((3, 4), (3, 1))
    assert found.rows[3].bytes_per_minibatch == 290_000
    # A fifth machine cannot help: the layer with the parameters is as slow.
    assert found.enough == 4


def test_a_machine_within_a_twentieth_is_enough() -> None:
    # 100 ms on one machine, halves on two; the cut lets no third one help much.
    chain = chain_of([Layer(50, 6 * MB, 0), Layer(50, 0, 10**12)])

    assert sweep(chain, 1, 1e9).enough == 1
    assert sweep(chain, 4, 1e9).enough == 1


@pytest.mark.parametrize("machines", [33, 64, 100])
def test_a_long_sweep_leaves_numbers_out_but_not_the_one_that_is_enough(machines: int) -> None:
    chain = chain_of([Layer(1.0 + index % 3, 1000, 10_000) for index in range(12)])

    found = sweep(chain, machines, 1e9)

    counts = [row.machines for row in found.rows]
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == (1, machines)
    assert len(counts) <= 34
    best = found.rows[-1].minibatch_ms
    every = [
        minibatch_ms(chain, best_partition(chain, Cluster(m, 1e9)), Cluster(m, 1e9)) for m in range(1, machines + 1)
    ]
    assert found.enough == 1 + next(index for index, ms in enumerate(every) if ms <= best * 1.05)
    assert found.enough in counts


def test_a_sweep_under_a_limit_says_where_nothing_fits() -> None:
    chain, sizes = chain_of(HYBRID), Sizes.of(layer_profiles(HYBRID), 0)

    found = sweep(chain, 3, 1e9, limit=Limit(sizes, 305 * MB))
    tight = sweep(chain, 2, 1e9, limit=Limit(sizes, 20 * MB))

    assert [row.partition is None for row in found.rows] == [False, False, False]
    assert [row.partition for row in tight.rows] == [None, None]
    assert tight.enough is None


def test_figures_that_are_hardly_off_change_nothing() -> None:
    chain, park = chain_of(HYBRID), Cluster(4, 1e9)
    plan = best_partition(chain, park)

    for spread in (shaken_profile(chain, plan, park, 1e-6, 0), shaken_bandwidth(chain, plan, park, 1e-6, 0)):
        assert spread.draws == 200
        assert spread.configs == (("3-1", 200),)
        assert (spread.changed, spread.median_slower) == (0, 0)
        assert spread.worst_slower < 1e-5


def test_a_bandwidth_that_decides_is_found_out() -> None:
    # At 1 Gbit/s the cut takes 16 ms, two machines 16.5 ms each; at less the cut is the bottleneck, and at 1.2 not.
    chain, park = chain_of([Layer(16.5, MB, 0), Layer(16.5, 0, 10**9)]), Cluster(2, 1e9)
    plan = best_partition(chain, park)
    assert plan.config == "1-1"

    spread = shaken_bandwidth(chain, plan, park, 0.2, seed=3)

    assert spread.configs == (("1-1", 200),)
    assert spread.worst_slower == 0
    # 0.4 times the bandwidth: the cut takes 40 ms, one machine 33.
    spread = shaken_bandwidth(chain, plan, park, 0.8, seed=3)
    assert dict(spread.configs).keys() == {"1-1", "1"}
    assert 0.1 < spread.changed < 0.5
    assert spread.median_slower == 0
    assert 0.5 < spread.worst_slower < 16 / 0.2 / 33 - 1


def test_the_loss_is_that_of_planning_anew() -> None:
    chain, park = chain_of([Layer(10, 100, 10**5), Layer(12, 100, 10**5), Layer(9, 100, 10**6)]), Cluster(3, 1e8)
    plan = best_partition(chain, park)

    spread = shaken_profile(chain, plan, park, 0.3, seed=7)

    assert spread.worst_slower > 0
    assert sum(count for _, count in spread.configs) == spread.draws
    assert spread.changed == 1 - dict(spread.configs).get(plan.config, 0) / spread.draws


def test_a_seed_gives_the_same_answer_again_and_another_seed_another() -> None:
    chain, park = chain_of(HYBRID), Cluster(4, 1e9)
    plan = best_partition(chain, park)

    first, again, other = (shaken_profile(chain, plan, park, 0.3, seed) for seed in (1, 1, 2))

    assert first == again
    assert first != other


@pytest.mark.usefixtures("folder")
def test_the_tables_are_printed_below_the_report_within_80_columns() -> None:
    output = succeed("--machines", "4", "--sweep", "--robustness", "0.2", "--seed", "5")

    assert (
        "machines config              a minibatch   speed-up  efficiency sent a minibatch\n"
        "       1 1                      120.0 ms     1.00 x        100%              0 B\n"
    ) in output
    assert (
        "       4 3-1                    30.00 ms     4.00 x        100%           290 kB\n4 machines are enough: "
        in output
    )
    assert "off by up to 20%               draws  other config  slower, half  slower, worst\n" in output
    assert "(--seed 5)" in output
    assert max(map(len, output.splitlines())) <= 80
    assert read_plan(Path("plan.json")).config == "3-1"


@pytest.mark.usefixtures("folder")
def test_json_is_all_that_goes_to_the_standard_output() -> None:
    result = json.loads(succeed("--machines", "4", "--sweep", "--robustness", "0.2", "--json"))

    assert (result["format"], result["version"]) == ("pipedream-comparison", 1)
    assert result["plan"] == json.loads(Path("plan.json").read_text())
    rows = {row["name"]: row for row in result["comparison"]}
    assert list(rows) == ["this plan", "single machine", "data parallelism", "model parallelism", "straight pipeline"]
    assert (rows["this plan"]["config"], rows["this plan"]["minibatch_ms"], rows["this plan"]["speedup"]) == (
        "3-1",
        30,
        4,
    )
    assert result["sweep"]["enough_machines"] == 4
    assert [row["machines"] for row in result["sweep"]["rows"]] == [1, 2, 3, 4]
    assert result["robustness"]["profile"]["draws"] == result["robustness"]["bandwidth"]["draws"] == 200
    assert any(text.startswith("The bottleneck is ") for text in result["explanation"])


@pytest.mark.usefixtures("folder")
def test_json_says_what_a_memory_limit_did() -> None:
    result: dict[str, Any] = json.loads(succeed("--machines", "4", "--memory", "1GB", "--json"))

    assert result["memory"]["limit_bytes"] == 10**9
    assert result["memory"]["without_limit"]["config"] == "3-1"
    assert "sweep" not in result


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--machines", "4", "--robustness", "20"],
            "Invalid value for '--robustness': 20.0 is not in the range 0<x<1.",
        ),
        (["--machines", "4", "--robustness", "0"], "Invalid value for '--robustness': 0.0 is not in the range 0<x<1."),
        (["--machines", "4", "--robustness", "nan"], "Invalid value for '--robustness': nan is not "),
        (["--machines", "4", "--robustness", "0.2", "--seed", "-1"], "Invalid value for '--seed': -1 is not in "),
        (["--config", "3-1", "--sweep"], "--sweep and --robustness ask for the best plan; leave out --config and "),
        (["--machines", "4", "--robustness", "0.2", "--memory", "1GB"], "--robustness looks at times without a memory"),
        (["--machines", "4", "--json", "--timeline"], "--json leaves no room for a timeline; write it to a file"),
    ],
)
def test_questions_that_do_not_go_together_end_with_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, [*arguments, "--bandwidth", "1gbps"])

    assert result.exit_code == 2
    assert result.stderr.partition("Error: ")[2].startswith(message)
    assert not Path("plan.json").exists()
