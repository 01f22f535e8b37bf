"""Speed, as ratios and differences within one run: `make bench`, some six minutes on two idle cores.

Four questions, each with its goal:

1. One stage on one machine against a plain PyTorch loop: same model, data, order, optimizer, threads and allocator.
2. What the runtime adds to a minibatch at a stage. The layers take microseconds and a message has a few kilobytes, so
   nearly all that is measured is the runtime.
3. How long planning takes.
4. What the transport reaches of a plain socket, and beside gloo (`benchmarks/transport.py`, in its quick form).

Absolute times on a shared machine are worth little. The two sides of a comparison run in turns, each piece in new
processes; of a piece the fastest epoch counts, since what disturbs only ever slows down. Neighbouring pieces are
compared, and the table shows the median and the range of these pairs. Processor time, which other programs disturb
less, stands beside the time on the clock. On a busy machine only that column means anything.

    python benchmarks/bench.py                  all of it
    python benchmarks/bench.py --only plan      one part: loop, runtime, plan or transport
    python benchmarks/bench.py --pairs 9        more pairs, for a narrower answer
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from pd_format.jsonfile import write_record
from pd_format.layers.chain import build_chain
from pd_format.layers.factory import build_model, load_function
from pd_format.plan import Plan
from pd_format.profile import Device, InputSpec, LayerProfile, ModelSpec, Profile
from pd_format.versions import Mode
from pd_plan.cluster import Cluster
from pd_plan.cost import Chain
from pd_plan.partition import best_partition
from pd_plan.planner import make_plan
from pd_train.datasets.loading import load_datasets
from pd_train.events import EpochEnded, Event
from pd_train.launch import launch
from pd_train.options import OptimizerOptions, RunOptions
from pd_train.seeding import epoch_order

HERE = Path(__file__).resolve()
OPTIMIZER = OptimizerOptions("sgd", lr=0.01, momentum=0.9)
SEED = 0


@dataclass(frozen=True)
class Work:
    """What both sides of a comparison do."""

    name: str
    factory: str
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    """Of a minibatch of the model's one input."""
    data: str
    epochs: int
    """Of one piece; the first one warms up and does not count."""
    threads: int = 1
    """One, so that a busy neighbour on the other core does not decide."""

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """The input's description."""
        return (InputSpec(name="x", shape=self.shape, dtype="float32"),)


@dataclass(frozen=True)
class Piece:
    """One process, or one pipeline of them, doing a work once; seconds of an epoch of training."""

    wall: float
    cpu: float
    """Of all its processes together; NaN where the system does not tell."""


def digits_8() -> tuple[TensorDataset, TensorDataset]:
    """Handwritten digits of 8x8; hardly anything to validate on, since validation is not measured."""
    return _digits("digits", (32, 1, 8, 8), 1280)


def digits_32() -> tuple[TensorDataset, TensorDataset]:
    """Few of them, of 32x32 and three channels."""
    return _digits("digits:32", (32, 3, 32, 32), 320)


def _digits(name: str, shape: tuple[int, ...], samples: int) -> tuple[TensorDataset, TensorDataset]:
    training, validation = load_datasets(name, (InputSpec(name="x", shape=shape, dtype="float32"),), 10, shape[0])
    assert isinstance(training, TensorDataset)
    assert isinstance(validation, TensorDataset)
    return (
        TensorDataset(*(each[:samples] for each in training.tensors)),
        TensorDataset(*(each[:1] for each in validation.tensors)),
    )


def small_net() -> nn.Module:
    """So little to compute that the runtime is what takes time; 4 kB cross a cut at a minibatch of 32."""
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(),
        nn.Linear(32, 32), nn.ReLU(),
        nn.Linear(32, 32), nn.ReLU(),
        nn.Linear(32, 32), nn.Linear(32, 10),
    )  # fmt: skip


