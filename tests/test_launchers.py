"""Real launchers: a Slurm of two nodes on this machine (`slurm.py`), Open MPI's mpirun, and torchrun.

make test-launchers       # installs what is missing, as root, and runs these
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import plans
from pd_format.jsonfile import write_record
from slurm import Slurm, slurm_cluster, why_not_slurm
from test_checkpoint import assert_same, options_of, run
from test_network import OPTIONS as NETWORK_OPTIONS

pytestmark = pytest.mark.launchers

OPTIONS = tuple(option for option in NETWORK_OPTIONS if option != "--insecure")

_NO_SLURM = why_not_slurm()
needs_slurm = pytest.mark.skipif(_NO_SLURM is not None, reason=str(_NO_SLURM))
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plan, with `pd-train`, and with a run whose workers were all here."""
    folder = tmp_path_factory.mktemp("local")
    options = options_of(folder / "run", "2-1-1", checkpoint_every=None)
    write_record(folder / "plan.json", options.plan)
    program = folder / "bin" / "pd-train"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from pd_train.cli import main; main()" "$@"\n')
    program.chmod(0o755)
    run(options)
    return folder


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_cluster() as cluster:
        yield cluster


def start(
    command: Sequence[str], local: Path, folder: Path, environment: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Run a command that finds pd-train; its exit code, output and errors, the latter with single spaces."""
    environment = dict(os.environ if environment is None else environment)
    environment["PATH"] = f"{local / 'bin'}:{Path(sys.executable).parent}:{environment['PATH']}"
    process = subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=120)
    except BaseException:
        process.terminate()  # A launcher ends what it has started.
        print(*process.communicate(timeout=30))
        raise
    return process.returncode, " ".join(output.split()), " ".join(errors.split())


def batch(command: Sequence[str], slurm: Slurm, local: Path, folder: Path) -> tuple[int, str, str]:
    """The same for a batch job: sbatch with its options and script."""
    code, output, errors = start(
        ["sbatch", "--parsable", "--output=job.out", *command], local, folder, slurm.environment
    )
    assert code == 0, output + errors
    code = slurm.wait_for_job(output)
    return code, " ".join((folder / "job.out").read_text().split()), ""


def training(local: Path, *more: str) -> list[str]:
    return ["pd-train", "--plan", str(local / "plan.json"), *OPTIONS, *more]


def assert_trained(ended: tuple[int, str, str], folder: Path, local: Path, variable: str) -> None:
    code, output, errors = ended
    assert code == 0, output + errors
    for rank in range(4):
        assert f"worker {rank}: {variable} says {rank}; hosts from" in output
    assert output.count("best validation accuracy") == 1
    assert_same(folder, local / "run")


@needs_slurm
def test_srun_on_one_node_and_going_on_with_that_run_on_two(slurm: Slurm, local: Path, tmp_path: Path) -> None:
    ended = start(["srun", "-N1", "-n", "4", *training(local)], local, tmp_path, slurm.environment)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("test-slurm-")
    assert_trained(ended, folder, local, "Slurm's SLURM_PROCID")
    # The earlier hosts are not the run's: it goes on wherever it is started.
    command = ["srun", "-N2", "-n", "4", "pd-train", "--resume", str(folder), "--insecure"]
    code, output, errors = start(command, local, tmp_path, slurm.environment)
    assert code == 0, output + errors
    assert "hosts from Slurm's list of nodes" in output
    assert "going on from checkpoint epoch-0002" in output
    assert len((folder / "restarts.jsonl").read_text().splitlines()) == 1


@needs_slurm
def test_srun_on_two_nodes(slurm: Slurm, local: Path, tmp_path: Path) -> None:
    command = ["srun", "-N2", "-n", "4", *training(local, "--insecure", "--run-dir", "run")]
    ended = start(command, local, tmp_path, slurm.environment)
    assert_trained(ended, tmp_path / "run", local, "Slurm's SLURM_PROCID")
    assert "hosts from Slurm's list of nodes" in ended[1]


@needs_slurm
def test_two_nodes_are_no_loopback(slurm: Slurm, local: Path, tmp_path: Path) -> None:
    code, output, errors = start(["srun", "-N2", "-n", "4", *training(local)], local, tmp_path, slurm.environment)
    assert code == 1, output + errors
    assert "worker 0 is on pdnode1" in errors


@needs_slurm
@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ("3", "Slurm has started 3 programs (SLURM_STEP_NUM_TASKS), and the plan has 4 workers"),
        ("5", "Slurm has started 5 programs (SLURM_STEP_NUM_TASKS), and the plan has 4 workers"),
    ],
)
def test_srun_of_another_size_is_refused(
    programs: str, message: str, slurm: Slurm, local: Path, tmp_path: Path
) -> None:
    code, output, errors = start(["srun", "-n", programs, *training(local)], local, tmp_path, slurm.environment)
    assert code == 1, output + errors
    assert errors.count(message) == int(programs)
    assert not (tmp_path / "runs").exists()


@needs_slurm
def test_a_batch_job_that_starts_one_program_has_all_workers_there(slurm: Slurm, local: Path, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/sh\nexec " + " ".join(training(local, "--run-dir", "run")) + "\n")
    code, text, _ = batch(["-n", "4", "job.sh"], slurm, local, tmp_path)
    assert code == 0, text
    assert "starting 4 workers" in text
    assert_same(tmp_path / "run", local / "run")


@needs_slurm
def test_the_batch_script_of_the_examples_trains_on_two_nodes_and_goes_on(
    slurm: Slurm, local: Path, tmp_path: Path
) -> None:
    script = str(plans.HERE.parent / "examples" / "slurm.sbatch")
    shutil.copy(local / "plan.json", tmp_path)
    assert start(["pd-train", "--make-key", "job.key"], local, tmp_path)[0] == 0
    # A node has eight cores here.
    size = ["--ntasks=4", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2"]
    command = [*size, "--export=ALL,RUN=run", script, *OPTIONS]
    ended = batch(command, slurm, local, tmp_path)
    assert_trained(ended, tmp_path / "run", local, "Slurm's SLURM_PROCID")
    code, text, _ = batch(command, slurm, local, tmp_path)
    assert code == 0, text
    assert "going on from checkpoint epoch-0002" in text


@needs_slurm
def test_one_rank_that_fails_before_it_has_met_the_others_ends_all(slurm: Slurm, local: Path, tmp_path: Path) -> None:
    """They wait for it on two nodes; each hears why it does not come."""
    script = (
        f'[ "$SLURM_PROCID" = 2 ] && set -- --run-dir /dev/null/x; exec {" ".join(training(local, "--insecure"))} "$@"'
    )
    command = ["srun", "-N2", "-n", "4", "sh", "-c", script]
    code, output, errors = start(command, local, tmp_path, slurm.environment)
    assert code == 1, output + errors
    assert errors.count("--run-dir /dev/null/x: cannot be made (Not a directory); name another place.") == 4
    assert errors.count("Error: worker 2 on pdnode1: --run-dir /dev/null/x") == 3


@needs_slurm
def test_all_that_fail_for_the_same_reason_say_so_and_end(slurm: Slurm, local: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.pt").write_text("an earlier one")
    command = ["srun", "-N1", "-n", "4", *training(local, "--run-dir", "run")]
    code, output, errors = start(command, local, tmp_path, slurm.environment)
    assert code == 1, output + errors
    assert errors.count("--run-dir run: is not empty; name a new folder") == 4


@needs_mpirun
def test_mpirun(local: Path, tmp_path: Path) -> None:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4", *training(local, "--run-dir", "run")]
    ended = start(command, local, tmp_path)
    assert_trained(ended, tmp_path / "run", local, "Open MPI's OMPI_COMM_WORLD_RANK")
    assert "\x1b[2K" not in ended[1]


@needs_slurm
@needs_mpirun
def test_mpirun_in_a_slurm_job(slurm: Slurm, local: Path, tmp_path: Path) -> None:
    """Slurm's numbers are those of mpirun's daemons, one a node."""
    assert start(["pd-train", "--make-key", "job.key"], local, tmp_path)[0] == 0
    (tmp_path / "job.sh").write_text(
        "#!/bin/sh\nexec mpirun --allow-run-as-root --oversubscribe -n 4 "
        + " ".join(
            training(local, "--run-dir", "run", "--hosts", "pdnode1,pdnode1,pdnode1,pdnode2", "--key", "job.key")
        )
        + "\n"
    )
    ended = batch(["-N2", "-n", "4", "job.sh"], slurm, local, tmp_path)
    assert_trained(ended, tmp_path / "run", local, "Open MPI's OMPI_COMM_WORLD_RANK")


def test_torchrun(local: Path, tmp_path: Path) -> None:
    command = ["torchrun", "--standalone", "--nproc-per-node", "4", "--no-python", *training(local, "--run-dir", "run")]
    ended = start(command, local, tmp_path)
    assert_trained(ended, tmp_path / "run", local, "torchrun's RANK")


def test_torchrun_of_another_size_is_refused(local: Path, tmp_path: Path) -> None:
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", *training(local)]
    code, _, errors = start(command, local, tmp_path)
    assert code == 1, errors
    assert "torchrun has started 2 programs (WORLD_SIZE), and the plan has 4 workers" in errors
