"""A Slurm of two nodes on this machine: munged, slurmctld and two slurmd with a configuration of their own.

    python tests/slurm.py srun -n 4 hostname        # start it, run a command that sees it, stop it

Nothing of the machine's own is touched: all files are in a temporary folder, all ports are free ones. The nodes are
called pdnode1 and pdnode2 and have loopback addresses of their own, which only jobs on them can look up. It needs root.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["Slurm", "slurm_cluster", "why_not_slurm"]

NODES = ("pdnode1", "pdnode2")
_START_S = 60.0

_CONFIGURATION = """\
ClusterName=pd
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports[0]} CPUs=8
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports[1]} CPUs=8
PartitionName=all Nodes={nodes[0]},{nodes[1]} Default=YES State=UP OverSubscribe=FORCE
"""


def why_not_slurm() -> str | None:
    """What is missing here to start one, or None."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed; make test-launchers does so as root"
    return None if os.geteuid() == 0 else "slurmd and munged need root here"


class Slurm:
    """A running one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        """Of commands that are to see it."""
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons and wait until both nodes take jobs."""
        folder = self._folder
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        controller, *nodes = _free_ports(3)
        (folder / "state").mkdir()
        text = _CONFIGURATION.format(
            folder=folder, host=socket.gethostname().partition(".")[0], controller_port=controller, node_ports=nodes,
            nodes=NODES,
        )  # fmt: skip
        (folder / "slurm.conf").write_text(text)
        (folder / "hosts").write_text(
            Path("/etc/hosts").read_text() + "".join(f"127.0.1.{n} {name}\n" for n, name in enumerate(NODES, 1))
        )
        self._daemon(
            "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
        )  # fmt: skip
        self._until(lambda: (folder / "munge.socket").exists(), "munged to listen")
        self._daemon("slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for node in NODES:
            # A mount namespace of its own, in which the nodes' names can be looked up.
            within = f"mount --bind {folder}/hosts /etc/hosts && exec slurmd -D -N {node} -f {folder}/slurm.conf"
            self._daemon("unshare", "--mount", "sh", "-c", within)
        self._until(self._nodes_are_idle, "both nodes to be idle")

    def wait_for_job(self, number: str, seconds: float = 120.0) -> int:
        """Wait until a batch job is over, and return its exit code. `sbatch --wait` looks twice a minute at most."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            said = subprocess.run(
                ["scontrol", "--oneliner", "show", "job", number], env=self.environment, capture_output=True, text=True
            ).stdout
            fields = dict(part.split("=", 1) for part in said.split() if "=" in part)
            if fields.get("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"):
                return int(fields["ExitCode"].partition(":")[0])
            time.sleep(0.2)
        raise TimeoutError(f"job {number} is not over after {seconds:.0f} s: {said}")

    def stop(self) -> None:
        """Cancel what still runs, and end the daemons, last started first."""
        if self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    ["scancel", "--user=root"], env=self.environment, capture_output=True, timeout=10, check=False
                )
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _daemon(self, *command: str) -> None:
        with (self._folder / f"{len(self._daemons)}-{command[0]}.out").open("wb") as output:
            started = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self._daemons.append(started)

    def _nodes_are_idle(self) -> bool:
        said = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"], env=self.environment, capture_output=True, text=True
        )
        return said.stdout.split() == ["idle"] * len(NODES)

    def _until(self, ready: object, what: str) -> None:
        """Daemons say nothing when they are ready: ask again and again."""
        assert callable(ready)
        end = time.monotonic() + _START_S
        while not ready():
            ended = [daemon for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > end:
                texts = "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(self._folder.glob("*.out")))
                raise RuntimeError(f"waited in vain for {what}:\n{texts}")
            time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def slurm_cluster() -> Iterator[Slurm]:
    """Start one, and stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="pdslurm", ignore_cleanup_errors=True) as folder:
        cluster = Slurm(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def main(command: Sequence[str]) -> int:
    """Run a command that sees a Slurm."""
    if (reason := why_not_slurm()) is not None:
        print(f"no Slurm here: {reason}", file=sys.stderr)
        return 2
    with slurm_cluster() as cluster:
        return subprocess.run(command, env=cluster.environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["sinfo"]))
