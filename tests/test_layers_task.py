"""Classification: which loss and which count each kind of output gives, and what is refused."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from pd_format.errors import UserError
from pd_format.layers.task import classes_of, get_task, label_shape_of

Inception = namedtuple("Inception", ["logits", "aux_logits"])
GoogLeNet = namedtuple("GoogLeNet", ["logits", "aux_logits2", "aux_logits1"])

LOGITS = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0], [0.5, 0.0, 0.0], [0.0, 0.0, 4.0]])
ONE, TWO = LOGITS * 0.3, -LOGITS
LABELS = torch.tensor([0, 1, 2, 2])
task = get_task("classification")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (LOGITS, cross_entropy(LOGITS, LABELS)),
        ({"logits": LOGITS, "hidden": ONE}, cross_entropy(LOGITS, LABELS)),
        (Inception(LOGITS, ONE), cross_entropy(LOGITS, LABELS) + 0.4 * cross_entropy(ONE, LABELS)),
        (Inception(LOGITS, None), cross_entropy(LOGITS, LABELS)),
        (
            GoogLeNet(LOGITS, aux_logits2=TWO, aux_logits1=ONE),
            cross_entropy(LOGITS, LABELS) + 0.3 * cross_entropy(ONE, LABELS) + 0.3 * cross_entropy(TWO, LABELS),
        ),
    ],
)
def test_loss_is_the_mean_cross_entropy_with_what_auxiliary_classifiers_say(
    output: Any, expected: torch.Tensor
) -> None:
    assert torch.equal(task.loss(output, LABELS), expected)
    assert task.correct(output, LABELS) == 3
    assert task.samples(LABELS) == 4
    assert classes_of(output) == 3


def test_torchvisions_auxiliary_outputs_have_the_fields_that_count() -> None:
    googlenet = pytest.importorskip("torchvision.models").GoogLeNet.__module__
    module = __import__(googlenet, fromlist=["GoogLeNetOutputs"])
    assert set(module.GoogLeNetOutputs._fields) == {"logits", "aux_logits1", "aux_logits2"}


def test_labels_of_other_integer_types_count_alike() -> None:
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(task.loss(LOGITS, LABELS.to(dtype)), cross_entropy(LOGITS, LABELS))
        assert task.correct(LOGITS, LABELS.to(dtype)) == 3


def test_classes_are_known_from_meta_tensors() -> None:
    assert classes_of(torch.empty(32, 17, device="meta")) == 17
    assert classes_of(Inception(torch.empty(32, 17, device="meta"), None)) == 17


@pytest.mark.parametrize(("label", "found"), [(3, 3), (-1, -1), (-100, -100), (1000, 1000)])
def test_a_label_out_of_range_is_named_with_the_number_of_classes(label: int, found: int) -> None:
    with pytest.raises(UserError, match=f"holds the label {found}; the model tells 3 classes apart.* from 0 to 2"):
        task.loss(LOGITS, torch.tensor([0, 1, label, 2]))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(4), r"are a tensor of shape \(4,\) and float32; .* int64 and shape \(B,\)"),
        (torch.zeros(4, 1, dtype=torch.int64), r"are a tensor of shape \(4, 1\) and int64"),
        (torch.tensor(1), r"are a tensor of shape \(\) and int64"),
        ([0, 1], "are a list"),
        (torch.zeros(5, dtype=torch.int64), "logits for 4 samples, the minibatch has 5 labels"),
    ],
)
def test_labels_of_another_form_are_refused(labels: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task.loss(LOGITS, labels)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ((LOGITS, ONE), r"returns a tuple; classification expects floating-point logits of shape \(B, classes\)"),
        ({"scores": LOGITS}, "returns a dict with 'scores'"),
        (None, "returns a NoneType"),
        (LABELS, r"returns a tensor of shape \(4,\) and int64"),
        (LABELS[:, None], r"returns a tensor of shape \(4, 1\) and int64"),
        (LOGITS.sum(), r"returns a tensor of shape \(\) and float32"),
    ],
)
def test_outputs_without_logits_are_refused(output: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task.loss(output, LABELS)
    with pytest.raises(UserError, match=message):
        task.random_targets(output, torch.Generator())


def test_every_position_of_a_sequence_has_a_label() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = logits.argmax(dim=-1)
    torch.testing.assert_close(task.loss(logits, labels), cross_entropy(logits.transpose(1, 2), labels))
    assert (classes_of(logits), label_shape_of(logits), label_shape_of(LOGITS)) == (5, (3,), ())
    assert task.samples(labels) == 2
    assert task.correct(logits, labels) == 2
    labels[0, 0] = (labels[0, 0] + 1) % 5
    assert task.correct(logits, labels) == pytest.approx(1 + 2 / 3)
    with pytest.raises(UserError, match=r"logits of shape \(2, 3, 5\), .* labels of shape \(2, 2\)"):
        task.loss(logits, labels[:, :2])


@pytest.mark.parametrize("output", [LOGITS, {"logits": LOGITS}, LOGITS[None]])
def test_random_targets_fit_the_output(output: Any) -> None:
    labels = task.random_targets(output, torch.Generator().manual_seed(0))
    assert labels.dtype == torch.int64
    assert torch.isfinite(task.loss(output, labels))


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="'regression' is unknown; expected one of: 'classification'"):
        get_task("regression")
