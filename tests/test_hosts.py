"""Hosts as people write them, and which worker a program is: by options, launchers and addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_format.errors import UserError
from pd_format.hosts import HostSlots, place_workers, read_hosts
from pd_format.plan import Host, Plan
from pd_format.profile import InputSpec
from pd_train.whoami import Identity, cores_of_task, expand_nodes, find_identity
from plans import HERE, plan_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", [HostSlots("node1", 1, 29600)]),
        ("node1,node2:29700", [HostSlots("node1", 1, 29600), HostSlots("node2", 1, 29700)]),
        ("10.0.0.1, 10.0.0.2", [HostSlots("10.0.0.1", 1, 29600), HostSlots("10.0.0.2", 1, 29600)]),
        ("[fe80::1]:7,::1", [HostSlots("fe80::1", 1, 7), HostSlots("::1", 1, 29600)]),
        ("a,b,a", [HostSlots("a", 2, 29600), HostSlots("b", 1, 29600)]),
        ("train-{rank}.train:9", [HostSlots("train-{rank}.train", 1, 9)]),
        # Longer than any file's name may be.
        (",".join(f"10.77.0.{n}:29700" for n in range(40)), [HostSlots(f"10.77.0.{n}", 1, 29700) for n in range(40)]),
    ],
)
def test_a_list_of_hosts(text: str, expected: list[HostSlots]) -> None:
    assert read_hosts(text) == expected


def test_a_host_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# mine\nnode1 slots=2 max_slots=4\n\n10.0.0.2:5000   # the old one\nnode1 slots=1\n[::1]:7 slots=2\n"
    )
    assert read_hosts(str(path)) == [
        HostSlots("node1", 3, 29600),
        HostSlots("10.0.0.2", 1, 5000),
        HostSlots("::1", 2, 7),
    ]
    assert place_workers(read_hosts(str(path)), 5) == (
        Host(address="node1", port=29600), Host(address="node1", port=29601), Host(address="node1", port=29602),
        Host(address="10.0.0.2", port=5000), Host(address="::1", port=7),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "names no host"),
        ("node1 slots=0", r"line 1: found 'slots=0'; expected 'slots=N'"),
        ("node1\nnode2 cores=3", r"line 2: found 'cores=3'"),
        ("node1:70000", "line 1: found port 70000"),
        ("no de/1", r"line 1: found 'de/1'"),
        ("a:1\na:2", "stands there with ports 1 and 2"),
    ],
)
def test_a_host_file_that_is_wrong_names_the_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(content)
    with pytest.raises(UserError, match=message):
        read_hosts(str(tmp_path / "hosts"))


@pytest.mark.parametrize(
    ("text", "message"),
    [("no/file", "there is no such file"), ("a,,b", "found '', which is no host"), ("a b", "no host")],
)
def test_a_list_that_is_wrong(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_hosts(text)


def test_too_few_slots_are_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"have 2 slots, and the plan has 3 workers"):
        place_workers(read_hosts("a,b"), 3)


def test_a_pattern_has_a_host_for_every_worker() -> None:
    hosts = place_workers(read_hosts("t-{rank}.t:9"), 3)
    assert [host.address for host in hosts] == ["t-0.t", "t-1.t", "t-2.t"]


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("gpu7", ["gpu7"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
    ],
)
def test_slurms_list_of_nodes(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


SLURM = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "3"}
HOSTS = "n0,n1,n2,n3"


def four_workers(hosts: tuple[Host, ...] = ()) -> Plan:
    inputs = (InputSpec(name="x", shape=(4, 1, 6, 6), dtype="float32"),)
    plan = plan_of(f"{HERE / 'training_models.py'}:bn_dropout", inputs, "2-1-1", ["2", "8"])
    return plan.model_copy(update={"hosts": hosts})


PLAN = four_workers()


def identity(
    rank: int | None = None, hosts: str | None = None, environment: dict[str, str] | None = None, here: str = ""
) -> Identity:
    return find_identity(PLAN, rank, hosts, environment or {}, lambda address: address in here.split())


def test_without_hosts_and_launcher_all_workers_are_here() -> None:
    assert identity()[:2] == ((0, 1, 2, 3), ())


@pytest.mark.parametrize(
    "environment",
    [
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # A batch script.
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-3]"},  # Within salloc, outside a step.
        {"RANK": "0", "WORLD_SIZE": "1"},
        KUBERNETES,
    ],
)
def test_a_launcher_of_one_program_has_nothing_to_say(environment: dict[str, str]) -> None:
    assert identity(environment=environment)[:2] == ((0, 1, 2, 3), ())


@pytest.mark.parametrize(
    ("environment", "rank"),
    [(SLURM, 2), (MPI, 2), (TORCHRUN, 1), ({"PMI_RANK": "3", "PMI_SIZE": "4"}, 3), (KUBERNETES, 3)],
)
def test_a_launcher_says_which_worker_this_is(environment: dict[str, str], rank: int) -> None:
    found = identity(hosts=HOSTS, environment=environment)
    assert found.ranks == (rank,)
    assert [host.address for host in found.hosts] == HOSTS.split(",")
    assert f"says {rank}" in found.why


@pytest.mark.parametrize(
    "environment",
    [{**SLURM, "SLURM_STEP_NUM_TASKS": "3"}, {**MPI, "OMPI_COMM_WORLD_SIZE": "8"}, {**TORCHRUN, "WORLD_SIZE": "2"}],
)
@pytest.mark.parametrize("hosts", [None, HOSTS])
def test_a_launcher_of_another_size_is_refused_with_both_numbers(
    environment: dict[str, str], hosts: str | None
) -> None:
    with pytest.raises(UserError, match=r"has started (3|8|2) programs .* and the plan has 4 workers"):
        identity(hosts=hosts, environment=environment)


def test_a_launcher_within_another_one_counts_alone() -> None:
    """mpirun starts one daemon a node by srun, so its programs see Slurm's numbers too."""
    for daemons in ("2", "4"):
        inside = {**SLURM, "SLURM_STEP_NUM_TASKS": daemons, "SLURM_PROCID": "0"}
        assert identity(hosts=HOSTS, environment={**MPI, **inside}).ranks == (2,)
        assert identity(hosts=HOSTS, environment={**HYDRA, **inside}).ranks == (1,)


