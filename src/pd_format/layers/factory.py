"""Calls the function that makes the user's model, named the way uvicorn names an application (design, section 1)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from torch import nn

from pd_format.errors import UserError
from pd_format.function_file import closest, function_file

__all__ = ["build_model", "load_function"]


def build_model(factory: str, kwargs: Mapping[str, object]) -> nn.Module:
    """Call `factory` with `kwargs` and return the model that it makes.

    Args:
        factory: `"package.module:function"`, or `"path/file.py:function"` relative to the working directory.
        kwargs: the function's keyword arguments.

    Raises:
        UserError: the file, module or function does not exist, the call fails, or its result is no `nn.Module`.
    """
    function = load_function(factory)
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        raise UserError(
            f"{factory} cannot be called with {_call_text(kwargs)}: {error}. Its signature is "
            f"{factory.rpartition(':')[2]}{inspect.signature(function)}; give its arguments with --model-arg."
        ) from error
    except ValueError:
        pass  # Some functions written in C have no signature to look at; the call itself will tell.
    try:
        model = function(**kwargs)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{factory} failed when called with {_call_text(kwargs)}: "
            f"{type(error).__name__}: {error}{_place(error)}. Mend the function or its --model-arg values."
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{factory} returned {type(model).__name__}; expected a torch.nn.Module. "
            "Name a function that builds and returns the model."
        )
    return model


def load_function(name: str) -> Callable[..., object]:
    """Import the function that `name` names; also used for a user's data set.

    While it is imported and while it runs, the folder of its file, or the working directory for a module, can be
    imported from; `sys.path` is as before in between.

    Raises:
        UserError: the text has another form, or the file, module or function does not exist; the closest names are
            given.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise UserError(f"{name!r} names no function; expected 'package.module:function' or 'path/file.py:function'.")
    folder = Path(place).resolve().parent if place.endswith(".py") else Path.cwd()
    with _importable(folder):
        module = _load_file(name, place) if place.endswith(".py") else _load_module(name, place)
    function = getattr(module, attribute, None)
    if not callable(function):
        found = (
            "holds no callable of that name" if function is None else f"has {attribute} as a {type(function).__name__}"
        )
        names = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise UserError(f"{name}: {place} {found}.{closest(attribute, names)}")
    called = function

    @functools.wraps(called)
    def call(*args: object, **kwargs: object) -> object:
        with _importable(folder):
            return called(*args, **kwargs)

    return call


def _load_module(name: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or place
        if place != missing and not place.startswith(missing + "."):
            raise UserError(
                f"{name}: importing {place} failed, as it needs the module {missing!r}, which is not installed. "
                "Install it in this environment."
            ) from error
        hint = (
            f" There is a file {place}.py here: name it as '{place}.py:...'." if Path(f"{place}.py").is_file() else ""
        )
        raise UserError(
            f"{name}: there is no module {missing!r} to import.{hint or closest(missing, _neighbours(missing))} "
            "A file is named by its path, 'path/file.py:function'."
        ) from error
    except Exception as error:
        raise _import_failed(name, place, error) from error


def _import_failed(name: str, place: str, error: Exception) -> UserError:
    return UserError(
        f"{name}: importing {place} failed: {type(error).__name__}: {error}{_place(error)}. Mend what is there."
    )


def _load_file(name: str, place: str) -> ModuleType:
    path = function_file(name)
    assert path is not None
    # The digest keeps two files of one name in two folders apart, and gives every process the same module name.
    unique = f"pd_user_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{name}: {place} cannot be imported as a Python file.")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: dataclasses and pickle look their module up by name.
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except UserError:
        sys.modules.pop(unique, None)
        raise
    except Exception as error:
        sys.modules.pop(unique, None)
        raise _import_failed(name, place, error) from error
    return module


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let user code import from a folder, and leave `sys.path` as it was."""
    entry = str(folder)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def _neighbours(missing: str) -> list[str]:
    """Names of modules beside the missing one, for the hint: children of its package, or top-level names in use."""
    parent, _, _ = missing.rpartition(".")
    if not parent:
        return [name for name in sys.modules if "." not in name and not name.startswith("_")]
    package = sys.modules.get(parent)
    folders = [Path(folder) for folder in getattr(package, "__path__", [])]
    return [f"{parent}.{path.stem}" for folder in folders if folder.is_dir() for path in folder.glob("[!_]*")]


def _call_text(kwargs: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in kwargs.items()) or "no arguments"


def _place(error: Exception) -> str:
    """` (file:line)` where the error arose, or nothing."""
    if isinstance(error, SyntaxError) and error.filename:
        return ""  # The text of a syntax error has its place already.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    frames = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
