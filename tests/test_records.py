"""Profile and plan files: what is read back, and what is refused with the file's name and the field's path."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pd_format.errors import FormatError, UserError
from pd_format.jsonfile import write_record, write_text
from pd_format.plan import read_plan
from pd_format.profile import LayerProfile, read_profile
from pd_plan.planner import make_plan

PROFILE = """{
  "format": "pipedream-profile",
  "version": 1,
  "model": {"name": "tiny", "factory": "examples/tiny.py:build", "kwargs": {"width": 8}, "fingerprint": "abc"},
  "minibatch_size": 4,
  "inputs": [{"name": "x", "shape": [4, 8], "dtype": "float32"}],
  "device": {"kind": "cpu", "name": "test"},
  "minibatches": 3,
  "layers": [
    {"name": "fc1", "op": "Linear", "forward_ms": 1, "backward_ms": 2.5, "activation_bytes": 128,
     "parameter_bytes": 1000},
    {"name": "fc2", "op": "Linear", "forward_ms": 2.0, "backward_ms": 4.0, "activation_bytes": 0,
     "parameter_bytes": 500, "trainable_bytes": 0, "stash_bytes": 64, "cut": false}
  ]
}
"""

GOLDEN_LAYER = {
    "name": "fc1",
    "op": "Linear",
    "forward_ms": 1.0,
    "backward_ms": 2.5,
    "forward_ms_std": 0.0,
    "backward_ms_std": 0.0,
    "activation_bytes": 128,
    "parameter_bytes": 1000,
    "trainable_bytes": 1000,
    "stash_bytes": 0,
    "cut": True,
}


@pytest.fixture
def profile_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(PROFILE)
    return path


@pytest.fixture
def plan_path(profile_path: Path, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    write_record(path, make_plan(read_profile(profile_path), 3, 1e9, config=(2, 1)))
    return path


def edited(path: Path, edit: Callable[[Any], object]) -> Path:
    """Change a file's JSON in place."""
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))
    return path


def test_a_profile_is_read_with_its_defaults(profile_path: Path) -> None:
    profile = read_profile(profile_path)

    assert (profile.data, profile.task, profile.precision) == ("synthetic", "classification", "fp32")
    assert not profile.device.estimated
    assert profile.model.kwargs == {"width": 8}
    first, second = profile.layers
    assert first.model_dump() == GOLDEN_LAYER
    assert (second.trainable_bytes, second.stash_bytes, second.cut, second.compute_ms) == (0, 64, False, 6.0)


