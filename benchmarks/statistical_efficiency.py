"""How many minibatches each synchronisation mode needs to learn the same thing: the evidence that the paper left out.

The paper (section 3.3) calls weight stashing critical and vertical sync negligible, and measures neither. Here every
mode runs the same schedule on the same minibatches from the same start, each with its own best learning rate from one
small grid. The runs use the single-process reference of the tests, which computes what the workers compute to the bit
(tests/test_equality.py), so that eight stages run on one core. Only asp has no such table: its gradients miss r - 1
updates each here, as among r workers that are equally fast; real runs report what they meet.

    python benchmarks/statistical_efficiency.py                      all of it, 30 to 40 minutes on two cores
    python benchmarks/statistical_efficiency.py --only digits/stash/4 --seeds 1      one row, one seed
    python benchmarks/statistical_efficiency.py --progress FILE      keeps finished runs there; goes on after a stop

Writes docs/evidence.json (every run), and the tables and the plot that docs/evidence.md shows.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import reference  # noqa: E402
from pd_format.schedule import paper_depths  # noqa: E402
from pd_format.versions import least_group  # noqa: E402
from pd_train.options import OptimizerOptions  # noqa: E402

DOCS = ROOT / "docs"
MODES = ("single", "bsp", "asp", "stash", "vertical-sync", "none", "flush", "2bw")
DEPTHS = (2, 4, 8)
GRID = (0.003, 0.01, 0.03, 0.1, 0.3)
TUNING_SEEDS = (100, 101)
MOMENTUM = 0.9


def digits_net() -> nn.Sequential:
    """Five convolutions and three fully connected layers for 8x8 pixels."""
    layers: list[nn.Module] = []
    for channels, out, stride in ((1, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 32, 2)):
        layers += [nn.Conv2d(channels, out, 3, padding=1, stride=stride), nn.BatchNorm2d(out), nn.ReLU()]
    layers += [nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


def text_net() -> nn.Sequential:
    """The next of 92 characters from the twelve before it: an embedding and seven fully connected layers."""
    layers: list[nn.Module] = [nn.Embedding(92, 16), nn.Flatten()]
    for inputs in (192, 128, 128, 128, 128, 128):
        layers += [nn.Linear(inputs, 128), nn.LayerNorm(128), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 92))


@functools.cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's handwritten digits, split and normalised as pd-train does."""
    from pd_format.profile import InputSpec
    from pd_train.datasets.loading import load_datasets

    training, validation = load_datasets("digits", [InputSpec(name="x", shape=(16, 1, 8, 8), dtype="float32")], 10, 16)
    return training, validation  # type: ignore[return-value]


@functools.cache
def text() -> tuple[TensorDataset, TensorDataset]:
    """The prose with which scikit-learn describes its data sets; the last sixth is for validation."""
    import sklearn.datasets

    folder = Path(sklearn.datasets.__file__).parent / "descr"
    prose = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.rst")))
    alphabet = sorted(set(prose))
    codes = torch.tensor([alphabet.index(character) for character in prose])
    windows = codes.unfold(0, 13, 1)
    cut = len(windows) * 5 // 6
    training, validation = windows[:cut:4], windows[cut + 13 :: 2]
    return TensorDataset(training[:, :12], training[:, 12]), TensorDataset(validation[:, :12], validation[:, 12])


@dataclass(frozen=True)
class Task:
    """Something real to learn without a network."""

    build: Any
    load: Any
    minibatch: int
    epochs: int
    target: float
    """Validation accuracy."""


TASKS = {
    "digits": Task(digits_net, digits, minibatch=32, epochs=15, target=0.97),
    "text": Task(text_net, text, minibatch=64, epochs=12, target=0.30),
}


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    task: str
    mode: str
    depth: int

    @property
    def name(self) -> str:
        return f"{self.task}/{self.mode}/{self.depth}"


def cells() -> Iterator[Cell]:
    for task in TASKS:
        yield Cell(task, "single", 1)
        for depth in DEPTHS:
            for mode in MODES[1:]:
                yield Cell(task, mode, depth)


Job = tuple[Cell, float, int]
"""What to train, at which learning rate, from which seed."""


