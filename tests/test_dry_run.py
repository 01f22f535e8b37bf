"""pd-train --dry-run, and what is noticed before a run's folder is made."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from test_emulation import written
from test_train_cli import _hosts, assert_refused, edit, pd_train, write_plan


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test finds, no file is made, no worker started and nobody connected to."""

    def never(*_: Any) -> None:
        raise AssertionError("a dry run starts and meets nobody")

    monkeypatch.setattr("pd_train.session.train_and_show", never)
    monkeypatch.setattr("pd_train.transport.Transport.connect", never)
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "run").exists()


def rows_of(output: str) -> list[list[str]]:
    """The table's, without the heading."""
    return [re.split(r" {2,}", line.strip()) for line in output.splitlines() if re.match(r" +\d", line)]


def test_it_says_who_does_what(tmp_path: Path) -> None:
    result = pd_train("--plan", write_plan(tmp_path, "2-1"), "--dry-run", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert rows_of(result.stdout) == [
        ["0", "here", "0 (1 of 2)", "2", "2", "cpu", "1 MB"],
        ["1", "here", "0 (2 of 2)", "2", "2", "cpu", "1 MB"],
        ["2", "here", "1", "3", "1", "cpu", "1 MB"],
    ]
    assert "stage 1  2 to 4 (3 layers)" in result.stdout
    assert "40 training samples in minibatches of 4" in " ".join(result.stdout.split())
    assert "All checks passed and nothing was started" in result.stdout
    assert result.stderr == ""


def test_quiet_leaves_one_line(tmp_path: Path) -> None:
    result = pd_train("--plan", write_plan(tmp_path), "--dry-run", "--quiet")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1


def test_of_a_host_it_tries_its_own_port_and_looks_the_others_up(tmp_path: Path) -> None:
    path = edit(write_plan(tmp_path), _hosts(("127.0.0.1", free_port()), ("nowhere.invalid", 29600)))
    result = pd_train("--plan", path, "--dry-run", "--insecure", "--device", "cpu")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert re.search(r"port \d+ can be bound; no address is known here for nowhere\.invalid", text)
    assert "worker 0: of the plan's hosts, these are this machine's addresses" in text
    assert [row[0] for row in rows_of(result.stdout)] == ["0", "1"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        path = edit(write_plan(tmp_path), _hosts(("127.0.0.1", free_port()), ("127.0.0.1", port)))
        result = pd_train("--plan", path, "--dry-run")
    assert_refused(result, rf"worker 1 \(stage 1 replica 0 on 127\.0\.0\.1\): port {port} of 127\.0\.0\.1 is in use")


def test_another_model_than_the_plans_is_refused(tmp_path: Path) -> None:
    path = edit(write_plan(tmp_path), lambda plan: plan["model"].update(fingerprint="0" * 64))
    assert_refused(pd_train("--plan", path, "--dry-run"), "the plan was made for another version of model test")


def test_samples_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    result = pd_train("--plan", write_plan(tmp_path), "--dry-run", "--data", "digits")
    assert_refused(result, r"worker 0 \(stage 0 replica 0\): The model takes samples of 16; --data digits has 1x8x8")


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.zeros(3, 3)}, tmp_path / "weights.pt")
    result = pd_train("--plan", write_plan(tmp_path), "--dry-run", "--init-from", "weights.pt")
    assert_refused(result, "--init-from weights.pt does not fit the model")


def test_a_folder_that_holds_something_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    path = write_plan(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").touch()
    assert_refused(pd_train("--plan", path, "--dry-run", "--run-dir", "old"), "--run-dir old: is not empty")
    assert_refused(pd_train("--plan", path, "--dry-run", "--run-dir", path / "run"), "run: cannot be made")


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "gone.py:samples"], r"there is no file gone\.py"),
        (["--data", "text:gone.txt"], r"--data text:gone\.txt: there is no file gone\.txt on this host"),
        (["--data", "imagefolder:gone"], "--data imagefolder:gone: there is no folder gone on this host"),
        (["--init-from", "gone.pt"], "--init-from gone.pt: there is no such file on this host"),
    ],
)
def test_a_file_that_is_not_there_is_noticed_at_once(
    arguments: list[str], message: str, dry: bool, tmp_path: Path
) -> None:
    assert_refused(pd_train("--plan", write_plan(tmp_path), *arguments, *["--dry-run"] * dry), message)


def test_a_host_without_the_first_stage_needs_no_data(tmp_path: Path) -> None:
    path = edit(write_plan(tmp_path), _hosts(("192.0.2.1", 29600), ("127.0.0.1", free_port())))
    result = pd_train("--plan", path, "--dry-run", "--insecure", "--data", "imagefolder:gone")
    assert result.exit_code == 0, result.output
    assert "no worker here reads any" in result.stdout


def test_nothing_that_an_option_asks_for_besides_is_done(tmp_path: Path) -> None:
    path = write_plan(tmp_path)
    assert_refused(pd_train("--plan", path, "--dry-run", "--measure-network"), "--dry-run means nothing with", 2)
    assert_refused(pd_train("--report", "old", "--dry-run"), "--dry-run means nothing with --report", 2)


def test_of_an_emulation_neither_model_nor_data_are_needed(tmp_path: Path) -> None:
    profile, plan = written(tmp_path, "2-1")
    result = pd_train("--plan", plan, "--emulate", profile, "--dry-run")
    assert result.exit_code == 0, result.output
    assert [row[5] for row in rows_of(result.stdout)] == ["emulated"] * 3


def test_a_run_to_go_on_with_needs_a_checkpoint(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    path = write_plan(tmp_path)
    (old / "plan.json").write_bytes(path.read_bytes())
    (old / "options.json").write_text('{"format": "pipedream-run", "version": 1, "options": {}}')
    assert_refused(pd_train("--resume", old, "--dry-run"), "old: holds no checkpoint; train from the beginning")
    (old / "checkpoints/epoch-0001").mkdir(parents=True)
    (old / "checkpoints/epoch-0001/part.json").touch()
    before = sorted(old.rglob("*"))
    result = pd_train("--resume", old, "--dry-run", "--quiet")
    assert result.exit_code == 0, result.output
    assert sorted(old.rglob("*")) == before


def test_samples_that_do_not_go_through_the_model_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def data():\n"
        "    one = TensorDataset(torch.randn(8, 99), torch.zeros(8, dtype=torch.int64))\n"
        "    return one, one\n"
    )
    result = pd_train("--plan", write_plan(tmp_path), "--data", f"{tmp_path / 'odd.py'}:data", "--dry-run")
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "samples of shape (99,) do not go through the first stage" in said
    assert "profile with it and plan anew" in said
