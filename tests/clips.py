"""Folders of captioned videos, made up for tests.

The frames of a clip show who does what to which thing, each as a direction of its own in their features: first the
one who acts, then the act, then the thing. Its captions say just that.

Not a test module: tests import it as `clips`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy

__all__ = ["WIDTH", "write_clips", "write_folder"]

WHO, DOES, WHAT = ("man", "woman", "dog"), ("cuts", "throws", "eats"), ("apple", "ball", "bread", "hat")
WIDTH = len(WHO) + len(DOES) + len(WHAT)


def write_folder(folder: Path, features: Mapping[str, numpy.ndarray], captions: str) -> Path:
    """Features of each video, and captions as they stand in the file."""
    (folder / "features").mkdir(parents=True)
    for video, array in features.items():
        numpy.save(folder / "features" / f"{video}.npy", array)
    (folder / "captions.csv").write_text(captions, encoding="utf-8")
    return folder


def write_clips(folder: Path, copies: int = 3, validation: Sequence[int] = (2,)) -> Path:
    """Clips of each of the 36 scenes, so many of each, 6 to 9 frames long; some of the copies are for validation."""
    noise = numpy.random.default_rng(0)
    features, lines, parts = {}, ["video,sentence"], {"train": [], "val": []}
    for number, (who, does, what) in enumerate(product(range(3), range(3), range(4))):
        for copy in range(copies):
            video = f"clip{number}_{copy}"
            shown = numpy.repeat([who, 3 + does, 6 + what], 2 + (number + copy) % 2)
            features[video] = (4 * numpy.eye(WIDTH)[shown] + noise.normal(0, 0.4, (len(shown), WIDTH))).astype(
                "float32"
            )
            lines.append(f'{video},"A {WHO[who]} {DOES[does]} the {WHAT[what]}."')
            parts["val" if copy in validation else "train"].append(video)
    for part, videos in parts.items():
        folder.mkdir(exist_ok=True)
        (folder / f"{part}.txt").write_text("\n".join(videos))
    return write_folder(folder, features, "\n".join(lines))
