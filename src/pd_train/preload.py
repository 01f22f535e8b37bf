"""Imported once by the process that workers are forked from: what every worker needs, loaded before the forks.

A module whose import does something. The first matrix product on torch's meta device, which tracing a model
needs, makes torch load its compiler, some two seconds that each worker would spend again.

SIGUSR1 is not for this process, nor for a worker before it can answer it.
Ctrl-C reaches this process too. While it loads there is nothing to stop but itself, which it does without a word;
afterwards the program that started it stops the workers, and both leave the signal alone.
"""

import os
import signal

import pd_train.tied

signal.signal(signal.SIGINT, lambda *_: os._exit(130))
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGUSR1})

import torch  # noqa: E402

import pd_train.worker  # noqa: E402, F401

torch.nn.functional.linear(
    torch.empty(1, 1, device="meta"), torch.empty(1, 1, device="meta"), torch.empty(1, device="meta")
)
signal.signal(signal.SIGINT, signal.SIG_IGN)
