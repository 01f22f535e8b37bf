"""The table of what the links of a plan carry, and which figure to plan with."""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import TYPE_CHECKING, TextIO

from pd_format.plan import Plan
from pd_format.units import format_bytes, format_ms
from pd_train.events import NetworkMeasured
from pd_train.host import is_loopback
from pd_train.narrow import fitted
from pd_train.terminal import UNKNOWN, open_console

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["advice", "network_table", "planning_bps", "print_network_table"]


def planning_bps(measured: NetworkMeasured) -> float:
    """The bandwidth to plan with, in bits a second: what the slowest machine gets through its network card, one way.

    A link alone has both of its ends to itself. While all links are in use, each end shares its card among its links,
    which is no loss: the busier end of a link still sends, or takes, what its card carries. What both ends fall short
    of is lost between them, as at a switch that many share. Of a link that was not measured alone this is all that is
    known.
    """
    out, into = Counter[int](), Counter[int]()
    for link in measured.links:
        out[link.sender] += link.at_once_bps  # type: ignore[assignment]
        into[link.receiver] += link.at_once_bps  # type: ignore[assignment]
    busy = (max(out[link.sender], into[link.receiver]) for link in measured.links)
    alone = (link.alone_bps for link in measured.links if link.alone_bps is not None)
    return min(*busy, *alone)


def advice(plan: Plan, measured: NetworkMeasured) -> str:
    """What to do about the plan's figure."""
    if all(is_loopback(host.address) for host in plan.hosts):
        return "All workers are on this machine: these are no figures of a network."
    found = planning_bps(measured)
    text = _option_text(found)
    if 0.8 <= found / plan.bandwidth_bps <= 1.25:
        return (
            f"The plan's {_rate(plan.bandwidth_bps)} fits: the slowest machine gets {_rate(found)} through, "
            f"--bandwidth {text}."
        )
    return (
        f"The plan was made for {_rate(plan.bandwidth_bps)}, and the slowest machine gets {_rate(found)} through. Plan "
        f"anew: pd-plan --bandwidth {text}"
    )


def _option_text(bps: float) -> str:
    """As `pd-plan --bandwidth` takes it: two digits, rounded down."""
    power = 10.0 ** (math.floor(math.log10(bps)) - 1) if bps >= 10 else 1.0
    rounded = max(1.0, math.floor(bps / power + 1e-9) * power)
    for unit, factor in (("gbps", 1e9), ("mbps", 1e6), ("kbps", 1e3)):
        if rounded >= factor:
            return f"{rounded / factor:g}{unit}"
    return f"{rounded:g}bps"


def network_table(plan: Plan, measured: NetworkMeasured) -> Table:
    """A row a link, one way each, beside the plan's figure."""
    from rich.table import Table

    title = f"Links of the plan {plan.config}; it was made for {_rate(plan.bandwidth_bps)}"
    table = Table(title=title, title_justify="left", title_style="bold")
    left_out = sum(link.alone_bps is None for link in measured.links)
    if left_out:
        table.caption = f"{left_out} of {len(measured.links)} links were not measured alone, which would take too long"
        table.caption_justify = "left"
    for column in ("from", "to", "carries", "a message", "alone", "all at once", "latency"):
        table.add_column(column, overflow="fold", justify="left" if column in ("from", "to", "carries") else "right")
    for link in measured.links:
        table.add_row(
            _name(plan, link.sender),
            _name(plan, link.receiver),
            link.what,
            format_bytes(link.message_bytes),
            UNKNOWN if link.alone_bps is None else _rate(link.alone_bps),
            _rate(link.at_once_bps),
            UNKNOWN if link.latency_ms is None else format_ms(link.latency_ms),
        )
    return table


def print_network_table(plan: Plan, measured: NetworkMeasured, stream: TextIO | None = None) -> None:
    """Print `network_table` and the advice, on standard output by default."""
    console = open_console(sys.stdout if stream is None else stream, terminal=None)
    console.print(fitted(network_table(plan, measured), console))
    console.print(advice(plan, measured), soft_wrap=True)


def _name(plan: Plan, rank: int) -> str:
    return f"{rank} {plan.hosts[rank].address}" if plan.hosts else str(rank)


def _rate(bps: float) -> str:
    return f"{format_bytes(bps)[:-1]}bit/s"
