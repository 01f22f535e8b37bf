"""Small models that are awkward to split, and the comparison of a split model with the whole one.

Not a test module: tests import it as `kit`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from pd_format.layers.chain import Chain
from pd_format.layers.stage import StageModule
from pd_format.profile import InputSpec

__all__ = [
    "K1", "K2", "K3", "K4", "K5", "K6", "K7", "K8", "K9", "K10",
    "assert_split_equals_whole", "backward", "detached", "run_stages", "specs", "tensors",
]  # fmt: skip


class K1(nn.Sequential):
    """A plain perceptron, 16 numbers in."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


class K2(nn.Module):
    """A skip connection that jumps over a whole stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        k = self.c(torch.tanh(self.b(torch.tanh(h))))
        return self.d(k + h)


class K3(nn.Module):
    """Tied embedding and head, integer input of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.m, self.o = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
        self.o.weight = self.e.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.o(torch.tanh(self.m(self.e(ids))))


class K4(nn.Sequential):
    """Convolutions with BatchNorm, and a tail without parameters but for the last layer; images of 3 x 8 x 8."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Flatten(), nn.Linear(8 * 64, 4),
        )  # fmt: skip


class K5(nn.Module):
    """An in-place activation on a value that a skip also carries: plain torch adds the clamped values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.r, self.b, self.h = nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        k = h
        return self.h(self.b(self.r(h)) + k)


class K6(nn.Module):
    """Two inputs and an optional one, a dictionary inside and another one as output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, idx: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        d = {"h": torch.tanh(self.a(x)), "idx": idx, "keep": x.sum(1) > 0, "mask": mask}
        h = torch.tanh(self.b(d["h"])) * d["keep"].unsqueeze(1)
        return {"logits": self.c(h) + d["idx"].unsqueeze(1), "aux": h.mean()}


class K7(nn.Sequential):
    """Dropout in every stage."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 4))


class K8(nn.Module):
    """A branch on data in the model's own forward, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = torch.relu(h) if h.sum() > 0 else -h
        return self.b(h)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e0, self.e1 = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, h: Tensor, which: Tensor) -> Tensor:
        return self.e0(h) if which[0] == 0 else self.e1(h)


class K9(nn.Module):
    """Two experts, one used a minibatch, so that the other one gets no gradient; the choice is a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.e, self.h = nn.Linear(16, 16), _Experts(), nn.Linear(16, 4)

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        return self.h(self.e(self.p(x), which))


class K10(nn.Module):
    """One submodule registered under two names and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.alias = self.a
        self.h = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.alias(torch.tanh(self.a(x))))


def specs(**inputs: Tensor) -> list[InputSpec]:
    """The description of inputs given as tensors."""
    return [
        InputSpec(name=name, shape=tuple(each.shape), dtype=str(each.dtype).removeprefix("torch."))
        for name, each in inputs.items()
    ]


def tensors(value: object) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)


def detached(value: object) -> object:
    """The value as another process would receive it: new leaves, which require a gradient where the originals did."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: detached(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        # A size arrives as a tuple.
        return (
            [detached(each) for each in value] if isinstance(value, list) else tuple(detached(each) for each in value)
        )
    return value


def run_stages(
    stages: Sequence[StageModule], inputs: Sequence[object]
) -> tuple[object, list[tuple[tuple[object, ...], tuple[object, ...]]]]:
    """Run stages one after the other; return the output and what each stage (received, returned)."""
    record: list[tuple[tuple[object, ...], tuple[object, ...]]] = []
    values = tuple(inputs)
    for index, stage in enumerate(stages):
        if index:
            assert stages[index - 1].outputs == stage.inputs
            received = detached(values)
            assert isinstance(received, tuple)
            values = received
        returned = stage(*values)
        record.append((values, returned))
        values = returned
    return values[0], record


def backward(record: Sequence[tuple[tuple[object, ...], tuple[object, ...]]], loss: Tensor) -> None:
    """Run the backward passes of stages, last one first, each from the gradients of the next one's received tensors."""
    loss.backward()
    for (_, returned), (received, _) in zip(reversed(record[:-1]), reversed(record[1:]), strict=True):
        sent = list(tensors(returned))
        gradients = [each.grad for each in tensors(received)]
        pairs = [(a, b) for a, b in zip(sent, gradients, strict=True) if a.requires_grad and b is not None]
        if pairs:
            torch.autograd.backward([a for a, _ in pairs], [b for _, b in pairs])


def assert_split_equals_whole(
    model: nn.Module, chain: Chain, cuts: Sequence[int], inputs: Sequence[Tensor], input_gradients: bool = True
) -> None:
    """Compare the stages between `cuts` with the whole: outputs, gradients, buffers, eval outputs; to the bit."""
    ends = [*cuts, len(chain.layers) - 1]
    state = copy.deepcopy(model.state_dict())
    model.train()
    whole_inputs = [each.clone().requires_grad_(input_gradients and each.is_floating_point()) for each in inputs]
    torch.manual_seed(1)
    expected = model(*whole_inputs)
    _loss(expected).backward()
    whole = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.eval()
    with torch.no_grad():
        whole_eval = [each.clone() for each in tensors(model(*(each.clone() for each in inputs)))]
    model.load_state_dict(state)
    model.zero_grad()
    model.train()

    stages = [chain.stage(first, last) for first, last in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
    split_inputs = [each.clone().requires_grad_(input_gradients and each.is_floating_point()) for each in inputs]
    torch.manual_seed(1)
    output, record = run_stages([stage.train() for stage in stages], split_inputs)
    _equal(list(tensors(expected)), list(tensors(output)), "outputs")
    backward(record, _loss(output))
    for name, gradient in whole.items():
        found = model.get_parameter(name).grad
        assert (found is None) == (gradient is None), f"{name} at {cuts}"
        assert found is None or torch.equal(found, gradient), f"gradient of {name} at {cuts}"
    for a, b in zip(whole_inputs, split_inputs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad), f"input gradient at {cuts}"
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), f"buffer {name} at {cuts}"
    with torch.no_grad():
        output, _ = run_stages([stage.eval() for stage in stages], [each.clone() for each in inputs])
    _equal(whole_eval, list(tensors(output)), "eval outputs")
    model.load_state_dict(state)
    model.zero_grad()


def _loss(output: object) -> Tensor:
    total = torch.zeros(())
    for each in tensors(output):
        if each.is_floating_point():
            weights = torch.linspace(-1, 1, each.numel()).view(each.shape)
            total = total + (each * weights).sum()
    return total


def _equal(expected: Sequence[Tensor], found: Sequence[Tensor], what: str) -> None:
    assert len(expected) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), f"{what} differ"
