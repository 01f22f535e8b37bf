"""The command `pd-plan`: reads a profile, decides, prints and writes the plan (design, section 1)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click
import cloup

from pd_format.errors import UserError
from pd_format.interrupts import Program, ending_at_once
from pd_plan.option_groups import TERMINAL, takes_options

if TYPE_CHECKING:
    from rich.console import Console

    from pd_format.hosts import HostSlots
    from pd_format.plan import Plan
    from pd_format.profile import Profile
    from pd_plan.planner import Decision

__all__ = ["main"]


EPILOG = """\b
Examples:
  pd-plan --machines 8 --bandwidth 10gbps
  pd-plan --profile profiles/vgg16.json --config 3-1 --bandwidth 1.25GB/s

\b
Exit codes: 0 done, 1 failed, 2 wrong usage, 128 + signal when stopped (130 by
Ctrl-C). Every option by task: docs/options.md"""


class _Command(Program, cloup.Command):
    """A command that takes Ctrl-C as a program does."""


@cloup.command(
    cls=_Command,
    epilog=EPILOG,
    formatter_settings={"col1_max_width": 27},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@takes_options
def main(
    profile_path: Path | None,
    machines: int | None,
    hosts: str | None,
    bandwidth: float,
    strategy: str,
    config: tuple[int, ...] | None,
    cost_model: Literal["paper", "duplex"],
    inference: bool,
    in_flight: str,
    links: str,
    memory: int | None,
    optimizer: str,
    recompute: bool,
    compress_gradients: str | None,
    compress_activations: str | None,
    sweep: bool,
    robustness: float | None,
    seed: int,
    as_json: bool,
    timeline: str | None,
    output: Path,
) -> None:
    """Decide how to split a profiled model over machines, so that a minibatch takes the least time.

    Layers become consecutive stages, a stage runs on one machine or is replicated on several. Prints the plan
    beside the usual alternatives and writes it to a file.
    """
    try:
        places = _hosts(hosts)
    except UserError as error:
        raise click.ClickException(str(error)) from None
    if machines is None and config is None and places is not None:
        machines = sum(place.slots for place in places if not place.is_pattern) or None
    machines = _machines(machines, strategy, config)
    if recompute and memory is None:
        raise click.UsageError("--recompute costs time to save memory; say with --memory how much there is.")
    if inference and cost_model != "paper":
        raise click.UsageError("--cost-model is about what is sent back, which --inference does without; leave it out.")
    if strategy == "simulated" and (inference or cost_model != "paper"):
        raise click.UsageError("--strategy simulated tries both cost models, for training; leave the other option out.")
    if recompute and inference:
        raise click.UsageError("--recompute saves what a backward pass needs, which --inference does without.")
    if (sweep or robustness is not None) and (config is not None or strategy != "auto"):
        raise click.UsageError("--sweep and --robustness ask for the best plan; leave out --config and --strategy.")
    if robustness is not None and memory is not None:
        raise click.UsageError("--robustness looks at times without a memory limit; leave out --memory.")
    if as_json and timeline == TERMINAL:
        raise click.UsageError("--json leaves no room for a timeline; write it to a file with --timeline file.svg.")
    options: dict[str, Any] = {"in_flight": in_flight, "links": links, "inference": inference}
    options |= {"memory_bytes": memory, "optimizer": optimizer, "recompute": recompute}
    if compress_gradients is not None or compress_activations is not None:
        from pd_format.compression import Compression

        options["compression"] = Compression.of(compress_gradients, compress_activations)
    questions = _Questions(sweep, robustness, seed, as_json)
    try:
        _plan(
            profile_path,
            machines,
            bandwidth,
            strategy,
            config,
            cost_model,
            options,
            questions,
            timeline,
            places,
            output,
        )
    except UserError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise _Stopped("stopped by Ctrl-C; no plan was written.") from None


class _Stopped(click.ClickException):
    """Ctrl-C: nothing has been written, and the exit code is the one that shells expect."""

    exit_code = 130


class _Questions(NamedTuple):
    """What else is to be answered, and how."""

    sweep: bool
    robustness: float | None
    seed: int
    as_json: bool


def _hosts(text: str | None) -> list[HostSlots] | None:
    """What --hosts names."""
    if text is None:
        return None
    from pd_format.hosts import read_hosts

    return read_hosts(text)


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
    cost_model: Literal["paper", "duplex"],
    options: dict[str, Any],
    questions: _Questions,
    timeline: str | None,
    hosts: list[HostSlots] | None,
    output: Path,
) -> None:
    # Imported here: --help and a mistyped option need neither numpy nor pydantic.
    with ending_at_once():
        from rich.console import Console

        from pd_format.graph_text import is_original, read_any_profile
        from pd_format.jsonfile import write_record
        from pd_plan.planner import decide, duplex_rival, forward_only
        from pd_plan.report import print_report
        from pd_plan.simulated import fastest_simulated

    chosen = "" if profile_path is not None else " (the newest in profiles/)"
    if profile_path is None:
        profile_path = _newest_profile(Path("profiles"))
    profile = read_any_profile(profile_path)
    if options["inference"]:
        profile = forward_only(profile)
    try:
        if strategy == "simulated":
            decision, rival = fastest_simulated(profile, machines, bandwidth, **options), None
        else:
            decision = decide(profile, machines, bandwidth, strategy, config, cost_model=cost_model, **options)
            rival = duplex_rival(profile, decision, **options)
    except UserError as error:
        raise UserError(f"{profile_path}: {error}") from None
    if hosts is not None:
        from pd_format.hosts import place_workers

        places = place_workers(hosts, decision.plan.workers)
        decision = decision._replace(plan=decision.plan.model_copy(update={"hosts": places}))
    # What programs read goes alone to the standard output.
    console = Console(highlight=False, stderr=questions.as_json)
    if not questions.as_json:
        console.print(f"Profile   {profile_path}{chosen}", soft_wrap=True, markup=False)
        print_report(console, profile, decision, rival)
    _answer(console, profile, decision, rival, questions)
    write_record(output, decision.plan)
    if not questions.as_json:
        console.print()
    if timeline is not None:
        _show_timeline(console, profile, decision.plan, options["links"], timeline)
    following = f"next: pd-train --plan {output}"
    if decision.plan.inference:
        following += " --evaluate-only --init-from weights.pt"
    else:
        following += "" if decision.plan.optimizer in ("sgd", "momentum") else f" --optimizer {decision.plan.optimizer}"
        following += " --flush 8" if decision.plan.precision == "fp16" else ""
    if is_original(profile):
        following = "to train, profile the model with pd-profile: a text profile does not say how to build it"
    console.print(f"wrote {output}; {following}", soft_wrap=True, markup=False)


def _answer(
    console: Console, profile: Profile, decision: Decision, rival: Decision | None, questions: _Questions
) -> None:
    """Print what was asked for beyond the report, or all of it as JSON."""
    from pd_plan.cluster import Cluster
    from pd_plan.compressed import as_sent, compression_of
    from pd_plan.planner import chain_of, model_of, partition_of

    if not (questions.sweep or questions.robustness is not None or questions.as_json):
        return
    from pd_plan import what_if
    from pd_plan.what_if_report import print_spreads, print_sweep

    plan, model = decision.plan, model_of(decision.plan)
    cluster, compression = Cluster(plan.machines, plan.bandwidth_bps), compression_of(plan)
    chain = chain_of(as_sent(profile, compression))
    sweep, spreads = None, None
    if questions.sweep:
        limit = None if decision.kept is None else decision.kept.limit
        sweep = what_if.sweep(chain, plan.machines, plan.bandwidth_bps, model, limit)
    if questions.robustness is not None:
        shaken = (chain, partition_of(plan), cluster, questions.robustness, questions.seed, model)
        spreads = (what_if.shaken_profile(*shaken), what_if.shaken_bandwidth(*shaken))
    if questions.as_json:
        from pd_plan.alternatives import alternatives
        from pd_plan.comparison import comparison_json
        from pd_plan.report import sentences_of

        others = alternatives(profile, cluster, model, compression)
        sentences = sentences_of(profile, decision, rival, others)
        click.echo(comparison_json(decision, others, sentences, sweep, spreads, questions.seed), nl=False)
        return
    if sweep is not None:
        console.print()
        print_sweep(console, sweep)
    if spreads is not None:
        console.print()
        print_spreads(console, plan.config, *spreads, questions.seed)


def _show_timeline(console: Console, profile: Profile, plan: Plan, links: str, where: str) -> None:
    """Draw the plan's simulation on the terminal, or into a file by its ending."""
    from pd_format.jsonfile import write_text
    from pd_plan import timeline
    from pd_plan.picture import svg
    from pd_plan.trace import chrome_trace

    if where == TERMINAL:
        timeline.print_timeline(console, timeline.film(profile, plan, links))
        console.print()
        return
    path = Path(where)
    film = timeline.film(profile, plan, links)
    write_text(path, svg(film) if path.suffix == ".svg" else chrome_trace(film))
    viewer = "a browser" if path.suffix == ".svg" else "ui.perfetto.dev or chrome://tracing"
    console.print(f"wrote {path}; open it with {viewer}", soft_wrap=True, markup=False)


def _newest_profile(folder: Path) -> Path:
    """The profile that was written last; of several at the same moment the last by name."""
    found = [path for path in folder.glob("*.json") if path.is_file()]
    if not found:
        raise UserError(
            f"there is no {folder}/*.json here; make one with pd-profile (pd-profile vgg16), "
            "or name another with --profile."
        )
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
