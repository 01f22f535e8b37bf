"""The program pd-plan: what it prints and writes, what it refuses, and the library function behind it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from memory_oracle import stage_memory_bytes
from original_profiles import original_profile
from pd_format.errors import UserError
from pd_format.jsonfile import write_record
from pd_format.plan import Plan, read_plan
from pd_format.profile import InputSpec, Profile
from pd_format.versions import Mode, stage_versions
from pd_plan.alternatives import alternatives
from pd_plan.cli import main
from pd_plan.cluster import Cluster
from pd_plan.cost import Partition
from pd_plan.explain import bounds_of, explain, kept_together
from pd_plan.planner import decide, make_plan, partition_of
from pd_plan.report import print_report
from pd_plan.strategies import STRATEGIES
from plan_oracles import Layer, profile_of

MB = 10**6

# Convolutions that compute, a linear layer that holds the parameters, a small cut between them: a hybrid at 1 Gbit/s.
HYBRID = [Layer(30, 2 * MB, 10_000), Layer(30, 2 * MB, 10_000), Layer(30, MB // 8, 10_000), Layer(30, 0, 100 * MB)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with one profile, profiles/tiny.json."""
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "profiles" / "tiny.json", profile_of(HYBRID))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def succeed(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(code: int, *arguments: str) -> str:
    """The one message of a run that must fail; it leaves no file and no traceback."""
    before = sorted(Path().rglob("*"))
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert sorted(Path().rglob("*")) == before
    message = result.stderr.partition("Error: ")[2]
    assert message.count("\n") == 1
    return message.strip()


def test_it_prints_the_stages_the_comparison_and_the_reasons(folder: Path) -> None:
    output = succeed("--machines", "4", "--bandwidth", "1gbps")

    assert output == (
        "Profile   profiles/tiny.json (the newest in profiles/)\n"
        "Model     tiny: 4 layers, minibatches of 4 (test)\n"
        "Cluster   4 machines, 1 Gbit/s (125 MB/s), one direction at a time\n"
        "Strategy  auto\n"
        "\n"
        "stage layers replicas in flight   compute  share      sync      pace   memory\n"
        "    0      3        3         2  90.00 ms  75.0%  0.640 ms  30.00 ms   420 kB\n"
        "      layer0 to layer2\n"
        "      -- cut: 125 kB each way, 2.00 ms --\n"
        "    1      1        1         1  30.00 ms  25.0%      0 ms  30.00 ms   301 MB\n"
        "      layer3\n"
        "compute: one minibatch on one worker, and its share of the model's; sync: one\n"
        "round of the stage's replicas; pace: the longer of both, divided by the\n"
        "replicas; memory: a worker.\n"
        "\n"
        "                    config              a minibatch   speed-up sent a minibatch\n"
        "this plan           3-1                    30.00 ms     4.00 x           290 kB\n"
        "single machine      1                      120.0 ms     1.00 x              0 B\n"
        "data parallelism    4                      600.2 ms     0.20 x           150 MB\n"
        "model parallelism   1-1-1-1                186.0 ms     0.65 x          8.25 MB\n"
        "straight pipeline   1-1-1-1                32.00 ms     3.75 x          8.25 MB\n"
        "\n"
        "                    in flight           a minibatch   to the model\n"
        "cost model, paper                          30.00 ms\n"
        "simulated           2-1                    30.00 ms          +0.0%\n"
        "\n"
        "Config 3-1: 2 stages on 4 machines, 30.00 ms a minibatch, 4.00 times as fast as\n"
        "one machine and 20.01 times as fast as data parallelism on 4.\n"
        "The bottleneck is stage 0's compute (90.00 ms a minibatch, shared by 3\n"
        "replicas): 30.00 ms.\n"
        "\n"
        "wrote plan.json; next: pd-train --plan plan.json\n"
    )


def test_the_file_holds_the_plan_that_the_library_makes(folder: Path) -> None:
    succeed("--machines", "4", "--bandwidth", "1gbps")

    plan = read_plan(folder / "plan.json")

    assert plan == make_plan(profile_of(HYBRID), 4, 1e9)
    assert (plan.config, plan.noam, plan.machines, plan.strategy, plan.bandwidth_bps) == ("3-1", 2, 4, "auto", 1e9)
    assert [stage.in_flight for stage in plan.stages] == [2, 1]
    assert [stage.workers for stage in plan.stages] == [(0, 1, 2), (3,)]
    assert [(stage.first_layer, stage.last_layer) for stage in plan.stages] == [("layer0", "layer2"), ("layer3",) * 2]
    assert plan.hosts == ()


def test_the_precision_of_the_profile_is_passed_on_and_named(folder: Path) -> None:
    write_record(folder / "profiles" / "tiny.json", profile_of(HYBRID).model_copy(update={"precision": "bf16"}))
    assert ", bf16 (" in succeed("--machines", "4", "--bandwidth", "1gbps")
    assert read_plan(folder / "plan.json").precision == "bf16"


def test_the_predictions_are_those_of_the_design() -> None:
    profile = profile_of(HYBRID)
    plan = make_plan(profile, 4, 1e9)
    predicted, (first, last) = plan.predicted, plan.stages

    weights = 30_000 + 100 * MB
    assert predicted.minibatch_ms == 30.0
    assert predicted.single_machine_ms == 120.0
    # 4 * 3/4 of all parameters at 125,000 bytes a ms, a round of 4.
    assert predicted.data_parallel_ms == pytest.approx(3 * weights / 125_000 / 4)
    assert predicted.speedup == 4.0
    assert predicted.speedup_over_data_parallel == pytest.approx(predicted.data_parallel_ms / 30)
    assert predicted.bytes_per_minibatch == 2 * 125_000 + 2 * 2 / 3 * 30_000
    assert predicted.data_parallel_bytes_per_minibatch == 1.5 * weights
    assert predicted.communication_reduction == pytest.approx(1 - 290_000 / (1.5 * weights))
    assert first.predicted.compute_ms == 90.0
    assert first.predicted.sync_ms == pytest.approx(4 * 2 / 3 * 30_000 / 125_000)
    assert (last.predicted.compute_ms, last.predicted.sync_ms) == (30.0, 0.0)
    versions = [stage_versions(Mode(), [3, 1], [2, 1], s) for s in range(2)]
    assert first.predicted.memory_bytes == stage_memory_bytes(profile.layers[:3], 128, 125_000, versions[0], None)
    assert last.predicted.memory_bytes == stage_memory_bytes(profile.layers[3:], 125_000, 0, versions[1], (3, 2))
    assert first.predicted.trainable_bytes == sum(layer.trainable_bytes for layer in profile.layers[:3])


def test_one_stage_synchronises_in_step() -> None:
    profile = profile_of(HYBRID)

    (stage,) = make_plan(profile, 4, 1e9, "data-parallel").stages
    versions = stage_versions(Mode(sync="bsp"), [4], [1], 0)

    assert stage.predicted.memory_bytes == stage_memory_bytes(profile.layers, 128, 0, versions, None)


@pytest.mark.parametrize(
    ("strategy", "config", "depths", "ms"),
    [
        ("auto", "3-1", [2, 1], 30.0),
        ("single", "1", [1], 120.0),
        ("data-parallel", "4", [1], 3 * (30_000 + 100 * MB) / 125_000 / 4),
        # One minibatch at a time: 120 ms of compute, cuts of 32, 32 and 2 ms.
        ("model-parallel", "1-1-1-1", [1, 1, 1, 1], 186.0),
        # A minibatch's round trip is 186 ms: 6 in flight would do if no transfer waited for another.
        ("straight", "1-1-1-1", [9, 6, 3, 2], 32.0),
    ],
)
def test_each_strategy(strategy: str, config: str, depths: list[int], ms: float) -> None:
    plan = make_plan(profile_of(HYBRID), 4, 1e9, strategy)

    assert (plan.strategy, plan.config) == (strategy, config)
    assert [stage.in_flight for stage in plan.stages] == depths
    assert plan.predicted.minibatch_ms == pytest.approx(ms)


def test_straight_and_model_parallel_choose_different_cuts() -> None:
    # The even cut is dear: a pipeline takes it all the same (2 * 4 < 10), one minibatch at a time avoids it.
    profile = profile_of([Layer(10, 4), Layer(9, 1), Layer(1)])

    assert partition_of(make_plan(profile, 2, 8000.0, "straight")).ends == (1, 3)
    assert partition_of(make_plan(profile, 2, 8000.0, "model-parallel")).ends == (2, 3)


def test_the_comparison_uses_no_more_stages_than_can_be_cut() -> None:
    profile = profile_of([Layer(10, 4, cut=False), Layer(9, 1), Layer(1)])

    found = {other.name: other.partition for other in alternatives(profile, Cluster(8, 8000.0))}

    assert found == {
        "single machine": Partition((3,), (1,)),
        "data parallelism": Partition((3,), (8,)),
        "model parallelism": Partition((2, 3), (1, 1)),
        "straight pipeline": Partition((2, 3), (1, 1)),
    }


@pytest.mark.usefixtures("folder")
def test_a_given_config_needs_no_number_of_machines() -> None:
    output = succeed("--config", "2-1-1", "--bandwidth", "1.25GB/s", "--output", "mine.json")

    plan = read_plan(Path("mine.json"))
    assert (plan.config, plan.machines, plan.strategy) == ("2-1-1", 4, "config")
    assert "Cluster   4 machines, 10 Gbit/s (1.25 GB/s)" in output
    assert output.endswith("wrote mine.json; next: pd-train --plan mine.json\n")


@pytest.mark.usefixtures("folder")
def test_machines_that_a_given_config_leaves_idle_are_told() -> None:
    assert "2 of 5 machines are used: the replicas that were given." in succeed(
        "--config", "1-1", "--machines", "5", "--bandwidth", "1gbps"
    )
    assert read_plan(Path("plan.json")).machines == 5


@pytest.mark.usefixtures("folder")
def test_single_needs_no_number_of_machines() -> None:
    succeed("--strategy", "single", "--bandwidth", "1gbps")

    assert read_plan(Path("plan.json")).machines == 1


def test_the_newest_profile_is_taken(folder: Path) -> None:
    write_record(folder / "profiles" / "older.json", profile_of(HYBRID, "older"))
    os.utime(folder / "profiles" / "older.json", (1, 1))
    (folder / "profiles" / "v100").mkdir()
    write_record(folder / "profiles" / "v100" / "shipped.json", profile_of(HYBRID, "shipped"))

    output = succeed("--machines", "2", "--bandwidth", "1gbps")
    assert output.startswith("Profile   profiles/tiny.json (the newest in profiles/)\n")

    os.utime(folder / "profiles" / "older.json", (4e9, 4e9))
    output = succeed("--machines", "2", "--bandwidth", "1gbps")
    assert output.startswith("Profile   profiles/older.json (the newest in profiles/)\n")

    output = succeed("--machines", "2", "--bandwidth", "1gbps", "--profile", "profiles/v100/shipped.json")
    assert output.startswith("Profile   profiles/v100/shipped.json\n")


def test_without_a_profile_it_names_the_program_that_makes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert fail(1, "--machines", "2", "--bandwidth", "1gbps") == (
        "there is no profiles/*.json here; make one with pd-profile (pd-profile vgg16), or name another with --profile."
    )


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machines", "0", "--bandwidth", "1gbps"], "Invalid value for '--machines': 0 is not in the range"),
        (["--machines", "-3", "--bandwidth", "1gbps"], "Invalid value for '--machines': -3 is not in the range"),
        (["--machines", "two", "--bandwidth", "1gbps"], "Invalid value for '--machines': 'two' is not a valid integer"),
        (["--bandwidth", "1gbps"], "--machines is missing; expected the number of machines, such as --machines 8."),
        (["--machines", "4"], "Missing option '--bandwidth'."),
        (
            ["--machines", "4", "--bandwidth", "10"],
            "Invalid value for '--bandwidth': '10' has no unit: it could be 10gbps or 10mbps, bits or bytes. "
            "Write bits as 10gbps or 25 Gbit/s, bytes as 1.25GB/s.",
        ),
        (["--machines", "4", "--bandwidth", "-1"], "Invalid value for '--bandwidth': '-1' has no unit"),
        (["--machines", "4", "--bandwidth", "10GB"], "Invalid value for '--bandwidth': '10GB' is a size, not a rate"),
        (["--config", "2-x", "--bandwidth", "1gbps"], "Invalid value for '--config': '2-x' is not a list of replicas"),
        (["--config", "2-0", "--bandwidth", "1gbps"], "Invalid value for '--config': '2-0' is not a list of replicas"),
        (["--config", "", "--bandwidth", "1gbps"], "Invalid value for '--config': '' is not a list of replicas"),
        (
            ["--config", "3-2", "--machines", "4", "--bandwidth", "1gbps"],
            "--config 3-2 takes 5 machines, --machines says 4; "
            "give fewer replicas, or --machines 5, or leave --machines out.",
        ),
        (
            ["--config", "1-1", "--strategy", "straight", "--bandwidth", "1gbps"],
            "--config 1-1 and --strategy straight exclude each other; give one of them.",
        ),
        (["--machines", "4", "--bandwidth", "1gbps", "--strategy", "best"], "Invalid value for '--strategy': 'best'"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: Sequence[str], message: str) -> None:
    assert fail(2, *arguments).startswith(message)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "1-1-1-1-1"],
        ["--strategy", "straight", "--machines", "5"],
        ["--strategy", "model-parallel", "--machines", "5"],
    ],
)
def test_more_stages_than_legal_cuts_are_refused_with_the_most_there_can_be(arguments: Sequence[str]) -> None:
    assert fail(1, *arguments, "--bandwidth", "1gbps") == (
        "profiles/tiny.json: 5 stages were asked for, but the profile's 4 layers can be cut into at most 4 "
        "(1 + its 3 places where a cut is allowed); ask for 4 stages or fewer."
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not whole JSON (line "),
        (lambda text: text.replace('"version": 1', '"version": 7'), "version is 7; this program reads version 1"),
        (lambda text: text.replace('"forward_ms": 30.0', '"forward_ms": NaN', 1), "layers[0].forward_ms: found NaN"),
        (lambda text: text.replace("30.0", "-30.0", 1), "layers[0].forward_ms: found -30.0"),
        (lambda text: text.replace('"activation_bytes": 0', '"activation_bytes": 9007199254740993'), "layers: their "),
    ],
)
def test_a_bad_profile_ends_with_1_and_its_name(folder: Path, edit: Callable[[str], str], message: str) -> None:
    path = folder / "profiles" / "tiny.json"
    text = path.read_text()
    assert edit(text) != text
    path.write_text(edit(text))

    assert fail(1, "--machines", "4", "--bandwidth", "1gbps").startswith(f"profiles/tiny.json: {message}")


