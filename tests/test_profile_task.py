from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pd_format.errors import UserError
from pd_profile.task import classification_loss, random_labels


class WithOneAuxiliary(NamedTuple):
    logits: Tensor
    aux_logits: Tensor | None


class WithTwoAuxiliaries(NamedTuple):
    logits: Tensor
    aux_logits2: Tensor | None
    aux_logits1: Tensor | None


LOGITS, FIRST, SECOND = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).unbind()
LABELS = torch.tensor([0, 3, 1, 4])


@pytest.mark.parametrize(
    "output", [LOGITS, {"logits": LOGITS, "aux": LOGITS.mean()}, (LOGITS, FIRST), WithOneAuxiliary(LOGITS, None)]
)
def test_loss_is_the_cross_entropy_of_the_logits(output: Any) -> None:
    assert torch.equal(classification_loss(output, LABELS), cross_entropy(LOGITS, LABELS))


def test_auxiliary_classifiers_weigh_less() -> None:
    main, first, second = (cross_entropy(one, LABELS) for one in (LOGITS, FIRST, SECOND))
    torch.testing.assert_close(classification_loss(WithOneAuxiliary(LOGITS, FIRST), LABELS), main + 0.4 * first)
    torch.testing.assert_close(
        classification_loss(WithTwoAuxiliaries(LOGITS, FIRST, SECOND), LABELS), main + 0.3 * first + 0.3 * second
    )


def test_every_position_of_a_sequence_has_a_label() -> None:
    logits = torch.randn(2, 3, 5)
    labels = random_labels(logits, torch.Generator().manual_seed(0))
    assert labels.shape == (2, 3)
    assert labels.dtype == torch.int64
    assert int(labels.min()) >= 0
    assert int(labels.max()) < 5
    torch.testing.assert_close(classification_loss(logits, labels), cross_entropy(logits.transpose(1, 2), labels))


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ({"hidden": LOGITS}, "a dict with the keys 'hidden'"),
        (None, "a NoneType"),
        (LABELS, "a int64 tensor of shape (4,)"),
        (LOGITS.sum(), "a float32 tensor of shape ()"),
    ],
)
def test_an_output_without_logits_is_refused(output: Any, found: str) -> None:
    with pytest.raises(UserError) as caught:
        random_labels(output, torch.Generator())
    assert f"The model returns {found}; classification needs " in str(caught.value)
