"""Text profiles of the original release: the chain they become, the known answers, and what is said of bad ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from original_profiles import original_path, original_profile
from pd_format.errors import FormatError
from pd_format.graph_text import is_original, parse_graph, read_any_profile
from pd_format.jsonfile import write_record
from pd_format.plan import read_plan
from pd_plan.cli import main
from plan_oracles import Layer, profile_of


def node(number: int, op: str = "Op", out: object = 1, weights: object = 0, forward: object = 1) -> str:
    return (
        f"node{number} -- {op} -- forward_compute_time={forward}, backward_compute_time=2.0, "
        f"activation_size={out}, parameter_size={weights}\n"
    )


# An input, a skip connection over node 3, and lines in no order: 10 comes after 9, not after 1.
SKIPPING = (
    node(10, "Linear(4, 2)", 8, 40)
    + node(3, "ReLU(inplace)", 4)
    + node(1, "Input", 100, 0, forward=635.9)
    + node(2, "Conv2d(3, 64, kernel_size=(3, 3))", "[2.0; 3.0]", "28.000")
    + node(9, "Add -- of two", 6)
    + "\tnode1 -- node2\n\tnode2 -- node3\n\tnode2 -- node9\n\tnode3 -- node9\n\tnode9 -- node10\n"
)


def test_a_graph_becomes_a_chain_in_the_order_of_its_edges() -> None:
    profile = parse_graph(SKIPPING, "skipping")

    assert [layer.name for layer in profile.layers] == ["node1", "node2", "node3", "node9", "node10"]
    assert [layer.op for layer in profile.layers][1::2] == ["Conv2d(3, 64, kernel_size=(3, 3))", "Add -- of two"]
    assert [layer.forward_ms for layer in profile.layers] == [0, 1, 1, 1, 1], "an input costs nothing"
    assert [layer.backward_ms for layer in profile.layers] == [0, 2, 2, 2, 2]
    assert [layer.parameter_bytes for layer in profile.layers] == [0, 28, 0, 0, 40]
    # Behind node 3 its own output and that of node 2 are still needed.
    assert [layer.activation_bytes for layer in profile.layers] == [100, 5, 5 + 4, 6, 0]
    assert [layer.stash_bytes for layer in profile.layers] == [0, 5, 0, 6, 8]
    assert [spec.shape for spec in profile.inputs] == [(100,)]
    assert is_original(profile)


def test_of_the_nodes_that_are_ready_the_lowest_number_comes_first() -> None:
    text = "".join(node(number) for number in (20, 3, 5, 100, 4))
    text += "\tnode20 -- node4\n\tnode3 -- node100\n\tnode5 -- node100\n"

    assert [layer.name for layer in parse_graph(text, "x").layers] == ["node3", "node5", "node20", "node4", "node100"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no node; expected lines such as 'node4 -- Conv2d(3, 64) -- forward_compute_time=1.5, "),
        ("hello\n", "line 1: found 'hello'; expected a node such as 'node4 -- "),
        (node(1) + "nodeX -- Op -- a=1\n", "line 2: found 'nodeX'; expected a node's name such as node4."),
        (
            node(1).replace("activation_size", "activation_sizes"),
            "line 1: node1 has the unknown field 'activation_sizes=1'; expected forward_compute_time, "
            "backward_compute_time, activation_size, parameter_size.",
        ),
        (node(1)[:-1] + ", parameter_size=3\n", "line 1: parameter_size of node1 stands twice; keep one of them."),
        ("node1 -- Op -- forward_compute_time=1, backward_compute_time=2\n", "line 1: node1 has no activation_size; "),
        ("node1 -- Op -- forward_compute_time=1, backward_comp", "line 1: node1 has the unknown field 'backward_comp'"),
        ("node1 -- Op\n", "line 1: found 'node1 -- Op'; expected a node such as "),
        (node(1, out="lots"), "line 1: activation_size of node1 is 'lots'; expected a number of bytes."),
        (node(1, out="nan"), "line 1: activation_size of node1 is 'nan'; expected a number of bytes."),
        (node(1, forward="-1.5"), "line 1: forward_compute_time of node1 is -1.5; expected 0 to 1e+15 milliseconds."),
        (node(1, weights="1e400"), "line 1: parameter_size of node1 is 1e400; expected 0 to 1e+15 bytes."),
        (node(1, weights="[1; 2]"), "line 1: parameter_size of node1 is a list, '[1; 2]'; expected one number."),
        (node(1, out="[1; x]"), "line 1: activation_size of node1 is '[1; x]'; expected a number of bytes."),
        (node(1, out="[1; 2"), "line 1: activation_size of node1 is '[1; 2'; expected ']' at the end of the list."),
        (node(1) + node(2) + node(1), "line 3: node1 is also on line 1; a node stands once."),
        (node(1) + "\tnode1 -- node2\n", "line 2: there is no line for node2; the file may not be whole."),
        (node(1) + node(2) + "\tnode1 --", "line 3: found 'node1 --'; expected an edge such as 'node1 -- node2'."),
        (node(1) + node(2) + "\tnode1 -- n", "line 3: found 'n'; expected a node's name such as node4."),
        (
            node(1) + node(2) + node(3) + "\tnode1 -- node2\n",
            "line 3: no edge begins or ends at node3; the file may not be whole.",
        ),
        (
            node(1)[:-1] + " -- stage_id=0\n",
            "line 1: has a 'stage_id=0', so this is a plan of the original optimizer; expected the profile that it "
            "was made from.",
        ),
        (
            node(1) + node(2) + node(3) + node(4) + "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node2\n"
            "\tnode3 -- node4\n",
            "line 6: the edges go round in a circle, node2 -> node3 -> node2; a profile is a graph without one.",
        ),
        (node(1) + "\tnode1 -- node1\n", "line 2: the edges go round in a circle, node1 -> node1; a profile "),
    ],
)
def test_a_bad_profile_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_graph(text, "bad")
    assert str(caught.value).startswith(message)


def test_every_beginning_of_a_profile_is_a_profile_or_refused() -> None:
    whole = parse_graph(SKIPPING, "x")
    for length in range(len(SKIPPING)):
        refusal = ""
        try:
            part = parse_graph(SKIPPING[:length], "x")
        except FormatError as error:
            refusal = str(error)
        if refusal:
            assert refusal.startswith(("line ", "holds no node"))
        else:
            # Cut off within the last line's number, or a node whose edges are all to come.
            assert len(part.layers) < len(whole.layers) or length >= len(SKIPPING) - 2


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b"\xff\xfe\x00node"),
        lambda path: path.mkdir(),
        lambda path: None,
        lambda path: path.write_text('{"format": "pipedream-profile"'),
        lambda path: path.write_text("node1 -- "),
    ],
)
def test_a_file_that_holds_no_profile_ends_with_1_and_its_name(tmp_path: Path, write: Callable[[Path], object]) -> None:
    path = tmp_path / "graph.txt"
    write(path)

    result = CliRunner().invoke(main, ["--profile", str(path), "--machines", "2", "--bandwidth", "1gbps"])

    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {path}: ")
    assert "Traceback" not in result.output


def test_what_a_file_holds_decides_and_not_only_its_name(tmp_path: Path) -> None:
    (tmp_path / "vgg").mkdir()
    (tmp_path / "vgg" / "graph.txt").write_text("\ufeff" + SKIPPING.replace("\n", "\r\n"), encoding="utf-8")
    write_record(tmp_path / "profile", profile_of([Layer(1)]))

    assert read_any_profile(tmp_path / "vgg" / "graph.txt").model.name == "vgg"
    assert read_any_profile(tmp_path / "profile") == profile_of([Layer(1)])


@pytest.mark.parametrize(
    ("name", "machines", "gbit", "config"),
    [
        ("vgg16", 4, 10, "3-1"),
        ("vgg16", 8, 10, "7-1"),
        ("vgg16", 16, 10, "15-1"),
        ("vgg16", 8, 25, "8"),
        ("alexnet", 4, 10, "3-1"),
        ("alexnet", 8, 10, "6-1"),
        ("alexnet", 8, 25, "7-1"),
        ("resnet50", 8, 25, "8"),
        ("inception_v3", 8, 25, "8"),
    ],
)
def test_known_answers_by_the_program(name: str, machines: int, gbit: int, config: str, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    arguments = ["--machines", str(machines), "--bandwidth", f"{gbit}gbps", "--output", str(output)]

    result = CliRunner().invoke(main, ["--profile", str(original_path(name)), *arguments])

    assert result.exit_code == 0, result.output
    assert read_plan(output).config == config
    assert f"Model     {name}: " in result.stdout
    assert "minibatches of unknown size" in result.stdout
    assert result.stdout.endswith(
        "to train, profile the model with pd-profile: a text profile does not say how to build it\n"
    )
    if name == "alexnet" and machines == 8 and gbit == 10:
        assert "5.67 times as fast as data parallelism" in " ".join(result.stdout.split())
        assert "so one more would idle" in " ".join(result.stdout.split())


@pytest.mark.parametrize(("name", "layers"), [("vgg16", 41), ("alexnet", 23), ("resnet50", 177), ("gnmt", 48)])
def test_the_shipped_profiles_are_read_whole(name: str, layers: int) -> None:
    profile = original_profile(name)

    assert len(profile.layers) == layers
    assert profile.layers[-1].activation_bytes == 0
    assert sum(layer.compute_ms for layer in profile.layers) < 1000


def test_a_list_of_activation_sizes_counts_in_full() -> None:
    lstm = next(layer for layer in original_profile("gnmt").layers if layer.name == "node7")

    assert lstm.stash_bytes == 6291456 + 131072 + 131072


@pytest.mark.parametrize(
    "text",
    [
        node(1, out="1" * 2_000_000 + "x"),
        node(1, out="1" * 2_000_000),
        "node1 -- Op -- " + "[," * 1_000_000,
        "".join(map(node, range(20_000))) + "".join(f"\tnode{n} -- node{(n + 1) % 20_000}\n" for n in range(20_000)),
    ],
    ids=["digits", "a long number", "commas", "a long circle"],
)
def test_a_hostile_profile_is_refused_soon(text: str) -> None:
    start = time.thread_time()
    with pytest.raises(FormatError):
        parse_graph(text, "bad")
    assert time.thread_time() - start < 5


def test_whitespace_is_whitespace_for_numbers_too() -> None:
    # Found by `make fuzz`: what str.strip takes away, float() does not.
    assert parse_graph(node(1, out="[6.0; 1.\x1f]"), "x").layers[0].stash_bytes == 7