@pytest.mark.usefixtures("folder")
def test_a_missing_profile_is_named() -> None:
    expected = "none.json: cannot be read (No such file or directory); name another file, or make it readable."
    assert fail(1, "--machines", "4", "--bandwidth", "1gbps", "--profile", "none.json") == expected


def test_an_output_that_cannot_be_written_leaves_nothing(folder: Path) -> None:
    (folder / "file").write_text("")

    message = fail(1, "--machines", "4", "--bandwidth", "1gbps", "--output", "file/plan.json")

    assert re.fullmatch(r"file/plan\.json: cannot be written \(.*\); name another place\.", message)


def test_the_plan_of_before_stays_whole_where_planning_fails(folder: Path) -> None:
    succeed("--machines", "4", "--bandwidth", "1gbps")
    before = (folder / "plan.json").read_bytes()

    fail(1, "--config", "1-1-1-1-1", "--bandwidth", "1gbps")

    assert (folder / "plan.json").read_bytes() == before


@pytest.mark.parametrize("machines", range(1, 9))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.usefixtures("folder")
def test_every_line_fits_80_columns_without_colour(strategy: str, machines: int) -> None:
    names = ["features.denseblock3.denselayer12.conv2_with_a_long_name.and_more", "b[bold]", "c"]
    profile = profile_of([Layer(1000.5 * 3**index, 10**index, 10**index) for index in range(8)])
    layers = tuple(
        layer.model_copy(update={"name": f"{names[index % 3]}{index}"}) for index, layer in enumerate(profile.layers)
    )
    write_record(Path("profiles/long.json"), profile.model_copy(update={"layers": layers}))

    output = succeed(
        "--machines", str(machines), "--bandwidth", "100mbit", "--strategy", strategy, "--profile", "profiles/long.json"
    )

    assert max(len(line) for line in output.splitlines()) <= 80
    assert "\x1b" not in output
    if strategy == "straight" and machines == 8:
        assert "      b[bold]1\n" in output


