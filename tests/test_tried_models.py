"""The record of tried models, and what `pd-profile --list-models` makes of it."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from pd_format.jsonfile import read_record
from pd_profile.cli import main
from pd_profile.shipped import SHIPPED
from pd_profile.tried import FORMAT, RECORD, VERSION, TriedModels, list_lines


def test_the_record_holds_every_model_of_the_installed_torchvision() -> None:
    torchvision = pytest.importorskip("torchvision")
    record = read_record(RECORD, TriedModels, FORMAT, VERSION)
    # What follows the plus tells builds of one version apart.
    if record.torchvision.partition("+")[0] != torchvision.__version__.partition("+")[0]:
        pytest.skip(f"recorded with torchvision {record.torchvision}; make models makes a record of the installed one")
    assert [model.name for model in record.models] == torchvision.models.list_models(module=torchvision.models)


def test_vision_transformers_are_on_record_as_passing() -> None:
    record = read_record(RECORD, TriedModels, FORMAT, VERSION)
    passing = {model.name for model in record.models if model.result == "passes"}
    assert passing >= {"vit_b_16", "swin_t", "vgg16", "alexnet", "resnet50", "inception_v3"}


def test_list_models_prints_every_name_and_exits() -> None:
    torchvision = pytest.importorskip("torchvision")
    result = CliRunner().invoke(main, ["--list-models"])
    assert result.exit_code == 0, result.output
    named = set(re.findall(r"^  (\S+)  ", result.output, re.MULTILINE))
    assert named == {*SHIPPED, *torchvision.models.list_models(module=torchvision.models)}
    assert re.search(r"^  vit_b_16 +passes +\d+ layers  3x224x224$", result.output, re.MULTILINE)


def test_a_model_that_is_not_on_record_was_not_tried() -> None:
    lines = list(list_lines(["resnet18", "resnet9000"], "99.0"))
    assert any(re.fullmatch(r"  resnet9000 +not tried", line) for line in lines)
    assert "Classification models of torchvision 99.0:" in lines
    assert any(re.match(r"Tried with torchvision \d+\.\d+", line) for line in lines)
