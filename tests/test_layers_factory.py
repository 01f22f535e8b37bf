"""Naming and calling the function that makes a model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from pd_format.errors import UserError
from pd_format.layers.factory import build_model

_FILE = """
from __future__ import annotations
from dataclasses import dataclass
from torch import nn
from sibling_of_the_model import WIDTH

@dataclass
class Settings:
    width: int = WIDTH

def small(classes: int = 3) -> nn.Module:
    return nn.Linear(Settings().width, classes)

def broken(depth):
    raise RuntimeError("no such depth")

def number():
    return 4

constant = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "net.py").write_text(_FILE)
    (tmp_path / "models" / "sibling_of_the_model.py").write_text("WIDTH = 7\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_in_a_file_is_called_with_its_siblings_importable(folder: Path) -> None:
    before = list(sys.path)
    model = build_model("models/net.py:small", {"classes": 4})
    assert isinstance(model, nn.Linear)
    assert (model.in_features, model.out_features) == (7, 4)
    assert sys.path == before
    assert any(name.endswith("_net") and name.startswith("pd_user_") for name in sys.modules)


def test_two_files_of_one_name_are_two_modules(folder: Path) -> None:
    (folder / "net.py").write_text("from torch import nn\ndef small():\n    return nn.Identity()\n")
    assert isinstance(build_model("net.py:small", {}), nn.Identity)
    assert isinstance(build_model("models/net.py:small", {}), nn.Linear)


def test_a_function_in_a_package_is_called() -> None:
    model = build_model("torchvision.models:alexnet", {"num_classes": 3})
    assert model.classifier[-1].out_features == 3  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    ("factory", "kwargs", "expected"),
    [
        ("models/nets.py:small", {}, "there is no file models/nets.py"),
        ("models/nets.py:small", {}, "Did you mean net.py"),
        ("models/net.py:smal", {}, "Did you mean small?"),
        ("models/net.py:constant", {}, "has constant as a int"),
        ("models/net.py:number", {}, "returned int; expected a torch.nn.Module"),
        ("models/net.py:broken", {"depth": 9}, "failed when called with depth=9: RuntimeError: no such depth"),
        ("models/net.py:broken", {"depth": 9}, "net.py:15)"),
        ("models/net.py:broken", {}, "missing a required argument: 'depth'"),
        ("models/net.py:small", {"clases": 4}, "got an unexpected keyword argument 'clases'"),
        ("torchvision.models:vgg61", {}, "vgg16"),
        ("torchvision.modles:vgg16", {}, "Did you mean torchvision.models"),
        ("no_such_package_at_all:f", {}, "there is no module 'no_such_package_at_all'"),
        ("models/net:small", {}, "name it as 'models/net.py:...'"),
        ("vgg16", {}, "expected 'package.module:function' or 'path/file.py:function'"),
        ("a.b:c d", {}, "expected 'package.module:function' or 'path/file.py:function'"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, factory: str, kwargs: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        build_model(factory, kwargs)
    assert expected in str(caught.value)


def test_a_file_that_fails_on_import_is_told_with_its_line(folder: Path) -> None:
    (folder / "bad.py").write_text("x = 1\nimport module_that_is_not_there\n")
    with pytest.raises(UserError, match=r"importing bad\.py failed: ModuleNotFoundError.*bad\.py:2"):
        build_model("bad.py:f", {})
    (folder / "syntax.py").write_text("def f(:\n")
    with pytest.raises(UserError, match=r"SyntaxError.*syntax\.py, line 1"):
        build_model("syntax.py:f", {})
    assert not any("_bad" in name and name.startswith("pd_user_") for name in sys.modules)


def test_an_import_inside_the_function_finds_siblings_too(folder: Path) -> None:
    text = "def build():\n    from late_sibling import make\n    return make()\n"
    (folder / "models" / "late.py").write_text(text)
    (folder / "models" / "late_sibling.py").write_text("from torch import nn\ndef make():\n    return nn.ReLU()\n")
    assert isinstance(build_model("models/late.py:build", {}), nn.ReLU)


def test_a_module_in_the_working_directory_can_be_named(folder: Path) -> None:
    (folder / "module_right_here.py").write_text("from torch import nn\nmake = nn.Tanh\n")
    assert isinstance(build_model("module_right_here:make", {}), nn.Tanh)