def plan_and_sentences(layers: list[Layer], machines: int, bandwidth_bps: float, **options: Any) -> tuple[Plan, str]:
    profile = profile_of(layers)
    plan = make_plan(profile, machines, bandwidth_bps, **options)
    return plan, " ".join(explain(profile, plan))


def test_idle_machines_are_explained_by_a_cut() -> None:
    plan, text = plan_and_sentences([Layer(60, MB, 0), Layer(9, 0, 1000 * MB)], 8, 1e9)

    assert plan.config == "4-1"
    assert "The bottleneck is the cut after layer0 (1 MB one way and as much back): 16.00 ms." in text
    assert text.endswith(
        "5 of 8 machines are used: the cut after layer0 is the bottleneck, no plan on more is faster, "
        "so the other 3 would idle."
    )


@pytest.mark.parametrize(("stages", "left_out"), [(24, 0), (25, 0), (26, 2), (60, 36)])
def test_a_long_plan_is_printed_in_part(stages: int, left_out: int) -> None:
    profile = profile_of([Layer(1.0)] * stages)
    console = Console(file=io.StringIO(), width=80)
    print_report(console, profile, decide(profile, stages, 1e9, config=[1] * stages))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]

    shown = [int(line.split()[0]) for line in lines if re.match(r" +\d+ +1 +1 ", line)]
    first = 20 if left_out else stages
    assert shown == [*range(first), *range(first + left_out, stages)]
    told = [line for line in lines if "left out here" in line]
    assert told == [f"      ... {left_out} stages left out here; the plan file has all ..."] * bool(left_out)


