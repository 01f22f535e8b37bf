"""The command `pd-plan`: reads a profile, decides, prints and writes the plan (design, section 1)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from pd_format.errors import UserError

__all__ = ["main"]

_STRATEGIES = ("auto", "single", "data-parallel", "model-parallel", "straight")


class Bandwidth(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """A rate with its unit, as bits per second."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See `pd_format.units.parse_bandwidth`."""
        from pd_format.units import parse_bandwidth

        if isinstance(value, float):
            return value
        try:
            return parse_bandwidth(value)
        except UserError as error:
            self.fail(str(error), param, ctx)


class Config(click.ParamType):  # type: ignore[type-arg]
    """Replicas a stage: `2-1-1`."""

    name = "replicas"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Read whole numbers of 1 or more, joined by `-`."""
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"0*[1-9]\d{0,8}(-0*[1-9]\d{0,8})*", value, re.ASCII):
            self.fail(
                f"{value!r} is not a list of replicas; expected one number of 1 or more for each stage, "
                "joined by '-', such as 2-1-1.",
                param,
                ctx,
            )
        return tuple(int(replicas) for replicas in value.split("-"))


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
    Examples:
      pd-plan --machines 8 --bandwidth 10gbps
      pd-plan --profile profiles/vgg16.json --config 3-1 --bandwidth 1.25GB/s --output vgg16-4.json

    The plan goes to pd-train: pd-train --plan plan.json""",
)
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path),
    metavar="file",
    help="Profile of the model, from pd-profile. Without it: the newest of profiles/*.json.",
)
@click.option(
    "--machines",
    type=click.IntRange(min=1, max=1_000_000),
    metavar="number",
    help="Machines there are, for one worker each. With --config: the sum of its replicas unless given.",
)
@click.option(
    "--bandwidth",
    type=Bandwidth(),
    metavar="rate",
    required=True,
    help="Of each machine's network link: 10gbps or 25 Gbit/s in bits, 1.25GB/s in bytes.",
)
@click.option(
    "--strategy",
    type=click.Choice(_STRATEGIES),
    default="auto",
    show_default=True,
    help="auto finds the fastest plan; the others are what to compare it with: one machine, one stage on all "
    "machines, one machine a stage with one minibatch at a time, or as a pipeline.",
)
@click.option(
    "--config",
    type=Config(),
    metavar="replicas",
    help="Replicas of each stage, such as 2-1-1; only the cuts are chosen.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="file",
    default=Path("plan.json"),
    show_default=True,
    help="Where the plan goes.",
)
@click.version_option(package_name="pipedream")
def main(
    profile_path: Path | None,
    machines: int | None,
    bandwidth: float,
    strategy: str,
    config: tuple[int, ...] | None,
    output: Path,
) -> None:
    """Decide how to split a profiled model over machines, so that a minibatch takes the least time.

    Layers become consecutive stages, a stage runs on one machine or is replicated on several. Prints the plan
    beside the usual alternatives and writes it to a file.
    """
    machines = _machines(machines, strategy, config)
    try:
        _plan(profile_path, machines, bandwidth, strategy, config, output)
    except UserError as error:
        raise click.ClickException(str(error)) from None


def _machines(machines: int | None, strategy: str, config: tuple[int, ...] | None) -> int:
    """How many machines there are, where the options agree with each other."""
    if config is not None:
        given = "-".join(map(str, config))
        if strategy != "auto":
            raise click.UsageError(f"--config {given} and --strategy {strategy} exclude each other; give one of them.")
        if machines is not None and sum(config) > machines:
            raise click.UsageError(
                f"--config {given} takes {sum(config)} machines, --machines says {machines}; "
                f"give fewer replicas, or --machines {sum(config)}, or leave --machines out."
            )
    if machines is not None:
        return machines
    if config is not None:
        return sum(config)
    if strategy == "single":
        return 1
    raise click.UsageError("--machines is missing; expected the number of machines, such as --machines 8.")


def _plan(
    profile_path: Path | None,
    machines: int,
    bandwidth: float,
    strategy: str,
    config: tuple[int, ...] | None,
    output: Path,
) -> None:
    # Imported here: --help and a mistyped option need neither numpy nor pydantic.
    from rich.console import Console

    from pd_format.jsonfile import write_record
    from pd_format.profile import read_profile
    from pd_plan.planner import make_plan
    from pd_plan.report import print_report

    chosen = "" if profile_path is not None else " (the newest in profiles/)"
    if profile_path is None:
        profile_path = _newest_profile(Path("profiles"))
    profile = read_profile(profile_path)
    try:
        plan = make_plan(profile, machines, bandwidth, strategy, config)
    except UserError as error:
        raise UserError(f"{profile_path}: {error}") from None
    console = Console(highlight=False)
    console.print(f"Profile   {profile_path}{chosen}", soft_wrap=True, markup=False)
    print_report(console, profile, plan)
    write_record(output, plan)
    console.print()
    console.print(f"wrote {output}; next: pd-train --plan {output}", soft_wrap=True, markup=False)


def _newest_profile(folder: Path) -> Path:
    """The profile that was written last; of several at the same moment the last by name."""
    found = [path for path in folder.glob("*.json") if path.is_file()]
    if not found:
        raise UserError(
            f"there is no {folder}/*.json here; make one with pd-profile (pd-profile vgg16), "
            "or name another with --profile."
        )
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
