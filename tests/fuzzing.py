"""Random and mutated inputs for everything that reads what somebody else may have written.

Not a test module: tests import it as `fuzzing`. A target makes an input from a random source and feeds it; whatever is
raised but the documented error is a fault.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import random
import re
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import torch

import plans
from pd_format.errors import FormatError
from pd_format.graph_text import read_any_profile
from pd_format.jsonfile import write_record
from pd_format.plan import Plan, read_plan
from pd_format.profile import Device, InputSpec, LayerProfile, ModelSpec, Profile, read_profile
from pd_train.admission import GREETING, Admission
from pd_train.checkpoint.part import DamagedPart, Range, ShardSlice, load_part, write_part
from pd_train.forms import plan_problem
from pd_train.packing import Region, aligned
from pd_train.routing import place_of
from pd_train.wire import Message, Opened, WireError, decode, encode

__all__ = ["Target", "targets"]

RUN = "0123456789abcdef-0123456789abcdef"
SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 63, 64, 65, 2**31, 2**47, 2**48, 10**12, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.0,
    1.5, 1e308, float("nan"), float("inf"), "", "x", "t", "l", "d", "s", "i", "float32", "bool", "9" * 400, "-0", "é",
    "\x1b[31m", "forward", "segment", b"", b"\xff" * 9,
]  # fmt: skip
VALUES: list[Any] = [
    *(each for each in SCALARS if not isinstance(each, bytes)), [], {}, [[]], {"a": {}}, [0] * 300, "x" * 5000,
    10**19, 10**30, -(10**19), "\ud800", "pipedream-plan", "pipedream-profile", [[1, 2], [3]],
]  # fmt: skip
NUMBERS = ["-1", "1e400", "1e15", "nan", "9" * 300, "0x1", "[1; 2", "[]", "[1.0; 2.0]", "1.", ".", "+1", "1e", ""]


class Target:
    """One reader.

    Args:
        name: of the reader, for people.
        make: an input from a random source.
        feed: reads it; returns whether it was taken.
        size: of an input, in bytes.
        share: of the inputs, in parts.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[random.Random], Any],
        feed: Callable[[Any], bool],
        size: Callable[[Any], int],
        share: int,
    ) -> None:
        self.name = name
        self.make = make
        self.feed = feed
        self.size = size
        self.share = share


def targets(folder: Path) -> list[Target]:
    """All of them; files are written into the folder."""
    plan = plans.plan_of(
        str(plans.HERE / "runtime_models.py") + ":perceptron",
        (InputSpec(name="x", shape=(4, 16), dtype="float32"),),
        "2-1",
        ["1"],
    )
    path = folder / "record.json"
    write_record(path, plan)
    plan_tree = json.loads(path.read_text())
    write_record(path, a_profile())
    profile_tree = json.loads(path.read_text())
    return [
        wire_target(plan),
        json_target("plan", plan_tree, path, read_plan),
        json_target("profile", profile_tree, path, read_profile),
        text_target(folder / "graph.txt"),
        part_target(folder),
    ]


def a_profile() -> Profile:
    layer = LayerProfile(
        name="a", op="Linear", forward_ms=1.5, backward_ms=3.0, activation_bytes=64, parameter_bytes=32,
        trainable_bytes=32, stash_bytes=8,
    )  # fmt: skip
    return Profile(
        model=ModelSpec(name="m", factory="a.b:c", kwargs={"k": 1, "f": 0.5, "s": "x"}, fingerprint="f"),
        minibatch_size=4,
        inputs=(InputSpec(name="x", shape=(4, 16), dtype="float32"),),
        device=Device(kind="cpu", name="n", versions={"torch": "2"}),
        minibatches=10,
        layers=(layer, layer.model_copy(update={"name": "b", "cut": False})),
    )


# Messages


