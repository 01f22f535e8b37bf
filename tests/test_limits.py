"""Plans within a memory limit: the figures, the best plan against brute force, and what is said where none fits."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_oracle import stage_memory_bytes
from pd_format.errors import UserError
from pd_format.jsonfile import write_record
from pd_format.memory import OPTIMIZER_STATES
from pd_format.plan import read_plan
from pd_format.profile import LayerProfile, Profile
from pd_format.schedule import paper_depths
from pd_format.versions import Mode, stage_versions
from pd_plan.cli import main
from pd_plan.cluster import Cluster
from pd_plan.cost import Chain, Partition
from pd_plan.limited import RoomSearch, best_limited
from pd_plan.limited_fixed import best_limited_cuts
from pd_plan.limits import Limit, Sizes, limited_minibatch_ms
from pd_plan.memory_report import memory_sentences
from pd_plan.planner import decide, make_plan
from pd_plan.rough import rough_partition
from plan_oracles import EQUAL, Layer, cut_time, partitions, profile_of, replica_counts, stage_time

INPUT = 2


class Heavy(NamedTuple):
    """A layer of a test's chain with all that memory depends on."""

    forward: int
    backward: int
    activation: int
    weight: int
    frozen: int
    stash: int
    cut: bool = True


FIGURES = st.sampled_from([1, 2, 3, 6, 0])
SIZES = st.sampled_from([3, 1, 7, 20, 0])
HEAVY = st.builds(Heavy, FIGURES, FIGURES, SIZES, SIZES, SIZES, SIZES, st.sampled_from([True, True, True, False]))
CHAINS = st.lists(HEAVY, min_size=1, max_size=5)
BANDWIDTHS = st.sampled_from([10**9, 30, 3])
PICKS = st.floats(0, 1)


def profiles_of(layers: list[Heavy]) -> list[LayerProfile]:
    return [
        LayerProfile(
            name=f"layer{index}",
            op="Test",
            forward_ms=float(layer.forward),
            backward_ms=float(layer.backward),
            activation_bytes=layer.activation,
            parameter_bytes=layer.weight + layer.frozen,
            trainable_bytes=layer.weight,
            stash_bytes=layer.stash,
            cut=layer.cut,
        )
        for index, layer in enumerate(layers)
    ]


def limit_of(layers: list[Heavy], limit: int, recompute: bool, optimizer: str = "momentum") -> Limit:
    return Limit(Sizes.of(profiles_of(layers), INPUT, optimizer), limit, recompute)


