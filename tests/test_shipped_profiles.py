"""The shipped profiles and plans are what the programs make, and estimates are as far from measured ones as said."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from original_profiles import original_path
from pd_format.plan import read_plan
from pd_format.profile import read_profile
from pd_plan.planner import make_plan
from pd_profile.roofline import CALIBRATED

ROOT = Path(__file__).resolve().parents[1]

#: Another release of torch may take an operation apart in another way.
TOLERANCE = 0.05


def script(path: str) -> ModuleType:
    """A script of the repository, as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


regenerate = script("profiles/regenerate.py")


def differences(ours: Any, shipped: Any, place: str = "") -> Iterator[str]:
    """Where two files differ: figures by more than the tolerance, anything else at all, versions not counted."""
    if isinstance(ours, dict) and isinstance(shipped, dict):
        for key in ours.keys() | shipped.keys():
            if key != "versions":
                yield from differences(ours.get(key), shipped.get(key), f"{place}.{key}")
    elif isinstance(ours, list) and isinstance(shipped, list) and len(ours) == len(shipped):
        for index, pair in enumerate(zip(ours, shipped, strict=True)):
            yield from differences(*pair, f"{place}[{index}]")
    elif ours != shipped:
        figures = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (ours, shipped))
        if not figures or ours != pytest.approx(shipped, rel=TOLERANCE):
            yield f"{place}: {ours!r} made now, {shipped!r} shipped"


# One device a model is enough, since only two figures differ between devices; Inception-v3 would take longest.
@pytest.mark.parametrize(
    ("model", "device"), [("vgg16", "v100"), ("alexnet", "titan-x"), ("resnet50", "titan-x"), ("s2vt", "v100")]
)
def test_shipped_files_are_what_the_programs_make(model: str, device: str, tmp_path: Path) -> None:
    for made in regenerate.regenerate(tmp_path, [model], [device]):
        shipped = ROOT / made.relative_to(tmp_path)
        texts = [json.loads(path.read_text(encoding="utf-8")) for path in (made, shipped)]
        assert list(differences(*texts)) == [], f"{shipped}: run `make profiles` and look at what changed"


def test_every_shipped_plan_is_that_of_its_shipped_profile() -> None:
    found = {path.relative_to(ROOT) for path in (ROOT / "plans").rglob("*.json")}
    expected = set()
    for device in regenerate.DEVICES:
        for model in regenerate.MINIBATCHES:
            profile = read_profile(regenerate.profile_path(ROOT, device, model))
            assert profile.device.estimated
            assert profile.minibatch_size == regenerate.MINIBATCHES[model]
            for machines in regenerate.MACHINES:
                for bandwidth in regenerate.BANDWIDTHS:
                    path = regenerate.plan_path(ROOT, device, model, machines, bandwidth)
                    expected.add(path.relative_to(ROOT))
                    plan = read_plan(path)
                    assert (plan.model, plan.minibatch_size) == (profile.model, profile.minibatch_size)
                    rate = float(bandwidth.removesuffix("gbps")) * 1e9
                    assert (plan.machines, plan.bandwidth_bps) == (machines, rate)
                    assert make_plan(profile, machines, rate, in_flight="noam").config == plan.config
    assert found == expected


def test_a_difference_is_seen() -> None:
    shipped = {"a": [1.0, {"b": "x", "versions": {"torch": "1"}}], "c": True}
    assert list(differences({"a": [1.01, {"b": "x", "versions": {}}], "c": True}, shipped)) == []
    assert list(differences({"a": [1.1, {"b": "x"}], "c": True}, shipped)) == [".a[0]: 1.1 made now, 1.0 shipped"]
    assert list(differences({"a": [1.0, {"b": "y"}], "c": False}, shipped)) != []


@pytest.fixture(scope="module")
def estimates() -> ModuleType:
    return script("benchmarks/estimates.py")


@pytest.fixture(scope="module")
def cases(estimates: ModuleType) -> list[Any]:
    """All four, since all of them went into the calibration; skips where the measured profiles are not there."""
    return [estimates.load(name, original_path(name).parent) for name in estimates.MINIBATCHES]


def test_totals_are_within_a_quarter_of_what_was_measured(estimates: ModuleType, cases: list[Any]) -> None:
    for case in cases:
        assert estimates.total_ms(case.estimated(CALIBRATED)) == pytest.approx(case.measured_ms, rel=0.25), case.name


def test_the_shares_are_those_of_the_calibration(estimates: ModuleType, cases: list[Any]) -> None:
    shares = estimates.calibrate(cases)
    assert shares.bandwidth == pytest.approx(CALIBRATED.bandwidth, rel=TOLERANCE)
    assert dict(shares.peak) == pytest.approx(dict(CALIBRATED.peak), rel=TOLERANCE)


@pytest.mark.parametrize(("name", "config"), [("vgg16", "7-1"), ("alexnet", "6-1"), ("resnet50", "8")])
def test_the_plan_is_that_of_the_measured_profile(cases: list[Any], name: str, config: str) -> None:
    case = next(case for case in cases if case.name == name)
    for profile in (case.measured, case.estimated(CALIBRATED)):
        assert make_plan(profile, 8, 10e9, in_flight="noam").config == config
