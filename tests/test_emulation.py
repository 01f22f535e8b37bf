"""Emulated runs: real messages of the real sizes in the schedule's order, and nothing that was not measured."""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import original_profiles
from pd_format.compression import parse_gradients, stage_bytes_after
from pd_format.jsonfile import write_record
from pd_format.plan import Plan, read_plan
from pd_format.profile import LayerProfile, Profile
from pd_format.schedule import work_order
from pd_format.versions import Mode
from pd_plan.cli import main as plan_main
from pd_train.cli import main
from pd_train.emulated import EmulatedEngine, NoArithmetic, parameters_of
from pd_train.emulated_assembly import assemble_emulated
from pd_train.emulation import Emulation, pace_of
from pd_train.inbox import Inbox
from pd_train.links import Links
from pd_train.options import RunOptions
from pd_train.recorder import Recorder
from pd_train.routing import place_of
from pd_train.segment import Segment
from pd_train.wire import Message, decode, encode
from plan_oracles import Layer, profile_of

HEADERS = 2000
"""Bytes of what is no tensor in a small plan's messages of one minibatch, at most."""
CHAIN = (Layer(2.0, 40_000, 3_000), Layer(1.0, 20_002, 0), Layer(3.0, 0, 400_000))


def small_profile(**changes: Any) -> Profile:
    profile = profile_of(CHAIN)
    frozen = profile.layers[2].model_copy(update={"trainable_bytes": 300_000})
    return profile.model_copy(update={"layers": (*profile.layers[:2], frozen), **changes})


