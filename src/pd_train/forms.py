"""What the body of each kind of message looks like, so that no other one reaches the code that takes it apart.

    forward       (values, targets, version met at stage 0)      backward     gradients of what was sent, or None,
                                                                              each in parts where it is compressed
    gradient      (bucket, pieces, version read)                 parameters   (bucket, pieces)
                  pieces are a tuple of tensors, or a list of them where they are compressed
    ...

Only the form is looked at here; whether a bucket's pieces have the right sizes, the parameter server knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from pd_format.plan import Plan
from pd_train.checkpoint.part import PartRecord
from pd_train.crossing import Crossing
from pd_train.meeting import About
from pd_train.pulse import Pulse
from pd_train.recorder import RECEIVED, ROW
from pd_train.routing import Place, may_send
from pd_train.segment import Segment
from pd_train.timing import Doing, WorkerTiming
from pd_train.wire import Message

__all__ = ["has_form", "plan_problem"]

Form = Callable[[Any], bool]


def plan_problem(plan: Plan, place: Place, message: Message) -> str | None:
    """What is wrong with a message by the plan, for the worker at `place`."""
    if not may_send(plan, place, message.kind, message.sender, message.index):
        return f"{_name(message)}, which the plan does not have that worker send to this one"
    if not has_form(message.kind, message.body) or not _fits(plan, message):
        return f"{_name(message)}, whose content has another form than such a message has"
    return None


def _fits(plan: Plan, message: Message) -> bool:
    """Whether what crosses a cut has the form that the plan's compression gives it, and a trace names its workers."""
    if message.kind == "timing":
        return _names_workers(message.body[1], plan.workers)
    if plan.compress_activations is None:
        return True
    crossing = Crossing(plan.compress_activations)
    if message.kind == "forward":
        return crossing.has_form(message.body[0])
    return message.kind != "backward" or crossing.has_answer_form(message.body)


def _name(message: Message) -> str:
    return f"{message.kind[:20]!r} {message.index} of worker {message.sender}"


def has_form(kind: str, body: Any) -> bool:
    """Whether a message of this kind may have this body."""
    form = _FORMS.get(kind)
    return form is not None and form(body)


def _is(*types: type) -> Form:
    """Exactly one of the types: a bool is no int."""
    return lambda value: type(value) in types


def _row(*forms: Form) -> Form:
    def form(value: Any) -> bool:
        if type(value) is not tuple or len(value) != len(forms):
            return False
        return all(each(item) for each, item in zip(forms, value, strict=True))

    return form


def _each(container: type[tuple[Any, ...]] | type[list[Any]], form: Form) -> Form:
    return lambda value: type(value) is container and all(form(item) for item in value)


def _named(form: Form) -> Form:
    return lambda value: type(value) is dict and all(type(key) is str and form(item) for key, item in value.items())


def _maybe(form: Form) -> Form:
    return lambda value: value is None or form(value)


def _either(*forms: Form) -> Form:
    return lambda value: any(form(value) for form in forms)


def _anything(value: Any) -> bool:
    return True


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_record(value: Any) -> bool:
    try:
        PartRecord.model_validate(value)
    except ValidationError:
        return False
    return True


_SEGMENT_FIELDS = {each.name: {"bool": bool, "int": int, "float": float}[str(each.type)] for each in fields(Segment)}


def _is_segment(value: Any) -> bool:
    if type(value) is not dict:
        return False
    if "save" in value:
        return value.keys() == {"save", "whole"} and _POSITION(value["save"]) and _each(list, _POSITION)(value["whole"])
    return value.keys() == _SEGMENT_FIELDS.keys() and all(
        type(value[name]) in (kind, int) and value[name] >= 0 for name, kind in _SEGMENT_FIELDS.items()
    )


_ABOUT_FIELDS = {"rank": int, "protocol": int, "options": dict}