def test_idle_machines_are_explained_where_a_single_layer_is_the_bottleneck() -> None:
    plan, text = plan_and_sentences([Layer(5, 10, 100 * MB), Layer(2, 0, 100)], 3, 1e9)

    assert plan.config == "1-1"
    assert text.endswith(
        "2 of 3 machines are used: synchronising or cutting for more would cost as much as they save, "
        "so one more would idle."
    )


def test_a_synchronisation_can_be_the_bottleneck() -> None:
    _, text = plan_and_sentences([Layer(5, 0, 100 * MB)], 3, 1e9, strategy="data-parallel")

    assert "The bottleneck is stage 0's synchronisation (2,133 ms a round of 3 minibatches): 711.1 ms." in text


def test_data_parallelism_is_called_so() -> None:
    _, text = plan_and_sentences([Layer(5, 0, 1)], 3, 1e9)

    assert text.startswith("Config 3: 1 stage on 3 machines, which is data parallelism, 1.67 ms a minibatch, 3.00 ")


def test_model_parallelism_has_no_bottleneck() -> None:
    _, text = plan_and_sentences(HYBRID, 2, 1e9, strategy="model-parallel")

    assert "One minibatch at a time passes all stages, so their times and those of the cuts add up." in text


def test_layers_that_stay_together_are_named() -> None:
    layers = [Layer(1, cut=False), Layer(1, cut=False), Layer(1), Layer(1), Layer(1, cut=False), Layer(1, cut=False)]
    profile = profile_of(layers)

    assert kept_together(profile) == [("layer0", "layer2"), ("layer4", "layer5")]
    assert explain(profile, make_plan(profile, 2, 1e9))[-1] == (
        "Kept in one stage each, since the profile allows no cut inside (as where layers share parameters): "
        "layer0 to layer2, layer4 to layer5."
    )