def run(job: Job) -> dict[str, Any]:
    """Train once; the validation accuracy after each epoch."""
    cell, rate, seed = job
    torch.set_num_threads(1)
    task = TASKS[cell.task]
    training, validation = task.load()
    torch.manual_seed(seed)
    model = task.build()
    stages, rules = _stages(model, cell)
    accuracies: list[float] = []

    def watch(epoch: int, state: dict[str, Tensor]) -> bool:
        inputs, labels = validation.tensors
        with torch.no_grad():
            logits = torch.func.functional_call(model, state, (inputs,))
        accuracies.append((logits.argmax(1) == labels).double().mean().item())
        return any(not torch.isfinite(value).all() for value in state.values())

    options = OptimizerOptions("sgd", lr=rate, momentum=MOMENTUM)
    reference.train(model, stages, training, task.minibatch, task.epochs, options, seed, rules=rules, watch=watch)
    return {"cell": cell.name, "rate": rate, "seed": seed, "accuracies": accuracies}


def _stages(model: nn.Sequential, cell: Cell) -> tuple[list[reference.ReferenceStage], reference.Rules]:
    """Replicas of one stage for bsp and asp; else a straight pipeline with the eight weight layers spread evenly."""
    everything = [str(index) for index in range(len(model))]
    if cell.mode in ("single", "bsp", "asp"):
        sync = "asp" if cell.mode == "asp" else "bsp"
        return [reference.ReferenceStage(everything, cell.depth, 1)], reference.Rules(sync=sync)
    starts = [index for index, layer in enumerate(model) if isinstance(layer, (nn.Conv2d, nn.Linear, nn.Embedding))]
    firsts = [0, *(starts[s * len(starts) // cell.depth] for s in range(1, cell.depth)), len(model)]
    replicas = [1] * cell.depth
    depths = paper_depths(replicas)
    stages = [reference.ReferenceStage(everything[firsts[s] : firsts[s + 1]], 1, depths[s]) for s in range(cell.depth)]
    if cell.mode == "flush":
        return stages, reference.Rules(flush=cell.depth)
    group = least_group(replicas, depths) if cell.mode == "2bw" else None
    return stages, reference.Rules(weights=cell.mode, group=group)


def run_all(
    imap: Callable[[Callable[[Job], dict[str, Any]], Sequence[Job]], Iterator[dict[str, Any]]],
    progress: Path | None,
    jobs: Sequence[Job],
) -> list[dict[str, Any]]:
    """The runs of the jobs, in their order; those that `progress` holds are taken from there."""
    lines = progress.read_text().splitlines() if progress is not None and progress.exists() else []
    done = {(one["cell"], one["rate"], one["seed"]): one for one in map(json.loads, lines)}
    missing = [job for job in jobs if (job[0].name, *job[1:]) not in done]
    for count, one in enumerate(imap(run, missing), 1):
        done[one["cell"], one["rate"], one["seed"]] = one
        if progress is not None:
            with progress.open("a") as file:
                file.write(json.dumps(one) + "\n")
        print(f"{count}/{len(missing)} {one['cell']} at {one['rate']:g}", file=sys.stderr, flush=True)
    return [done[cell.name, rate, seed] for cell, rate, seed in jobs]


def summarise(cell: Cell, rate: float, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row of the table from the runs of all seeds."""
    task = TASKS[cell.task]
    training, _ = task.load()
    minibatches = -(-len(training) // task.minibatch)
    reached = [epochs_to(run["accuracies"], task.target) for run in runs]
    there = [epoch for epoch in reached if epoch is not None]
    final = [run["accuracies"][-1] if len(run["accuracies"]) == task.epochs else 0.0 for run in runs]
    return {
        "cell": cell.name,
        "rate": rate,
        "reached": f"{len(there)}/{len(runs)}",
        "epochs": _spread([float(epoch) for epoch in there]),
        "minibatches": _spread([float(epoch * minibatches) for epoch in there]),
        "final_accuracy": _spread(final),
    }


def epochs_to(accuracies: Sequence[float], target: float) -> int | None:
    """The first epoch, from 1, whose accuracy is at least the target."""
    return next((epoch for epoch, accuracy in enumerate(accuracies, 1) if accuracy >= target), None)


def score(runs: Sequence[dict[str, Any]], task: Task) -> tuple[float, float]:
    """What tuning looks for: the target in few epochs, then a high final accuracy."""
    epochs = [epochs_to(run["accuracies"], task.target) or 2 * task.epochs for run in runs]
    final = [run["accuracies"][-1] if len(run["accuracies"]) == task.epochs else 0.0 for run in runs]
    return -statistics.mean(epochs), statistics.mean(final)


def _spread(values: Sequence[float]) -> list[float] | None:
    if not values:
        return None
    return [statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="TASK/MODE/DEPTH of one row; writes nothing")
    parser.add_argument("--seeds", type=int, default=5, help="runs a row, after tuning")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--progress", type=Path, help="a file of finished runs, read first and added to")
    arguments = parser.parse_args()
    chosen = [cell for cell in cells() if arguments.only in (None, cell.name)]
    if not chosen:
        parser.error(f"--only {arguments.only}: expected one of {', '.join(cell.name for cell in cells())}")
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        train = functools.partial(run_all, pool.imap, arguments.progress)
        tuned = train([(cell, rate, seed) for cell in chosen for rate in GRID for seed in TUNING_SEEDS])
        best = {
            cell: max(
                GRID,
                key=lambda rate, cell=cell: score(
                    [one for one in tuned if one["cell"] == cell.name and one["rate"] == rate], TASKS[cell.task]
                ),
            )
            for cell in chosen
        }
        final = train([(cell, best[cell], seed) for cell in chosen for seed in range(arguments.seeds)])
    rows = [summarise(cell, best[cell], [one for one in final if one["cell"] == cell.name]) for cell in chosen]
    for row in rows:
        print(json.dumps(row))
    if arguments.only is None:
        record = {
            "torch": torch.__version__,
            "grid": GRID,
            "tuning_seeds": TUNING_SEEDS,
            "momentum": MOMENTUM,
            "targets": {name: task.target for name, task in TASKS.items()},
            "rows": rows,
            "tuning": tuned,
            "runs": final,
        }
        (DOCS / "evidence.json").write_text(json.dumps(record) + "\n")
        write_tables(rows)
        plot(final)


def write_tables(rows: Sequence[dict[str, Any]]) -> None:
    """Replace the tables between the markers of docs/evidence.md."""
    path = DOCS / "evidence.md"
    before, _, rest = path.read_text().partition("<!-- tables -->\n")
    _, _, after = rest.partition("<!-- end of tables -->")
    lines: list[str] = []
    for name, task in TASKS.items():
        lines += [
            f"\n**{name}**, target {task.target:.0%}, {task.epochs} epochs of minibatches of {task.minibatch}\n",
            "| mode | depth | rate | seeds that reach it | epochs | minibatches | final accuracy |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            task_name, mode, depth = row["cell"].split("/")
            if task_name == name:
                figures = [
                    _shown(row["epochs"], 1),
                    _shown(row["minibatches"], 0),
                    _shown(row["final_accuracy"], 1, percent=True),
                ]
                lines.append(f"| {mode} | {depth} | {row['rate']:g} | {row['reached']} | {' | '.join(figures)} |")
    path.write_text(before + "<!-- tables -->\n" + "\n".join(lines) + "\n\n<!-- end of tables -->" + after)


def _shown(spread: Sequence[float] | None, digits: int, percent: bool = False) -> str:
    if spread is None:
        return "-"
    mean, deviation = (100 * value if percent else value for value in spread)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}" + (" %" if percent else "")


def plot(runs: Sequence[dict[str, Any]]) -> None:
    """Mean validation accuracy over epochs, a panel for each task and depth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(TASKS), len(DEPTHS), figsize=(12, 7), sharex="row", sharey="row")
    for line, (name, task) in zip(axes, TASKS.items(), strict=True):
        for panel, depth in zip(line, DEPTHS, strict=True):
            for mode in MODES:
                cell = f"{name}/{mode}/{1 if mode == 'single' else depth}"
                curves = [one["accuracies"] for one in runs if one["cell"] == cell]
                padded = [curve + [0.0] * (task.epochs - len(curve)) for curve in curves]
                means = [100 * statistics.mean(column) for column in zip(*padded, strict=True)]
                style = {"color": "black", "linestyle": "--"} if mode == "single" else {}
                panel.plot(range(1, task.epochs + 1), means, label=mode, **style)
            panel.axhline(100 * task.target, color="grey", linewidth=0.5)
            panel.set_title(f"{name}, depth {depth}")
            panel.set_xlabel("epoch")
        line[0].set_ylabel("validation accuracy, %")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(DOCS / "evidence.svg")


if __name__ == "__main__":
    main()
