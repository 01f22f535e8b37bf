"""Which options `--evaluate-only` and `--emulate` take: others would do nothing beside them, and are refused."""

from __future__ import annotations

import click

from pd_train.usage import refuse_beside, typed_options

__all__ = ["check_emulating", "check_evaluation"]

_OF_TRAINING = (
    "epochs", "minibatches", "optimizer", "lr", "momentum", "weight_decay", "lr_schedule", "lr_scaling", "sync",
    "weights", "group", "flush", "clip_stage_grad_norm", "clip_grad_norm", "drop_last", "target_metric",
    "checkpoint_every", "keep", "max_restarts",
    "target_accuracy",
)  # fmt: skip
"""What is about training."""
_UNEMULATED = {
    "data": "it reads no data",
    "resume": "it keeps no checkpoint",
    "init_from": "it has no weights",
    "evaluate_only": "it has no weights",
    "epochs": "--minibatches says how long it runs",
    "optimizer": "it updates nothing",
    "lr": "it updates nothing",
    "momentum": "it updates nothing",
    "weight_decay": "it updates nothing",
    "lr_schedule": "it updates nothing",
    "lr_scaling": "it updates nothing",
    "clip_stage_grad_norm": "its gradients have no norm",
    "clip_grad_norm": "its gradients have no norm",
    "precision": "times and bytes are the profile's",
    "drop_last": "all its minibatches are whole",
    "loader_workers": "it reads no data",
    "skip_corrupt": "it reads no data",
    "metric": "it has no result to judge",
    "target_metric": "it has no result to judge",
    "target_accuracy": "it has no result to judge",
    "device": "it computes on none",
    "measure_memory": "it holds no activations",
    "checkpoint_every": "it keeps no checkpoint",
    "keep": "it keeps no checkpoint",
    "max_restarts": "it keeps no checkpoint",
}
"""What is about results and computing, and why an emulated run has none of it."""


def check_evaluation(init_from: str | None) -> None:
    """Refuse an evaluation of random weights, and options of the running command that would do nothing in it.

    Raises:
        click.UsageError: naming the option.
    """
    typed = typed_options(click.get_current_context())
    for name in _OF_TRAINING:
        if name in typed:
            refuse_beside("--evaluate-only", name, "which trains nothing")
    if init_from is None:
        raise click.UsageError(
            "--evaluate-only asks how good some weights are, and random ones would be evaluated; say which with "
            "--init-from weights.pt, or model.pt of an earlier run."
        )


def check_emulating(sync: str | None) -> None:
    """Refuse options of the running command that mean nothing where nothing is computed.

    Args:
        sync: `--sync`.

    Raises:
        click.UsageError: naming one.
    """
    typed = typed_options(click.get_current_context())
    for name, reason in _UNEMULATED.items():
        if name in typed:
            refuse_beside("--emulate", name, f"since {reason}")
    if sync == "asp":
        raise click.UsageError("--sync asp is not emulated: what it loses is in the learning. Use overlap or bsp.")
