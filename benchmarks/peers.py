"""Training beside the peers, in one run: the same network, minibatch, threads, allocator settings and links for all.

Each worker is a process of one thread on a host of its own: a network namespace, whose link is limited each way. With
two cores, more than two workers share them. Compared are

    loop       one process with plain PyTorch, without a network: what all else is divided by
    ddp        torch.nn.parallel.DistributedDataParallel over gloo, a minibatch a worker
    1f1b       torch.distributed.pipelining.Schedule1F1B over gloo, with the cuts of this project's straight plan, and
               MICROBATCHES whole minibatches a step, so that its update averages that many
    plan       this project: what pd-plan --strategy simulated chooses for the machines and the bandwidth
    bsp        this project: pd-plan --strategy data-parallel

Where links have no limit, pd-plan is told what `pd-train --measure-network` finds, as docs/clusters.md advises.

The figure is samples a second in steady state: of steps after the first for the peers, between the filling and the
draining of the pipeline for this project. Needs root, iproute2 and the test dependencies.

    python benchmarks/peers.py                                all: about an hour
    python benchmarks/peers.py --quick                        AlexNet on two workers, two rates: three minutes
    python benchmarks/peers.py --networks alexnet --workers 4 --rates 100mbit
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent / "tests"))

from namespaces import network_of, why_not  # noqa: E402
from pd_format.layers.chain import build_chain  # noqa: E402
from pd_format.layers.factory import build_model  # noqa: E402
from pd_format.plan import read_plan  # noqa: E402
from pd_format.profile import read_profile  # noqa: E402
from pd_train.launch import MALLOC  # noqa: E402
from pd_train.timing import Phase, WorkerTiming  # noqa: E402

MICROBATCHES = 8
LR = "0.001"


@dataclass(frozen=True)
class Network:
    """A model and its minibatch, which takes about a second on one thread."""

    factory: str
    arguments: tuple[str, ...]
    """For pd-profile."""
    minibatch: int
    shape: tuple[int, ...]
    """Of a sample."""
    classes: int


NETWORKS = {
    "alexnet": Network("torchvision.models:alexnet", ("alexnet",), 32, (3, 224, 224), 1000),
    "dense": Network(f"{HERE}:dense", (f"{HERE}:dense", "--input-shape", "1024"), 128, (1024,), 1000),
}
RATES = {"100mbit": "100mbps", "1gbit": "1gbps", "unlimited": "10gbps"}
"""As tc and as pd-plan write them; the last one is only where measuring begins."""


def dense() -> nn.Module:
    """Six fully connected layers: 76 million parameters for hardly any activations."""
    wide = [layer for _ in range(4) for layer in (nn.Linear(4096, 4096), nn.ReLU())]
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), *wide, nn.Linear(4096, 1000))


def minibatch_of(network: Network) -> tuple[Tensor, Tensor]:
    """The same random minibatch for everyone."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(network.minibatch, *network.shape, generator=generator)
    return samples, torch.randint(network.classes, (network.minibatch,), generator=generator)


