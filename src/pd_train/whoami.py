"""Which workers this program starts, and where all of them listen: decided from options, launchers and addresses.

Pure: the environment and the test for own addresses are passed in. The order is `--rank`, then the environment of a
launcher, then this machine's own addresses among the hosts. A launcher counts only if it started as many programs as
the plan has workers; one that started a single program (a batch job, a pod) has nothing to say.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pd_format.errors import UserError
from pd_format.hosts import place_workers, read_hosts
from pd_format.plan import Host, Plan

__all__ = ["Identity", "cores_of_task", "expand_nodes", "find_identity"]


class Identity(NamedTuple):
    """What this program is in the run."""

    ranks: tuple[int, ...]
    """Of the workers that it starts."""
    hosts: tuple[Host, ...]
    """Where each worker listens, by rank; empty where all are here and ports are free to choose."""
    why: str
    """What was decided, and from what."""
    job: str | None = None
    """Names the start by a launcher, alike in all its programs; None where no launcher counts."""


class _Launcher(NamedTuple):
    name: str
    rank: str
    size: str
    local_size: str
    job: tuple[str, ...]
    """What tells one start from another, as far as it goes."""


_SLURM = _Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "", ("SLURM_JOB_ID", "SLURM_STEP_ID"))
_OPEN_MPI = _Launcher(
    "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("OMPI_MCA_ess_base_jobid",),
)  # fmt: skip
# The process manager of MPICH and its kin; it names no job.
_PMI = _Launcher("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ("PMI_JOBID",))
# Without --standalone or --rdzv-id all runs have the same name, and the port tells them apart.
_TORCHRUN = _Launcher(
    "torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "MASTER_PORT")
)  # fmt: skip
_LAUNCHERS = (_SLURM, _OPEN_MPI, _PMI, _TORCHRUN)
_KUBERNETES = _Launcher("Kubernetes", "JOB_COMPLETION_INDEX", "", "", ())
_FIRST_PORT, _PORTS = 20000, 9000


def find_identity(
    plan: Plan,
    rank: int | None,
    hosts: str | None,
    environment: Mapping[str, str],
    is_here: Callable[[str], bool],
) -> Identity:
    """Decide.

    Args:
        plan: of the run; its own hosts count where `hosts` is not given.
        rank: `--rank`.
        hosts: `--hosts`.
        environment: of this process.
        is_here: whether an address belongs to this machine.

    Raises:
        UserError: nothing tells, or what tells contradicts itself; the text lists it.
    """
    workers = plan.workers
    known = place_workers(read_hosts(hosts), workers) if hosts is not None else plan.hosts
    whence = "--hosts" if hosts is not None else "the plan's hosts"
    found = _launched(environment, workers, has_hosts=bool(known))
    if rank is not None and not 0 <= rank < workers:
        raise UserError(f"--rank {rank}: the plan has {workers} workers; give one of 0 to {workers - 1}.")
    if not known:
        if found is None:
            if rank is not None:
                raise UserError(f"--rank {rank}: where the other workers are is not known; name them with --hosts.")
            return Identity(tuple(range(workers)), (), f"all {workers} workers are here: neither hosts nor a launcher")
        known, whence = _hosts_of(found[1], environment, workers)
    here = tuple(r for r, host in enumerate(known) if is_here(host.listen or host.address))
    if rank is None and found is None:
        if not here:
            places = ", ".join(f"{r}: {host.address}" for r, host in enumerate(known))
            raise UserError(
                f"none of the hosts is this machine ({places}); run it on one of them, say which worker it is with "
                "--rank, or set `listen` of its host in the plan to an address that this machine has."
            )
        return Identity(here, known, f"{_workers(here)}: of {whence}, these are this machine's addresses")
    says = {f"--rank says {rank}": rank} if rank is not None else {}
    if found is not None:
        says[f"{found[1].name}'s {found[1].rank} says {found[0]}"] = found[0]
    if len(set(says.values())) > 1:
        raise UserError(f"which worker this is, is contradicted: {'; '.join(says)}. Leave one of them out.")
    own = next(iter(says.values()))
    if here and own not in here:
        raise UserError(
            f"which worker this is, is contradicted: {'; '.join(says)}, whose host is {known[own].address} by "
            f"{whence}, and this machine has the address of {_workers(here)}. Mend the hosts, or start it there."
        )
    job = None if found is None else _job_of(found[1], environment)
    return Identity((own,), known, f"{_workers((own,))}: {'; '.join(says)}; hosts from {whence}", job)


def _launched(environment: Mapping[str, str], workers: int, has_hosts: bool) -> tuple[int, _Launcher] | None:
    """The rank that a launcher gives, and which one does."""
    counted: dict[_Launcher, int] = {}
    others: list[str] = []
    for launcher in _LAUNCHERS:
        size, rank = _number(environment, launcher.size), _number(environment, launcher.rank)
        if size is None or rank is None:
            continue
        if size == workers:
            counted[launcher] = rank
        elif size > 1:
            others.append(f"{launcher.name} has started {size} programs ({launcher.size})")
    index = _number(environment, _KUBERNETES.rank)
    if index is not None and has_hosts and not counted:
        counted[_KUBERNETES] = index
    if _OPEN_MPI in counted or (_PMI in counted and _PMI.local_size in environment):
        # An mpirun starts a daemon of its own on each node by srun, and Slurm's numbers are the daemons'.
        counted.pop(_SLURM, None)
    if len(set(counted.values())) > 1:
        says = "; ".join(f"{launcher.name}'s {launcher.rank} says {rank}" for launcher, rank in counted.items())
        raise UserError(f"which worker this is, is contradicted: {says}. Unset what does not belong to this run.")
    for launcher, rank in counted.items():
        if not 0 <= rank < workers:
            raise UserError(
                f"{launcher.rank} is {rank}, and the plan has {workers} workers, 0 to {workers - 1}; start as many "
                "programs, or plan for as many machines."
            )
        return rank, launcher
    if others:
        raise UserError(
            f"{'; '.join(others)}, and the plan has {workers} workers; start one program for each worker, or plan for "
            "as many machines."
        )
    return None


def _hosts_of(launcher: _Launcher, environment: Mapping[str, str], workers: int) -> tuple[tuple[Host, ...], str]:
    """Where the workers are, from the launcher itself."""
    # Two jobs on one machine must not meet: ports follow from the job.
    port = _FIRST_PORT + zlib.crc32(_job_of(launcher, environment).encode()) % _PORTS
    if launcher is _SLURM:
        nodes = expand_nodes(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))
        counts = _tasks_per_node(
            environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
        )
        distribution = environment.get("SLURM_DISTRIBUTION", "block").partition(":")[0]
        if len(nodes) == 1:  # This one, on which nothing needs to leave the machine.
            return _all_here(port, workers), f"Slurm, which has started all of them on this machine, {nodes[0]}"
        if sum(counts) == workers and len(counts) == len(nodes) and distribution in ("block", ""):
            placed = [
                Host(address=node, port=port + slot)
                for node, count in zip(nodes, counts, strict=True)
                for slot in range(count)
            ]
            return tuple(placed), "Slurm's list of nodes"
        raise UserError(
            f"Slurm's tasks are spread as {distribution} ({environment.get('SLURM_STEP_TASKS_PER_NODE', '?')} on "
            f"{', '.join(nodes) or 'unknown nodes'}), which does not tell where each worker is; use "
            "--distribution=block, or name the hosts with --hosts."
        )
    if _number(environment, launcher.local_size) == workers:
        return _all_here(port, workers), f"{launcher.name}, which has started all of them on this machine"
    raise UserError(
        f"{launcher.name} does not say on which hosts its {workers} programs run; name them with --hosts, in the order "
        "of their ranks."
    )


def _all_here(port: int, workers: int) -> tuple[Host, ...]:
    return tuple(Host(address="127.0.0.1", port=port + rank) for rank in range(workers))


def _job_of(launcher: _Launcher, environment: Mapping[str, str]) -> str:
    """`slurm-12.0`: a part of a path, and short enough for people."""
    given = ".".join(environment[name] for name in launcher.job if environment.get(name))
    return re.sub(r"[^\w.-]+", "-", f"{launcher.name.lower()}-{given}").rstrip("-")


def cores_of_task(identity: Identity, environment: Mapping[str, str]) -> int | None:
    """The cores that Slurm has set aside for each of the programs that it started, where it was asked for some."""
    by_slurm = identity.job is not None and identity.job.startswith(f"{_SLURM.name.lower()}-")
    return _number(environment, "SLURM_CPUS_PER_TASK") or None if by_slurm else None


def expand_nodes(text: str) -> list[str]:
    """The nodes of a list as Slurm writes it: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7, login."""
    nodes: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            choices = [literal] if literal else [each for one in ranges.split(",") for each in _numbers(one)]
            names = [name + choice for name in names for choice in choices]
        nodes += names
    return nodes


def _numbers(text: str) -> list[str]:
    """`07-10` is 07, 08, 09, 10: as wide as its first number."""
    first, dash, last = text.partition("-")
    return [f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)] if dash else [first]


def _tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "") if name else ""
    return int(text) if text.isascii() and text.isdigit() else None


def _workers(ranks: Sequence[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