def test_the_longest_part_is_what_a_minibatch_takes() -> None:
    profile = profile_of(HYBRID)
    for config in ([1], [4], [3, 1], [1, 2, 1], [1, 1, 1, 1]):
        plan = make_plan(profile, 4, 1e9, config=config)
        assert max(bound.ms for bound in bounds_of(profile, plan)) == plan.predicted.minibatch_ms


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"machines": 0}, "machines is 0; expected 1 or more"),
        ({"bandwidth_bps": 0.0}, "the bandwidth is 0.0 bits a second"),
        ({"strategy": "best"}, "strategy 'best' is unknown; expected one of auto, single, "),
        ({"config": ()}, "config is ''; expected replicas of 1 or more"),
        ({"config": (2, 0)}, "config is '2-0'; expected replicas of 1 or more"),
        ({"config": (3, 2)}, "config 3-2 takes 5 machines, there are 4"),
        ({"config": (1, 1), "strategy": "straight"}, "config 1-1 and strategy straight exclude each other"),
    ],
)
def test_the_library_refuses_what_makes_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_plan(profile_of(HYBRID), **{"machines": 4, "bandwidth_bps": 1e9, **arguments})
    assert message in str(caught.value)


def test_a_profile_without_times_is_planned_for_one_machine_or_refused() -> None:
    weightless = make_plan(profile_of([Layer(0, 5), Layer(0)]), 4, 1e9)
    assert (weightless.config, weightless.predicted.speedup, weightless.predicted.minibatch_ms) == ("1", 1.0, 0.0)
    assert weightless.predicted.speedup_over_data_parallel == 1.0

    with pytest.raises(UserError, match="the profile's layers take 0 ms in all"):
        make_plan(profile_of([Layer(0, 5, 5), Layer(0)]), 4, 1e9)


