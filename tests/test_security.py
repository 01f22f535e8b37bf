"""Keys: how they are kept, who connects with them, and what becomes of all others. See `strangers.py`."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq
import zmq.auth
from click.testing import CliRunner

import strangers
from namespaces import needs_namespaces, network_of
from pd_format.errors import UserError
from pd_format.jsonfile import write_record
from pd_format.plan import Host, read_plan
from pd_train import handshakes, transport
from pd_train.admission import GREETING
from pd_train.cli import main
from pd_train.host import allow_open_files
from pd_train.keys import Key, answer_zap, make_key, read_key
from pd_train.transport import PeerLost, Transport
from pd_train.wire import Message, encode
from test_checkpoint import assert_same, options_of, run
from test_network import end, start, write_plan

RUN = "run-1"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    make_key(tmp_path / "job.key")
    return tmp_path / "job.key"


def new_key() -> Key:
    return Key(*zmq.curve_keypair())


class TestKeyFiles:
    def test_pyzmq_reads_what_is_made(self, key_file: Path) -> None:
        public, secret = zmq.auth.load_certificate(key_file)
        assert secret is not None
        assert zmq.curve_public(secret) == public
        assert read_key(key_file) == Key(public, secret)
        assert secret.decode() not in repr(read_key(key_file))

    def test_what_pyzmq_made_is_read(self, tmp_path: Path) -> None:
        _, path = zmq.auth.create_certificates(tmp_path, "job")
        Path(path).chmod(0o600)
        assert tuple(zmq.auth.load_certificate(path)) == (read_key(Path(path)).public, read_key(Path(path)).secret)

    def test_nobody_else_may_read_it_at_any_moment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, seen = tmp_path / "job.key", []
        draw = zmq.curve_keypair

        def watched() -> tuple[bytes, bytes]:
            seen.append(stat.S_IMODE(path.stat().st_mode))
            return draw()

        monkeypatch.setattr(zmq, "curve_keypair", watched)
        before = os.umask(0)
        try:
            make_key(path)
        finally:
            os.umask(before)
        assert [*seen, stat.S_IMODE(path.stat().st_mode)] == [0o600, 0o600]

    def test_a_file_that_is_there_is_left_as_it_is(self, key_file: Path) -> None:
        before = key_file.read_bytes()
        with pytest.raises(UserError, match=r"job\.key: there is such a file already"):
            make_key(key_file)
        (key_file.parent / "link").symlink_to(key_file.parent / "elsewhere")
        with pytest.raises(UserError, match="there is such a file already"):
            make_key(key_file.parent / "link")
        assert key_file.read_bytes() == before
        assert not (key_file.parent / "elsewhere").exists()

    def test_a_full_disk_leaves_no_file(self) -> None:
        with pytest.raises(UserError, match=r"cannot be written \(.*\); name another place"):
            make_key(Path("/proc/job.key"))

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
    def test_a_file_that_others_may_read_is_refused_as_ssh_does(self, mode: int, key_file: Path) -> None:
        key_file.chmod(mode)
        with pytest.raises(UserError, match=rf"mode {mode:04o}\).*Run: chmod 600 .*job\.key$"):
            read_key(key_file)

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda path, text: path.unlink(), "there is no such file; name the job's key, or make one"),
            (lambda path, text: (path.unlink(), path.mkdir()), "is no such file"),
            (lambda path, text: path.write_text(""), "holds no key"),
            (lambda path, text: path.write_text("public-key\n"), "holds no key"),
            (lambda path, text: path.write_bytes(os.urandom(2000)), "holds no key"),
            (lambda path, text: path.write_text(text.partition("    secret-key")[0]), "holds a public key alone"),
            (lambda path, text: path.write_text(text[:-10]), "belong together"),
            (lambda path, text: path.write_text(text.replace('public-key = "', 'public-key = "x')), "belong together"),
            (lambda path, text: path.write_text(text.swapcase()), "holds no key"),
            (lambda path, text: path.write_text(text + " " * 100_000), "is no such file"),
        ],
    )
    def test_what_is_no_key_is_refused_without_showing_it(
        self, spoil: Callable[[Path, str], object], message: str, key_file: Path
    ) -> None:
        key = read_key(key_file)
        spoil(key_file, key_file.read_text())
        with pytest.raises(UserError, match=message) as caught:
            read_key(key_file)
        assert key.secret.decode()[:20] not in str(caught.value)

    def test_a_library_without_curve_is_explained(self, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zmq, "has", lambda what: False)
        for act in (lambda: read_key(key_file), lambda: make_key(key_file.parent / "new.key")):
            with pytest.raises(UserError, match="built without CURVE"):
                act()


def test_only_the_own_key_gets_a_yes() -> None:
    key, other = new_key(), new_key()

    def status(mechanism: bytes, *credentials: bytes) -> bytes:
        return answer_zap([b"1.0", b"7", b"pipedream", b"10.0.0.1", b"", mechanism, *credentials], key)[2]

    raw = zmq.utils.z85.decode
    assert status(b"CURVE", raw(key.public)) == b"200"
    assert answer_zap([b"1.0", b"7", b"", b"", b"", b"CURVE", raw(key.public)], key)[:2] == [b"1.0", b"7"]
    for refused in (
        (b"CURVE", raw(other.public)),
        (b"CURVE", key.public),
        (b"CURVE",),
        (b"NULL",),
        (b"PLAIN", b"a", b"b"),
    ):
        assert status(*refused) == b"400"


@contextlib.contextmanager
def workers_with(*held: Key | None) -> Iterator[list[Transport]]:
    """Workers of one run, each with a key, all connected to each other."""
    workers = [Transport(rank, RUN, "127.0.0.1", key=key) for rank, key in enumerate(held)]
    addresses = {each.rank: (each.address, each.port) for each in workers}
    try:
        for each in workers:
            each.connect(addresses)
        yield workers
    finally:
        for each in workers:
            each.close()


def exchange(a: Transport, b: Transport, count: int = 5) -> None:
    """A message in each direction, some times, and nothing besides."""
    for index in range(count):
        sent = torch.randn(7)
        for one, other in ((a, b), (b, a)):
            one.send(other.rank, Message("forward", one.rank, 0, index, sent))
            received = other.receive(timeout=20)
            assert isinstance(received, Message)
            assert (received.sender, received.index) == (one.rank, index)
            assert torch.equal(received.body, sent)


def plausible() -> list[list[bytes]]:
    """What a worker would send."""
    messages = [Message(GREETING, 1, 0, 0), *(Message("forward", 1, 0, index, torch.ones(3)) for index in range(9))]
    return [list(map(bytes, encode(message, RUN, number))) for number, message in enumerate(messages)]


def test_holders_of_the_key_meet_and_lose_each_other_as_without() -> None:
    key = new_key()
    with workers_with(key, key) as (a, b):
        exchange(a, b)
        Transport.close(b)
        b.close = lambda: None  # type: ignore[method-assign]
        assert a.receive(timeout=10) == PeerLost(1)


def test_the_longest_frame_passes_with_a_key_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "FRAME_BYTES", 4096)
    key = new_key()
    with workers_with(key, key) as (a, b):
        a.send(1, Message("forward", 0, 0, 0, torch.zeros(1024)))
        assert isinstance(b.receive(timeout=10), Message)
        a.send(1, Message("forward", 0, 0, 1, torch.zeros(2048)))
        assert a.receive(timeout=10) == PeerLost(1)


@pytest.mark.parametrize("way", strangers.WAYS)
def test_strangers_get_nothing_and_disturb_nothing(way: str, caplog: pytest.LogCaptureFixture) -> None:
    key = new_key()
    with workers_with(key, key) as (a, b):
        ended, received = strangers.ask("127.0.0.1", b.port, way, key.public, plausible())
        assert ended.startswith("HANDSHAKE_FAILED")
        assert received == []
        exchange(a, b)
        assert a.receive() is b.receive() is None
        assert b.refused == 0  # No message came as far as to be refused.
    assert ("127.0.0.1 holds another key" in caplog.text) == (way == "other pair")


def test_one_who_holds_the_key_would_have_got_in() -> None:
    """The check of the test above: the stranger's code does connect where it may."""
    key = new_key()
    with workers_with(None, None) as (a, b):
        ended, _ = strangers.ask("127.0.0.1", b.port, "open", key.public, [])
        assert ended == "HANDSHAKE_SUCCEEDED"
        exchange(a, b)