class Repeated(Dataset[Any]):
    """One minibatch over and over, so that nobody waits for data."""

    def __init__(self, network: Network, minibatches: int) -> None:
        self._tensors = minibatch_of(network)
        self._samples = network.minibatch * minibatches

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(each[index % len(each)] for each in self._tensors)

    def rows(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Many samples, stacked."""
        return tuple(each[indices % len(each)] for each in self._tensors)


def alexnet_data() -> tuple[Repeated, Repeated]:
    """For training, and hardly anything to validate on, which is not measured."""
    return Repeated(NETWORKS["alexnet"], 1000), Repeated(NETWORKS["alexnet"], 1)


def dense_data() -> tuple[Repeated, Repeated]:
    """As above."""
    return Repeated(NETWORKS["dense"], 1000), Repeated(NETWORKS["dense"], 1)


def seconds_a_step(step: Callable[[], object], steps: int) -> float:
    """The median of the steps after a first one."""
    step()
    seconds = []
    for _ in range(steps):
        start = time.monotonic()
        step()
        seconds.append(time.monotonic() - start)
    return statistics.median(seconds)


def run_loop(network: Network, steps: int) -> float:
    """Samples a second of a plain loop."""
    model = build_model(network.factory, {}).train()
    return _train(model, network, steps, network.minibatch)


def run_ddp(network: Network, steps: int, rank: int, workers: int) -> float:
    """Samples a second of all workers."""
    model = nn.parallel.DistributedDataParallel(build_model(network.factory, {}).train())
    return _train(model, network, steps, network.minibatch * workers)


def _train(model: nn.Module, network: Network, steps: int, samples: int) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=float(LR), momentum=0.9)
    inputs, targets = minibatch_of(network)

    def step() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        loss.item()

    return samples / seconds_a_step(step, steps)


def run_1f1b(network: Network, steps: int, rank: int, workers: int, plan_path: Path) -> float:
    """Samples a second of the pipeline; stages are those of a plan, one worker each."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from pd_format.profile import InputSpec

    spec = InputSpec(name="x", shape=(network.minibatch, *network.shape), dtype="float32")
    chain = build_chain(build_model(network.factory, {}).train(), (spec,))
    names = [layer.name for layer in chain.layers]
    stage = read_plan(plan_path).stages[rank]
    module = chain.stage(names.index(stage.first_layer), names.index(stage.last_layer))
    pipeline = PipelineStage(_Single(module), rank, workers, torch.device("cpu"))
    schedule = Schedule1F1B(pipeline, MICROBATCHES, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(module.parameters(), lr=float(LR), momentum=0.9)
    inputs, targets = (torch.cat([each] * MICROBATCHES) for each in minibatch_of(network))

    def step() -> None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        elif rank == workers - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        optimizer.step()

    return network.minibatch * MICROBATCHES / seconds_a_step(step, steps)


class _Single(nn.Module):
    """A stage with one value in and one out."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.stage(value)[0]
        return result


def play_part(asked: argparse.Namespace) -> None:
    """One worker of a peer, in a process of its own; worker 0 prints what it measured."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network, rank, workers = NETWORKS[asked.networks[0]], asked.rank, asked.workers[0]
    if asked.part == "loop":
        print(run_loop(network, asked.steps))
        return
    address = f"tcp://{asked.address}:29500"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=workers)
    if asked.part == "ddp":
        result = run_ddp(network, asked.steps, rank, workers)
    else:
        result = run_1f1b(network, asked.steps, rank, workers, asked.plan)
    if rank == 0:
        print(result)
    torch.distributed.destroy_process_group()


class Bench:
    """One setting: a network and so many workers on links of one rate.

    Args:
        folder: for files.
        name: of the network.
        workers: on a host each.
        rate: of `RATES`.
        steps: that the peers are measured over.
    """

    def __init__(self, folder: Path, name: str, workers: int, rate: str, steps: int) -> None:
        self._folder = folder
        self._name = name
        self._workers = workers
        self._rate = rate
        self._steps = steps
        self._bandwidth = RATES[rate]
        self._is_measured = rate != "unlimited"
        self._environment = {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}

    def measure(self, contender: str) -> float:
        """Samples a second.

        Raises:
            RuntimeError: a process failed; with what it said.
        """
        with network_of(self._workers, None if self._rate == "unlimited" else self._rate) as hosts:
            if contender in ("plan", "bsp"):
                return self._own(hosts, contender)
            commands: list[list[str]] = []
            workers = 1 if contender == "loop" else self._workers
            if contender == "1f1b":
                self._plan("straight", hosts.addresses)
            for rank in range(workers):
                command = [sys.executable, str(HERE), "--part", contender, "--rank", str(rank), "--steps"]
                command += [str(self._steps), "--networks", self._name, "--workers", str(self._workers)]
                command += ["--address", hosts.addresses[0], "--plan", str(self._folder / "straight.json")]
                commands.append(hosts.command(rank, command))
            return float(self._run(commands)[0].split()[-1])

    def _own(self, hosts: Any, contender: str) -> float:
        if not self._is_measured:
            self._measure_network(hosts)
        plan_path = self._plan("simulated" if contender == "plan" else "data-parallel", hosts.addresses)
        plan = read_plan(plan_path)
        depth = max(stage.in_flight * stage.replicas for stage in plan.stages)
        # As many rounds in steady state as the peers have steps, after two that warm up.
        minibatches = depth + plan.stages[0].replicas * (self._steps + 2)
        run_dir = self._folder / f"{self._name}-{self._workers}-{self._rate}-{contender}"
        options = ["--plan", str(plan_path), "--minibatches", str(minibatches), "--threads", "1", "--lr", LR]
        options += ["--data", f"{HERE}:{self._name}_data", "--insecure"]
        commands = []
        for rank in range(plan.workers):
            more = ["--rank", str(rank), "--run-dir", f"{run_dir}-{rank}"]
            commands.append(hosts.command(rank, [*_program("pd_train"), *options, *more]))
        self._run(commands)
        epoch = json.loads(Path(f"{run_dir}-0/timing.jsonl").read_text().splitlines()[-1])
        paces = []
        for stage in plan.stages:
            for rank in stage.workers:
                timing = WorkerTiming.from_plain(epoch["workers"][rank])
                paces.append(timing.of_phase(Phase.STEADY) / timing.steady_minibatches / stage.replicas)
        print(f"    ({contender}: {plan.config}, in flight {[stage.in_flight for stage in plan.stages]})", flush=True)
        return plan.minibatch_size / statistics.median(paces)

    def _measure_network(self, hosts: Any) -> None:
        plan = str(self._plan("data-parallel", hosts.addresses))
        options = ["--plan", plan, "--measure-network", "--insecure", "--rank"]
        said = self._run(
            [hosts.command(rank, [*_program("pd_train"), *options, str(rank)]) for rank in range(self._workers)]
        )
        advice = re.search(r"pd-plan\s+--bandwidth\s+(\S+)", said[0])
        if advice is not None:
            self._bandwidth = advice[1]
        self._is_measured = True
        print(f"    (pd-plan is told {self._bandwidth})", flush=True)

    def _plan(self, strategy: str, addresses: Sequence[str]) -> Path:
        profile, plan = self._folder / f"{self._name}.json", self._folder / f"{strategy}.json"
        if not profile.exists():
            network = NETWORKS[self._name]
            options = ["--minibatch-size", str(network.minibatch), "--minibatches", "5", "--threads", "1"]
            self._run([[*_program("pd_profile"), *network.arguments, *options, "--output", str(profile)]])
        options = ["--profile", str(profile), "--bandwidth", self._bandwidth, "--strategy", strategy]
        options += ["--hosts", ",".join(addresses), "--links", "shared", "--output", str(plan)]
        if strategy == "straight":
            cuts = sum(layer.cut for layer in read_profile(profile).layers[:-1])
            assert self._workers <= cuts + 1
        self._run([[*_program("pd_plan"), *options]])
        return plan

    def _run(self, commands: Sequence[Sequence[str]]) -> list[str]:
        running = [
            subprocess.Popen(each, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for each in commands
        ]
        said = [each.communicate() for each in running]
        for process, (output, errors) in zip(running, said, strict=True):
            if process.returncode:
                raise RuntimeError(f"{process.args} ended with {process.returncode}:\n{output}\n{errors}")
        return [output for output, _ in said]


def _program(name: str) -> list[str]:
    return [sys.executable, "-c", f"from {name}.cli import main; main()"]


CONTENDERS = ("ddp", "1f1b", "bsp", "plan")


def compare(networks: Sequence[str], workers: Sequence[int], rates: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Measure and print a row a setting; a result is samples a second, and its ratio to one process."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in networks:
            alone = Bench(Path(folder), name, 1, "unlimited", 2 * steps).measure("loop")
            print(f"\n{name}, minibatch {NETWORKS[name].minibatch}: one process {alone:.1f} samples/s", flush=True)
            print("  ".join([f"{'times one process':<24}", *(f"{each:>8}" for each in CONTENDERS)]))
            for count in workers:
                for rate in rates:
                    bench = Bench(Path(folder), name, count, rate, steps)
                    figures = {contender: bench.measure(contender) for contender in CONTENDERS}
                    ratios = {contender: figure / alone for contender, figure in figures.items()}
                    text = f"{count} workers, {rate}"
                    print("  ".join([f"{text:<24}", *(f"{ratios[each]:>8.2f}" for each in CONTENDERS)]), flush=True)
                    rows.append({"network": name, "workers": count, "rate": rate, "alone": alone, **figures})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Training beside the peers, as ratios within one run.")
    parser.add_argument("--quick", action="store_true", help="AlexNet on two workers, at 1 Gbit/s and without limit")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--steps", type=int, default=3, help="that count, after one that warms up")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--part", choices=("loop", "ddp", "1f1b"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part is not None:
        play_part(asked)
        return
    if (reason := why_not()) is not None:
        sys.exit(f"benchmarks/peers.py {reason}")
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores")
    if asked.quick:
        asked.networks, asked.workers, asked.rates, asked.steps = ["alexnet"], [2], ["1gbit", "unlimited"], 2
    rows = compare(asked.networks, asked.workers, asked.rates, asked.steps)
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