def _is_about(value: Any) -> bool:
    names = {each.name for each in fields(About)}
    return (
        type(value) is dict
        and all(name in names and type(content) is _ABOUT_FIELDS.get(name, str) for name, content in value.items())
        and len(value) == len(names)
    )


def _is_counts(value: Any) -> bool:
    return type(value) is dict and all(type(key) is int and _is_whole(times) for key, times in value.items())


def _is_order(value: Any) -> bool:
    return _READ(value) or _TAKE(value)


def _is_rows(value: Any) -> bool:
    """Rows of a trace one after another, see `pd_train.recorder.ROW`."""
    if type(value) is not Tensor or value.dtype != torch.float64 or value.ndim != 1 or len(value) % len(ROW):
        return False
    what = value[ROW.index("what") :: len(ROW)]
    is_known = (what >= 0) & (what < len(Doing) + len(RECEIVED)) & (what == what.floor())
    return bool(is_known.all() and value.isfinite().all())


def _names_workers(rows: Tensor, workers: int) -> bool:
    """Whether what was received came from workers."""
    what, peers = (rows[ROW.index(name) :: len(ROW)] for name in ("what", "peer"))
    senders = peers[what >= len(Doing)]
    return bool(((senders >= 0) & (senders < workers) & (senders == senders.floor())).all())


def _is_timing(value: Any) -> bool:
    try:
        WorkerTiming.from_plain(value)
    except ValueError:
        return False
    return True


_TENSOR = _is(Tensor)
_TEXT = _is(str)
_POSITION = _row(_is_whole, _is_whole)
_RANGE = _row(_TEXT, _is_whole, _is_whole)
_STATE = _named(_TENSOR)
_READ = _row(lambda value: value == "read", _POSITION)
_TAKE = _row(lambda value: value == "take", _each(tuple, _row(_is_whole, _is_record)))
_STATISTICS = _row(_is_whole, _is_whole, _is_counts, _maybe(_is_whole), _is_whole, _each(list, _TEXT))

_FORMS: dict[str, Form] = {
    "hello": _is(type(None)),
    "about": _is_about,
    "missing": _TEXT,
    "refused": _TEXT,
    "welcome": _TEXT,
    "joined": _is(type(None)),
    "go": _is(type(None)),
    "what time": _is(type(None)),
    "time": _row(_is(float), _is(float)),
    "aligned": _is(float),
    "failed": _row(_TEXT, _is(bool)),
    "event": _row(_TEXT, _named(_anything)),
    "forward": _row(_is(tuple), _anything, _maybe(_is_whole)),
    "backward": _maybe(_each(list, _maybe(_either(_TENSOR, _each(tuple, _TENSOR))))),
    "gradient": _row(_is_whole, _either(_each(tuple, _maybe(_TENSOR)), _each(list, _TENSOR)), _is_whole),
    "parameters": _row(_is_whole, _either(_each(tuple, _TENSOR), _each(list, _TENSOR))),
    "buffers": _each(list, _TENSOR),
    "norm": _is(float),
    "finite": _is(bool),
    "score": _row(_maybe(_is(float)), _maybe(_is(int, float)), _is_whole, _maybe(_TENSOR)),
    "segment": _maybe(_is_segment),
    "pulse": Pulse.has_form,
    "timing": _row(_is_timing, _is_rows),
    "saved": _POSITION,
    "part": _row(_STATE, _STATISTICS),
    "goodbye": _is(type(None)),
    "bye": _is(type(None)),
    "kept": _row(_each(tuple, _POSITION), _row(_each(tuple, _TEXT), _each(tuple, _RANGE), _is(bool))),
    "order": _maybe(_is_order),
    "readable": _each(list, _is_record),
    "want": _row(_row(_POSITION, _is_whole, _is_whole), _each(tuple, _TEXT), _each(tuple, _RANGE), _is(bool)),
    "restored": _row(_STATE, _each(tuple, _row(_RANGE, _STATE)), _anything),
}
