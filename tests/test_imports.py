"""The law of imports (CONTRIBUTING.md, "The house"), read from the import lines and held in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"
PROGRAMS = ("pd_profile", "pd_plan", "pd_train")

FORBIDDEN = {
    "pd_format": {"click", "cloup", "rich", "zmq", *PROGRAMS},
    "pd_profile": {"zmq", "msgpack", "pd_plan", "pd_train"},
    "pd_plan": {"torch", "torchvision", "zmq", "msgpack", "pd_profile", "pd_train"},
    "pd_train": {"pd_profile", "pd_plan"},
}


OF_ZEROMQ = {f"pd_train/{name}.py" for name in ("transport", "handshakes", "keys")}


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def files() -> list[Path]:
    return sorted(SRC.glob("pd_*/**/*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SRC)))
def test_every_import_line_keeps_the_law(path: Path) -> None:
    """ZeroMQ is the transport's: its sockets, who may connect to them, and the files of the keys by which they do."""
    package, *_ = path.relative_to(SRC).parts
    tops = {name.partition(".")[0] for name in imports_of(path)}
    assert not tops & FORBIDDEN[package]
    if package == "pd_format" and "layers" not in path.parts:
        assert "torch" not in tops
    if path.relative_to(SRC).as_posix() not in OF_ZEROMQ:
        assert "zmq" not in tops
    if package == "pd_plan":
        assert not any(name.startswith("pd_format.layers") for name in imports_of(path))


@pytest.mark.parametrize("path", sorted(SRC.glob("pd_*/**/__init__.py")), ids=lambda path: path.parent.name)
def test_a_package_opens_with_a_docstring_and_nothing_else(path: Path) -> None:
    (only,) = ast.parse(path.read_text()).body
    assert isinstance(only, ast.Expr)
    assert isinstance(only.value, ast.Constant)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("pd_plan.cli", {"torch", "zmq", "msgpack", "pd_profile", "pd_train"}),
        ("pd_profile.cli", {"torch", "zmq", "msgpack", "pd_plan", "pd_train"}),
        ("pd_train.cli", {"torch", "pd_plan", "pd_profile"}),
    ],
)
def test_a_program_starts_without_what_it_does_not_need(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name.partition(".")[0] for name in loaded} & absent
