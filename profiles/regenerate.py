"""Makes every shipped profile and plan again, from nothing: `make profiles`, a minute on one core.

profiles/DEVICE/MODEL.json                    pd-profile MODEL --estimate DEVICE --minibatch-size ...
plans/DEVICE/MODEL-MACHINES-BANDWIDTH.json    pd-plan --profile ... --machines ... --bandwidth ...

python profiles/regenerate.py                           all, in place
python profiles/regenerate.py --folder out vgg16        one model, into another folder
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pd_plan.cli import main as pd_plan
from pd_profile.cli import main as pd_profile

ROOT = Path(__file__).resolve().parents[1]

DEVICES = ("v100", "titan-x")
MACHINES = (4, 8, 16)
BANDWIDTHS = ("10gbps", "25gbps")

#: Samples a minibatch. VGG-16, AlexNet, ResNet-50: `batch_size` in the driver_configs of the original release.
#: Inception-v3: by the input's bytes in the release's profile. S2VT: not known, a choice.
MINIBATCHES = {"vgg16": 64, "alexnet": 256, "resnet50": 128, "inception_v3": 128, "s2vt": 80}


def profile_path(folder: Path, device: str, model: str) -> Path:
    return folder / "profiles" / device / f"{model}.json"


def plan_path(folder: Path, device: str, model: str, machines: int, bandwidth: str) -> Path:
    return folder / "plans" / device / f"{model}-{machines}-{bandwidth}.json"


def regenerate(folder: Path, models: Sequence[str], devices: Sequence[str] = DEVICES) -> list[Path]:
    """Write the profiles and plans of some models below a folder, with the programs themselves; return the files."""
    written = []
    for device in devices:
        for model in models:
            profile = profile_path(folder, device, model)
            profile.parent.mkdir(parents=True, exist_ok=True)
            size = str(MINIBATCHES[model])
            _call(pd_profile, model, "--estimate", device, "--minibatch-size", size, "--output", str(profile))
            written.append(profile)
            for machines in MACHINES:
                for bandwidth in BANDWIDTHS:
                    plan = plan_path(folder, device, model, machines, bandwidth)
                    plan.parent.mkdir(parents=True, exist_ok=True)
                    network = ("--machines", str(machines), "--bandwidth", bandwidth)
                    _call(pd_plan, "--profile", str(profile), *network, "--output", str(plan))
                    written.append(plan)
    return written


def _call(program: object, *arguments: str) -> None:
    program.main(list(arguments), standalone_mode=False)  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MINIBATCHES)}  [default: all]")
    parser.add_argument("--folder", type=Path, default=ROOT, help="where profiles/ and plans/ are  [default: here]")
    options = parser.parse_args()
    unknown = [model for model in options.models if model not in MINIBATCHES]
    if unknown:
        parser.error(f"found {unknown[0]!r}; expected {', '.join(MINIBATCHES)}.")
    regenerate(options.folder, options.models or list(MINIBATCHES))


if __name__ == "__main__":
    main()
