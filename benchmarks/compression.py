"""What compression saves, and what it costs in learning: real runs of examples/digits_cnn.py on handwritten digits.

Every scheme trains by the same cuts, from the same starts and on the same minibatches, each at its own best learning
rate of a small grid (by one tuning seed: fewest epochs to the target, then the final accuracy). Bytes are what the
workers sent while they trained, as report.json counts them; accuracies are those of each epoch's validation.

    python benchmarks/compression.py                              all: up to 40 minutes on two cores
    python benchmarks/compression.py --only 2-1/onebit --seeds 1  one row, one seed
    python benchmarks/compression.py --progress FILE              keeps finished runs there; goes on after a stop

Prints the table that docs/evidence.md shows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pd_format.compression import Compression
from pd_format.jsonfile import write_record
from pd_format.plan import Plan
from pd_format.profile import Profile, read_profile
from pd_plan.planner import make_plan

MODEL = Path(__file__).resolve().parent.parent / "examples" / "digits_cnn.py"
CUTS = {"2-1": "10", "4": None}
"""Config, and the layer after which it is cut: the convolutions are replicated, or the whole model is."""
SCHEMES: dict[str, dict[str, tuple[str | None, str | None]]] = {
    "2-1": {
        "none": (None, None),
        "topk:0.01": ("topk:0.01", None),
        "powersgd:4": ("powersgd:4", None),
        "onebit": ("onebit", None),
        "bf16": (None, "bf16"),
        "int8": (None, "int8"),
    },
    "4": {
        "none": (None, None),
        "topk:0.01": ("topk:0.01", None),
        "powersgd:4": ("powersgd:4", None),
        "onebit": ("onebit", None),
    },
}
GRID = (0.003, 0.01)
TUNING_SEED = 100
EPOCHS = 8
TARGET = 0.98


def profile_of(folder: Path) -> Profile:
    """Of the model, with computed times: only its sizes and names matter here."""
    path = folder / "profile.json"
    arguments = [f"{MODEL}:digits_cnn", "--data", "digits", "--minibatch-size", "16", "--estimate", "v100"]
    call("pd_profile.cli", *arguments, "--output", str(path))
    return read_profile(path)


def plan_of(profile: Profile, config: str, gradients: str | None, activations: str | None) -> Plan:
    """Cut where `CUTS` says, whatever compression does to the costs."""
    layers = tuple(layer.model_copy(update={"cut": layer.name == CUTS[config]}) for layer in profile.layers)
    replicas = [int(part) for part in config.split("-")]
    compression = Compression.of(gradients, activations)
    profile = profile.model_copy(update={"layers": layers})
    return make_plan(profile, sum(replicas), 1e9, config=replicas, compression=compression)


def call(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of the programs."""
    program = f"from {module} import main; main()"
    return subprocess.run([sys.executable, "-c", program, *arguments], text=True, capture_output=True, check=False)


def train(plan: Plan, rate: float, seed: int) -> dict[str, Any]:
    """One run: bytes a minibatch, and the accuracy after each epoch until it diverged."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_record(folder / "plan.json", plan)
        options = {
            "--plan": folder / "plan.json",
            "--run-dir": folder / "run",
            "--epochs": EPOCHS,
            "--lr": rate,
            "--seed": seed,
            "--threads": 1,
        }
        done = call("pd_train.cli", *(str(part) for pair in options.items() for part in pair))
        metrics = folder / "run" / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        accuracies = [json.loads(line)["validation_accuracy"] for line in lines]
        if done.returncode and "the loss of" not in done.stderr:
            raise RuntimeError(done.stderr[-2000:])
        sent = None
        if not done.returncode:
            report = json.loads((folder / "run" / "report.json").read_text())
            sent = report["training_bytes_sent"] / report["minibatches"]
        planned = plan.predicted.bytes_per_minibatch
        return {"rate": rate, "seed": seed, "accuracies": accuracies, "sent": sent, "planned": planned}


def epochs_to(run: dict[str, Any]) -> int | None:
    """The first epoch whose validation reaches the target, from 1."""
    return next((epoch for epoch, found in enumerate(run["accuracies"], 1) if found >= TARGET), None)


def score(run: dict[str, Any]) -> tuple[float, float]:
    """Less is better."""
    final = run["accuracies"][-1] if run["sent"] is not None else 0.0
    return float(epochs_to(run) or EPOCHS + 1), -final


def row(name: str, runs: Sequence[dict[str, Any]], plain: float | None) -> str:
    """A line of the table."""
    reached = [epochs for run in runs if (epochs := epochs_to(run)) is not None]
    finals = [run["accuracies"][-1] for run in runs if run["sent"] is not None]
    sizes = [run["sent"] for run in runs if run["sent"] is not None]
    sent = statistics.mean(sizes) if sizes else None
    cells = [
        *name.split("/"),
        f"{runs[0]['rate']:g}",
        f"{runs[0]['planned'] / 1e3:.1f} kB",
        "diverged" if sent is None else f"{sent / 1e3:.1f} kB",
        "" if sent is None or plain is None else f"{1 - sent / plain:.0%}",
        f"{len(reached)}/{len(runs)}",
        _spread([float(each) for each in reached], 1),
        _spread([100 * each for each in finals], 1),
    ]
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", action="append", help="a row, such as 2-1/onebit")
    parser.add_argument("--progress", type=Path)
    arguments = parser.parse_args()
    kept: dict[str, Any] = {}
    if arguments.progress is not None and arguments.progress.exists():
        kept = json.loads(arguments.progress.read_text())
    with tempfile.TemporaryDirectory() as folder:
        profile = profile_of(Path(folder))

    def run(name: str, rate: float, seed: int) -> dict[str, Any]:
        key = f"{name} {rate:g} {seed}"
        if key not in kept:
            config, scheme = name.split("/")
            kept[key] = train(plan_of(profile, config, *SCHEMES[config][scheme]), rate, seed)
            print(f"# {key}: {kept[key]['accuracies']}", file=sys.stderr, flush=True)
            if arguments.progress is not None:
                arguments.progress.write_text(json.dumps(kept))
        found: dict[str, Any] = kept[key]
        return found

    print("| config | scheme | rate | planned | sent | saved | seeds that reach it | epochs | final accuracy, % |")
    print("|---|---|---|---|---|---|---|---|---|")
    plain: dict[str, float | None] = {}
    for config, schemes in SCHEMES.items():
        for scheme in schemes:
            name = f"{config}/{scheme}"
            if arguments.only and name not in arguments.only:
                continue
            best = min((run(name, rate, TUNING_SEED) for rate in GRID), key=score)["rate"]
            runs = [run(name, best, seed) for seed in range(arguments.seeds)]
            if scheme == "none":
                plain[config] = runs[0]["sent"]
            print(row(name, runs, plain.get(config)), flush=True)


if __name__ == "__main__":
    main()