def test_garbage_and_connections_left_half_way_disturb_nothing() -> None:
    key = new_key()
    with workers_with(key, key) as (a, b), contextlib.ExitStack() as held:
        for content in [*strangers.GARBAGE.values()] * 10:
            held.enter_context(strangers.throw("127.0.0.1", b.port, content))
            exchange(a, b, count=1)
        for _ in range(300):
            held.enter_context(strangers.throw("127.0.0.1", b.port, strangers.SIGNATURE))
        exchange(a, b)
        assert (a.refused, b.refused) == (0, 0)
        assert "connections that came to nothing: 0" not in b.standing()


def test_more_connections_than_files_are_usually_allowed() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
        allow_open_files(600)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600, before[1])
        allow_open_files(550)  # Never fewer.
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_handshake_that_is_not_finished_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "_HANDSHAKE_MS", 200)
    key = new_key()
    with workers_with(key, key) as (a, b), contextlib.ExitStack() as held:
        streams = [held.enter_context(strangers.throw("127.0.0.1", b.port, strangers.SIGNATURE)) for _ in range(50)]
        for stream in streams:
            stream.settimeout(20)
            while stream.recv(4096):  # Until it is closed.
                pass
        exchange(a, b)


def test_nobody_is_served_before_somebody_answers_for_the_key() -> None:
    """A worker listens for some time before its thread runs: who comes then waits, and is asked all the same."""
    key = new_key()
    early = Transport(0, RUN, "127.0.0.1", key=key)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, dealer.get_monitor_socket() as monitor:
        strangers.WAYS["other pair"](dealer, key.public)
        dealer.linger = 0
        dealer.connect(f"tcp://127.0.0.1:{early.port}")
        dealer.send(b"junk")
        while zmq.utils.monitor.recv_monitor_message(monitor)["event"] != zmq.EVENT_CONNECTED:
            pass
        early.connect({})
        assert monitor.poll(10_000)
        assert zmq.utils.monitor.recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        assert early.receive(timeout=0.05) is None
        assert early.refused == 0
        dealer.disable_monitor()
    early.close()


