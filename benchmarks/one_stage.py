"""One stage on one device against a plain PyTorch loop: what the runtime itself costs.

Both train a model of torchvision on one minibatch over and over, in turns, in processes with the same allocator
settings. The figure is the pace after the first minibatches; of each side the median of its turns counts.

    python benchmarks/one_stage.py vgg16 --minibatch-size 64 --device cuda
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from pd_format.layers.factory import build_model
from pd_train.launch import MALLOC

HERE = Path(__file__).resolve()
SHAPE = "ONE_STAGE_SHAPE"
"""Environment variable: samples of the minibatch and their pixels, for `data`, which takes no arguments."""
LR = 0.001
WARM_UP = 5


class Repeated(Dataset[Any]):
    """One minibatch over and over, so that nobody waits for data."""

    def __init__(self, tensors: tuple[Tensor, ...], samples: int) -> None:
        self._tensors = tensors
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(each[index % len(each)] for each in self._tensors)

    def rows(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Many samples, stacked: as many as the minibatch has, without a copy, or fewer."""
        return tuple(each[: len(indices)] for each in self._tensors)


def data() -> tuple[Repeated, Repeated]:
    """For training, and hardly anything to validate on."""
    tensors = made_up(*map(int, os.environ[SHAPE].split("x")))
    return Repeated(tensors, 1000 * len(tensors[0])), Repeated(tensors, 1)


def made_up(samples: int, pixels: int) -> tuple[Tensor, Tensor]:
    """A minibatch of images and labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 3, pixels, pixels, generator=generator)
    return images, torch.randint(1000, (samples,), generator=generator)


def run_plain(asked: argparse.Namespace) -> float:
    """Seconds a minibatch of a plain loop, in this process."""
    torch.set_num_threads(asked.threads)
    device = torch.device(asked.device)
    images, labels = made_up(asked.minibatch_size, asked.pixels)
    if device.type == "cuda":
        images, labels = images.pin_memory(), labels.pin_memory()
    model = build_model(f"torchvision.models:{asked.model}", {}).train().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    start = 0.0
    for number in range(WARM_UP + asked.minibatches):
        if number == WARM_UP:
            start = time.monotonic()
        optimizer.zero_grad()
        loss = cross_entropy(model(images.to(device, non_blocking=True)), labels.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
        loss.item()
    return (time.monotonic() - start) / asked.minibatches


def run_own(asked: argparse.Namespace, folder: Path, turn: int) -> float:
    """Seconds a minibatch of this project, with a plan of one stage on one machine."""
    profile, plan, run_dir = folder / "profile.json", folder / "plan.json", folder / f"run-{turn}"
    common = ["--device", asked.device, "--threads", str(asked.threads)]
    if not plan.exists():
        size = ["--minibatch-size", str(asked.minibatch_size), "--input-shape", f"3,{asked.pixels},{asked.pixels}"]
        _call("pd_profile", asked.model, *size, "--minibatches", "3", *common, "--output", str(profile))
        network = ["--machines", "1", "--bandwidth", "10gbps"]
        _call("pd_plan", "--profile", str(profile), *network, "--output", str(plan))
    options = ["--minibatches", str(WARM_UP + asked.minibatches), "--data", f"{HERE}:data", "--lr", str(LR)]
    options += ["--trace-minibatches", f"{WARM_UP}:{WARM_UP + asked.minibatches}"]
    _call("pd_train", "--plan", str(plan), *options, *common, "--run-dir", str(run_dir))
    trace = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    starts = sorted(event["ts"] for event in trace if event.get("cat") == "forward")
    return float(starts[-1] - starts[0]) / 1e6 / (len(starts) - 1)


def _call(program: str, *arguments: str) -> None:
    command = [sys.executable, "-c", f"from {program}.cli import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{program} {' '.join(arguments)}\n{done.stdout}{done.stderr}")


def compare(asked: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds a minibatch of the turns of both sides."""
    environment = {**os.environ, **MALLOC}
    own, plain = [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(asked.pairs):
            own.append(run_own(asked, Path(folder), turn))
            command = [sys.executable, str(HERE), *sys.argv[1:], "--plain"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            plain.append(float(done.stdout))
    return own, plain


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="One stage on one device, against a plain PyTorch loop.")
    parser.add_argument("model", help="of torchvision")
    parser.add_argument("--minibatch-size", type=int, default=32)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--minibatches", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    os.environ[SHAPE] = f"{asked.minibatch_size}x{asked.pixels}"
    if asked.plain:
        print(run_plain(asked))
        return
    own, plain = (sorted(side) for side in compare(asked))
    print(f"{asked.model}, minibatch {asked.minibatch_size}, {asked.device}, {asked.minibatches} minibatches a turn")
    for name, side in (("this project", own), ("plain loop", plain)):
        middle = statistics.median(side)
        print(
            f"{name:<14} {1000 * middle:9.2f} ms a minibatch ({1000 * side[0]:.2f} to {1000 * side[-1]:.2f}), "
            f"{asked.minibatch_size / middle:9.1f} samples/s"
        )
    print(f"{'ratio':<14} {statistics.median(plain) / statistics.median(own):9.3f}")


if __name__ == "__main__":
    main()