def memory(
    layers: list[Heavy], ends: tuple[int, ...], replicas: tuple[int, ...], flags: tuple[bool, ...], optimizer: str
) -> int:
    """What the fullest worker holds, by the words of the design, at the paper's depths."""
    depths = [-(-sum(replicas[s:]) // replicas[s]) for s in range(len(ends))]
    starts = (0, *ends[:-1])
    most = 0
    for s, (start, end, r, w) in enumerate(zip(starts, ends, replicas, depths, strict=True)):
        lag = 1 if r > 1 and len(ends) > 1 else 0
        stage = layers[start:end]
        trainable = sum(layer.weight for layer in stage)
        arriving = layers[start - 1].activation if start else INPUT
        leaving = layers[end - 1].activation if end < len(layers) else 0
        stash = sum(layer.stash for layer in stage)
        held = sum(layer.frozen for layer in stage) + (w + lag) * trainable
        held += trainable + (1 + lag) * (r - 1) * trainable // r
        held += OPTIMIZER_STATES[optimizer] * trainable // r
        held += w * arriving + stash if flags[s] else w * stash
        held += w * leaving
        if s:
            held += (-(-depths[s - 1] * replicas[s - 1] // r) + 1) * arriving
        most = max(most, held)
    return most


class Choice(NamedTuple):
    value: Fraction
    machines: int
    stages: int
    recomputing: int
    sent: Fraction
    later: tuple[int, ...]
    ends: tuple[int, ...]
    replicas: tuple[int, ...]
    flags: tuple[bool, ...]


def choices(
    layers: list[Heavy],
    ends: tuple[int, ...],
    replicas: tuple[int, ...],
    bandwidth: Fraction,
    limit: Limit,
) -> list[Choice]:
    """All that fit of the ways to recompute in a partition."""
    result = []
    plain = [Layer(layer.forward + layer.backward, layer.activation, layer.weight) for layer in layers]
    again = [Layer(layer.ms + heavy.forward, *layer[1:]) for layer, heavy in zip(plain, layers, strict=True)]
    starts = (0, *ends[:-1])
    cuts = [cut_time(plain[end - 1], bandwidth) for end in ends[:-1]]
    sent = sum((2 * Fraction(layers[end - 1].activation) for end in ends[:-1]), Fraction(0))
    for start, end, r in zip(starts, ends, replicas, strict=True):
        sent += Fraction(2 * (r - 1), r) * sum(layer.weight for layer in layers[start:end])
    for flags in product([False, True] if limit.recompute else [False], repeat=len(ends)):
        if memory(layers, ends, replicas, flags, limit.sizes.optimizer) > limit.memory_bytes:
            continue
        times = [
            stage_time((again if flag else plain)[start:end], r, bandwidth)
            for start, end, r, flag in zip(starts, ends, replicas, flags, strict=True)
        ]
        result.append(
            Choice(
                max([*times, *cuts]),
                sum(replicas),
                len(ends),
                sum(flags),
                sent,
                tuple(-end for end in ends),
                ends,
                replicas,
                flags,
            )
        )
    return result


def binding(layers: list[Heavy], shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], pick: float) -> int:
    """A limit that some plan just keeps: the peaks of all plans, from the least at 0 to the most at 1, less one."""
    peaks = {
        memory(layers, ends, replicas, flags, "momentum")
        for ends, replicas in shapes
        for flags in product([False, True], repeat=len(ends))
    }
    ranked = [min(peaks) - 1, *sorted(peaks)]
    return max(1, ranked[round(pick * (len(ranked) - 1))])


def shapes_of(layers: list[Heavy], machines: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    every = partitions(plain_layers(layers))
    return [(ends, replicas) for ends in every for replicas in replica_counts(len(ends), machines)]


def preferred(found: list[Choice]) -> Choice | None:
    least = min((choice.value for choice in found), default=Fraction(0))
    return min((c for c in found if c.value <= least * (1 + EQUAL)), key=lambda c: c[1:6], default=None)


def plain_layers(layers: list[Heavy]) -> list[Layer]:
    return [Layer(0, cut=layer.cut) for layer in layers]


@settings(max_examples=300, deadline=None)
@given(CHAINS, st.integers(1, 5), BANDWIDTHS, PICKS, st.booleans(), st.sampled_from(["momentum", "sgd", "adam"]))
def test_the_plan_is_the_one_that_brute_force_prefers(
    layers: list[Heavy], machines: int, bytes_per_ms: int, pick: float, recompute: bool, optimizer: str
) -> None:
    shapes = shapes_of(layers, machines)
    limit = limit_of(layers, binding(layers, shapes, pick), recompute, optimizer)
    expected = preferred(
        [choice for shape in shapes for choice in choices(layers, *shape, Fraction(bytes_per_ms), limit)]
    )
    chain, park = Chain.of(profiles_of(layers)), Cluster(machines, bytes_per_ms * 8000.0)

    found = best_limited(chain, limit, park)

    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.exact
    assert limit.fits(found.partition, paper_depths(found.partition.replicas), found.recompute)
    value = limited_minibatch_ms(chain, limit.sizes, found.partition, found.recompute, park)
    assert value == pytest.approx(float(expected.value), rel=1e-12)
    (same,) = (
        choice
        for choice in choices(layers, *found.partition, Fraction(bytes_per_ms), limit)
        if choice.flags == found.recompute
    )
    assert same[1:6] == expected[1:6]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(HEAVY, min_size=2, max_size=6),
    st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    BANDWIDTHS,
    PICKS,
    st.booleans(),
)
def test_given_replicas_get_the_cuts_that_brute_force_prefers(
    layers: list[Heavy], replicas: tuple[int, ...], bytes_per_ms: int, pick: float, recompute: bool
) -> None:
    chain = Chain.of(profiles_of(layers))
    replicas = replicas[: chain.most_stages]
    shapes = [(ends, replicas) for ends in partitions(plain_layers(layers), len(replicas))]
    limit = limit_of(layers, binding(layers, shapes, pick), recompute)
    expected = preferred(
        [
            choice
            for ends in partitions(plain_layers(layers), len(replicas))
            for choice in choices(layers, ends, replicas, Fraction(bytes_per_ms), limit)
        ]
    )

    found = best_limited_cuts(chain, replicas, paper_depths(replicas), limit, Cluster(99, bytes_per_ms * 8000.0))

    assert found == (expected and (Partition(expected.ends, expected.replicas), expected.flags))


@settings(max_examples=100, deadline=None)
@given(CHAINS, st.integers(1, 5), BANDWIDTHS, PICKS, st.booleans())
def test_a_rough_plan_keeps_within_the_limit_and_is_no_better_than_the_best(
    layers: list[Heavy], machines: int, bytes_per_ms: int, pick: float, recompute: bool
) -> None:
    limit = limit_of(layers, binding(layers, shapes_of(layers, machines), pick), recompute)
    chain = Chain.of(profiles_of(layers))
    park = Cluster(machines, bytes_per_ms * 8000.0)
    best = best_limited(chain, limit, park)

    found = rough_partition(chain, limit, park)

    if found is not None:
        assert best is not None
        assert limit.fits(found[0], paper_depths(found[0].replicas), found[1])
        times = [limited_minibatch_ms(chain, limit.sizes, *plan, park) for plan in (best[:2], found)]
        assert times[0] <= times[1] * (1 + 1e-9)


MB = 10**6
GB = 10**9


def heavy_profile(*layers: Heavy) -> Profile:
    """Sizes in MB."""
    scaled = [
        layer._replace(
            activation=layer.activation * MB, weight=layer.weight * MB, frozen=layer.frozen * MB, stash=layer.stash * MB
        )
        for layer in layers
    ]
    return profile_of([Layer(1)]).model_copy(update={"layers": tuple(profiles_of(scaled)), "minibatch_size": 64})


# Convolutions with large activations, a linear layer with large parameters.
NET = heavy_profile(
    Heavy(10, 20, 8, 1, 0, 100), Heavy(10, 20, 8, 1, 0, 100), Heavy(10, 20, 1, 1, 0, 100), Heavy(10, 20, 0, 200, 0, 1)
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with one profile."""
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "profiles" / "tiny.json", NET)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--bandwidth", "1gbps"])


def fail(code: int, *arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert not Path("plan.json").exists()
    return result.stderr.partition("Error: ")[2].strip()


def test_memory_by_hand() -> None:
    plan = make_plan(NET, 4, 1e9, in_flight="noam")
    first, last = plan.stages

    assert (plan.config, [stage.in_flight for stage in plan.stages]) == ("3-1", [2, 1])
    # Three sets, gradients and 2 * 2/3 of them for the shard's rounds, a third of the momentum; two stashes and two
    # gradients of the output in flight.
    assert first.predicted.memory_bytes == 3 * 3 * MB + 3 * MB + 4 * MB + 1 * MB + 2 * 300 * MB + 2 * MB
    # One set, gradients and momentum; seven activations of 1 MB have arrived or may yet.
    assert last.predicted.memory_bytes == 3 * 200 * MB + 1 * MB + 7 * MB


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2)])
def test_the_optimizer_is_written_and_its_state_counted(optimizer: str, states: int, folder: Path) -> None:
    assert run("--machines", "1", "--optimizer", optimizer).exit_code == 0

    plan = read_plan(folder / "plan.json")
    assert plan.optimizer == optimizer
    assert plan.stages[0].predicted.memory_bytes == (2 + states) * 203 * MB + 301 * MB


def test_a_stage_recomputes_where_that_is_the_fastest_way_to_fit(folder: Path) -> None:
    result = run("--machines", "4", "--memory", "610MB", "--recompute", "--in-flight", "noam")

    assert result.exit_code == 0, result.output
    plan = read_plan(folder / "plan.json")
    assert plan.config == "3-1"
    assert [stage.recompute for stage in plan.stages] == [True, False]
    # 90 ms and the forward pass once more, shared by three.
    assert plan.stages[0].predicted.compute_ms == 120.0
    assert plan.predicted.minibatch_ms == 40.0
    assert plan.stages[0].predicted.memory_bytes == 17 * MB + 300 * MB + 2 * MB + 2 * 128
    text = " ".join(result.stdout.split())
    assert "Memory at most 610 MB a worker, optimizer momentum, stages may recompute" in text
    assert "layer0 to layer2, recomputed" in text
    assert "Stage 1 is the fullest: 608 MB a worker of at most 610 MB. Stage 0 recomputes: only inputs are kept" in text
    assert (
        "Without the limit these cuts without recomputation would take 30.00 ms a minibatch (this plan: +33%) " in text
    )
    assert "and 619 MB a worker." in text
    assert "Over the limit, of those it is compared with: single machine (910 MB), data parallelism (" in text
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_limit_that_nothing_exceeds_changes_nothing_but_what_is_said() -> None:
    free, kept = make_plan(NET, 4, 1e9), decide(NET, 4, 1e9, memory_bytes=10 * GB)

    assert kept.plan == free
    assert kept.kept is not None
    assert kept.kept.exact


@pytest.mark.parametrize("strategy", ["auto", "straight", "model-parallel"])
@pytest.mark.parametrize("limit", [450, 610, 700, 900, 1500])
def test_no_plan_exceeds_its_limit(strategy: str, limit: int) -> None:
    for recompute in (False, True):
        try:
            plan = make_plan(NET, 4, 1e9, strategy, memory_bytes=limit * MB, recompute=recompute)
        except UserError as error:
            refusal = str(error)
        else:
            refusal = ""
            assert max(stage.predicted.memory_bytes for stage in plan.stages) <= limit * MB
        assert not refusal or "The obstacle is layer " in refusal


@pytest.mark.usefixtures("folder")
def test_where_nothing_fits_the_layer_and_its_need_are_named_and_what_would_help() -> None:
    assert fail(1, "--machines", "2", "--memory", "590MB") == (
        "profiles/tiny.json: no plan on 2 machines keeps within 590 MB a worker at the paper's depths. The obstacle is "
        "layer layer0, Test: the leanest of these has it in stage 0 (config 1-1, 2 in flight), which needs 614 MB, 204 MB of it for this "
        "layer. What would help: an optimizer without state (--optimizer sgd)."
    )


@pytest.mark.usefixtures("folder")
def test_more_machines_smaller_minibatches_and_recomputation_are_tried_before_they_are_advised() -> None:
    message = fail(1, "--machines", "1", "--memory", "615MB", "--optimizer", "momentum")

    assert (
        "no plan on 1 machine keeps within 615 MB a worker with one minibatch in flight. The obstacle is layer layer3, "
        "Test: the leanest of these" in message
    )
    machines = re.search(r"What would help: (\d+) machines", message)
    assert machines
    assert run("--machines", machines[1], "--memory", "615MB").exit_code == 0


VGG = ["--profile", str(Path(__file__).parent.parent / "profiles/v100/vgg16.json")]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--machines", "8", "--memory", "3GB"],
        ["--machines", "8", "--memory", "4.5GB"],
        ["--machines", "8", "--strategy", "straight", "--memory", "12GB"],
        ["--config", "3-2-2-1", "--memory", "4GB"],
    ],
)
def test_fewer_minibatches_in_flight_are_tried_before_they_are_advised(arguments: list[str]) -> None:
    message = fail(1, *VGG, *arguments)
    advised = re.search(r"fewer minibatches in flight, which is slower \((--config \S+ --in-flight \S+)\)", message)
    assert advised, message
    memory = arguments[arguments.index("--memory") :]
    result = run(*VGG, *advised[1].split(), *memory)
    assert result.exit_code == 0, result.output
    plan = read_plan(Path("plan.json"))
    replicas = [stage.replicas for stage in plan.stages]
    assert sum(stage.in_flight for stage in plan.stages) < sum(paper_depths(replicas))


@given(CHAINS, st.integers(1, 5), st.integers(1, 3), st.integers(0, 120), st.booleans())
def test_some_plan_with_so_few_in_flight_is_found_where_there_is_one(
    layers: list[Heavy], machines: int, most: int, memory_bytes: int, recompute: bool
) -> None:
    limit = limit_of(layers, memory_bytes, recompute)
    chain = Chain.of(profiles_of(layers))
    found = RoomSearch(chain, limit, Cluster(machines, 1e9), most_in_flight=most).plan_under(math.inf)

    def depths_of(replicas: Sequence[int]) -> list[int]:
        return [min(depth, most) for depth in paper_depths(replicas)]

    if found is not None:
        assert limit.fits(found[0], depths_of(found[0].replicas), found[1])
        assert sum(found[0].replicas) <= machines
        return
    for ends, replicas in shapes_of(layers, machines):
        for again in product((False, True) if recompute else (False,), repeat=len(ends)):
            assert not limit.fits(Partition(ends, replicas), depths_of(replicas), again)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (
            ["--machines", "2", "--memory", "1MB"],
            "profiles/tiny.json: no plan on 2 machines keeps within 1 MB a worker at the paper's depths. ",
        ),
        (
            ["--config", "1-1", "--memory", "500MB"],
            "profiles/tiny.json: no plan of config 1-1 keeps within 500 MB a worker at the paper's depths. The obstacle is ",
        ),
        (
            ["--machines", "2", "--strategy", "data-parallel", "--memory", "500MB"],
            "profiles/tiny.json: strategy data-parallel (config 2) does not fit: nothing of it keeps within 500 MB",
        ),
        (
            ["--config", "1-1", "--memory", "900MB", "--in-flight", "9-1"],
            "profiles/tiny.json: no plan of config 1-1 keeps within 900 MB a worker at these depths. The obstacle is layer layer0, ",
        ),
        (
            ["--machines", "2", "--memory", "1.5GB", "--in-flight", "9-1"],
            "profiles/tiny.json: in_flight 9-1 needs 2.",
        ),
    ],
)
def test_what_does_not_fit_ends_with_1(arguments: list[str], start: str) -> None:
    assert fail(1, *arguments).startswith(start)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--memory", "16"], "Invalid value for '--memory': '16' has no unit: it could be 16GB or 16MB. Write 16GB "),
        (["--memory", "16Gbit"], "Invalid value for '--memory': '16Gbit' counts bits; memory is counted in bytes (B)."),
        (["--memory", "16GB/s"], "Invalid value for '--memory': '16GB/s' is a rate, not a size."),
        (["--memory", "-1GB"], "Invalid value for '--memory': '-1GB' is not above 0."),
        (["--recompute"], "--recompute costs time to save memory; say with --memory how much there is."),
        (["--optimizer", "lion"], "Invalid value for '--optimizer': 'lion' is not one of "),
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], start: str) -> None:
    assert fail(2, "--machines", "4", *arguments).startswith(start)


def test_depths_are_chosen_within_the_limit() -> None:
    # Cuts take as long as stages, so that deeper is better; there is memory for a little more than the paper's depths.
    profile = heavy_profile(*[Heavy(30, 60, 5, 0, 0, 100)] * 4)
    free = make_plan(profile, 4, 1e9, "straight")
    paper = make_plan(profile, 4, 1e9, "straight", in_flight="noam")
    limit = max(stage.predicted.memory_bytes for stage in paper.stages)

    kept = make_plan(profile, 4, 1e9, "straight", memory_bytes=limit)

    assert max(stage.predicted.memory_bytes for stage in free.stages) > limit
    assert max(stage.predicted.memory_bytes for stage in kept.stages) <= limit


def test_a_chain_too_long_for_the_exact_search_is_planned_and_says_so() -> None:
    layers = [Heavy(10, 20, 1, 1, 0, 40)] * 60
    profile = heavy_profile(*layers)

    decision = decide(profile, 200, 1e9, memory_bytes=1500 * MB, in_flight="noam")

    assert decision.kept is not None
    assert not decision.kept.exact
    assert max(stage.predicted.memory_bytes for stage in decision.plan.stages) <= 1500 * MB
    assert any("a faster one may have been missed" in text for text in memory_sentences(decision, []))


def test_a_thousand_stages_are_counted_without_walking_their_order() -> None:
    assert (
        make_plan(heavy_profile(*[Heavy(1, 1, 0, 1, 0, 1)] * 300), 300, 1e18, "straight", in_flight="noam").noam == 300
    )


def test_of_equal_plans_one_that_does_not_recompute_is_preferred_to_fewer_bytes() -> None:
    layers = [Heavy(0, 0, 2, 0, 0, 10), Heavy(0, 0, 1, 0, 0, 30), Heavy(2, 3, 0, 0, 0, 40)]
    chain, park = Chain.of(profiles_of(layers)), Cluster(2, 8e12)

    # On one machine it takes 80 bytes. The second cut sends less, but its first stage needs 82 bytes or to recompute.
    found = best_limited(chain, limit_of(layers, 78, recompute=True), park)

    assert found == (Partition((1, 3), (1, 1)), (False, False), True)
    tighter = best_limited(chain, limit_of(layers, 75, recompute=True), park)
    assert tighter == (Partition((2, 3), (1, 1)), (True, False), True)


@settings(max_examples=50, deadline=None)
@given(st.lists(HEAVY, min_size=3, max_size=3), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans())
def test_the_planner_and_the_walk_of_the_order_agree(layers: list[Heavy], replicas: list[int], recompute: bool) -> None:
    whole, count = profiles_of(layers), len(replicas)
    partition = Partition((*range(1, count), 3), tuple(replicas))
    depths = [depth + 1 for depth in paper_depths(replicas)]
    mode = Mode(sync="bsp" if count == 1 else "overlap")

    found = Sizes.of(whole, INPUT, "adam").needed(partition, depths, [recompute] * count)

    assert found == [
        stage_memory_bytes(
            whole[first:end],
            input_bytes=whole[first - 1].activation_bytes if first else INPUT,
            output_bytes=whole[end - 1].activation_bytes if end < 3 else 0,
            versions=stage_versions(mode, replicas, depths, s),
            previous=(replicas[s - 1], depths[s - 1]) if s else None,
            optimizer="adam",
            recompute=recompute,
        )
        for s, (first, end) in enumerate(partition.ranges)
    ]
