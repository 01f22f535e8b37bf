"""Which options `--evaluate-only` takes: forward passes over the validation data, of weights that are given."""

from __future__ import annotations

import click
from click.core import ParameterSource

__all__ = ["check_evaluation"]

_OF_TRAINING = (
    "epochs", "minibatches", "optimizer", "lr", "momentum", "weight_decay", "lr_schedule", "lr_scaling", "sync",
    "weights", "group", "flush", "clip_stage_grad_norm", "clip_grad_norm", "drop_last", "target_metric",
    "checkpoint_every", "keep", "max_restarts",
    "target_accuracy",
)  # fmt: skip


def check_evaluation(init_from: str | None) -> None:
    """Refuse an evaluation of random weights, and options of the running command that would do nothing in it.

    Raises:
        click.UsageError: naming the option.
    """
    context = click.get_current_context()
    for option in context.command.params:
        given = option.name is not None and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
        if given and option.name in _OF_TRAINING:
            raise click.UsageError(f"{option.opts[0]} is about training, which --evaluate-only leaves out; drop it.")
    if init_from is None:
        raise click.UsageError(
            "--evaluate-only asks how good some weights are, and random ones would be evaluated; say which with "
            "--init-from weights.pt, or model.pt of an earlier run."
        )
