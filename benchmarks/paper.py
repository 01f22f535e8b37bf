"""The paper's tables, measured on an emulated cluster: everything real but the arithmetic (docs/emulation.md).

Each machine is a network namespace whose link is limited each way; passes wait for a profile's times. All is slowed
down together, times and links, until this machine can move the bytes, and figures are in model time again. Measured is
the steady state of: one machine, data parallelism (bsp), model parallelism, a straight pipeline, and pd-plan's plan.

    cluster b    V100, 10 Gbit/s     the paper's Table 1, VGG-16 and Inception-v3; Figure 1
    cluster a    Titan X, 25 Gbit/s  Table 1 and Figure 13

The profiles are those below profiles/, which are estimated. `--originals FOLDER` takes measured ones of the original
release (vgg16.txt, ...) for cluster b. Needs root, iproute2 and the test dependencies.

    python benchmarks/paper.py --quick                       VGG-16, 8 machines, 10 Gbit/s: minutes
    python benchmarks/paper.py --json rows.json              all: hours
    python benchmarks/paper.py --cluster a --models vgg16 --machines 4 8
    python benchmarks/paper.py --ratios                      no run: where the simulator finds the paper's ratio
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent / "tests"))

from namespaces import network_of, why_not  # noqa: E402
from pd_format.graph_text import read_any_profile  # noqa: E402
from pd_format.jsonfile import write_record  # noqa: E402
from pd_format.plan import Plan  # noqa: E402
from pd_format.profile import Profile  # noqa: E402
from pd_plan.depth import loads_of, rate_depths  # noqa: E402
from pd_plan.network import Wiring  # noqa: E402
from pd_plan.planner import decide, partition_of  # noqa: E402

PROFILES = HERE.parent.parent / "profiles"
STRATEGIES = ("single", "data-parallel", "model-parallel", "straight", "auto")
TITLES = {"single": "one machine", "data-parallel": "bsp", "auto": "plan"}
BYTES_PER_SECOND = 300e6
"""That this machine is asked to move in all; the time scale follows from it."""
LEAST_MS = 150.0
"""Of a minibatch, as it passes: what the runtime takes itself is small beside it."""
QUEUE = "2s"
"""Room in a switch for what all machines send to one at once: slowed down, bursts last as much longer."""
LEAST_SCALE = 5.0
"""Of several workers: a message's way through the processes is small beside a pass."""
FRAME = 9000
"""Bytes of a packet: a cluster's network has such long ones."""
PAYLOAD = (FRAME - 52) / (FRAME + 14 + 66 / 2)
"""Of what a link's rate counts: headers of Ethernet, IP and TCP go off, and one acknowledgement of two packets, the
other way, where as much is sent both ways."""
MOST_PARAMETER_BYTES = 5e9
"""Of all workers of a data-parallel run together, whose messages this machine must hold."""


@dataclass(frozen=True)
class Cluster:
    """Machines of the paper."""

    device: str
    gbps: float
    text: str


CLUSTERS = {
    "a": Cluster("titan-x", 25, "cluster A: Titan X, 25 Gbit/s"),
    "b": Cluster("v100", 10, "cluster B: V100, 10 Gbit/s"),
}

PAPER: dict[tuple[str, str, int, str], str] = {
    # Table 1: times one machine, and times bsp.
    ("a", "vgg16", 4, "data-parallel"): "1.47 x one machine",
    ("a", "vgg16", 4, "auto"): "2-1-1: 3.14 x one machine, 2.13 x bsp, 90 % less sent",
    ("a", "vgg16", 8, "data-parallel"): "2.35 x one machine",
    ("a", "vgg16", 8, "auto"): "7-1: 7.04 x one machine, 2.99 x bsp, 95 % less sent",
    ("a", "vgg16", 16, "data-parallel"): "3.28 x one machine",
    ("a", "vgg16", 16, "auto"): "9-5-1-1: 9.86 x one machine, 3.00 x bsp, 91 % less sent",
    ("a", "inception_v3", 8, "auto"): "8: 1.00 x bsp",
    ("b", "vgg16", 8, "auto"): "7-1: 5.12 x bsp, 95 % less sent",
    ("b", "inception_v3", 8, "auto"): "7-1: 1.45 x bsp, 47 % less sent",
    # Figure 13: times one machine.
    ("a", "vgg16", 4, "straight"): "2.56 x one machine",
    ("a", "vgg16", 8, "straight"): "3.49 x one machine",
    ("a", "vgg16", 4, "model-parallel"): "below 1 x one machine",
    ("a", "vgg16", 8, "model-parallel"): "below 1 x one machine",
    # Figure 1, read from the bars: the part of the time that bsp loses to communication.
    ("b", "vgg16", 8, "data-parallel"): "about 85 % lost",
    ("b", "alexnet", 16, "data-parallel"): "about 90 % lost",
    ("b", "inception_v3", 16, "data-parallel"): "about 45 % lost",
    ("b", "resnet50", 16, "data-parallel"): "about 55 % lost",
}