def test_workers_with_different_keys_never_meet_and_each_knows_it() -> None:
    with workers_with(new_key(), new_key()) as (a, b):
        for one, other in ((a, b), (b, a)):
            while other.rank not in one.unmet:
                assert one.receive(timeout=0.05) is None
        assert a.receive() is b.receive() is None


def test_a_worker_without_a_key_and_one_with_end_at_once_and_say_why() -> None:
    """Which side sees the mismatch is a race at each try: on a busy machine it may take many."""
    with workers_with(new_key(), None) as (a, b):
        a.send(1, Message("forward", 0, 0, 0))
        with pytest.raises(UserError, match=r"worker 1 is one that was given no --key.*the same key file"):
            a.receive(timeout=45)
        with pytest.raises(UserError, match=r"worker 0 is one that was given a --key.*the same key file"):
            b.receive(timeout=45)
        a.send(1, Message("forward", 0, 0, 1))  # To nobody, which is no error of its own.
        a.send(0, Message("forward", 0, 0, 2))
        assert isinstance(a.receive(timeout=10), Message)


def test_another_program_at_a_workers_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        a = Transport(0, RUN, "127.0.0.1", key=new_key())
        a.connect({1: other.getsockname()})
        stream, _ = other.accept()
        with stream:
            stream.sendall(strangers.GARBAGE["ssh"] * 20)
            with pytest.raises(UserError, match="or no pd-train at all"):
                a.receive(timeout=10)
        a.close()


