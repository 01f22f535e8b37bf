"""Timelines: the drawing in the code is what the terminal shows; the files are what other programs can read."""

from __future__ import annotations

import io
import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from rich.console import Console

import pd_plan.timeline
from pd_format.errors import UserError
from pd_format.jsonfile import write_record
from pd_format.profile import Profile
from pd_plan.cli import main
from pd_plan.picture import svg
from pd_plan.planner import make_plan
from pd_plan.timeline import Film, film, print_timeline
from pd_plan.trace import chrome_trace
from plan_oracles import Layer, profile_of


def equal_layers(count: int, transfer_bytes: int = 0, backward_ms: float = 2.0) -> Profile:
    profile = profile_of([Layer(3, transfer_bytes if index < count - 1 else 0, 10) for index in range(count)])
    update = {"forward_ms": 1.0, "backward_ms": backward_ms}
    return profile.model_copy(update={"layers": tuple(layer.model_copy(update=update) for layer in profile.layers)})


def drawn(shown: Film, width: int = 80, colour: bool = False) -> str:
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=colour, color_system="standard" if colour else None, highlight=False
    )
    print_timeline(console, shown)
    return file.getvalue()


def four_stages() -> Film:
    profile = equal_layers(4)
    return film(profile, make_plan(profile, 4, 1e9, config=(1, 1, 1, 1)))


def hybrid(links: str = "card") -> Film:
    profile = profile_of([Layer(12, 2000, 3000), Layer(4, 0, 0)])
    return film(profile, make_plan(profile, 4, 8e6, config=(3, 1), links=links), links)


def test_four_equal_stages_are_the_papers_figure() -> None:
    picture = re.findall(r"^    (\d stage .*)$", pd_plan.timeline.__doc__ or "", re.MULTILINE)
    assert len(picture) == 4

    text = drawn(four_stages())

    lines = text.splitlines()
    start = lines.index("start-up, in ms") + 2
    for expected, line in zip(picture, lines[start : start + 4], strict=True):
        assert line == expected
    assert lines[:2] == [
        "Timeline, simulated",
        "0-- forward, 0== backward pass of minibatch 0; a column is 0.333 ms",
    ]
    assert "steady state, in ms" in lines
    assert max(map(len, lines)) <= 80


def test_passes_of_one_length_are_cells_of_one_width() -> None:
    profile = equal_layers(4, 1500)
    text = drawn(film(profile, make_plan(profile, 4, 8e6, config=(1, 1, 1, 1), in_flight=(9, 7, 4, 1))))

    steady = text.partition("steady state")[2]
    cells = re.findall(r"(?<=[-= ])(\d+-+|\d+=+)(?=[\d ])", steady)
    assert len(cells) > 20
    assert {(cell[-1], len(cell)) for cell in cells} == {("-", 3), ("=", 6)}


def test_forward_and_backward_have_two_colours_on_a_terminal_and_none_elsewhere() -> None:
    text = drawn(four_stages(), colour=True)

    (forward,) = set(re.findall(r"\x1b\[([\d;]+)m0--", text))
    (backward,) = set(re.findall(r"\x1b\[([\d;]+)m0==", text))
    assert forward != backward
    assert "\x1b" not in drawn(four_stages())


def test_a_wide_terminal_shows_it_in_one_drawing() -> None:
    text = drawn(four_stages(), width=400)

    assert "start-up, in ms" in text
    assert "steady state, in ms" not in text


def test_replicas_are_named_and_many_workers_are_left_out() -> None:
    assert re.search(r"^2 stage 0\.2 2-", drawn(hybrid()), re.MULTILINE)

    profile = profile_of([Layer(100, 1, 1)])
    text = drawn(film(profile, make_plan(profile, 40, 1e9, "data-parallel")))
    assert text.count("\n... 16 more workers\n") == 1
    assert len(re.findall(r"^ ?\d+ stage 0\.\d+ ", text, re.MULTILINE)) == 24


