"""Runs over several hosts: network namespaces with links of their own (see `namespaces.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import plans
from namespaces import Network, needs_namespaces, network_of
from pd_format.hosts import place_workers, read_hosts
from pd_format.jsonfile import write_record
from test_checkpoint import assert_same, options_of, run

pytestmark = needs_namespaces

OPTIONS = (
    "--epochs", "2", "--optimizer", "sgd", "--lr", "0.05", "--weight-decay", "0.001", "--lr-schedule", "cosine",
    "--seed", "7", "--threads", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def network() -> Network:
    with network_of(4) as built:
        yield built


def write_plan(folder: Path, network: Network, config: str = "2-1-1") -> Path:
    options = options_of(folder, config)
    workers = options.plan.workers
    (folder / "hosts").write_text("".join(f"{address}\n" for address in network.addresses[:workers]))
    hosts = place_workers(read_hosts(str(folder / "hosts")), workers)
    write_record(folder / "plan.json", options.plan.model_copy(update={"hosts": hosts}))
    return folder / "plan.json"


def start(
    network: Network, host: int, plan: Path, run_dir: Path, *more: str, trust: tuple[str, ...] = ("--insecure",)
) -> subprocess.Popen[str]:
    code = "from pd_train.cli import main; main()"
    command = [sys.executable, "-c", code, "--plan", str(plan), "--run-dir", str(run_dir), *OPTIONS, *trust, *more]
    return subprocess.Popen(
        network.command(host, command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=plans.HERE
    )


def end(programs: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        texts = [program.communicate(timeout=120) for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    return [(program.returncode, *text) for program, text in zip(programs, texts, strict=True)]


def test_four_hosts_compute_the_bits_of_one(network: Network, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, network)
    programs = [start(network, host, plan, tmp_path / f"host-{host}") for host in (3, 1, 0, 2)]
    for code, output, errors in end(programs):
        assert code == 0, output + errors
        assert "by the plan's hosts" in output or "of the plan's hosts" in output
        assert "best validation accuracy" in output
    run(options_of(tmp_path / "local", "2-1-1", checkpoint_every=None))
    assert_same(tmp_path / "host-0", tmp_path / "local")


def test_a_cut_link_ends_all_hosts_with_the_same_cause(network: Network, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, network)
    more = ("--epochs", "100000", "--lr-schedule", "constant", "--peer-timeout", "2")
    programs = [start(network, host, plan, tmp_path / f"host-{host}", *more) for host in range(4)]
    try:
        wait_for("epoch 2/", programs[0])
        network.cut(3)
        ended = end(programs)
    finally:
        network.mend(3)
    assert [code for code, _, _ in ended] == [1, 1, 1, 1]
    cause = "lost the connection to worker 3 (stage 2 replica 0 on 10.77.0.4): it has ended, or was silent for 2 s."
    for _, output, errors in ended[:3]:
        assert cause in " ".join(errors.split()), output + errors
    assert "lost the connection to worker " in ended[3][2]


def test_a_run_recovers_once_the_link_is_back(network: Network, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, network)
    more = ("--epochs", "60", "--lr-schedule", "constant", "--peer-timeout", "2", "--max-restarts", "3")
    programs = [start(network, host, plan, tmp_path / f"host-{host}", *more) for host in range(4)]
    try:
        wait_for("epoch 2/", programs[0])
        network.cut(1)
        wait_for("Starting again", programs[0])
    finally:
        network.mend(1)
    for code, output, errors in end(programs):
        assert code == 0, output + errors
        assert "restarts" in output


def test_hosts_that_are_not_alike_are_refused_on_all(network: Network, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, network)
    programs = [
        start(network, host, plan, tmp_path / f"host-{host}", *(("--seed", "8") if host == 2 else ()))
        for host in range(4)
    ]
    for code, output, errors in end(programs):
        assert code == 1, output + errors
        assert "another seed: worker 0 on " in " ".join(errors.split())
        assert "has 7, worker 2 on" in " ".join(errors.split())


def test_a_host_that_does_not_come_is_named(network: Network, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, network)
    programs = [
        start(network, host, plan, tmp_path / f"host-{host}", "--rendezvous-timeout", "12") for host in (0, 1, 3)
    ]
    for code, output, errors in end(programs):
        assert code == 1, output + errors
        assert "worker 2 at 10.77.0.3:29600 did not come within 12 s (--rendezvous-timeout)" in " ".join(errors.split())


def wait_for(text: str, program: subprocess.Popen[str]) -> None:
    assert program.stdout is not None
    for line in program.stdout:
        if text in line:
            return
    raise AssertionError(f"ended without {text!r}: {program.communicate()[1]}")


def test_a_network_that_nobody_calls_trusted_is_refused(network: Network, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, network)
    code = "from pd_train.cli import main; main()"
    command = network.command(0, [sys.executable, "-c", code, "--plan", str(plan), "--run-dir", str(tmp_path / "run")])
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "worker 0 is on 10.77.0.1, so activations" in result.stderr
    assert not (tmp_path / "run").exists()


END = """
import sys, torch
from pd_train.transport import Transport
from pd_train.wire import Message

rank, own, other = int(sys.argv[1]), *sys.argv[2:4]
end = Transport(rank, "run-1", own, 29700, peer_timeout=1.0)
end.connect({1 - rank: (other, 29700)})
end.send(1 - rank, Message("forward", rank, 0, 0, None))
print(type(end.receive(timeout=30)).__name__, flush=True)
if rank == 0:
    end.send(1, Message("forward", 0, 0, 1, torch.arange(5_000_000, dtype=torch.int32)))
    print(end.receive(timeout=30), flush=True)
else:
    received = end.receive(timeout=30)
    print(received.body.sum().item() if isinstance(received, Message) else received, flush=True)
    end.send(0, Message("forward", 1, 0, 1, "thanks"))
end.close(linger=5)
"""


def test_a_link_that_is_slow_is_not_taken_for_one_that_is_dead() -> None:
    """One tensor takes it for four times as long as a peer may be silent."""
    with network_of(2, "40mbit") as slow:
        programs = [
            subprocess.Popen(
                slow.command(rank, [sys.executable, "-c", END, str(rank), *slow.addresses[:: 1 - 2 * rank]]),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        (_, first, errors), (_, second, _) = end(programs)
    assert "'thanks'" in first, first + errors
    assert second.split() == ["Message", str(4_999_999 * 2_500_000)]