def small_data() -> tuple[TensorDataset, TensorDataset]:
    """500 minibatches of 32."""
    generator = torch.Generator().manual_seed(SEED)
    samples = torch.randn(16_000, 16, generator=generator)
    labels = torch.randint(10, (16_000,), generator=generator)
    return TensorDataset(samples, labels), TensorDataset(samples[:1], labels[:1])


LOOPS = (
    Work(
        "digits_cnn",
        f"{HERE.parent.parent}/examples/digits_cnn.py:digits_cnn",
        {},
        (32, 1, 8, 8),
        f"{HERE}:digits_8",
        5,
    ),
    Work("resnet18", "torchvision.models:resnet18", {"num_classes": 10}, (32, 3, 32, 32), f"{HERE}:digits_32", 5),
)
SMALL = Work("small", f"{HERE}:small_net", {}, (32, 16), f"{HERE}:small_data", 5)
SMALL_MINIBATCHES = 500


def run_pipeline(work: Work, plan: Plan) -> Piece:
    """Train with real workers; seconds are those of metrics.jsonl."""
    cpu: list[float] = []

    def show(event: Event) -> None:
        if isinstance(event, EpochEnded):
            cpu.append(_cpu_seconds_of_children())

    with tempfile.TemporaryDirectory() as folder:
        options = RunOptions(
            plan=plan,
            run_dir=Path(folder),
            data=work.data,
            epochs=work.epochs,
            optimizer=OPTIMIZER,
            threads=work.threads,
            mode=Mode(sync="overlap" if len(plan.stages) > 1 else "bsp"),
            seed=SEED,
            device="cpu",
        )
        launch(options, show)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines[1:]]
    return Piece(min(seconds), (cpu[-1] - cpu[0]) / len(seconds))


def run_plain(work: Work) -> Piece:
    """Train with a plain PyTorch loop, in a process that starts as a worker does.

    It comes from the server that workers are forked from, which `launch` started: it has the same imports and the same
    settings of the allocator, which speed up a plain loop too.
    """
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_train_plainly, args=(work, there))
    process.start()
    there.close()
    wall, cpu = here.recv()
    process.join()
    return Piece(min(wall[1:]), statistics.mean(cpu[1:]))


