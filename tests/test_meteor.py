"""METEOR without Java: what the program is told, that it never outlives its use, and what is said when it is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pd_format.errors import UserError
from pd_train.meteor import Meteor, check_meteor

PROGRAM = """
import sys
with open(sys.argv[1], "a") as log:
    for number, line in enumerate(sys.stdin):
        log.write(line)
        log.flush()
        if "broken" in line:
            sys.exit(1)
        kind, *rest = line.rstrip("\\n").split(" ||| ")
        print("\\n".join(["0.25"] * len(rest) + ["0.75"]) if kind == "EVAL" else f"figures {number}", flush=True)
    log.write("ended by itself")
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a program in METEOR's place was told."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "log")]
    monkeypatch.setattr("pd_train.meteor._command", lambda: command)
    return tmp_path / "log"


def test_the_score_of_all_sentences_comes_last(log: Path) -> None:
    with Meteor() as judge:
        assert judge.score(["a man", "", "x ||| y\n"], [["a", "b c"], ["d"], ["e"]]) == 0.75
        assert judge.score(["again"], [["f"]]) == 0.75
    assert judge._process.returncode is not None
    assert log.read_text().splitlines() == [
        "SCORE ||| a ||| b c ||| a man",
        "SCORE ||| d ||| ",
        "SCORE ||| e ||| x y",
        "EVAL ||| figures 0 ||| figures 1 ||| figures 2",
        "SCORE ||| f ||| again",
        "EVAL ||| figures 4",
    ]


def test_a_program_that_ends_early_is_reported(log: Path) -> None:
    with Meteor() as judge, pytest.raises(UserError, match=r"ended early; .*Try it by hand: .*program\.py"):
        judge.score(["fine", "broken", "more"], [["a"], ["b"], ["c"]])
    assert judge._process.returncode is not None


def test_the_program_ends_when_its_user_fails(log: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Meteor() as judge:
        raise KeyboardInterrupt
    assert judge._process.returncode is not None


def test_what_is_missing_is_named_with_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install pycocoevalcap\. Or leave --metric out: .* token accuracy"):
        check_meteor()
    monkeypatch.undo()
    (tmp_path / "pycocoevalcap" / "meteor").mkdir(parents=True)
    (tmp_path / "pycocoevalcap" / "meteor" / "meteor-1.5.jar").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"needs Java, .*apt-get install default-jre-headless"):
        check_meteor()
