"""Profiles of the original PipeDream release, for tests with known answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_format.graph_text import read_any_profile
from pd_format.profile import Profile

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "pipedream-profiles"


def original_path(name: str) -> Path:
    """Where one of the profiles is; skips the test where they are not there."""
    path = FOLDER / f"{name}.txt"
    if not path.exists():
        pytest.skip("the profiles of the original release are not here")
    return path


def original_profile(name: str) -> Profile:
    """Read one of the profiles, or skip the test."""
    return read_any_profile(original_path(name))
