"""Tables on terminals that are too narrow for them: nothing is cut, and every figure stands beside its name."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table

from pd_plan.cli import main as pd_plan
from pd_train.bottleneck import Setting
from pd_train.narrow import fitted
from pd_train.report import performance_of
from pd_train.stage_table import print_stages
from plans import plan_of
from test_report import INPUTS, epoch, worker

V100 = Path(__file__).parent.parent / "profiles/v100"


def console_of(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False, markup=False)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def small_table(where: str = "here") -> Table:
    table = Table(title="Workers", title_justify="left")
    table.add_column("worker")
    table.add_column("waits:\ninput")
    table.add_column("\nsync")
    table.add_column("")
    table.add_column("where", overflow="fold")
    for rank in range(3):
        table.add_row(str(rank), f"{rank}.25 ms", "-", f"+{rank} %", where)
    return table


def printed(table: Table, width: int) -> str:
    console = console_of(width)
    console.print(fitted(table, console, headless="difference"))
    return "\n".join(line.rstrip() for line in text_of(console).splitlines())


def test_a_table_that_fits_stays_as_it_is() -> None:
    console = console_of(80)
    console.print(small_table())
    assert printed(small_table(), 80) == "\n".join(line.rstrip() for line in text_of(console).splitlines())
    # What may be folded does not make a table too wide.
    assert "│" in printed(small_table("a/very/long/path/" * 5), 80)


def test_one_that_does_not_is_turned() -> None:
    assert printed(small_table(), 40) == (
        "Workers\n"
        "worker              0        1        2\n"
        "waits: input  0.25 ms  1.25 ms  2.25 ms\n"
        "waits: sync         -        -        -\n"
        "difference       +0 %     +1 %     +2 %\n"
        "where            here     here     here"
    )
    assert "\n\nworker              2\n" in printed(small_table(), 35)


@pytest.mark.parametrize("width", [40, 45, 50, 59, 60, 70, 77])
def test_no_figure_of_a_stage_is_cut(width: int) -> None:
    plan = plan_of("kit:K1", INPUTS, "1-1-1-1", ["1", "2", "3"])
    workers = [worker(24, 20, forward=1000 + rank, backward=20.25, update=3.5, other=0.75) for rank in range(4)]
    console = console_of(width)
    print_stages(performance_of(plan, [epoch(0)], [workers], Setting(), "accuracy", None), console)
    text = text_of(console)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for figure in ("1,020", "1,021", "1,022", "1,023"):
        assert figure in text
    assert {line.split("  ")[0] for line in text.splitlines()} >= {"busy", "update", "waits: sync", "hidden: sync"}


@pytest.mark.parametrize("width", [40, 60, 78])
def test_pd_plan_keeps_to_the_width_and_cuts_nothing(width: int, tmp_path: Path) -> None:
    def run(columns: int) -> str:
        arguments = ["--profile", V100 / "vgg16.json", "--machines", 8, "--bandwidth", "10gbps", "--sweep"]
        arguments += ["--output", tmp_path / "plan.json"]
        result = CliRunner().invoke(pd_plan, list(map(str, arguments)), env={"COLUMNS": str(columns)})
        assert result.exit_code == 0, result.output
        return result.stdout

    narrow, wide = run(width), run(80)
    figures = [word for word in wide.split() if word[0].isdigit()]
    assert not {word.rstrip(",.") for word in figures} - {word.rstrip(",.") for word in narrow.split()}
    tables = narrow.partition("Strategy")[2].partition("wrote ")[0]
    assert max(map(len, tables.splitlines())) <= width
