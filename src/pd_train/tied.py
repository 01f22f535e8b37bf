"""Imported first by a process that others are forked from: the system ends it with the program that started it.

While such a process loads torch it would not notice that the program has been killed. Only Linux can do this, and
what is forked from the process is not tied in turn: workers and loader processes watch for themselves.
"""

import contextlib
import ctypes
import signal

_PR_SET_PDEATHSIG = 1

with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