def test_what_is_written_is_read_back_and_written_alike(profile_path: Path, plan_path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    for path, read in ((profile_path, read_profile), (plan_path, read_plan)):
        record = read(path)
        write_record(again, record)
        assert read(again) == record
        first = again.read_bytes()
        write_record(again, read(again))
        assert again.read_bytes() == first


def test_a_plan_file_holds_exactly_the_fields_of_the_design(plan_path: Path) -> None:
    plan = json.loads(plan_path.read_text())

    assert list(plan) == [
        "format", "version", "model", "minibatch_size", "inputs", "data", "task", "precision", "machines",
        "bandwidth_bps", "strategy", "config", "noam", "stages", "predicted", "hosts", "optimizer", "cost_model", "inference",
        "compress_gradients", "compress_activations",
    ]  # fmt: skip
    assert list(plan["stages"][0]) == [
        "index", "first_layer", "last_layer", "layers", "replicas", "workers", "in_flight", "predicted", "recompute",
    ]  # fmt: skip
    assert list(plan["stages"][0]["predicted"]) == [
        "compute_ms", "sync_ms", "memory_bytes", "trainable_bytes",
    ]  # fmt: skip
    assert list(plan["predicted"]) == [
        "minibatch_ms", "single_machine_ms", "data_parallel_ms", "speedup", "speedup_over_data_parallel",
        "bytes_per_minibatch", "data_parallel_bytes_per_minibatch", "communication_reduction",
    ]  # fmt: skip


def refusal(read: Callable[[Path], object], path: Path) -> str:
    """The message of a refused file; it always begins with the file's name."""
    with pytest.raises(FormatError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.endswith((".", ")"))
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda v: v.update(version=2), "version is 2; this program reads version 1. Make the file anew."),
        (lambda v: v.update(version=True), "version is True; this program reads version 1."),
        (lambda v: v.pop("version"), "version is None; this program reads version 1."),
        (lambda v: v.update(format="pipedream-plan"), "format is 'pipedream-plan'; expected 'pipedream-profile'."),
        (lambda v: v.pop("layers"), "layers: is missing."),
        (lambda v: v["layers"].clear(), "layers: found []; "),
        (lambda v: v["layers"][1].pop("forward_ms"), "layers[1].forward_ms: is missing."),
        (lambda v: v["layers"][1].update(speed=3), "layers[1].speed: is unknown; expected only the fields"),
        (lambda v: v["layers"][0].update(forward_ms="1"), "layers[0].forward_ms: found '1'; "),
        (lambda v: v["layers"][0].update(forward_ms=-1.0), "layers[0].forward_ms: found -1.0; "),
        (lambda v: v["layers"][0].update(parameter_bytes=1.5), "layers[0].parameter_bytes: found 1.5; "),
        (lambda v: v["layers"][0].update(parameter_bytes=-1), "layers[0].parameter_bytes: found -1; "),
        (lambda v: v["layers"][0].update(cut="yes"), "layers[0].cut: found 'yes'; "),
        (lambda v: v["layers"][0].update(cut=1), "layers[0].cut: found 1; "),
        (lambda v: v["layers"][1].update(name="fc1"), "layers[1].name: 'fc1' is also layers[0]; a name stands once."),
        (lambda v: v.update(minibatch_size=0), "minibatch_size: found 0; "),
        (lambda v: v["inputs"][0].update(shape=[]), "inputs[0].shape: found []; "),
        (lambda v: v["model"].update(factory="torchvision"), "model: factory is 'torchvision'; expected "),
        (lambda v: v["model"].update(name=None), "model.name: found None; "),
        (
            lambda v: (
                [layer.update(forward_ms=1e308) for layer in v["layers"]] and v["layers"][0].update(backward_ms=1e308)
            ),
            "layers: the sum of their times is not a finite number.",
        ),
    ],
)
def test_a_bad_field_is_refused_with_its_path(profile_path: Path, edit: Callable[[Any], object], message: str) -> None:
    assert refusal(read_profile, edited(profile_path, edit)).startswith(message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"forward_ms": 1,', '"forward_ms": NaN,', "layers[0].forward_ms: found NaN; expected a finite number."),
        ('"forward_ms": 1,', '"forward_ms": Infinity,', "layers[0].forward_ms: found Infinity; "),
        ('"forward_ms": 1,', '"forward_ms": -Infinity,', "layers[0].forward_ms: found -Infinity; "),
        ('"forward_ms": 1,', '"forward_ms": 1e999,', "layers[0].forward_ms: found inf; "),
        (
            '"minibatches": 3,',
            '"minibatches": 3, "minibatches": 4,',
            "minibatches: stands twice in one object; keep one of them.",
        ),
        ('"op": "Linear", "forward_ms": 2.0', '"op": "A", "op": "B", "forward_ms": 2.0', "layers[1].op: stands twice"),
        ('"version": 1', '"version": 1,,', "is not whole JSON (line 3, column "),
    ],
)
def test_text_that_is_not_a_profile_is_refused(profile_path: Path, old: str, new: str, message: str) -> None:
    assert old in PROFILE
    profile_path.write_text(PROFILE.replace(old, new, 1))

    assert refusal(read_profile, profile_path).startswith(message)