def wire_target(plan: Plan) -> Target:
    tensor = torch.arange(24.0).view(2, 3, 4)
    bodies: list[tuple[str, object]] = [
        ("forward", ((tensor.requires_grad_(), {"a": [1, None, 2.5]}), torch.zeros(2, dtype=torch.int64), 3)),
        ("backward", [tensor.detach().permute(2, 0, 1), None]),
        ("gradient", (0, (torch.ones(5), None), 1)),
        ("parameters", (1, (torch.ones(5), torch.ones(()), torch.ones(0, 3)))),
        ("score", (0.5, None, 4, None)),
        ("segment", {"number": 1, "training": True, "epoch": 0, "first": 0, "minibatches": 9, "samples": 4}),
        ("order", ("read", (1, 0))),
        (GREETING, None),
        ("forward", ((10**30, "text", b"b", [(), [], {}], {None: True}), None, None)),
    ]
    corpus = [[bytes(frame) for frame in encode(Message(kind, 1, 2, 3, body), RUN, 1)] for kind, body in bodies]
    mark = msgpack.packb(RUN)
    place = place_of(plan, 2)

    def make(draw: random.Random) -> list[bytes]:
        if draw.random() < 0.1:
            prefix = mark if draw.random() < 0.8 else b""
            return [prefix + draw.randbytes(draw.randrange(60)), *(draw.randbytes(9) for _ in range(draw.randrange(3)))]
        frames = list(draw.choice(corpus))
        if draw.random() < 0.7:
            scalars = list(msgpack.Unpacker(io.BytesIO(frames[0])))[1:]
            for _ in range(draw.randint(1, 3)):
                change_list(draw, scalars, SCALARS if draw.random() < 0.9 else VALUES[-18:])
            with_surrogates = {"unicode_errors": "surrogatepass"}
            frames[0] = mark + b"".join(msgpack.packb(fit(each), **with_surrogates) for each in scalars)
        if draw.random() < 0.3:
            frames[0] = change_bytes(draw, frames[0])
        if draw.random() < 0.3:
            change_list(draw, frames, [b"", b"1234", bytes(96), *frames])
        return frames

    def feed(frames: list[bytes]) -> bool:
        admission = Admission(lambda message: plan_problem(plan, place, message))
        with contextlib.suppress(WireError):  # As if the bytes had come apart from the header.
            apart = b"".join(frame.ljust(aligned(len(frame)), b"\0") for frame in frames[1:])
            Opened(frames[0] if frames else b"", (RUN,)).read(Region(memoryview(bytearray(apart))))
        try:
            message = decode(frames, RUN)
        except WireError:
            return False
        with contextlib.suppress(WireError):
            admission.check(b"a", message)
        plan_problem(plan, place, Message(message.kind, 0, 0, 0, message.body))
        return True

    return Target("messages", make, feed, lambda frames: sum(map(len, frames)), 14)


def fit(value: Any) -> Any:
    """What msgpack can write."""
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**64 else value


# Files


def json_target(name: str, tree: Any, path: Path, read: Callable[[Path], object]) -> Target:
    def make(draw: random.Random) -> bytes:
        value = copy.deepcopy(tree)
        for _ in range(draw.randint(1, 3)):
            change_tree(draw, value)
        text = json.dumps(value)
        if draw.random() < 0.05:
            depth = draw.choice([50, 300, 5000, 100_000])
            text = text.replace("[", "[" * depth, 1) if draw.random() < 0.5 else "[" * depth + "]" * depth
        content = text.encode("utf-8", "surrogatepass")
        return change_bytes(draw, content) if draw.random() < 0.3 else content

    def feed(content: bytes) -> bool:
        path.write_bytes(content)
        try:
            read(path)
        except FormatError as error:
            assert_printable(str(error))
            return False
        return True

    return Target(name, make, feed, len, 3)


def text_target(path: Path) -> Target:
    lines = [
        f"node{n} -- {op} -- forward_compute_time={n}.5, backward_compute_time=2, activation_size={out}, parameter_size=8.0"
        for n, op, out in (
            (1, "Input0", "8"),
            (2, "Linear(3, 2)", "[6.0; 1.0]"),
            (3, "ReLU(inplace)", "4"),
            (4, "Add", "1"),
        )
    ] + ["\tnode1 -- node2", "\tnode2 -- node3", "\tnode2 -- node4", "\tnode3 -- node4"]

    def make(draw: random.Random) -> bytes:
        mutated = list(lines)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(mutated))
            number = draw.choice(NUMBERS)
            replaced = [f"{part}{number}" for part in mutated[at].rpartition("=")[:2]] if draw.random() < 0.5 else []
            change_list(
                draw, mutated, [*lines, "".join(replaced), f"\tnode{draw.randrange(9)} -- node{draw.randrange(9)}"]
            )
            if not mutated:
                break
        content = draw.choice(["\n", "\r\n", "\u2028"]).join(mutated).encode()
        return change_bytes(draw, content) if draw.random() < 0.5 else content

    def feed(content: bytes) -> bool:
        path.write_bytes(content)
        try:
            read_any_profile(path)
        except FormatError as error:
            assert_printable(str(error))
            return False
        return True

    return Target("text profile", make, feed, len, 3)