@needs_namespaces
def test_a_host_without_the_key_gets_nothing_from_a_run_and_disturbs_nothing(key_file: Path, tmp_path: Path) -> None:
    """It tries from before the second worker is there until after the run; the run's bits are those of a quiet one."""
    key = read_key(key_file)
    trust = ("--key", str(key_file))
    with network_of(3) as network, contextlib.ExitStack() as stack:
        network.add_address(0, "10.77.0.100")
        plan = write_plan(tmp_path, network, "1-1")
        first = start(network, 0, plan, tmp_path / "host-0", trust=trust)
        stack.callback(first.kill)
        port = read_plan(plan).hosts[0].port
        command = [sys.executable, strangers.__file__, network.addresses[0], str(port), key.public.decode()]
        stranger = subprocess.Popen(network.command(2, command), stdout=subprocess.PIPE, text=True)
        stack.callback(stranger.communicate)
        stack.callback(stranger.kill)
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "round 1\n"
        for address, listens in ((network.addresses[0], True), ("10.77.0.100", False), ("127.0.0.1", False)):
            tried = subprocess.run(
                network.command(0, [sys.executable, "-c", CONNECT, address, str(port)]), stderr=subprocess.DEVNULL
            )
            assert (tried.returncode == 0) == listens, address
        second = start(network, 1, plan, tmp_path / "host-1", trust=trust)
        seen = all_that_processes_show()
        assert str(key_file).encode() in seen
        assert key.secret not in seen
        for code, output, errors in end([first, second]):
            assert code == 0, output + errors
            assert key.secret.decode() not in output + errors
        stranger.kill()
        said = stranger.stdout.read().splitlines()
    assert all(line.startswith("round ") for line in said), said
    run(options_of(tmp_path / "local", "1-1", checkpoint_every=None))
    assert_same(tmp_path / "host-0", tmp_path / "local")
    assert json.loads((tmp_path / "host-0/report.json").read_text())["refused_messages"] == 0
    log = (tmp_path / "host-0/worker-0.log").read_text()
    assert "refused connection 1 " in log
    assert log.count("refused connection") < 20
    for path in [*tmp_path.glob("host-*/**/*")]:
        assert path.is_dir() or key.secret not in path.read_bytes(), path


CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)"


def all_that_processes_show() -> bytes:
    """Arguments and environments of all processes of this machine."""
    shown = bytearray()
    for path in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                shown += (path / name).read_bytes()
    return bytes(shown)


class TestCommand:
    def test_a_key_is_made_without_a_plan(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        made = CliRunner().invoke(main, ["--make-key", "job.key"])
        assert made.exit_code == 0
        assert "job.key: a new key. Copy it to every host" in made.output
        assert read_key(Path("job.key")).secret.decode() not in made.output
        again = CliRunner().invoke(main, ["--make-key", "job.key"])
        assert again.exit_code == 1
        assert "there is such a file already" in again.output

    def test_a_key_that_is_no_good_is_refused_before_anything_starts(
        self, key_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = key_file.parent
        monkeypatch.chdir(folder)
        write_record(folder / "plan.json", options_of(folder, "1-1").plan)
        key_file.chmod(0o644)
        command = ["--plan", str(folder / "plan.json"), "--run-dir", str(folder / "run"), "--key", "job.key"]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 1
        # The whole path is what a run keeps: it may go on from another folder.
        assert f"chmod 600 {key_file}" in " ".join(result.output.split())
        assert not (folder / "run").exists()

    def test_an_open_network_is_refused_naming_the_key_first(self, tmp_path: Path) -> None:
        plan = options_of(tmp_path, "1-1").plan
        hosts = tuple(Host(address=f"198.51.100.{number}", port=29600) for number in (1, 2))
        write_record(tmp_path / "plan.json", plan.model_copy(update={"hosts": hosts}))
        result = CliRunner().invoke(main, ["--plan", str(tmp_path / "plan.json"), "--rank", "0"])
        text = " ".join(result.output.split())
        assert result.exit_code == 1, text
        assert (
            text.index("pd-train --make-key job.key") < text.index("--key job.key on each") < text.index("--insecure")
        )