def plan_for(folder: Path, profile: Path, *options: object) -> Path:
    arguments = ["--profile", profile, "--bandwidth", "1gbps", "--output", folder / "plan.json", *options]
    result = CliRunner().invoke(plan_main, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    return folder / "plan.json"


def written(folder: Path, config: str, *options: object) -> tuple[Path, Path]:
    """The small profile and a plan of it."""
    write_record(folder / "profile.json", small_profile())
    return folder / "profile.json", plan_for(folder, folder / "profile.json", "--config", config, *options)


def emulate(folder: Path, plan: Path, profile: Path, *options: object) -> Result:
    arguments = ["--plan", plan, "--emulate", profile, "--run-dir", folder / "run", *options]
    return CliRunner().invoke(main, [str(each) for each in arguments])


# A stage


class Clock:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now

    def wait(self, due: float) -> None:
        self.now = max(self.now, due)


def engine_of(layers: list[LayerProfile], clock: Clock, **options: Any) -> EmulatedEngine:
    return EmulatedEngine(layers, 2.0, 4, clock=clock, wait=clock.wait, **{"is_last": False, **options})


def layer(name: str, forward_ms: float, backward_ms: float, activation: int, trainable: int) -> LayerProfile:
    return LayerProfile(
        name=name,
        op="",
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        activation_bytes=activation,
        parameter_bytes=trainable,
        trainable_bytes=trainable,
    )


LAYERS = [layer("a", 1, 2, 8, 4), layer("b", 3, 4, 16, 0), layer("c", 5, 6, 10, 8)]


def test_passes_take_the_time_of_the_profile_from_their_beginning() -> None:
    clock = Clock()
    engine = engine_of(LAYERS, clock)
    sent = engine.forward(0, 0, (torch.empty(3, requires_grad=True),), seed=0)
    assert clock.now == pytest.approx(10.0 + 0.002 * 9)
    assert [tensor.nbytes for tensor in sent] == [8, 2]
    assert [tensor.requires_grad for tensor in sent] == [True, False]
    (answer,) = engine.backward(0, 0, [torch.empty(2)])
    assert answer is not None
    assert (answer.shape, answer.dtype) == ((3,), torch.float32)
    assert clock.now == pytest.approx(10.0 + 0.002 * (9 + 12))
    assert engine.ends == [clock.now]


@pytest.mark.parametrize(("recompute", "extra_ms"), [(False, 0), (True, 9)])
def test_gradients_come_within_the_backward_pass_at_the_times_of_their_layers(recompute: bool, extra_ms: int) -> None:
    clock = Clock()
    engine = engine_of(LAYERS, clock, is_last=True, recompute=recompute)
    ready: list[tuple[float, int, int]] = []
    engine.watch_gradients(lambda number, gradient: ready.append((clock.now, number, gradient.nbytes)))
    assert engine.forward_loss(0, 0, (), None, seed=0).loss is None
    start = clock.now
    engine.backward(0, 0, None)
    assert [each[1:] for each in ready] == [(1, 8), (0, 4)]
    assert [each[0] for each in ready] == [
        pytest.approx(start + 0.002 * (extra_ms + 6)),
        pytest.approx(start + 0.002 * (extra_ms + 12)),
    ]
    assert clock.now == pytest.approx(start + 0.002 * (extra_ms + 12))


def test_parameters_have_the_bytes_that_train() -> None:
    layers = [*LAYERS, layer("d", 1, 1, 0, 7)]
    assert [parameter.nbytes for parameter in parameters_of(layers)] == [4, 8, 7]


def test_a_gradient_of_another_size_is_refused() -> None:
    engine = engine_of(LAYERS, Clock())
    engine.forward(0, 0, (), seed=0)
    with pytest.raises(RuntimeError, match="arrived for values"):
        engine.backward(0, 0, [torch.empty(3)])


# A pipeline on threads


class Post:
    """Takes messages between workers that are threads, through the frames of the wire."""

    def __init__(self, rank: int, boxes: dict[int, queue.SimpleQueue[Message]]) -> None:
        self.rank = rank
        self.boxes = boxes
        self.sent_bytes: Counter[str] = Counter()
        self.refused = 0

    def send(self, rank: int, message: Message) -> None:
        frames = encode(message, "run")
        if rank != self.rank:
            self.sent_bytes[message.kind] += sum(len(frame) for frame in frames)
        self.boxes[rank].put(decode(frames, "run"))

    def receive(self, timeout: float | None = 0.0) -> Message | None:
        try:
            return self.boxes[self.rank].get(timeout != 0.0, timeout or None)
        except queue.Empty:
            return None


def run_on_threads(
    plan: Plan, mode: Mode, minibatches: int, monkeypatch: pytest.MonkeyPatch, emulation: Emulation | None = None
) -> tuple[list[list[str]], int]:
    """Every worker's passes in their order, and all bytes sent; at hardly any time unless an emulation is given."""
    passes: dict[int, list[str]] = defaultdict(list)
    for name in ("forward", "forward_loss", "backward"):
        real = getattr(EmulatedEngine, name)

        def noted(self: EmulatedEngine, key: int, *rest: Any, name: str = name, real: Any = real) -> Any:
            passes[id(self)].append(f"{name[0].upper()}{key}")
            return real(self, key, *rest)

        monkeypatch.setattr(EmulatedEngine, name, noted)
    options = RunOptions(plan=plan, run_dir=Path(), data="", epochs=1, mode=mode)
    emulation = emulation or Emulation(small_profile(), 1e-6)
    boxes: dict[int, queue.SimpleQueue[Message]] = {rank: queue.SimpleQueue() for rank in range(plan.workers)}
    posts = [Post(rank, boxes) for rank in boxes]
    stages = []
    for rank, post in enumerate(posts):
        inbox = Inbox(post, str(rank), 30.0, lambda text: None)  # type: ignore[arg-type]
        inbox.handle("score", lambda message: None)
        stages.append(
            assemble_emulated(options, emulation, Links(place_of(plan, rank), post, inbox), Recorder(time.monotonic))
        )  # type: ignore[arg-type]
    segment = Segment(0, True, 0, 0, 0, minibatches, 4, 4, 0.1)
    threads = [threading.Thread(target=stage.runner.run, args=(segment,)) for stage in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [passes[id(stage.engine)] for stage in stages], sum(post.sent_bytes.total() for post in posts)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ("1-1-1", Mode()),
        ("2-1", Mode()),
        ("1-2", Mode("vertical-sync")),
        ("3", Mode(sync="bsp")),
        ("1-1", Mode("none")),
        ("2-1", Mode("2bw", group=4)),
    ],
)
def test_passes_come_in_the_order_of_the_schedule_and_send_the_bytes_of_the_plan(
    config: str, mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = read_plan(written(tmp_path, config)[1])
    passes, sent = run_on_threads(plan, mode, 12, monkeypatch)
    expected = []
    for rank in range(plan.workers):
        stage, replica = plan.stage_of(rank)
        expected.append([str(item) for item in work_order(replica, stage.replicas, stage.in_flight, 12)])
    assert passes == expected
    a_minibatch = plan.predicted.bytes_per_minibatch
    if mode.weights == "2bw":  # One update for four minibatches of two replicas each.
        a_minibatch -= 3_000 / 2
    assert 12 * a_minibatch - 12 * 4 <= sent <= 12 * (a_minibatch + HEADERS)


def test_replicas_in_step_update_within_their_backward_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = read_plan(written(tmp_path, "2")[1])
    profile = small_profile()
    slower = tuple(layer.model_copy(update={"backward_ms": 10.0}) for layer in profile.layers)
    within: set[int] = set()
    updates: list[bool] = []
    backward, step = EmulatedEngine.backward, NoArithmetic.step

    def noted_backward(self: EmulatedEngine, *arguments: Any) -> Any:
        within.add(threading.get_ident())
        try:
            return backward(self, *arguments)
        finally:
            within.discard(threading.get_ident())

    def noted_step(*arguments: Any) -> None:
        updates.append(threading.get_ident() in within)
        step(*arguments)

    monkeypatch.setattr(EmulatedEngine, "backward", noted_backward)
    monkeypatch.setattr(NoArithmetic, "step", noted_step)
    emulation = Emulation(profile.model_copy(update={"layers": slower}), 1.0)
    run_on_threads(plan, Mode(sync="bsp"), 8, monkeypatch, emulation)
    # The last layer's bucket is complete 20 ms before the pass ends.
    assert any(updates)


@pytest.mark.parametrize("config", ["1-2", "3"])
@pytest.mark.parametrize("gradients", ["topk:0.05", "powersgd:4", "onebit"])
def test_a_compressed_plan_sends_its_bytes(
    config: str, gradients: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = read_plan(written(tmp_path, config)[1])
    options = ("--compress-gradients", gradients, "--compress-activations", "int8")
    plan = read_plan(written(tmp_path, config, *options)[1])
    assert plan.predicted.bytes_per_minibatch < 0.3 * plain.predicted.bytes_per_minibatch
    _, sent = run_on_threads(plan, Mode(sync="bsp"), 12, monkeypatch)
    expected = 12 * plan.predicted.bytes_per_minibatch
    for stage in plan.stages:  # The last round of a segment travels whole.
        whole = stage.predicted.trainable_bytes or 0
        compressed = stage_bytes_after(parse_gradients(gradients), whole, stage.replicas)
        expected += 2 * (stage.replicas - 1) * (whole - compressed)
    assert expected * 0.995 <= sent <= expected + 12 * HEADERS


# Whole runs


@pytest.mark.parametrize(("config", "flush"), [("1-1", None), ("2-1", None), ("2", 8)])
def test_a_run_reports_its_pace_and_no_result(config: str, flush: int | None, tmp_path: Path) -> None:
    profile, plan = written(tmp_path, config)
    options = [] if flush is None else ["--flush", flush]
    result = emulate(tmp_path, plan, profile, "--time-scale", 0.5, "--minibatches", 40, *options)
    assert result.exit_code == 0, result.output
    assert "Emulated" in result.stdout
    assert "loss" not in result.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    pace = report["emulated"]
    assert report["device"] == "emulated"
    assert report["minibatches"] == 40
    assert pace["time_scale"] == 0.5
    assert pace["measured_minibatches"] > 0
    # Waiting is never too short; all that is above that is the machine's.
    slowest = max(stage.predicted.compute_ms / stage.replicas for stage in read_plan(plan).stages)
    assert pace["minibatch_ms"] >= slowest * 0.999
    assert pace["samples_per_second"] == pytest.approx(4000 / pace["minibatch_ms"])
    if flush is None:
        planned = read_plan(plan).predicted.bytes_per_minibatch
        assert planned - 4 <= report["training_bytes_sent"] / 40 <= planned + HEADERS
    assert not {path.name for path in (tmp_path / "run").iterdir()} & {"metrics.jsonl", "model.pt", "options.json"}


def test_a_profile_of_the_original_release_runs(tmp_path: Path) -> None:
    profile = original_profiles.original_path("alexnet")
    plan = plan_for(tmp_path, profile, "--machines", 2, "--strategy", "straight")
    result = emulate(tmp_path, plan, profile, "--time-scale", 0.01, "--minibatches", 4)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    planned = read_plan(plan).predicted.bytes_per_minibatch
    assert planned - 8 <= report["training_bytes_sent"] / 4 <= planned + HEADERS
    assert report["emulated"]["minibatch_ms"] is None or report["emulated"]["minibatch_ms"] > 0


# What is refused


def assert_refused(result: Result, message: str, code: int = 1) -> None:
    assert result.exit_code == code, result.output
    assert re.search(message, " ".join(result.stderr.split())), result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "digits"), "--data means nothing with --emulate, since it reads no data; leave it out"),
        (("--epochs", "2"), "--epochs means nothing with --emulate, since --minibatches says"),
        (("--init-from", "x.pt"), "--init-from means nothing"),
        (("--resume", "runs/x"), "--resume means nothing with --emulate, since it keeps no checkpoint"),
        (("--evaluate-only", "--init-from", "x"), "means nothing"),
        (("--target-accuracy", "0.5"), "--target-accuracy means nothing"),
        (("--sync", "asp"), "--sync asp is not emulated"),
    ],
)
def test_options_without_meaning_are_refused(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    profile, plan = written(tmp_path, "1")
    assert_refused(emulate(tmp_path, plan, profile, *options), message, 2)


def test_a_time_scale_needs_an_emulation(tmp_path: Path) -> None:
    _, plan = written(tmp_path, "1")
    result = CliRunner().invoke(main, ["--plan", str(plan), "--time-scale", "2"])
    assert_refused(result, "--time-scale belongs to --emulate PROFILE; add that, or leave it out", 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minibatch_size": 8}, "the plan's minibatch_size is 4, the profile's is 8"),
        ({"layers": small_profile().layers[:2]}, "the plan's layers is 3, the profile's is 2"),
        ({"model": small_profile().model.model_copy(update={"name": "huge"})}, "plan's model is tiny, the.*is huge"),
        (
            {"model": small_profile().model.model_copy(update={"fingerprint": "1"})},
            "plan's fingerprint is 0, the.*is 1",
        ),
        (
            {"layers": tuple(each.model_copy(update={"name": each.name + "x"}) for each in small_profile().layers)},
            r"stages\[0\].first_layer: the model has no layer",
        ),
    ],
)
def test_a_profile_of_something_else_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, plan = written(tmp_path, "1")
    write_record(tmp_path / "other.json", small_profile(**changes))
    assert_refused(emulate(tmp_path, plan, tmp_path / "other.json"), message)