@dataclass(frozen=True)
class Row:
    """One strategy; milliseconds a minibatch in model time."""

    cluster: str
    model: str
    machines: int
    strategy: str
    config: str
    in_flight: str
    time_scale: float
    model_ms: float
    """What the cost model says."""
    simulated_ms: float
    measured_ms: float | None
    """None where this machine cannot carry it."""
    single_ms: float
    less_sent: float
    paper: str


def plan_for(profile: Profile, machines: int, gbps: float, strategy: str) -> tuple[Plan, float]:
    """A plan as the paper makes it, and what the simulator says of it on links that TCP shares, in ms."""
    count = 1 if strategy == "single" else machines
    if strategy in ("straight", "model-parallel"):
        count = min(machines, 1 + sum(layer.cut for layer in profile.layers[:-1]))
    plan = decide(profile, count, gbps * 1e9, strategy).plan
    loads = loads_of(profile.layers, partition_of(plan))
    wiring = Wiring(gbps * 1e9 / 8000, "shared")
    simulated_ms = rate_depths(loads, wiring, [stage.in_flight for stage in plan.stages]).simulated_ms
    assert simulated_ms is not None, "a pipeline of so few machines is simulated"
    return plan, simulated_ms


def scale_for(plan: Plan, simulated_ms: float) -> float:
    """How much all is slowed down, times and links alike."""
    a_second = plan.predicted.bytes_per_minibatch / (simulated_ms / 1000)
    least = LEAST_SCALE if plan.workers > 1 else 1.0
    return max(least, a_second / BYTES_PER_SECOND, LEAST_MS / simulated_ms)


def fits(profile: Profile, plan: Plan) -> bool:
    """Whether this machine can hold what the workers of a data-parallel plan send each other."""
    trainable = sum(layer.trainable_bytes or 0 for layer in profile.layers)
    return len(plan.stages) > 1 or plan.workers * trainable <= MOST_PARAMETER_BYTES


def emulate(profile_path: Path, plan: Plan, time_scale: float, gbps: float, folder: Path, rounds: int) -> float:
    """Run a plan; ms a minibatch in steady state, in model time.

    Raises:
        RuntimeError: a worker failed; with what it said.
    """
    write_record(folder / "plan.json", plan)
    in_flight = max(stage.in_flight * stage.replicas for stage in plan.stages)
    # Twice what is in flight warms up and as much drains.
    minibatches = 3 * in_flight + max(rounds, rounds * in_flight // 2)
    rate = f"{round(gbps * 1e9 / time_scale / PAYLOAD)}bit"
    program = [sys.executable, "-c", "from pd_train.cli import main; main()", "--plan", str(folder / "plan.json")]
    program += ["--emulate", str(profile_path), "--time-scale", str(time_scale), "--minibatches", str(minibatches)]
    program += ["--insecure", "--peer-timeout", "60", "--trace-minibatches", "0:0"]
    with network_of(plan.workers, rate, QUEUE, FRAME) as hosts:
        if plan.workers > 1:
            program += ["--hosts", ",".join(f"{address}:29700" for address in hosts.addresses)]
        running = []
        for rank in range(plan.workers):
            command = [
                *program,
                "--run-dir",
                str(folder / f"run-{rank}"),
                *(["--rank", str(rank)] * (plan.workers > 1)),
            ]
            command = hosts.command(rank, command)
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        said = [each.communicate()[0] for each in running]
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"{process.args} ended with {process.returncode}:\n{text}")
    report = json.loads((folder / "run-0" / "report.json").read_text())
    return float(report["emulated"]["minibatch_ms"])


def rows_of(
    cluster: str, model: str, machines: int, path: Path, strategies: Sequence[str], rounds: int
) -> Iterator[Row]:
    """Measure the strategies of one model on one cluster."""
    profile, gbps = read_any_profile(path), CLUSTERS[cluster].gbps
    single_ms = sum(layer.forward_ms + layer.backward_ms for layer in profile.layers)
    done: set[tuple[str, tuple[int, ...]]] = set()
    for strategy in strategies:
        plan, simulated_ms = plan_for(profile, machines, gbps, strategy)
        depths = tuple(stage.in_flight for stage in plan.stages)
        scale = scale_for(plan, simulated_ms)
        measured_ms = None
        if (plan.config, depths) not in done and fits(profile, plan):
            with tempfile.TemporaryDirectory() as folder:
                measured_ms = emulate(path, plan, scale, gbps, Path(folder), rounds)
        done.add((plan.config, depths))
        yield Row(
            cluster=cluster,
            model=model,
            machines=machines,
            strategy=strategy,
            config=plan.config,
            in_flight="-".join(map(str, depths)),
            time_scale=round(scale, 1),
            model_ms=plan.predicted.minibatch_ms,
            simulated_ms=simulated_ms,
            measured_ms=measured_ms,
            single_ms=single_ms,
            less_sent=plan.predicted.communication_reduction,
            paper=PAPER.get((cluster, model, machines, strategy), ""),
        )


