"""The command `pd-plan` as a shell starts it: Ctrl-C while it loads ends it at once (`pd_format.interrupts`)."""

from pd_format.interrupts import ending_at_once

with ending_at_once():
    from pd_plan.command import main

__all__ = ["main"]
