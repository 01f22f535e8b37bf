"""A run as the launcher sees it: failures end all workers with the first cause, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

import plans
from pd_format.errors import UserError
from pd_format.plan import Host, Plan
from pd_format.profile import InputSpec
from pd_train.events import Event, Progress
from pd_train.launch import Stopped, launch
from pd_train.options import OptimizerOptions, RunOptions

MODELS = str(plans.HERE / "training_models.py")
INPUTS = (InputSpec(name="x", shape=(4, 1, 6, 6), dtype="float32"),)


def a_plan(config: str = "1-1", model: str = "skip", data: str = "synthetic:400") -> Plan:
    cuts = ["a", "b", "c"][: config.count("-")]
    return plans.plan_of(f"{MODELS}:{model}", INPUTS, config, cuts, data=data)


def options_of(plan: Plan, run_dir: Path, **changes: object) -> RunOptions:
    run_dir.mkdir(exist_ok=True)
    settings = {"epochs": 2, "device": "cpu", "stall_timeout": 60.0, **changes}
    return RunOptions(plan=plan, run_dir=run_dir, data=plan.data, **settings)


def test_a_loss_that_becomes_nan_stops_the_run_and_names_the_minibatch(tmp_path: Path) -> None:
    options = options_of(a_plan(), tmp_path / "run", optimizer=OptimizerOptions("sgd", lr=1e30))
    with pytest.raises(UserError, match=r"worker 1 \(stage 1 replica 0\): the loss of minibatch \d+ of epoch 1 is"):
        launch(options, lambda event: None)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_worker_is_the_first_cause(victim: int, tmp_path: Path) -> None:
    import multiprocessing

    killed = threading.Event()

    def show(event: Event) -> None:
        if isinstance(event, Progress) and not killed.is_set():
            killed.set()
            (process,) = (p for p in multiprocessing.active_children() if p.name == f"pd-worker-{victim}")
            os.kill(process.pid or 0, signal.SIGKILL)

    options = options_of(a_plan("1-1-1", data="synthetic:100000"), tmp_path / "run", epochs=50)
    with pytest.raises(UserError, match=rf"worker {victim} \(stage {victim} replica 0\): .* was killed by SIGKILL"):
        launch(options, show)


def test_a_signal_stops_all_workers(tmp_path: Path) -> None:
    stopped = threading.Event()

    def show(event: Event) -> None:
        if not stopped.is_set():
            stopped.set()
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped, match="SIGINT"):
        launch(options_of(a_plan(data="synthetic:100000"), tmp_path / "run", epochs=50), show)


def test_a_model_that_differs_from_the_plan_is_refused_with_the_place(tmp_path: Path) -> None:
    plan = a_plan("1-1")
    changed = plan.model.model_copy(update={"factory": f"{MODELS}:bn_dropout"})
    with pytest.raises(UserError, match="the plan was made for another version of model test"):
        launch(options_of(plan.model_copy(update={"model": changed}), tmp_path / "run"), lambda event: None)


def test_a_fault_in_the_users_code_shows_its_last_line_and_where_the_log_is(tmp_path: Path) -> None:
    plan = a_plan(data=f"{MODELS}:broken_samples")
    with pytest.raises(UserError, match=r"worker 0 .*ZeroDivisionError.*worker-0\.log"):
        launch(options_of(plan, tmp_path / "run"), lambda event: None)
    assert "Traceback" in (tmp_path / "run" / "worker-0.log").read_text()


def test_a_port_in_use_names_the_worker_and_the_port(tmp_path: Path) -> None:
    with socket.socket() as holder, socket.socket() as free:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        free.bind(("127.0.0.1", 0))
        ports = free.getsockname()[1], holder.getsockname()[1]
        free.close()
        hosts = tuple(Host(address="127.0.0.1", port=port) for port in ports)
        plan = a_plan("1-1").model_copy(update={"hosts": hosts})
        with pytest.raises(
            UserError, match=rf"worker 1 \(stage 1 replica 0 on 127\.0\.0\.1\): port {ports[1]} of 127\.0\.0\.1"
        ):
            launch(options_of(plan, tmp_path / "run"), lambda event: None)


def test_a_plan_with_hosts_on_this_machine_trains(tmp_path: Path) -> None:
    with socket.socket() as a, socket.socket() as b:
        a.bind(("127.0.0.1", 0))
        b.bind(("127.0.0.1", 0))
        hosts = tuple(Host(address="127.0.0.1", port=each.getsockname()[1]) for each in (a, b))
    plan = a_plan("1-1", data="synthetic:20").model_copy(update={"hosts": hosts})
    launch(options_of(plan, tmp_path / "run"), lambda event: None)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    expected = {"checkpoints", "metrics.jsonl", "model.pt", "report.json", "timing.jsonl"}
    assert names == {*expected, "worker-0.log", "worker-1.log"}
