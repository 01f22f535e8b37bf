"""How far estimated profiles are from measured ones, and the calibration that they rest on: half a minute on one core.

    python benchmarks/estimates.py                the tables of docs/estimates.md
    python benchmarks/estimates.py --calibrate    the figures of `pd_profile.roofline.CALIBRATED`

It needs the text profiles that the original release measured on V100s, `profiler/*/profiles/*/graph.txt` of
msr-fiddle/pipedream, as FOLDER/vgg16.txt and so on; --profiles names the folder.

Layers are paired by kind (convolution, batch normalisation, ReLU, pooling, linear), in order. That profiler did not
time additions, concatenations and views, and it put the same time into every layer's forward pass, as small as the
layer is: `OVERHEAD_MS`, the smallest of all. It is taken off before layers are compared, and before calibrating.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torchvision
from torch import Tensor, nn

from pd_format.graph_text import read_any_profile
from pd_format.layers.chain import build_chain
from pd_format.layers.task import get_task
from pd_format.profile import InputSpec, LayerProfile, Profile
from pd_plan.planner import make_plan
from pd_profile.counting import Kind, Work
from pd_profile.estimating import LayerWork, count_work, estimated_summary
from pd_profile.machines import MACHINES
from pd_profile.record import build_record, describe_machine
from pd_profile.roofline import CALIBRATED, Shares, work_ms
from pd_profile.table import readable_op

V100 = MACHINES["v100"]
HERE = Path(__file__).resolve()

#: The minibatch of each measured profile, by the bytes of its input.
MINIBATCHES = {"vgg16": 128, "alexnet": 256, "resnet50": 128, "inception_v3": 128}

#: What the original profiler adds to the forward pass of each layer that it times.
OVERHEAD_MS = 0.273

#: What is paired, by the operation's name in either profile.
PAIRED = {
    "conv2d": "convolution",
    "batchnorm2d": "batch normalisation",
    "relu": "ReLU",
    "maxpool2d": "max pooling",
    "avgpool2d": "average pooling",
    "linear": "linear",
}
MEMORY_BOUND = {"batch normalisation", "ReLU", "max pooling", "average pooling"}


@dataclass(frozen=True)
class Pair:
    """A layer of ours, its operations, and the layer that was measured."""

    layer: LayerProfile
    work: LayerWork
    measured: LayerProfile
    kind: str

    @property
    def net_ms(self) -> float:
        """What was measured, without what the profiler added."""
        return self.measured.compute_ms - OVERHEAD_MS


@dataclass(frozen=True)
class Case:
    """One model: what was measured of it, what is estimated, and the layers that can be compared."""

    name: str
    measured: Profile
    works: list[LayerWork]
    estimated: Callable[[Shares], Profile]
    pairs: list[Pair]

    @property
    def measured_ms(self) -> float:
        return total_ms(self.measured)


def total_ms(profile: Profile) -> float:
    return sum(layer.compute_ms for layer in profile.layers)


def load(name: str, folder: Path) -> Case:
    """Count a model's work, and read what was measured of it."""
    measured = read_any_profile(folder / f"{name}.txt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = getattr(torchvision.models, name)().train()
    pixels = 299 if name == "inception_v3" else 224
    inputs = [InputSpec(name="x", shape=(MINIBATCHES[name], 3, pixels, pixels), dtype="float32")]
    chain = build_chain(model, inputs)
    works, stash_bytes = count_work(model, chain, inputs, get_task("classification"))

    def estimated(shares: Shares) -> Profile:
        return build_record(
            name=name,
            factory=f"torchvision.models:{name}",
            kwargs={},
            chain=chain,
            inputs=inputs,
            data="synthetic",
            task="classification",
            device=describe_machine(V100),
            summary=estimated_summary(works, V100, shares),
            stash_bytes=stash_bytes,
        )

    return Case(name, measured, works, estimated, list(_pairs(estimated(CALIBRATED), works, measured)))


def _pairs(ours: Profile, works: Sequence[LayerWork], theirs: Profile) -> Iterator[Pair]:
    waiting = defaultdict(list)
    for layer in reversed(theirs.layers):
        waiting[_kind_of(layer)].append(layer)
    for layer, work in zip(ours.layers, works, strict=True):
        kind = _kind_of(layer)
        if kind is not None and waiting[kind]:
            yield Pair(layer, work, waiting[kind].pop(), kind)


def _kind_of(layer: LayerProfile) -> str | None:
    return PAIRED.get(readable_op(layer.op).lower().replace("_", ""))


def calibrate(cases: Sequence[Case]) -> Shares:
    """The shares with which, of each kind of operation, all layers together take what was measured.

    First the bandwidth, from the layers that compute next to nothing; then each kind's share of the peak.
    """
    phases = [
        (works, max(time, 1e-3), pair.kind)
        for case in cases
        for pair in case.pairs
        for works, time in (
            (pair.work.forward, pair.measured.forward_ms - OVERHEAD_MS),
            (pair.work.backward, pair.measured.backward_ms),
        )
    ]
    bound = [(works, time) for works, time, kind in phases if kind in MEMORY_BOUND]
    bandwidth = _share(bound, lambda share: Shares({}, share))
    peak = {}
    for kind, backward in CALIBRATED.peak:
        chosen = [
            (works, time)
            for works, time, name in phases
            if name in ("convolution", "linear") and (kind, backward) in {(each.kind, each.backward) for each in works}
        ]
        if chosen:
            # What else runs in these phases computes nothing, so that its share of the peak does not matter.
            peak[kind, backward] = _share(
                chosen, lambda share: Shares(dict.fromkeys(CALIBRATED.peak, share), bandwidth)
            )
    return Shares(peak, bandwidth)


def _share(phases: Sequence[tuple[Sequence[Work], float]], shares: Callable[[float], Shares]) -> float:
    """Bisect, on a logarithmic scale, for the share with which the phases take what they took."""
    goal = sum(time for _, time in phases)
    low, high = 1e-3, 1e2
    for _ in range(40):
        middle = math.sqrt(low * high)
        trial = shares(middle)
        if sum(work_ms(work, V100, trial) for works, _ in phases for work in works) > goal:
            low = middle
        else:
            high = middle
    return middle


def compare(cases: Sequence[Case]) -> list[list[str]]:
    """A row a model: totals, and the errors of single layers."""
    rows = [["model", "minibatch", "measured", "estimated", "error", "without the model", "layers: median", "worst"]]
    for case in cases:
        estimate = total_ms(case.estimated(CALIBRATED))
        others = calibrate([other for other in cases if other is not case])
        others = Shares({**CALIBRATED.peak, **others.peak}, others.bandwidth)
        errors = layer_errors(case)
        worst = max(errors, key=lambda pair: abs(math.log1p(pair[0])))
        rows.append(
            [
                case.name,
                str(MINIBATCHES[case.name]),
                f"{case.measured_ms:.0f} ms",
                f"{estimate:.0f} ms",
                signed(estimate / case.measured_ms - 1),
                signed(total_ms(case.estimated(others)) / case.measured_ms - 1),
                f"{statistics.median(abs(error) for error, _ in errors):.0%}",
                f"{signed(worst[0])} ({worst[1]})",
            ]
        )
    return rows


def layer_errors(case: Case) -> list[tuple[float, str]]:
    """How far each estimated layer lies above what was measured of it, as a share of that, and its name."""
    return [(pair.layer.compute_ms / pair.net_ms - 1, pair.layer.name) for pair in case.pairs]


def compare_kinds(cases: Sequence[Case]) -> list[list[str]]:
    """A row a kind of layer: sums over all models, and the errors of single layers."""
    rows = [["layers", "how many", "measured", "estimated", "error", "layer: median"]]
    for kind in PAIRED.values():
        pairs = [pair for case in cases for pair in case.pairs if pair.kind == kind]
        measured, estimate = sum(pair.net_ms for pair in pairs), sum(pair.layer.compute_ms for pair in pairs)
        median = statistics.median(abs(pair.layer.compute_ms / pair.net_ms - 1) for pair in pairs)
        row = [kind, len(pairs), f"{measured:.0f} ms", f"{estimate:.0f} ms", signed(estimate / measured - 1)]
        rows.append([*map(str, row), f"{median:.0%}"])
    return rows


def compare_plans(cases: Sequence[Case]) -> list[list[str]]:
    """A row a model and network: the plan from either profile, and what the one from the estimate really costs."""
    rows = [["model", "network", "machines", "measured", "estimated", "the latter, by what was measured"]]
    for case in cases:
        estimate = case.estimated(CALIBRATED)
        for gbps in (10, 25):
            for machines in (4, 8, 16):
                plans = [
                    make_plan(profile, machines=machines, bandwidth_bps=gbps * 1e9, in_flight="noam")
                    for profile in (case.measured, estimate)
                ]
                cost = "same plan"
                if plans[0].config != plans[1].config:
                    replicas = [int(part) for part in plans[1].config.split("-")]
                    again = make_plan(
                        case.measured, machines=machines, bandwidth_bps=gbps * 1e9, config=replicas, in_flight="noam"
                    )
                    slower = again.predicted.minibatch_ms / plans[0].predicted.minibatch_ms - 1
                    cost = f"{slower:.0%} slower"
                rows.append([case.name, f"{gbps} Gbit/s", str(machines), plans[0].config, plans[1].config, cost])
    return rows


class _Recurrent(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(features, 1024), nn.Linear(1024, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.lstm(x)[0])
        return logits


def compare_recurrent(folder: Path) -> list[list[str]]:
    """GNMT's long short-term memories, which no figure was calibrated with: 48 steps of 32 samples, by their bytes."""
    rows = [["LSTM", "measured forward", "estimated", "measured backward", "estimated"]]
    measured = [layer for layer in read_any_profile(folder / "gnmt.txt").layers if layer.op.startswith("LSTM(")]
    for features in (1024, 2048):
        layers = [layer for layer in measured if layer.op == f"LSTM({features}, 1024)"]
        inputs = [InputSpec(name="x", shape=(48, 32, features), dtype="float32")]
        model = _Recurrent(features).train()
        works, _ = count_work(model, build_chain(model, inputs), inputs, get_task("classification"))
        summary = estimated_summary(works, V100)
        row = [f"{features} to 1024, {len(layers)} of them"]
        for times, estimate in (
            ([layer.forward_ms for layer in layers], summary.forward_ms[0]),
            ([layer.backward_ms for layer in layers], summary.backward_ms[0]),
        ):
            row += [f"{statistics.median(times):.2f} ms", f"{estimate:.2f} ms"]
        rows.append(row)
    return rows


def signed(share: float) -> str:
    return f"{share:+.0%}" if round(share, 2) else "0%"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, default=HERE.parents[2] / "shared" / "pipedream-profiles")
    parser.add_argument("--calibrate", action="store_true")
    options = parser.parse_args()
    missing = [name for name in (*MINIBATCHES, "gnmt") if not (options.profiles / f"{name}.txt").is_file()]
    if missing:
        parser.error(f"there is no {missing[0]}.txt in {options.profiles}; name the folder with --profiles.")
    cases = [load(name, options.profiles) for name in MINIBATCHES]
    if options.calibrate:
        shares = calibrate(cases)
        for (kind, backward), share in shares.peak.items():
            print(f"{Kind(kind).name:12} {'backward' if backward else 'forward':9} {share:.3f}")
        print(f"bandwidth              {shares.bandwidth:.3f}")
        return
    for rows in (compare(cases), compare_kinds(cases), compare_recurrent(options.profiles), compare_plans(cases)):
        print(markdown(rows), end="\n\n")


if __name__ == "__main__":
    main()
