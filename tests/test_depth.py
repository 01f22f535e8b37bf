"""The choice of depths: the search worked by hand, known plans, and what pd-plan says of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from memory_oracle import stage_memory_bytes
from original_profiles import original_profile
from pd_format.errors import UserError
from pd_format.jsonfile import write_record
from pd_format.plan import read_plan
from pd_format.profile import Profile
from pd_format.versions import Mode, stage_versions
from pd_plan.cli import main
from pd_plan.cost import Partition
from pd_plan.depth import candidates, choose_depths, given_depths, loads_of, rate_depths
from pd_plan.network import Wiring
from pd_plan.planner import decide, duplex_rival, make_plan, partition_of
from pd_plan.rates import rate_rows, rate_sentences
from pd_plan.simulator import StageLoad
from plan_oracles import Layer, profile_of

# One byte a ms; in halves of a ms: 1 ms forward, 2 ms backward, 1.5 ms each way over a cut.
FOUR = [StageLoad(2, 4, 3 if s < 3 else 0, 0, 1) for s in range(4)]
CARD, PAIRWISE = Wiring(1.0), Wiring(1.0, "pairwise")
ALONE = [0.0] * 4


def four_equal_layers(transfer_bytes: int = 1500) -> Profile:
    """1 ms forward and 2 ms backward each; a byte takes a microsecond at 8 Mbit/s."""
    profile = profile_of([Layer(3, transfer_bytes if index < 3 else 0, 10) for index in range(4)])
    layers = tuple(layer.model_copy(update={"forward_ms": 1.0, "backward_ms": 2.0}) for layer in profile.layers)
    return profile.model_copy(update={"layers": layers})


def test_the_candidates_are_round_trips_over_the_pace_times_a_factor() -> None:
    """R: 4 * 6 + 3 * 6 = 42, 30, 18, 6 at a pace of 6, so 7, 5, 3 and 1 times 1, 1.1, 1.2, ..., 2.5, rounded up."""
    assert list(candidates(FOUR, CARD, 6.0, ALONE)) == [
        (7, 5, 3, 1),
        (8, 6, 4, 2),
        (9, 6, 4, 2),
        (10, 7, 5, 2),
        (11, 8, 5, 2),
        (13, 9, 6, 2),
        (14, 10, 6, 2),
        (18, 13, 8, 3),
    ]


def test_a_replicated_stage_allows_for_its_synchronisation() -> None:
    loads = [StageLoad(3, 5, 1, 100, 2), StageLoad(1, 1, 0, 0, 1)]

    # R = 8 + 2 + 2 = 12, synchronisation 20, pace 4: ceil(12 / 8) = 2, ceil(32 / 8) - 1 = 3.
    first = next(candidates(loads, CARD, 4.0, [20.0, 0.0]))
    assert first == (3, 1)
    assert next(candidates(loads, CARD, 4.0, [0.0, 0.0])) == (2, 1)


@pytest.mark.parametrize(("wiring", "expected"), [(PAIRWISE, (7, 5, 3, 1)), (CARD, (11, 8, 5, 2))])
def test_the_first_that_is_as_fast_as_the_model_is_taken(wiring: Wiring, expected: Sequence[int]) -> None:
    depths = choose_depths(FOUR, wiring, 6.0, ALONE)

    assert depths.in_flight == expected
    assert depths.simulated_ms == pytest.approx(6.0)
    assert depths.paper == (4, 3, 2, 1)
    assert depths.paper_ms == pytest.approx(10.5, rel=1e-3)


def test_what_does_not_fit_the_memory_is_passed_over() -> None:
    depths = choose_depths(FOUR, CARD, 6.0, ALONE, fits=lambda tried: tried[0] <= 8)

    # Of (4, 3, 2, 1), (7, 5, 3, 1) and (8, 6, 4, 2) the latter two are equally fast, and the former has fewer.
    assert depths.in_flight == (7, 5, 3, 1)
    assert depths.simulated_ms == pytest.approx(20 / 3, rel=1e-3)


def test_where_nothing_fits_the_papers_depths_stay() -> None:
    assert choose_depths(FOUR, CARD, 6.0, ALONE, fits=lambda tried: False).in_flight == (4, 3, 2, 1)


def test_what_deadlocks_is_passed_over() -> None:
    # Stage 1 is so fast that a third of a minibatch is in flight at each replica, stage 2 needs many.
    loads = [StageLoad(10, 10, 0, 0, 1), StageLoad(0, 1, 0, 0, 3), StageLoad(9, 9, 0, 0, 1)]
    for x in (1, 2):
        depths = choose_depths(loads, CARD, 20.0 / x, [0.0] * 3)
        assert given_depths([1, 3, 1], depths.in_flight) == depths.in_flight


def test_the_papers_depths_are_taken_where_they_do() -> None:
    # Transfers of next to no time would otherwise cost a minibatch more in flight at each stage.
    loads = [load._replace(output_bytes=1 if load.output_bytes else 0) for load in FOUR]

    assert choose_depths(loads, Wiring(1e6), 6.0, ALONE).in_flight == (4, 3, 2, 1)


def test_one_stage_keeps_a_single_minibatch_in_flight() -> None:
    """However long its synchronisation takes: data parallelism stays synchronous."""
    load = StageLoad(1, 2, 0, 40, 4)

    depths = choose_depths([load], CARD, 15.0, [60.0])

    assert depths.in_flight == depths.paper == (1,)
    assert depths.simulated_ms is not None
    assert depths.simulated_ms > 15


def test_a_pipeline_too_large_to_simulate_keeps_the_papers_depths() -> None:
    loads = [StageLoad(1, 2, 1, 0, 1)] * 400

    depths = choose_depths(loads, CARD, 3.0, [0.0] * 400)

    assert depths.in_flight == depths.paper == tuple(range(400, 0, -1))
    assert depths.simulated_ms is depths.paper_ms is None
    assert rate_depths(loads, CARD, depths.in_flight).simulated_ms is None


def test_loads_are_sums_of_the_layers_and_recomputation_adds_a_forward_pass() -> None:
    layers = four_equal_layers().layers

    first, second = loads_of(layers, Partition((3, 4), (2, 1)), recompute=[True, False])

    assert (first.forward_ms, first.backward_ms, first.output_bytes, first.weight_bytes) == (3, 9, 1500, 30)
    assert (second.forward_ms, second.backward_ms, second.output_bytes, second.weight_bytes) == (1, 2, 0, 10)
    # After 3 of 9 ms of recomputation a third of the parameters is ready every 2 ms.
    assert first.ready == pytest.approx([5 / 9] * 5 + [7 / 9] * 5 + [1] * 6)
    assert second.ready == ()


def test_parameters_at_the_end_are_ready_first() -> None:
    layers = four_equal_layers().layers
    heavy_end = [*layers[:3], layers[3].model_copy(update={"trainable_bytes": 10**6})]

    (load,) = loads_of(heavy_end, Partition((4,), (2,)))

    assert load.ready == pytest.approx([0.25] * 15 + [1.0])


@pytest.mark.parametrize("given", ["noam", "3-2-1", (3, 2, 1)])
def test_given_depths(given: str | Sequence[int]) -> None:
    assert given_depths([1, 1, 1], given) == (3, 2, 1)


@pytest.mark.parametrize(
    ("replicas", "given", "message"),
    [
        ([1, 1], "many", "in_flight is 'many'; expected auto, noam, or depths of 1 or more such as 7-5-3-1."),
        ([1, 1], "2-0", "in_flight is '2-0'; expected"),
        ([1, 1], "2--1", "in_flight is '2--1'; expected"),
        ([1, 1], "", "in_flight is ''; expected"),
        ([2, 1], "2", "in_flight 2 has 1 depths, config 2-1 has 2 stages; give one a stage, such as 2-1."),
        (
            [1, 1],
            "2-3",
            "in_flight 2 of stage 0 (1 replica) and in_flight 3 of stage 1 (1 replica) deadlock: stage 1 waits for more than 2 "
            "minibatches, stage 0 sends 2 before it waits for an answer. Give deeper earlier stages, such as 2-1.",
        ),
    ],
)
def test_depths_that_make_no_sense_are_refused(replicas: Sequence[int], given: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        given_depths(replicas, given)
    assert str(caught.value).startswith(message)


def test_the_plan_states_the_chosen_depths_and_the_memory_that_they_take() -> None:
    profile = four_equal_layers()

    auto = make_plan(profile, 4, 8e6, config=(1, 1, 1, 1))
    noam = make_plan(profile, 4, 8e6, config=(1, 1, 1, 1), in_flight="noam")
    given = make_plan(profile, 4, 8e6, config=(1, 1, 1, 1), in_flight=(9, 7, 4, 1))

    assert [stage.in_flight for stage in auto.stages] == [11, 8, 5, 2]
    assert [stage.in_flight for stage in noam.stages] == [4, 3, 2, 1]
    assert [stage.in_flight for stage in given.stages] == [9, 7, 4, 1]
    # What the cost model says knows of no depths.
    assert auto.predicted == noam.predicted == given.predicted
    assert auto.noam == 4
    versions = stage_versions(Mode(), [1] * 4, [11, 8, 5, 2], 1)
    held = stage_memory_bytes(profile.layers[1:2], 1500, 1500, versions, (1, 11))
    assert auto.stages[1].predicted.memory_bytes == held > noam.stages[1].predicted.memory_bytes


def test_model_parallelism_is_one_minibatch_at_a_time() -> None:
    decision = decide(four_equal_layers(), 4, 8e6, "model-parallel")

    assert decision.depths.in_flight == (1, 1, 1, 1)
    assert decision.depths.simulated_ms == pytest.approx(decision.plan.predicted.minibatch_ms)
    # Whatever the links could do: nothing ever comes back while something goes out.
    duplex = decide(four_equal_layers(), 4, 8e6, "model-parallel", cost_model="duplex")
    assert duplex.plan.predicted.minibatch_ms == decision.plan.predicted.minibatch_ms
    with pytest.raises(UserError, match="one minibatch at a time"):
        decide(four_equal_layers(), 4, 8e6, "model-parallel", in_flight="4-3-2-1")


def test_the_duplex_model_counts_a_link_s_directions_apart() -> None:
    profile = profile_of([Layer(6, 1000, 8000), Layer(2, 0, 0)])

    paper = make_plan(profile, 3, 8e6, config=(2, 1))
    duplex = make_plan(profile, 3, 8e6, config=(2, 1), cost_model="duplex")

    assert (paper.cost_model, duplex.cost_model) == ("paper", "duplex")
    assert paper.stages[0].predicted.sync_ms == 2 * duplex.stages[0].predicted.sync_ms == 16
    assert (paper.predicted.minibatch_ms, duplex.predicted.minibatch_ms) == (8, 4)
    assert paper.predicted.bytes_per_minibatch == duplex.predicted.bytes_per_minibatch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost_model": "half"}, "cost_model 'half' is unknown; expected one of paper, duplex."),
        ({"links": "bus"}, "links 'bus' is unknown; expected one of card, pairwise, shared."),
    ],
)
def test_the_library_refuses_unknown_models_and_links(options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_plan(four_equal_layers(), 4, 8e6, **options)
    assert str(caught.value) == message


def test_alexnet_on_v100_is_faster_than_the_papers_model_says_and_there_is_a_better_plan() -> None:
    profile = original_profile("alexnet")

    decision = decide(profile, 8, 10e9)
    rival = duplex_rival(profile, decision)

    assert decision.plan.config == "6-1"
    assert decision.plan.predicted.minibatch_ms == pytest.approx(15.1, abs=0.01)
    assert decision.depths.simulated_ms == pytest.approx(12.7, abs=0.05)
    assert rival is not None
    assert rival.plan.config == "7-1"
    assert rival.depths.simulated_ms == pytest.approx(10.9, abs=0.05)
    text = " ".join(rate_sentences(decision, rival))
    assert "Simulated, a minibatch takes 16% less than by the cost model: links carry both directions at once" in text
    assert "--cost-model duplex finds config 7-1 on 8 machines, which simulates at 10.90 ms a minibatch, 17% " in text


def test_there_is_no_rival_where_the_duplex_model_finds_the_same_or_the_plan_was_given() -> None:
    profile = original_profile("vgg16")

    assert duplex_rival(profile, decide(profile, 8, 10e9)) is None
    assert duplex_rival(profile, decide(profile, 8, 10e9, cost_model="duplex")) is None
    assert duplex_rival(profile, decide(profile, 8, 10e9, config=(4, 4))) is None


@pytest.mark.parametrize("name", ["gnmt", "vgg16", "inception_v3"])
def test_chosen_depths_are_never_slower_than_the_papers(name: str) -> None:
    profile = original_profile(name)
    for bandwidth in (1e9, 25e9):
        decision = decide(profile, 8, bandwidth)
        plan, depths = decision.plan, decision.depths
        assert depths.simulated_ms is not None
        assert depths.paper_ms is not None
        assert depths.simulated_ms <= depths.paper_ms * 1.01
        assert tuple(stage.in_flight for stage in plan.stages) == depths.in_flight
        assert sum(partition_of(plan).replicas) == plan.workers


def test_the_rates_in_the_table() -> None:
    decision = decide(four_equal_layers(), 4, 8e6, config=(1, 1, 1, 1))

    rows = [(row.name, row.in_flight, row.ms and round(row.ms, 2)) for row in rate_rows(decision)]

    assert rows == [
        ("cost model, paper", (), 3.0),
        ("simulated", (11, 8, 5, 2), 3.0),
        ("paper's depths", (4, 3, 2, 1), 5.25),
    ]
    assert [row.difference and round(row.difference, 2) for row in rate_rows(decision)] == [None, 0.0, 0.75]
    assert list(rate_sentences(decision)) == [
        "At the paper's depths (4-3-2-1) a minibatch would take 5.25 ms: they leave no time for transfers."
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"in_flight": "noam"}, "these depths leave too little time for transfers; --in-flight auto looks for others."),
        ({"strategy": "data-parallel"}, "a round's last parameters arrive after its last backward pass"),
    ],
)
def test_why_a_simulation_is_slower_than_the_model(options: dict[str, str], sentence: str) -> None:
    profile = profile_of([Layer(3, 1500, 800)] * 3 + [Layer(3, 0, 800)])

    decision = decide(profile, 4, 8e6, options.get("strategy", "straight"), in_flight=options.get("in_flight", "auto"))

    (text,) = rate_sentences(decision)
    assert text.startswith("Simulated, a minibatch takes ")
    assert f"longer than by the cost model: {sentence}" in text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "profiles" / "four.json", four_equal_layers())
    return tmp_path


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["--config", "1-1-1-1", "--bandwidth", "1MB/s", *arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(
    ("arguments", "depths", "line"),
    [
        ([], [11, 8, 5, 2], "simulated           11-8-5-2                3.00 ms          +0.0%\n"),
        (["--in-flight", "noam"], [4, 3, 2, 1], "simulated           4-3-2-1                 5.25 ms         +75.0%\n"),
        (["--in-flight", "7-5-3-1"], [7, 5, 3, 1], "simulated           7-5-3-1                 3.33 ms         +11.1"),
        (["--links", "pairwise"], [7, 5, 3, 1], "simulated           7-5-3-1                 3.00 ms          +0.0%\n"),
        (["--cost-model", "duplex"], [11, 8, 5, 2], "cost model, duplex                          3.00 ms\n"),
    ],
)
def test_the_options_of_pd_plan(folder: Path, arguments: Sequence[str], depths: Sequence[int], line: str) -> None:
    output = run(*arguments)

    assert line in output
    assert [stage.in_flight for stage in read_plan(folder / "plan.json").stages] == depths


@pytest.mark.usefixtures("folder")
def test_wrong_depths_end_with_1_and_say_what_to_give() -> None:
    assert "in_flight 4-3 has 2 depths, config 1-1-1-1 has 4 stages; give one a stage, such as 4-3-2-1." in run(
        "--in-flight", "4-3", code=1
    )
    assert "deadlock" in run("--in-flight", "1-1-1-2", code=1)
    assert "expected auto, noam, or depths" in run("--in-flight", "deep", code=1)