@pytest.mark.parametrize("kept", [0, 1, 40, len(PROFILE) // 2, len(PROFILE) - 3])
def test_a_file_that_is_cut_off_is_refused(profile_path: Path, kept: int) -> None:
    profile_path.write_text(PROFILE[:kept])

    assert refusal(read_profile, profile_path).startswith("is not whole JSON (line ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "holds a list; expected an object of format 'pipedream-profile'."),
        (b"3", "holds a int; expected an object"),
        (b"\x80\x02}q\x00.", "is not text ("),
        (b"[" * 100_000, "is nested too deeply to be a pipedream-profile file; name another."),
        (b'{"a": 1' + b"0" * 5000 + b"}", "a: found a whole number of 5001 digits; expected at most 20."),
    ],
)
def test_other_content_is_refused(profile_path: Path, content: bytes, message: str) -> None:
    profile_path.write_bytes(content)

    assert message in refusal(read_profile, profile_path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert (
        refusal(read_profile, tmp_path / "none.json")
        == "cannot be read (No such file or directory); name another file, or make it readable."
    )
    assert refusal(read_profile, tmp_path) == "cannot be read (Is a directory); name another file, or make it readable."


def test_more_than_one_problem_is_counted(profile_path: Path) -> None:
    path = edited(profile_path, lambda v: v["layers"][0].update(forward_ms=-1.0, speed=1, cut=3))

    assert refusal(read_profile, path).endswith("(2 more problems.)")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda v: v.update(version=2), "version is 2; this program reads version 1."),
        (lambda v: v.update(config="3"), "config: found '3'; the stages' replicas are '2-1'."),
        (lambda v: v.update(noam=3), "noam: found 3; 3 workers over the first stage's replicas give 2."),
        (lambda v: v.update(machines=2), "machines: found 2; the stages use 3 workers."),
        (lambda v: v["stages"][1].update(index=5), "stages[1].index: found 5; stages are numbered from 0, expected 1."),
        (lambda v: v["stages"][1].update(workers=[1]), "stages[1].workers: found [1]; with 1 replicas and workers"),
        (lambda v: v["stages"][0].update(layers=0), "stages[0].layers: found 0; "),
        (lambda v: v["stages"][0].update(in_flight=0), "stages[0].in_flight: found 0; "),
        (lambda v: v["stages"].clear(), "stages: found []; "),
        (lambda v: v.update(bandwidth_bps=0.0), "bandwidth_bps: found 0.0; "),
        (lambda v: v["predicted"].update(speedup=-1.0), "predicted.speedup: found -1.0; "),
        (lambda v: v["predicted"].update(communication_reduction=2.0), "predicted.communication_reduction: found 2.0"),
        (lambda v: v.update(hosts=[{"address": "a", "port": 1}]), "hosts: found 1; expected one for each of the 3"),
        (lambda v: v.update(hosts=[{"address": "a", "port": 0}] * 3), "hosts[0].port: found 0; "),
        (lambda v: v.update(hosts=[{"address": "a", "port": 5}] * 3), "hosts[1]: a port 5 is also hosts[0]; "),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(
    plan_path: Path, edit: Callable[[Any], object], message: str
) -> None:
    assert refusal(read_plan, edited(plan_path, edit)).startswith(message)


def test_a_plan_knows_the_stage_of_a_worker(plan_path: Path) -> None:
    plan = read_plan(plan_path)

    assert plan.workers == 3
    assert [(stage.index, replica) for stage, replica in map(plan.stage_of, range(3))] == [(0, 0), (0, 1), (1, 0)]
    with pytest.raises(ValueError, match="worker 3 of 3"):
        plan.stage_of(3)


def test_a_record_is_frozen() -> None:
    layer = LayerProfile.model_validate(GOLDEN_LAYER)

    with pytest.raises(ValidationError, match="frozen"):
        layer.name = "other"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)

    with pytest.raises(UserError, match=r"plan\.json: cannot be written \(No space left on device\); name another"):
        write_text(path, "new, never whole")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "old")
    seen = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(path.read_text()))

    write_text(path, "new")

    assert seen == ["old"]
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_written_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    write_text(tmp_path / "ours", "")
    (tmp_path / "plain").touch()

    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "plain")}
    assert len(modes) == 1


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")

    with pytest.raises(UserError, match=r"cannot be written \((Not a directory|File exists)\); name another place\."):
        write_text(tmp_path / "runs" / "plan.json", "{}")


@pytest.mark.parametrize("replicas", [10**9, 10**15, 2**64 - 1])
def test_a_plan_cannot_ask_for_more_memory_than_its_text(replicas: int, plan_path: Path) -> None:
    path = edited(plan_path, lambda v: v["stages"][0].update(replicas=replicas))

    assert refusal(read_plan, path).startswith("stages[0].workers: found [0")


@pytest.mark.parametrize("key", ["\x1b[31m", "\ud800", "x" * 1000])
def test_a_message_shows_no_control_characters_of_a_file(key: str, profile_path: Path) -> None:
    for change in (lambda v: v["device"].update({key: 1}), lambda v: v["device"].update({key: float("nan")})):
        text = refusal(read_profile, edited(profile_path, change))
        assert text.encode().decode().isprintable()
        assert len(text) < 200


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(FormatError, match=r"/dev/zero: is longer than 16 MiB; expected a JSON file\."):
        read_profile(Path("/dev/zero"))


def test_many_problems_of_a_kind_are_one(profile_path: Path) -> None:
    path = edited(profile_path, lambda v: v.update(layers=[{}] * 100_000))

    assert refusal(read_profile, path) == "layers[0].name: is missing. (6 more problems.)"


def test_an_object_with_thousands_of_fields_is_refused(profile_path: Path) -> None:
    path = edited(profile_path, lambda v: v["device"].update({str(number): 0 for number in range(5000)}))

    text = refusal(read_profile, path)
    assert text.startswith("device: holds 500")
    assert text.endswith(" fields; expected only the fields of the format.")