def test_a_pipeline_in_which_nothing_takes_time_is_not_drawn() -> None:
    profile = profile_of([Layer(0), Layer(0)])

    shown = film(profile, make_plan(profile, 2, 1e9, config=(1, 1)))

    assert "there is nothing to draw" in drawn(shown)
    ElementTree.fromstring(svg(shown))


def test_one_too_large_to_draw_is_refused() -> None:
    profile = equal_layers(2)

    with pytest.raises(
        UserError, match=r"a timeline of 2 workers and 14000 minibatches in flight would show about 336,"
    ):
        film(profile, make_plan(profile, 2, 1e9, config=(1, 1), in_flight=(14_000, 1)))


@pytest.mark.parametrize("links", ["card", "pairwise", "shared"])
def test_the_trace_has_every_pass_and_transfer_and_no_row_does_two_things_at_once(links: str) -> None:
    shown = hybrid(links)

    trace = json.loads(chrome_trace(shown))

    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(shown.passes) + len(shown.transfers)
    assert {event["cat"] for event in slices} == {
        *("forward", "backward", "activations", "gradients", "parameter gradients", "parameters")
    }
    rows = defaultdict(list)
    for event in slices:
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        row.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(row))
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert set(rows) <= set(names)
    assert names[0, 1] == "worker 1 (replica 1)"
    first = next(event for event in slices if event["name"] == "B0" and event["pid"] == 0)
    assert first["dur"] == pytest.approx(0)  # All of a test layer's time is forward.
    assert next(event for event in slices if event["name"] == "F0")["dur"] == pytest.approx(12_000)


def test_the_picture_is_well_formed_and_has_every_pass() -> None:
    shown = four_stages()

    root = ElementTree.fromstring(svg(shown))

    space = "{http://www.w3.org/2000/svg}"
    tips = [rect.findtext(f"{space}title") or "" for rect in root.iter(f"{space}rect")]
    assert sum(tip.startswith(("forward pass", "backward pass")) for tip in tips) == len(shown.passes)
    texts = [text.text or "" for text in root.iter(f"{space}text")]
    assert "tiny, config 1-1-1-1, in flight 4-3-2-1, simulated" in texts
    assert "stage 3, worker 3" in texts
    assert "start-up | steady state" in texts


def test_names_from_the_profile_are_escaped_in_the_picture() -> None:
    profile = equal_layers(2)
    model = profile.model.model_copy(update={"name": "<script>&"})
    profile = profile.model_copy(update={"model": model})

    text = svg(film(profile, make_plan(profile, 2, 1e9, config=(1, 1))))

    assert "<script>" not in text
    ElementTree.fromstring(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "profiles" / "four.json", equal_layers(4))
    return tmp_path


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["--config", "1-1-1-1", "--bandwidth", "1gbps", *arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.usefixtures("folder")
def test_pd_plan_draws_it_after_the_table() -> None:
    output = run("--timeline")

    assert "\n0 stage 0 0--1--2--3--                  0=====4--" in output
    assert output.endswith("wrote plan.json; next: pd-train --plan plan.json\n")
    # The option needs no value, wherever it stands.
    assert run("--timeline", "--output", "other.json").endswith("next: pd-train --plan other.json\n")


def test_pd_plan_writes_it_to_files(folder: Path) -> None:
    assert "wrote line.svg; open it with a browser\n" in run("--timeline", "line.svg")
    assert "wrote out/line.json; open it with ui.perfetto.dev or chrome://tracing\n" in run(
        "--timeline", "out/line.json"
    )

    ElementTree.parse(folder / "line.svg")
    assert json.loads((folder / "out" / "line.json").read_text())["traceEvents"]


@pytest.mark.usefixtures("folder")
def test_another_ending_is_refused() -> None:
    assert "'line.png' ends in neither .json nor .svg; give no file to draw it here." in run(
        "--timeline", "line.png", code=2
    )