# The steady state


def plan_with(config: str, tmp_path: Path) -> Plan:
    return read_plan(written(tmp_path, config)[1])


def test_the_pace_leaves_out_start_up_and_drain(tmp_path: Path) -> None:
    plan = plan_with("1-1", tmp_path)
    rounds = max(stage.in_flight for stage in plan.stages)
    start, drain = 2 * rounds, rounds
    ends, now = [], 0.0
    for number in range(start + 60 + drain):
        now += 0.02 if start <= number < start + 60 else 5.0
        ends.append(now)
    pace = pace_of(plan, 2.0, ends)
    assert pace.measured_minibatches == 60
    assert pace.minibatch_ms == pytest.approx(10.0)


def test_too_short_a_run_has_no_pace(tmp_path: Path) -> None:
    plan = plan_with("1-1", tmp_path)
    assert pace_of(plan, 1.0, [1.0, 2.0]).minibatch_ms is None
    assert pace_of(plan, 1.0, [1.0]).samples_per_second is None


def test_the_pace_of_a_flushed_run_is_that_of_whole_segments(tmp_path: Path) -> None:
    plan = plan_with("2", tmp_path)
    ends = [5.0, 5.5, 6.0, 6.5, 7.0, 7.5]
    pace = pace_of(plan, 1.0, ends, flush=4)
    assert pace.measured_minibatches == 8
    assert pace.minibatch_ms == pytest.approx(250.0)