@pytest.mark.parametrize("dtype", ["float32", "torch.int64", "bfloat16", "bool", "uint8", "float8_e4m3fn"])
def test_inputs_of_any_dtype_are_planned(dtype: str) -> None:
    profile = profile_of(HYBRID).model_copy(update={"inputs": (InputSpec(name="x", shape=(4,), dtype=dtype),)})

    assert make_plan(profile, 4, 1e9).inputs[0].dtype == dtype


def test_the_numbers_of_a_real_profile_are_consistent() -> None:
    profile: Profile = original_profile("alexnet")
    plan = make_plan(profile, 8, 10e9)

    assert plan.predicted.minibatch_ms == pytest.approx(15.1, abs=0.005)
    assert plan.workers == 7
    assert sum(stage.layers for stage in plan.stages) == len(profile.layers)
    assert partition_of(plan).replicas == (6, 1)


def test_a_fresh_interpreter_imports_neither_torch_nor_the_network(folder: Path) -> None:
    code = (
        "import sys, json\n"
        "from pd_plan.cli import main\n"
        "assert not {'numpy', 'pydantic', 'rich'} & set(sys.modules), 'needed later only'\n"
        "main(['--machines', '4', '--bandwidth', '1gbps'], standalone_mode=False)\n"
        "banned = {'torch', 'torchvision', 'zmq', 'msgpack', 'pd_profile', 'pd_train'}\n"
        "print(json.dumps(sorted(banned & set(sys.modules))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert (folder / "plan.json").exists()


def test_help_has_an_example_and_version_a_number() -> None:
    assert "pd-plan --machines 8 --bandwidth 10gbps" in succeed("--help")
    assert re.fullmatch(r"pd-plan \d+\.\d+\.\d+\S*\n", succeed("--version"))


def test_hosts_go_into_the_plan_and_say_how_many_machines_there_are(folder: Path) -> None:
    (folder / "hosts").write_text("node1 slots=2\n10.0.0.2\n")
    succeed("--bandwidth", "1gbps", "--hosts", "hosts", "--strategy", "data-parallel")
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["machines"] == 3
    assert [(host["address"], host["port"]) for host in plan["hosts"]] == [
        ("node1", 29600), ("node1", 29601), ("10.0.0.2", 29600)
    ]  # fmt: skip
    said = fail(1, "--bandwidth", "1gbps", "--hosts", "a,b", "--machines", "3", "--strategy", "data-parallel")
    assert "have 2 slots, and the plan has 3 workers" in " ".join(said.split())
    fail(2, "--bandwidth", "1gbps", "--hosts", "t-{rank}.t")