def test_srun_speaks_pmi_as_well() -> None:
    """`srun --mpi=pmi2`: both say the same, and Slurm knows the nodes."""
    found = identity(environment={**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4", "SLURM_JOB_NODELIST": "n1"})
    assert found.ranks == (2,)
    with pytest.raises(UserError, match=r"SLURM_PROCID says 2; PMI's PMI_RANK says 1"):
        identity(environment={**SLURM, "PMI_RANK": "1", "PMI_SIZE": "4"})


def test_a_task_of_slurm_has_the_cores_that_were_asked_for_each() -> None:
    environment = {**SLURM, "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_PER_TASK": "8"}
    assert cores_of_task(identity(environment=environment), environment) == 8
    assert cores_of_task(identity(environment=SLURM | {"SLURM_JOB_NODELIST": "n1"}), SLURM) is None
    alone = {**environment, "SLURM_STEP_NUM_TASKS": "1"}  # They are for all workers then.
    assert cores_of_task(identity(environment=alone), alone) is None


def test_every_start_has_ports_and_a_name_of_its_own() -> None:
    steps = [{**SLURM, "SLURM_JOB_NODELIST": "n1", "SLURM_STEP_ID": step} for step in ("0", "1")]
    runs = [{**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": port} for port in ("29500", "29501")]
    found = [identity(environment=environment) for environment in (*steps, *runs, HYDRA)]
    assert [one.job for one in found] == [
        "slurm-7.0", "slurm-7.1", "torchrun-none.29500", "torchrun-none.29501", "pmi",
    ]  # fmt: skip
    assert len({one.hosts[0].port for one in found}) == 5
    assert identity(environment={**TORCHRUN, "TORCHELASTIC_RUN_ID": "../x"}).job == "torchrun-..-x"
    assert identity(hosts=HOSTS, here="n2").job is None


def test_two_launchers_that_contradict_each_other_are_listed() -> None:
    with pytest.raises(UserError, match=r"Open MPI's OMPI_COMM_WORLD_RANK says 2; torchrun's RANK says 1"):
        identity(hosts=HOSTS, environment={**MPI, **TORCHRUN})


def test_an_option_that_contradicts_the_launcher_is_listed() -> None:
    with pytest.raises(UserError, match=r"--rank says 3; Slurm's SLURM_PROCID says 2"):
        identity(rank=3, hosts=HOSTS, environment=SLURM)


def test_own_addresses_say_it_where_nothing_else_does() -> None:
    assert identity(hosts=HOSTS, here="n2").ranks == (2,)
    assert identity(hosts="n0,n1,n0,n1", here="n1").ranks == (2, 3)
    with pytest.raises(UserError, match=r"none of the hosts is this machine \(0: n0, 1: n1, 2: n2, 3: n3\)"):
        identity(hosts=HOSTS, here="elsewhere")


def test_a_rank_on_another_machine_than_its_host_is_refused() -> None:
    with pytest.raises(UserError, match=r"--rank says 1, whose host is n1 .* this machine has the address of worker 2"):
        identity(rank=1, hosts=HOSTS, here="n2")


def test_the_address_to_listen_on_tells_where_a_worker_is() -> None:
    hosts = tuple(Host(address="nat", port=5 + r, listen=f"10.0.0.{r}") for r in range(4))
    assert find_identity(four_workers(hosts), None, None, {}, lambda address: address == "10.0.0.3").ranks == (3,)


@pytest.mark.parametrize(
    ("more", "nodes"),
    [
        ({"SLURM_JOB_NODELIST": "n1"}, ["127.0.0.1"] * 4),
        ({"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, ["n1", "n1", "n2", "n2"]),
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "3,1"}, ["n1", "n1", "n1", "n2"]),
    ],
)
def test_slurm_says_where_the_workers_are(more: dict[str, str], nodes: list[str]) -> None:
    found = identity(environment={**SLURM, **more})
    assert found.ranks == (2,)
    assert [host.address for host in found.hosts] == nodes
    assert len({(host.address, host.port) for host in found.hosts}) == 4


def test_tasks_that_are_not_spread_in_blocks_are_refused() -> None:
    more = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_DISTRIBUTION": "cyclic"}
    with pytest.raises(UserError, match=r"spread as cyclic .* use --distribution=block"):
        identity(environment={**SLURM, **more})


@pytest.mark.parametrize("environment", [MPI, HYDRA, TORCHRUN, {**SLURM, "SLURM_JOB_NODELIST": "n1"}])
def test_a_launcher_on_one_machine_needs_no_hosts(environment: dict[str, str]) -> None:
    found = identity(environment=environment)
    assert {host.address for host in found.hosts} == {"127.0.0.1"}
    assert len({host.port for host in found.hosts}) == 4


def test_a_launcher_on_several_machines_needs_hosts() -> None:
    with pytest.raises(UserError, match=r"Open MPI does not say on which hosts .* name them with --hosts"):
        identity(environment={**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


def test_a_rank_without_hosts_is_refused() -> None:
    with pytest.raises(UserError, match="--rank 1: where the other workers are is not known"):
        identity(rank=1)
    with pytest.raises(UserError, match="--rank 4: the plan has 4 workers; give one of 0 to 3"):
        identity(rank=4, hosts=HOSTS)
