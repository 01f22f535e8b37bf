"""Files that the options name: whether they are there, looked at before a run's folder is made and workers start.

What is in them, the workers see.
"""

from __future__ import annotations

from pathlib import Path

from pd_format.data import parse_data
from pd_format.errors import UserError
from pd_format.function_file import function_file
from pd_train.options import RunOptions

__all__ = ["check_named_files", "weights_file"]


def check_named_files(options: RunOptions) -> None:
    """Refuse data, weights or a model whose file is not on this host, where a worker here would read it.

    Raises:
        UserError: naming the file.
    """
    if options.emulate is not None:
        return
    function_file(options.plan.model.factory)
    if set(options.ranks) & set(options.plan.stages[0].workers):
        _check_data(options.data)
    # A run that goes on takes its weights from the checkpoint; the file that it began with may be gone.
    if options.init_from is not None and options.resume == "no" and not options.init_from.startswith("torchvision:"):
        weights_file(options.init_from)


def weights_file(name: str) -> Path:
    """The file of `--init-from`.

    Raises:
        UserError: there is none.
    """
    path = Path(name)
    if not path.is_file():
        raise UserError(
            f"--init-from {name}: there is no such file on this host (looked for {path.resolve()}); name the model.pt "
            "of a run, or any file with a plain state dict."
        )
    return path


def _check_data(name: str) -> None:
    data = parse_data(name)
    if data.kind == "function":
        function_file(name)
    elif data.path is not None and not Path(data.path).exists():
        what = "file" if data.kind == "text" else "folder"
        raise UserError(
            f"--data {name}: there is no {what} {data.path} on this host (looked for {Path(data.path).resolve()}); "
            f"give the data set's own, as in --data {data.kind}:{what.upper()}."
        )
