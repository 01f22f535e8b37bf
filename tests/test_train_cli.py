"""pd-train as a person meets it: what it refuses and in which words, what a run leaves behind, how it is stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import plans
from pd_format.errors import UserError
from pd_format.jsonfile import write_record
from pd_format.layers.chain import build_chain
from pd_format.profile import InputSpec
from pd_train.cli import main
from pd_train.coverage import stage_ranges
from pd_train.host import available_memory_bytes
from pd_train.options import RunOptions
from pd_train.run_folder import held

MODELS = str(plans.HERE / "runtime_models.py")
INPUTS = (InputSpec(name="x", shape=(4, 16), dtype="float32"),)
CUTS = {1: [], 2: ["1"], 3: ["1", "3"]}


def write_plan(folder: Path, config: str = "1-1", data: str = "numbers_40", **changes: Any) -> Path:
    plan = plans.plan_of(
        f"{MODELS}:perceptron", INPUTS, config, CUTS[len(config.split("-"))], data=f"{MODELS}:{data}", **changes
    )
    write_record(folder / "plan.json", plan)
    return folder / "plan.json"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    return path


def pd_train(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def assert_refused(result: Result, message: str, code: int = 1) -> None:
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    assert re.search(message, " ".join(result.stderr.split())), result.stderr
    assert "Traceback" not in result.output
    assert result.stderr.count("Error:") == 1


# Before anything starts


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from pd_train.cli import main; main(['--help'], standalone_mode=False); "
        "assert not {'torch', 'zmq', 'numpy'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--plan" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minibatches", "0"], "'--minibatches': 0 is not in the range x>=1"),
        (["--epochs", "-1"], "'--epochs'"),
        (["--threads", "0"], "'--threads'"),
        (["--lr", "-0.1"], "'--lr'"),
        (["--momentum", "1"], "'--momentum'"),
        (["--target-accuracy", "97"], "'--target-accuracy': 97.* is not in the range"),
        (["--metric", "bleu"], "'--metric': 'bleu' is not one of"),
        (["--optimizer", "lbfgs"], "'--optimizer': 'lbfgs' is not one of"),
        (["--lr-scaling", "double"], "'--lr-scaling'"),
        (["--sync", "asp2"], "'--sync'"),
        (["--precision", "fp8"], "'--precision': 'fp8' is not one of"),
        (["--peer-timeout", "0"], "'--peer-timeout': 0.* is not in the range"),
        (["plan.json"], "unexpected extra argument"),
        (["--plam", "plan.json"], "No such option"),
    ],
)
def test_wrong_usage_names_the_option(arguments: list[str], message: str) -> None:
    assert_refused(pd_train(*arguments), message, code=2)


def test_a_missing_plan_says_which_program_makes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(pd_train(), r"--plan plan\.json: there is no such file; make one with pd-plan")
    long = "n" * 300
    assert_refused(pd_train("--plan", long), "there is no such file; make one with pd-plan")
    assert_refused(pd_train("--resume", long), "holds no run")
    assert_refused(pd_train("--report", long), "holds no run")


def _hosts(*hosts: tuple[str, int]) -> Callable[[dict[str, Any]], object]:
    return lambda plan: plan.update(hosts=[{"address": address, "port": port} for address, port in hosts])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda p: p.update(version=9), r"plan\.json: version is 9", id="another version"),
        pytest.param(lambda p: p.update(format="other"), r"plan\.json: .*format", id="another format"),
        pytest.param(lambda p: p.update(noam=float("nan")), r"plan\.json: noam: found NaN", id="NaN"),
        pytest.param(lambda p: p.update(colour="red"), "colour: is unknown", id="unknown field"),
        pytest.param(lambda p: p.pop("stages"), "stages: is missing", id="missing field"),
        pytest.param(lambda p: p["stages"][1].update(layers=0), r"stages\[1\]\.layers: found 0", id="empty stage"),
        pytest.param(
            lambda p: p["stages"][1].update(workers=[0]), r"stages\[1\]\.workers: found \[0\].*\[1\]", id="overlap"
        ),
        pytest.param(
            lambda p: p["stages"][0].update(replicas=3), r"stages\[0\]\.workers: found \[0\]", id="more replicas"
        ),
        pytest.param(_hosts(("a", 1), ("a", 1)), r"hosts\[1\]: a port 1 is also hosts\[0\]", id="host twice"),
        pytest.param(_hosts(("a", 1), ("b", -1)), r"hosts\[1\]\.port: found -1", id="negative port"),
        pytest.param(_hosts(("a", 1)), "hosts: found 1; expected one for each of the 2 workers", id="too few hosts"),
        pytest.param(
            lambda p: p["stages"][1].update(in_flight=5), "in_flight 2 of stage 0 .* deadlock", id="depths deadlock"
        ),
        pytest.param(lambda p: p.update(inference=True), "inference: found true; .* Plan anew without", id="inference"),
        pytest.param(
            lambda p: p.update(precision="int8"), r"precision: found 'int8'.*'fp32', 'bf16' or 'fp16'", id="precision"
        ),
        pytest.param(lambda p: p.update(precision="fp16"), "fp16 needs a loss scale.* Add --flush N", id="fp16"),
    ],
)
def test_a_bad_plan_is_refused_before_anything_starts(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    path = edit(write_plan(tmp_path), change)
    assert_refused(pd_train("--plan", path, "--run-dir", tmp_path / "run"), message)
    assert not (tmp_path / "run").exists()


def test_a_plan_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = write_plan(tmp_path)
    path.write_text(path.read_text()[:300])
    assert_refused(pd_train("--plan", path, "--run-dir", tmp_path / "run"), r"plan\.json: is not whole JSON")
    assert not (tmp_path / "run").exists()


def test_how_long_a_peer_may_be_silent_reaches_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[RunOptions] = []
    monkeypatch.setattr("pd_train.session.train_and_show", lambda options, *_: runs.append(options))
    path = write_plan(tmp_path)
    assert pd_train("--plan", path, "--run-dir", tmp_path / "a", "--peer-timeout", "2.5").exit_code == 0
    assert pd_train("--plan", path, "--run-dir", tmp_path / "b").exit_code == 0
    assert [run.peer_timeout for run in runs] == [2.5, 10.0]


def test_a_plan_that_needs_more_memory_than_is_free_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_train.settling.available_memory_bytes", lambda: 1_999_999)
    result = pd_train("--plan", write_plan(tmp_path), "--run-dir", tmp_path / "run")
    assert_refused(result, "2 workers on this host need .* of memory and .* are free")
    assert not (tmp_path / "run").exists()


def test_a_limit_on_the_container_counts_as_the_hosts_memory(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n",
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "900000\n",
        "sys/fs/cgroup/job/step/memory.stat": "anon 1\ninactive_file 7\n",
        "sys/fs/cgroup/job/memory.max": "5000000\n",
        "sys/fs/cgroup/job/memory.current": "1000000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 300000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory_bytes(tmp_path) == 4_300_000
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_memory_bytes(tmp_path) == 8000 * 1024


def test_a_folder_that_holds_a_run_is_not_written_to(tmp_path: Path) -> None:
    path = write_plan(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    assert_refused(pd_train("--plan", path, "--run-dir", tmp_path / "run"), "run: is not empty; name a new folder")
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    path = write_plan(tmp_path)
    assert_refused(pd_train("--plan", path, "--run-dir", path / "run"), r"--run-dir .*plan\.json.run: cannot be made")


PERCEPTRON = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(
            nn.Sequential(OrderedDict(zip(["0", "1", "two", "3", "4"], PERCEPTRON, strict=True))),
            "number 3, 'two'",
            id="renamed layer",
        ),
        pytest.param(nn.Sequential(*PERCEPTRON, nn.ReLU()), r"layer 6, '5', is new here\. .*5 layers.*6", id="added"),
        pytest.param(nn.Sequential(*PERCEPTRON[:-1]), r"layers after number 4, '3', are missing here", id="removed"),
        pytest.param(
            nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 32), *PERCEPTRON[3:]),
            r"number 1, '0', here Linear\(in_features=16, out_features=24",
            id="changed width",
        ),
    ],
)
def test_another_model_than_the_plans_is_refused_with_the_place(model: nn.Module, message: str) -> None:
    plan = plans.plan_of(f"{MODELS}:perceptron", INPUTS, "1-1", CUTS[2])
    with pytest.raises(UserError, match=message) as caught:
        stage_ranges(plan, build_chain(model, INPUTS))
    assert "Profile and plan the model anew" in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        pytest.param([("0", "1", 2), ("3", "4", 2)], r"stages\[1\]\.first_layer: '3' leaves out .* '2'", id="gap"),
        pytest.param([("0", "2", 3), ("2", "4", 3)], r"stages\[1\]\.first_layer: '2' again holds .* '3'", id="overlap"),
        pytest.param([("0", "4", 5), ("0", "4", 5)], r"stages\[1\]\.first_layer: '0' again holds", id="listed twice"),
        pytest.param([("0", "1", 2), ("2", "3", 2)], r"stages\[1\]\.last_layer: .* after '3' to '4'", id="end missing"),
        pytest.param([("1", "1", 1), ("2", "4", 3)], r"stages\[0\]\.first_layer: '1' leaves out", id="start missing"),
        pytest.param([("0", "1", 2), ("2", "nine", 3)], r"stages\[1\]\.last_layer: .*no layer 'nine'", id="unknown"),
        pytest.param([("0", "1", 3), ("2", "4", 3)], r"stages\[0\]\.layers: found 3; .* has 2", id="wrong count"),
        pytest.param([("0", "1", 2), ("2", "1", 1)], r"stages\[1\]\.layers: found 1; .* has 0", id="without layers"),
    ],
)
def test_stages_that_do_not_cover_the_model_once_are_refused(stages: list[tuple[str, str, int]], message: str) -> None:
    plan = plans.plan_of(f"{MODELS}:perceptron", INPUTS, "1-1", CUTS[2])
    changed = tuple(
        stage.model_copy(update={"first_layer": first, "last_layer": last, "layers": layers})
        for stage, (first, last, layers) in zip(plan.stages, stages, strict=True)
    )
    with pytest.raises(UserError, match=message):
        stage_ranges(plan.model_copy(update={"stages": changed}), plans.chain_of(plan.model.factory, INPUTS))


# What workers refuse


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("gone.py:samples", r"there is no file gone\.py"),
        (f"{MODELS}:number_40", "holds no callable of that name. Did you mean numbers_40"),
        ("imagenet", "Data set 'imagenet' is unknown; expected synthetic"),
        ("digits", r"The model takes samples of 16; --data digits has 1x8x8"),
    ],
)
def test_data_that_is_missing_or_does_not_fit_is_refused(data: str, message: str, tmp_path: Path) -> None:
    result = pd_train("--plan", write_plan(tmp_path), "--data", data, "--run-dir", tmp_path / "run")
    assert_refused(result, message)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_scikit_learn_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text("raise ImportError('not installed')\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = write_plan(tmp_path, kwargs={"classes": 10})
    result = pd_train("--plan", path, "--data", "digits:4", "--run-dir", tmp_path / "run")
    assert_refused(result, r"needs scikit-learn, which is not installed: pip install scikit-learn")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder, socket.socket() as free:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1], holder.getsockname()[1]]
        free.close()
        path = edit(write_plan(tmp_path), _hosts(*(("127.0.0.1", port) for port in ports)))
        result = pd_train("--plan", path, "--run-dir", tmp_path / "run")
    assert_refused(
        result, rf"worker 1 \(stage 1 replica 0 on 127\.0\.0\.1\): port {ports[1]} of 127\.0\.0\.1 is in use"
    )


def test_a_failed_start_does_not_block_its_folder(tmp_path: Path) -> None:
    path, run = write_plan(tmp_path), tmp_path / "run"
    assert_refused(pd_train("--plan", path, "--run-dir", run, "--data", f"{MODELS}:number_40"), "no callable")
    result = pd_train("--plan", path, "--run-dir", run, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "no callable" not in (run / "worker-0.log").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_no_division_by_zero(tmp_path: Path) -> None:
    result = pd_train("--plan", write_plan(tmp_path), "--run-dir", tmp_path / "run", "--device", "cuda")
    assert_refused(result, "--device cuda: torch finds no GPU on this machine")


def test_a_loss_that_becomes_nan_names_the_minibatch(tmp_path: Path) -> None:
    result = pd_train("--plan", write_plan(tmp_path), "--run-dir", tmp_path / "run", "--lr", "1e30")
    assert_refused(result, r"the loss of minibatch \d+ of epoch 1 is (nan|inf); training stopped")
    assert not (tmp_path / "run" / "model.pt").exists()


def test_a_loss_that_becomes_nan_in_the_last_update_is_noticed(tmp_path: Path) -> None:
    arguments = ["--run-dir", tmp_path / "run", "--lr", "1e30", "--minibatches", 1]
    result = pd_train("--plan", write_plan(tmp_path), *arguments)
    assert_refused(result, r"the loss of validation minibatch 0 of epoch 1 is (nan|inf)")


# What a run leaves


def test_a_run_prints_plain_lines_and_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_plan(tmp_path, "2-1", "numbers_17")
    options = ["--epochs", 3, "--optimizer", "adam", "--weight-decay", 0.1, "--lr-schedule", "cosine", "--seed", 5]
    result = pd_train(*options, "--drop-last", "--threads", 2, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    lines, _, table = result.stdout.partition("Run ")
    assert all(re.match(r"\d\d:\d\d:\d\d  \S", line) for line in lines.splitlines())
    assert "plan 2-1: starting 3 workers of 2 threads each" in lines
    assert len(re.findall(r"epoch \d/3  loss", lines)) == 3
    assert "2-1 (2 stages, 3 workers)" in table
    (run,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"test-\d{8}-\d{6}", run.name)
    logs = {f"worker-{rank}.log" for rank in range(3)}
    assert {each.name for each in run.iterdir()} == {
        "plan.json", "options.json", "checkpoints", "metrics.jsonl", "timing.jsonl", "trace.json", "model.pt",
        "report.json", *logs
    }  # fmt: skip
    report = json.loads((run / "report.json").read_text())
    assert (report["format"], report["version"], report["config"]) == ("pipedream-report", 1, "2-1")
    assert report["device"] == "cpu"
    assert report["torch"] == torch.__version__
    assert report["options"] == {
        "data": f"{MODELS}:numbers_17",
        "epochs": 3,
        "minibatches": None,
        "optimizer": {
            "name": "adam",
            "lr": 0.001,
            "momentum": 0.9,
            "weight_decay": 0.1,
            "lr_schedule": "cosine",
            "lr_scaling": "balanced",
        },
        "mode": {"weights": "stash", "sync": "overlap", "flush": None, "group": None},
        "clip_stage_norm": None,
        "clip_norm": None,
        "precision": "fp32",
        "loss_scaling": None,
        "drop_last": True,
        "skip_corrupt": False,
        "metric": "accuracy",
        "target_metric": None,
        "init_from": None,
        "checkpoint_every": None,
        "seed": 5,
        "threads": 2,
        "emulate": None,
    }
    assert report["performance"]["breakdown"]["timed_minibatches"] == report["minibatches"] == 12
    assert len(report["performance"]["breakdown"]["stages"]) == 2
    assert report["performance"]["bottleneck"]["sentence"] in " ".join(table.split())
    assert "peak_memory_bytes" in report["of_last_start"]
    assert set(report["of_last_start"]) < set(report)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # 17 samples in minibatches of 4, the last one left out.
    assert [(each["epoch"], each["minibatches"]) for each in metrics] == [(0, 4), (1, 4), (2, 4)]


def test_the_cap_on_minibatches_counts_over_all_epochs(tmp_path: Path) -> None:
    arguments = ["--epochs", 9, "--minibatches", 13, "--run-dir", tmp_path / "run"]
    result = pd_train("--plan", write_plan(tmp_path, "1"), *arguments)
    assert result.exit_code == 0, result.output
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [each["minibatches"] for each in metrics] == [10, 3]
    assert "epoch 2/2  loss" in result.stdout


@pytest.mark.parametrize(("target", "text"), [("0.1", r"reached in \d.* s: \d epochs? of"), ("1", "not reached")])
def test_a_target_accuracy_stops_the_run_and_says_when(target: str, text: str, tmp_path: Path) -> None:
    arguments = ["--epochs", 4, "--target-accuracy", target, "--lr", 1e-4, "--run-dir", tmp_path / "run"]
    result = pd_train("--plan", write_plan(tmp_path), *arguments)
    assert result.exit_code == 0, result.output
    assert re.search(f"target {float(target):.2%}".replace("%", " %") + rf" +│ {text}", result.stdout), result.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["reached_target"] is (target == "0.1")
    accuracies = [
        json.loads(line)["validation_accuracy"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [accuracy >= float(target) for accuracy in accuracies[:-1]] == [False] * (len(accuracies) - 1)
    assert report["epochs"] == len(accuracies) <= 4


# How a run is stopped

_STARTING, _LOADING, _TRAINING = "starting", "loading torch", "epoch 2/"


class Program:
    """pd-train in a process group of its own, like a job of a shell."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-c", "from pd_train.cli import main; main()", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def wait_for(self, moment: str) -> None:
        assert self.process.stdout is not None
        if moment == _LOADING:
            while not any("/libtorch_cpu" in (each / "maps").read_text() for each in self.others()):
                assert self.process.poll() is None
            return
        for line in self.process.stdout:
            if moment in line:
                return
        raise AssertionError(f"ended without {moment!r}: {self.process.communicate()[1]}")

    def others(self) -> Iterator[Path]:
        """Where the system tells of each other process of the group."""
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # It has just ended.
                state, _, group = (each / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.process.pid != int(each.name) and state != "Z":
                    yield each

    def watch(self) -> list[int]:
        """Descriptors that tell of the end of each other process of the group."""
        found = []
        for each in self.others():
            with contextlib.suppress(OSError):
                found.append(os.pidfd_open(int(each.name)))
        return found


@contextlib.contextmanager
def running(*arguments: object) -> Iterator[Program]:
    program = Program(*arguments)
    try:
        yield program
    finally:
        for descriptor in program.watch():
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        program.process.kill()
        program.process.communicate()


def assert_end(descriptors: list[int]) -> None:
    """Wait until all have ended; not one must take ten seconds."""
    for descriptor in descriptors:
        ended, _, _ = select.select([descriptor], [], [], 10)
        os.close(descriptor)
        assert ended, "a process is left"


needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


WRITTEN_MEANWHILE = {"metrics.jsonl", "timing.jsonl", "trace.json", "checkpoints"}


@needs_pidfd
@pytest.mark.parametrize("moment", [_STARTING, _LOADING, _TRAINING])
def test_ctrl_c_ends_all_processes_with_one_message(moment: str, tmp_path: Path) -> None:
    path = write_plan(tmp_path, "2-1")
    with running("--plan", path, "--epochs", 100_000, "--run-dir", tmp_path / "run") as program:
        program.wait_for(moment)
        watched = program.watch()
        # A terminal sends it to every process of the group.
        os.killpg(program.process.pid, signal.SIGINT)
        _, errors = program.process.communicate(timeout=60)
        assert program.process.returncode == 130
        *hint, last = errors.splitlines()
        assert last == "Stopped by SIGINT; the files written so far are whole."
        saved = list((tmp_path / "run").glob("checkpoints/*/*.json"))
        assert hint == ([f"To go on from its newest checkpoint: pd-train --resume {tmp_path / 'run'}"] if saved else [])
        assert_end(watched)
    names = {each.name for each in (tmp_path / "run").iterdir()}
    assert names - {f"worker-{rank}.log" for rank in range(3)} - WRITTEN_MEANWHILE == {
        "plan.json", "options.json"
    }  # fmt: skip
    if moment is _TRAINING:
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
            assert json.loads(line)["minibatches"] == 10


@needs_pidfd
def test_when_pd_train_itself_is_killed_its_workers_end(tmp_path: Path) -> None:
    path = write_plan(tmp_path, "2-1")
    with running("--plan", path, "--epochs", 100_000, "--run-dir", tmp_path / "run") as program:
        program.wait_for(_TRAINING)
        watched = program.watch()
        assert len(watched) >= 3
        program.process.kill()
        assert_end(watched)


# Going on with a run


def test_a_run_goes_on_with_the_options_that_it_was_started_with(tmp_path: Path) -> None:
    path = write_plan(tmp_path, "1-1", "numbers_17")
    run = tmp_path / "run"
    assert pd_train("--plan", path, "--run-dir", run, "--optimizer", "adam", "--lr", 0.003).exit_code == 0
    first = (run / "metrics.jsonl").read_text()
    result = pd_train("--resume", run, "--epochs", 2)
    assert result.exit_code == 0, result.output
    assert "going on from checkpoint epoch-0001" in result.stdout
    assert re.search(r"restarts +│ 1, ", result.stdout)
    assert (run / "metrics.jsonl").read_text().startswith(first)
    report = json.loads((run / "report.json").read_text())
    assert report["epochs"] == 2
    assert report["options"]["optimizer"]["lr"] == 0.003
    for arguments, message in (
        (["--lr", 0.1], r"--lr 0\.1: the run in .* was started with 0\.003, and its numbers depend on it"),
        (["--checkpoint-every", 3], "--checkpoint-every 3: the run in .* was started with None"),
        (["--run-dir", "other"], "leave out --run-dir"),
        (["--init-from", "w.pt"], "leave out --init-from"),
    ):
        assert_refused(pd_train("--resume", run, *arguments), message)


def test_a_folder_without_a_run_cannot_go_on(tmp_path: Path) -> None:
    assert_refused(pd_train("--resume", tmp_path), "holds no run .* name the folder of a run")


def test_a_run_cannot_go_on_with_another_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert pd_train("--plan", write_plan(tmp_path), "--run-dir", run, "--minibatches", 1).exit_code == 0
    other = edit(write_plan(tmp_path), lambda plan: plan["model"].update(fingerprint="0" * 64))
    assert_refused(pd_train("--resume", run, "--plan", other), "and the run in .* trains test or another version")


def test_checkpoints_come_at_multiples_of_the_replicas(tmp_path: Path) -> None:
    path = write_plan(tmp_path, "2-1", "numbers_17")
    result = pd_train("--plan", path, "--run-dir", tmp_path / "run", "--checkpoint-every", 1)
    assert result.exit_code == 0, result.output
    assert "--checkpoint-every 1 is rounded up to 2, so that every replica" in " ".join(result.stdout.split())


@pytest.mark.parametrize("option", ["--lr", "--momentum", "--weight-decay", "--target-accuracy", "--peer-timeout"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_number_that_is_none_is_wrong_usage(option: str, value: str, tmp_path: Path) -> None:
    result = pd_train("--plan", write_plan(tmp_path), "--run-dir", tmp_path / "run", option, value)
    assert_refused(result, f"{value} is no finite number", code=2)


def test_a_plan_whose_minibatch_was_edited_is_refused(tmp_path: Path) -> None:
    path = edit(write_plan(tmp_path), lambda plan: plan.update(minibatch_size=8))
    assert_refused(
        pd_train("--plan", path, "--run-dir", tmp_path / "run"), r"inputs\[0\].shape: found \[4, 16\]; the first is"
    )


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    path = write_plan(tmp_path)
    with held(tmp_path, alone=True):
        assert_refused(pd_train("--plan", path, "--run-dir", tmp_path), "another pd-train is running in this folder")


def test_a_finished_run_says_so_and_stays_as_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert pd_train("--plan", write_plan(tmp_path), "--run-dir", run).exit_code == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for options in ([], ["--dry-run"], ["--quiet"]):
        result = pd_train("--resume", run, *options)
        assert result.exit_code == 0, result.output
        assert "nothing is left to train: 1 of 1 epochs are over" in result.output
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    longer = pd_train("--resume", run, "--epochs", 2)
    assert longer.exit_code == 0, longer.output
    assert "going on from checkpoint epoch-0001" in longer.stdout


def test_quiet_says_one_line_and_warns_on_standard_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["--epochs", 2, "--quiet", "--run-dir", run, "--checkpoint-every", 3, "--target-accuracy", 1]
    result = pd_train("--plan", write_plan(tmp_path), *arguments)
    assert result.exit_code == 0, result.output
    line = rf"{re.escape(str(run))}: 2 epochs in \S+ s, \S+ samples/s, best validation accuracy \S+ %, target 100.00 % "
    assert re.fullmatch(rf"{line}not reached\n", result.stdout), result.stdout
    assert result.stderr == ""
    again = pd_train("--resume", run, "--quiet")
    assert again.exit_code == 0, again.output
    assert again.stdout.startswith(f"{run}: 2 epochs in ")
    assert "nothing is left to train" in again.stderr
