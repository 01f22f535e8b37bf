"""The project's own models, which have a bare name like those of torchvision."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SHIPPED", "Shipped"]


class Shipped(NamedTuple):
    """One model."""

    factory: str
    task: str
    """What it learns unless told otherwise."""
    about: str


SHIPPED = {
    "gpt": Shipped(
        "pd_format.layers.models.gpt:gpt",
        "language-modeling",
        "decoder-only language model; --model-arg layers=12 width=768 heads=12 context=1024 vocabulary=256",
    ),
    "s2vt": Shipped(
        "pd_format.layers.models.s2vt:s2vt",
        "captioning",
        "captions of videos; --model-arg vocabulary=12594 frames=50 words=30 features=4096 embedding=500 hidden=1000",
    ),
}