def _train_plainly(work: Work, connection: Connection) -> None:
    torch.set_num_threads(work.threads)
    torch.manual_seed(SEED)
    model = build_model(work.factory, work.kwargs).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=OPTIMIZER.lr, momentum=OPTIMIZER.momentum)
    made: Any = load_function(work.data)()
    samples, labels = made[0].tensors
    wall, cpu = [], []
    for epoch in range(work.epochs):
        start, cpu_start = time.monotonic(), time.process_time()
        total = 0.0
        for chosen in epoch_order(len(samples), SEED, epoch).split(work.shape[0]):
            optimizer.zero_grad()
            loss = cross_entropy(model(samples[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(chosen)
        wall.append(time.monotonic() - start)
        cpu.append(time.process_time() - cpu_start)
    connection.send((wall, cpu))


def _cpu_seconds_of_children() -> float:
    """What the running child processes have used so far."""
    try:
        ticks = 0
        for child in multiprocessing.active_children():
            fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return float("nan")


def plan_of(work: Work, config: str, in_flight: int | None = None) -> Plan:
    """A plan of these replicas and about as many layers in each stage."""
    chain = build_chain(build_model(work.factory, work.kwargs), work.inputs)
    profile = Profile(
        model=ModelSpec(name=work.name, factory=work.factory, kwargs=work.kwargs, fingerprint=chain.fingerprint),
        minibatch_size=work.shape[0],
        inputs=work.inputs,
        data=work.data,
        device=Device(kind="cpu", name="none", estimated=True),
        minibatches=0,
        layers=tuple(_layer(layer.name, 1.0, 1.0, 0, 0) for layer in chain.layers),
    )
    replicas = [int(part) for part in config.split("-")]
    plan = make_plan(profile, sum(replicas), 1e10, config=replicas)
    if in_flight is None:
        return plan
    return plan.model_copy(
        update={"stages": tuple(stage.model_copy(update={"in_flight": in_flight}) for stage in plan.stages)}
    )


def _layer(name: str, forward_ms: float, backward_ms: float, activation: int, parameters: int) -> LayerProfile:
    return LayerProfile(
        name=name,
        op="made up",
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        activation_bytes=activation,
        parameter_bytes=parameters,
        trainable_bytes=parameters,
    )


def compare_with_plain_loop(pairs: int) -> None:
    """Part 1."""
    _print_title(
        "One stage on one machine, against a plain PyTorch loop", "samples a second; ratio, goal at least 0.95"
    )
    _print_row("", "this project", "plain PyTorch", "ratio", "range", "by processor time")
    for work in LOOPS:
        plan = plan_of(work, "1")
        samples = len(load_function(work.data)()[0])  # type: ignore[index]
        runs = [(run_pipeline(work, plan), run_plain(work)) for _ in range(pairs)]
        ratios = [plain.wall / own.wall for own, plain in runs]
        _print_row(
            work.name,
            f"{samples / statistics.median(own.wall for own, _ in runs):.0f}",
            f"{samples / statistics.median(plain.wall for _, plain in runs):.0f}",
            f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{statistics.median(plain.cpu / own.cpu for own, plain in runs):.3f}",
        )


@dataclass(frozen=True)
class Setting:
    """A plan whose overhead is measured; seconds an epoch to seconds a minibatch at a stage, for both sides."""

    text: str
    config: str
    own: Callable[[float], float]
    plain: Callable[[float], float]
    in_flight: int | None = None


def _per_minibatch(seconds: float) -> float:
    return seconds / SMALL_MINIBATCHES


SETTINGS = (
    Setting("1, no messages", "1", _per_minibatch, _per_minibatch),
    Setting("1-1", "1-1", _per_minibatch, lambda plain: _per_minibatch(plain) / 2),
    # Nothing overlaps: the way of a message there and back is seen in full.
    Setting(
        "1-1, one at a time",
        "1-1",
        lambda own: _per_minibatch(own) / 2,
        lambda plain: _per_minibatch(plain) / 2,
        in_flight=1,
    ),
    Setting("1-1-1-1", "1-1-1-1", _per_minibatch, lambda plain: _per_minibatch(plain) / 4),
    # Each worker has half of the minibatches.
    Setting("2, synchronised", "2", lambda own: 2 * _per_minibatch(own), _per_minibatch),
)


def measure_runtime(pairs: int) -> None:
    """Part 2."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    _print_title(
        "What the runtime adds to a minibatch at a stage",
        f"milliseconds, messages of 4 kB; goal under 2. {cores} cores; a plan with more workers than cores shares them",
    )
    _print_row("", "this project", "plain PyTorch", "added", "range", "processor time added")
    for setting in SETTINGS:
        plan = plan_of(SMALL, setting.config, setting.in_flight)
        runs = [(run_pipeline(SMALL, plan), run_plain(SMALL)) for _ in range(pairs)]
        own = [1000 * setting.own(one.wall) for one, _ in runs]
        plain = [1000 * setting.plain(one.wall) for _, one in runs]
        added = [a - b for a, b in zip(own, plain, strict=True)]
        # Each minibatch visits every stage once, on one of its replicas.
        cpu = [1000 * _per_minibatch(one.cpu - other.cpu) / len(plan.stages) for one, other in runs]
        _print_row(
            setting.text,
            f"{statistics.median(own):.2f}",
            f"{statistics.median(plain):.2f}",
            f"{statistics.median(added):.2f}",
            f"{min(added):.2f} to {max(added):.2f}",
            f"{statistics.median(cpu):.2f}",
        )


def measure_planning(pairs: int) -> None:
    """Part 3."""
    _print_title("Planning made-up chains", "seconds; goal for 330 layers and 16 machines: under 1")
    _print_row("", "median", "", "", "range", "")
    for layers, machines in ((330, 16), (1500, 1024)):
        cluster = Cluster(machines, 10e9)
        seconds = []
        for seed in range(pairs):
            chain = Chain.of(_made_up_layers(layers, seed))
            start = time.monotonic()
            best_partition(chain, cluster)
            seconds.append(time.monotonic() - start)
        _print_row(
            f"{layers} layers, {machines} machines",
            f"{statistics.median(seconds):.2f}",
            "",
            "",
            f"{min(seconds):.2f} to {max(seconds):.2f}",
            "",
        )
    _print_title("The pd-plan command, 326 made-up layers, 16 machines", "seconds from start to end; goal: under 2")
    _print_row("", "median", "", "", "range", "")
    with tempfile.TemporaryDirectory() as folder:
        for options in ("", "--sweep", "--robustness 0.2", "--memory 4GB"):
            seconds = [_time_command(Path(folder), options, seed) for seed in range(pairs)]
            _print_row(
                f"pd-plan {options}",
                f"{statistics.median(seconds):.2f}",
                "",
                "",
                f"{min(seconds):.2f} to {max(seconds):.2f}",
                "",
            )


def _time_command(folder: Path, options: str, seed: int) -> float:
    profile = Profile(
        model=ModelSpec(name="made-up", factory="none:none", kwargs={}, fingerprint="none"),
        minibatch_size=32,
        inputs=(InputSpec(name="x", shape=(32, 1), dtype="float32"),),
        device=Device(kind="cpu", name="none", estimated=True),
        minibatches=0,
        layers=tuple(_made_up_layers(326, seed)),
    )
    write_record(folder / "profile.json", profile)
    command = [sys.executable, "-c", "from pd_plan.cli import main; main()", "--profile", "profile.json"]
    command += ["--machines", "16", "--bandwidth", "10gbps", *options.split()]
    start = time.monotonic()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start


def _made_up_layers(count: int, seed: int) -> Sequence[LayerProfile]:
    """As in a convolutional network: activations get smaller and parameters more, with much chance in both."""
    draw = random.Random(seed)
    layers = []
    for index in range(count):
        place = index / count
        time_ms = draw.lognormvariate(0.0, 1.0)
        activation = int(draw.lognormvariate(0.0, 0.7) * 3e7 * 0.01**place)
        parameters = int(draw.lognormvariate(0.0, 1.0) * 1e4 * 1000**place)
        layers.append(
            _layer(f"layer{index}", time_ms, 2 * time_ms, 0 if index == count - 1 else activation, parameters)
        )
    return layers


def _print_title(title: str, unit: str) -> None:
    print(f"\n{title}\n({unit})")


def _print_row(*cells: str) -> None:
    first, *others = cells
    print("  ".join([f"{first:<28}", *(f"{cell:>14}" for cell in others)]).rstrip(), flush=True)


def compare_transport(pairs: int) -> None:
    """Part 4."""
    _print_title(
        "The transport against a plain socket and gloo",
        "ratios of throughput to the socket's; goal at least 0.9 from 1 MB on a link that has a rate, and above gloo",
    )
    command = [sys.executable, str(HERE.parent / "transport.py"), "--quick", "--rounds", str(pairs)]
    subprocess.run(command, check=True)


PARTS: dict[str, Callable[[int], None]] = {
    "loop": compare_with_plain_loop,
    "runtime": measure_runtime,
    "plan": measure_planning,
    "transport": compare_transport,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Speed, as ratios and differences within one run.")
    parser.add_argument("--only", choices=PARTS, help="one part of the four")
    parser.add_argument("--pairs", type=int, default=3, help="pieces of each side, in turns (default 3)")
    asked = parser.parse_args()
    print(f"{asked.pairs} pairs; torch {torch.__version__}, Python {sys.version.split()[0]}")
    if asked.only not in ("plan", "transport"):
        # The first run starts the server that every process of the measurement comes from.
        run_pipeline(dataclasses.replace(SMALL, epochs=2), plan_of(SMALL, "1"))
    for name, part in PARTS.items():
        if asked.only in (None, name):
            part(max(1, asked.pairs))


if __name__ == "__main__":
    main()
