"""METEOR 1.5 of sentences (Denkowski and Lavie 2014): asks the authors' own program, which needs Java.

The package pycocoevalcap brings the program. It is told one line a sentence and answers each with its figures; of all
of these it makes the score of the whole, which is not the mean of the sentences' scores.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pd_format.errors import UserError

__all__ = ["Meteor", "check_meteor"]

INSTEAD = "Or leave --metric out: then the run is judged by its token accuracy."


def check_meteor() -> None:
    """Look for what METEOR needs.

    Raises:
        UserError: it is not installed; the message says how to.
    """
    _command()


class Meteor:
    """The program, running: `with Meteor() as judge: judge.score(...)`. It takes some seconds to start.

    Raises:
        UserError: what it needs is not installed.
    """

    def __init__(self) -> None:
        self._command = _command()

    def __enter__(self) -> Meteor:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        # What could not be written any more is of no interest.
        with contextlib.suppress(OSError), self._process:
            pass

    def score(self, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
        """The score of all sentences together, between 0 and 1.

        Args:
            hypotheses: a sentence each, which may be empty.
            references: for each of them, one sentence or more that would be right.

        Raises:
            UserError: the program fails.
        """
        try:
            figures = []
            for hypothesis, right in zip(hypotheses, references, strict=True):
                self._tell("SCORE", *map(_plain, right), _plain(hypothesis))
                figures.append(self._answer())
            self._tell("EVAL", *figures)
            # One line a sentence, then the score of all.
            return float([self._answer() for _ in range(len(figures) + 1)][-1])
        except (OSError, EOFError):
            raise UserError(
                f"METEOR's program ended early; it needs some 2 GB of memory. Try it by hand: "
                f"{' '.join(self._command)}. {INSTEAD}"
            ) from None

    def _tell(self, *parts: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ||| ".join(parts) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError
        return line.strip()


def _command() -> list[str]:
    # Only looked for: importing it would load what has nothing to do with METEOR.
    package = importlib.util.find_spec("pycocoevalcap")
    folders = list(package.submodule_search_locations or ()) if package is not None else []
    jars = [jar for folder in folders if (jar := Path(folder, "meteor", "meteor-1.5.jar")).is_file()]
    if not jars:
        raise UserError(
            f"--metric meteor needs pycocoevalcap, which is not installed: pip install pycocoevalcap. {INSTEAD}"
        )
    java = shutil.which("java")
    if java is None:
        raise UserError(
            "--metric meteor needs Java, and there is no program java on this machine's PATH: install it, on Debian "
            f"and Ubuntu with apt-get install default-jre-headless. {INSTEAD}"
        )
    return [java, "-Xmx2G", "-jar", str(jars[0]), "-", "-", "-stdio", "-l", "en", "-norm"]


def _plain(sentence: str) -> str:
    """Without what the program would read as the end of a sentence."""
    return " ".join(sentence.replace("|||", " ").split())