def lines_of(rows: Sequence[Row]) -> Iterator[str]:
    """A table in Markdown of one model on one cluster and so many machines."""
    first = rows[0]
    yield f"\n**{first.model}, {first.machines} machines, {CLUSTERS[first.cluster].text}**\n"
    yield "| | config | in flight | simulated ms | measured ms | off by | x one machine | x bsp | lost | the paper |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|---|"
    bsp = next((row for row in rows if row.strategy == "data-parallel"), None)
    for row in rows:
        same = next((one for one in rows if (one.config, one.in_flight) == (row.config, row.in_flight)), row)
        measured, base = same.measured_ms, None if bsp is None else bsp.measured_ms
        workers = sum(map(int, row.config.split("-")))
        # Replicas of a stage do not wait for each other but for the network: what is left is communication.
        lost = None if measured is None or row.strategy != "data-parallel" else 1 - row.single_ms / workers / measured
        cells = (
            TITLES.get(row.strategy, row.strategy),
            row.config if len(row.config) < 20 else f"{workers} stages of 1",
            row.in_flight if len(row.in_flight) < 20 else f"{row.in_flight[:8]}...",
            f"{row.simulated_ms:.1f}",
            "-" if measured is None else f"{measured:.1f}",
            "-" if measured is None else f"{100 * (measured / row.simulated_ms - 1):+.1f} %",
            "-" if measured is None else f"{row.single_ms / measured:.2f}",
            "-" if measured is None or base is None else f"{base / measured:.2f}",
            "" if lost is None else f"{100 * lost:.0f} %",
            row.paper,
        )
        yield f"| {' | '.join(cells)} |"


def scaled(profile: Profile, factor: float) -> Profile:
    """The profile at another minibatch size, as if time and activations went with it and parameters did not."""
    layers = tuple(
        layer.model_copy(
            update={
                "forward_ms": layer.forward_ms * factor,
                "backward_ms": layer.backward_ms * factor,
                "activation_bytes": round(layer.activation_bytes * factor),
            }
        )
        for layer in profile.layers
    )
    return profile.model_copy(update={"layers": layers})


def print_ratios(profile: Profile, machines: int) -> None:
    """What the plan gains over bsp by bandwidth and minibatch size: by the paper's cost model, and simulated."""
    print(
        f"\n{profile.model.name}, {machines} machines, plan over bsp: by the cost model / simulated on shared links\n"
    )
    sizes = (1.0, 0.5, 0.25)
    heads = [f"{size:g} of the minibatch" for size in sizes]
    print(f"| Gbit/s | {' | '.join(heads)} |\n|---|{'---|' * len(sizes)}")
    for gbps in (25, 10, 5, 2.5, 1):
        cells = []
        for size in sizes:
            smaller = scaled(profile, size)
            plan, simulated = plan_for(smaller, machines, gbps, "auto")
            bsp, bsp_simulated = plan_for(smaller, machines, gbps, "data-parallel")
            ratio = bsp.predicted.minibatch_ms / plan.predicted.minibatch_ms
            cells.append(f"{plan.config}: {ratio:.2f} / {bsp_simulated / simulated:.2f}")
        print(f"| {gbps:g} | {' | '.join(cells)} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The paper's tables on an emulated cluster.")
    parser.add_argument("--quick", action="store_true", help="VGG-16 on 8 machines of cluster b only")
    parser.add_argument("--cluster", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--models", nargs="+", default=["vgg16", "alexnet", "resnet50", "inception_v3", "gnmt"])
    parser.add_argument("--machines", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--originals", type=Path, help="folder of the original release's profiles, for cluster b")
    parser.add_argument("--rounds", type=int, default=8, help="that are measured, at least (default 8)")
    parser.add_argument("--json", type=Path, help="also append the rows there, an object a line")
    parser.add_argument("--ratios", action="store_true", help="run nothing: simulate other bandwidths and minibatches")
    asked = parser.parse_args()
    if asked.quick:
        asked.cluster, asked.models, asked.machines, asked.rounds = ["b"], ["vgg16"], [8], 4
    if not asked.ratios and (reason := why_not()) is not None:
        sys.exit(f"benchmarks/paper.py {reason}")
    for cluster in asked.cluster:
        for model in asked.models:
            path = PROFILES / CLUSTERS[cluster].device / f"{model}.json"
            if cluster == "b" and asked.originals is not None:
                path = asked.originals / f"{model}.txt"
            if not path.exists():
                continue
            for machines in asked.machines:
                if asked.ratios:
                    print_ratios(read_any_profile(path), machines)
                    continue
                rows = []
                for row in rows_of(cluster, model, machines, path, asked.strategies, asked.rounds):
                    rows.append(row)
                    print(f"({row.strategy}: {row.config}, scale {row.time_scale}: {row.measured_ms})", file=sys.stderr)
                    if asked.json is not None:
                        with asked.json.open("a") as file:
                            file.write(json.dumps(asdict(row)) + "\n")
                print("\n".join(lines_of(rows)), flush=True)


if __name__ == "__main__":
    main()