def part_target(folder: Path) -> Target:
    record = {
        "run": "a", "epoch": 1, "minibatch": 0, "stage": 0, "replica": 0, "rank": 0, "written": 0.0, "sent_bytes": 0,
        "training_bytes": 0,
    }  # fmt: skip
    shard = [ShardSlice(Range("w", 0, 6), {"momentum": torch.ones(6), "step": torch.tensor(2.0)})]
    state = {"w": torch.arange(6.0).view(2, 3), "n": torch.ones(2, dtype=torch.int64), "h": torch.ones(3).bfloat16()}
    progress = {"losses": torch.zeros(2), "position": (1, 0), "epochs": [{"epoch": 0, "metric": "loss", "loss": 0.5}]}
    path = write_part(folder, record, "stage-0", state, shard, progress)
    file = path.with_suffix(".pt")
    whole, tree = file.read_bytes(), json.loads(path.read_text())

    def make(draw: random.Random) -> tuple[bytes, bytes]:
        content, changed = whole, copy.deepcopy(tree)
        what = draw.random()
        if what < 0.4:
            content = change_bytes(draw, content)
        elif what < 0.8:
            content = repacked(draw, content)
        if what > 0.7:
            change_tree(draw, changed)
        if what < 0.8 and draw.random() < 0.9:  # Otherwise no change of the file would be looked at.
            changed |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        return content, json.dumps(changed).encode("utf-8", "surrogatepass")

    def feed(contents: tuple[bytes, bytes]) -> bool:
        # A file that is still mapped into memory is not written to.
        file.unlink(missing_ok=True)
        file.write_bytes(contents[0])
        path.write_bytes(contents[1])
        try:
            part = load_part(path)
        except DamagedPart as error:
            assert not re.search("MemoryError|can't allocate", str(error)), error
            return False
        for tensor in (*part.state.values(), *(each for one in part.shard for each in one.state.values())):
            tensor.clone()
        return True

    return Target("checkpoint part", make, feed, lambda contents: sum(map(len, contents)), 3)


def repacked(draw: random.Random, content: bytes) -> bytes:
    """The same archive with another list of tensors in it, or with an entry changed."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(result, "w") as other:
        entries = archive.infolist()
        chosen = entries[0] if draw.random() < 0.8 else draw.choice(entries)
        for entry in entries:
            data = archive.read(entry)
            if entry is chosen:
                data = change_bytes(draw, data)
                entry.compress_type = draw.choice([zipfile.ZIP_STORED] * 9 + [zipfile.ZIP_DEFLATED])
            other.writestr(entry, data)
    return result.getvalue()


def assert_printable(text: str) -> None:
    text.encode()
    assert all(character.isprintable() or character == "\n" for character in text), ascii(text)


# Mutations


def change_bytes(draw: random.Random, content: bytes) -> bytes:
    """One to four edits."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at, end = sorted(draw.randrange(len(changed) + 1) for _ in range(2))
        end = min(end, at + draw.choice([1, 1, 2, 8, 64]))
        how = draw.randrange(6)
        if how == 0:
            changed[at:end] = draw.randbytes(end - at)
        elif how == 1:
            changed[at:at] = draw.randbytes(draw.choice([1, 2, 9]))
        elif how == 2:
            del changed[at:end]
        elif how == 3:
            changed[at:at] = changed[at:end] * draw.choice([1, 2, 50])
        elif how == 4:
            changed[at : at + 4] = draw.choice([b"\xff" * 4, b"\x00" * 4, b"\xdd\xff\xff\xff\xff", b"\x7f\xff\xff\xff"])
        else:
            del changed[draw.randrange(len(changed) + 1) :]
    return bytes(changed)


def change_list(draw: random.Random, items: list[Any], others: Sequence[Any]) -> None:
    """One edit in place."""
    at = draw.randrange(len(items) + 1)
    how = draw.randrange(5)
    if how == 0 or at == len(items):
        items.insert(at, draw.choice(others))
    elif how in (1, 2):
        items[at] = draw.choice(others)
    elif how == 3:
        del items[at]
    else:
        items[at:at] = items[at : at + draw.randint(1, 3)] * draw.choice([1, 1, 20])


def change_tree(draw: random.Random, tree: Any) -> None:
    """One edit in place, anywhere in a parsed file."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(tree)
    if not places:
        return
    holder, key = draw.choice(places)
    how = draw.randrange(5)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[draw.choice(["x", "", "name", "\x1b[2J", "\ud800", "x" * 500, key.upper()])] = holder[key]
    elif how == 2 and isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key])] * draw.choice([1, 2, 100])
    else:
        holder[key] = copy.deepcopy(draw.choice(VALUES))
