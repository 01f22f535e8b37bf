"""The clock of these tests is moved by the layers themselves, so that every figure can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn

from pd_format.layers.chain import Chain, build_chain
from pd_format.profile import InputSpec
from pd_profile.clocks import HostClock
from pd_profile.measuring import measure, measure_overhead
from pd_profile.steps import Overhead, plain_step, timed_step, untouched


class FakeClock:
    """Milliseconds that pass only when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0

    def stamp(self) -> float:
        return self.now

    def elapsed_ms(self, begin: float, end: float) -> float:
        return end - begin

    def synchronize(self) -> None:
        self.waits += 1


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, clock: FakeClock, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.work = (clock, backward_ms)
        clock.now += forward_ms
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        clock, backward_ms = ctx.work
        clock.now += backward_ms
        return gradient, None, None, None


def work(value: Tensor, clock: FakeClock, forward_ms: float, backward_ms: float) -> Tensor:
    result: Tensor = _Work.apply(value, clock, forward_ms, backward_ms)  # type: ignore[no-untyped-call]
    return result


class Steps:
    """A chain as `timed_step` sees one, made of plain functions from the values so far to the layer's result."""

    def __init__(self, *functions: Callable[[list[Any]], Any]) -> None:
        self.functions = functions
        self.layers = functions

    def walk(self, inputs: Sequence[Tensor]) -> Iterator[tuple[int, Any]]:
        values: list[Any] = list(inputs)
        for index, function in enumerate(self.functions):
            values.append(function(values))
            yield index, values[-1]
        return values[-1]


def times_of(
    clock: FakeClock, *functions: Callable[[list[Any]], Any], overhead: Overhead | None = None, loss_ms: float = 0.0
) -> tuple[list[float], list[float]]:
    """Forward and backward milliseconds a layer; the loss takes `loss_ms` forward and twice that backward."""
    weight = torch.ones(3, requires_grad=True)

    def loss(output: Tensor) -> Tensor:
        return work(output, clock, loss_ms, 2 * loss_ms).sum()

    times = timed_step(cast(Chain, Steps(*functions)), [weight], loss, clock, overhead)
    return times.forward_ms, times.backward_ms


def test_each_layer_gets_its_own_time_and_the_last_one_the_loss() -> None:
    clock = FakeClock()
    forward, backward = times_of(
        clock,
        lambda values: work(values[-1], clock, 1, 10),
        lambda values: work(values[-1], clock, 2, 20),
        lambda values: work(values[-1], clock, 3, 30),
        loss_ms=100,
    )
    assert forward == [1, 2, 103]
    assert backward == [10, 20, 230]
    assert clock.waits == 2


def test_a_skip_connection_does_not_mix_up_the_layers() -> None:
    # 0 -> 1 -> 2 -> (2 + 0): the gradient of layer 0 is complete only after layers 2 and 1 are done.
    clock = FakeClock()
    forward, backward = times_of(
        clock,
        lambda values: work(values[-1], clock, 1, 10),
        lambda values: work(values[-1], clock, 2, 20),
        lambda values: work(values[-1], clock, 3, 30),
        lambda values: work(values[1] + values[3], clock, 4, 40),
    )
    assert forward == [1, 2, 3, 4]
    assert backward == [10, 20, 30, 40]


def test_two_branches_are_told_apart() -> None:
    clock = FakeClock()
    _, backward = times_of(
        clock,
        lambda values: work(values[0], clock, 1, 10),
        lambda values: work(values[1], clock, 2, 20),
        lambda values: work(values[1], clock, 3, 30),
        lambda values: torch.cat([values[2], values[3]]),
    )
    assert backward == [10, 20, 30, 0]


def test_a_layer_of_several_operations_and_results_gets_all_of_their_time() -> None:
    clock = FakeClock()

    def two(values: list[Any]) -> dict[str, Any]:
        first = work(work(values[-1], clock, 1, 10), clock, 1, 10)
        return {"a": (first, [work(first, clock, 1, 10)]), "flag": 3}

    forward, backward = times_of(
        clock,
        lambda values: work(values[-1], clock, 5, 50),
        two,
        lambda values: work(values[-1]["a"][0] + values[-1]["a"][1][0], clock, 7, 70),
    )
    assert forward == [5, 3, 7]
    assert backward == [50, 30, 70]


def test_a_layer_that_hands_on_its_input_takes_nobodys_time() -> None:
    clock = FakeClock()
    forward, backward = times_of(
        clock, lambda values: work(values[-1], clock, 1, 10), lambda values: values[-1], lambda values: values[-1] * 2
    )
    assert forward == [1, 0, 0]
    assert backward == [10, 0, 0]


def test_a_result_changed_in_place_leaves_the_time_with_the_layer_that_made_it() -> None:
    clock = FakeClock()
    _, backward = times_of(
        clock,
        lambda values: work(values[-1], clock, 1, 10),
        lambda values: values[-1].relu_(),
        lambda values: work(values[-1], clock, 3, 30),
    )
    assert backward == [10, 0, 30]


def test_layers_without_gradient_take_no_backward_time() -> None:
    clock = FakeClock()
    _, backward = times_of(
        clock,
        lambda values: work(values[-1].detach(), clock, 1, 10),
        lambda values: (values[-1] > 0).float(),
        lambda values: work(values[0] * values[2], clock, 3, 30),
    )
    assert backward == [0, 0, 30]


def test_a_model_without_any_gradient_has_no_backward_pass() -> None:
    clock = FakeClock()
    forward, backward = times_of(clock, lambda values: work(values[-1].detach(), clock, 1, 10), loss_ms=5)
    assert (forward, backward) == ([6], [0])


def test_the_overhead_is_taken_off_each_layer_and_never_below_zero() -> None:
    clock = FakeClock()
    forward, backward = times_of(
        clock,
        lambda values: work(values[-1], clock, 1.0, 10),
        lambda values: work(values[-1], clock, 0.25, 0.5),
        lambda values: work(values[-1], clock, 3.0, 30),
        overhead=Overhead(forward_ms=0.5, backward_ms=1.0),
    )
    assert forward == [0.5, 0, 2.5]
    assert backward == [9, 0, 29]


class Busy(nn.Module):
    def __init__(self, clock: FakeClock, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.clock, self.times = clock, (forward_ms, backward_ms)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: Tensor) -> Tensor:
        return work(value * self.weight, self.clock, *self.times)


class Measured(NamedTuple):
    reports: list[tuple[int, int]]
    steps: list[str]
    summary: Any


def measured(minibatches: int | None, slower: Sequence[float] = ()) -> Measured:
    """Measure two layers of 1 + 10 and 2 + 20 ms; the n-th loss, warm-up not counted, takes `slower[n]` more."""
    clock = FakeClock()
    model = nn.Sequential(Busy(clock, 1, 10), Busy(clock, 2, 20))
    steps: list[str] = []
    reports: list[tuple[int, int]] = []
    extra = iter(slower)

    class Recorded(Steps):
        def walk(self, inputs: Sequence[Tensor]) -> Iterator[tuple[int, Any]]:
            steps.append("layers")
            return super().walk(inputs)

    def loss(output: Tensor) -> Tensor:
        if reports:
            clock.now += next(extra, 0.0)
        return output.sum()

    model.register_forward_pre_hook(lambda module, inputs: steps.append("plain"))
    chain = Recorded(lambda values: model[0](values[-1]), lambda values: model[1](values[-1]))
    summary = measure(
        model,
        cast(Chain, chain),
        [torch.ones(2)],
        loss,
        clock=clock,
        minibatches=minibatches,
        report=lambda done, expected: reports.append((done, expected)),
    )
    return Measured(reports, steps, summary)


def test_measure_warms_up_then_times_both_kinds_of_step_in_turns() -> None:
    found = measured(3)
    assert found.summary.minibatches == 3
    assert found.summary.forward_ms == (1, 2)
    assert found.summary.backward_ms == (10, 20)
    assert found.summary.forward_ms_std == (0, 0)
    assert found.summary.plain_ms == found.summary.layers_ms == 33
    assert found.reports == [(0, 3), (1, 3), (2, 3), (3, 3)]
    warm_up = ["layers", "plain"] * 5
    assert found.steps == [*warm_up, "plain", "layers", "layers", "plain", "plain", "layers"]


def test_steady_times_end_the_measurement_at_the_fewest() -> None:
    found = measured(None)
    assert found.summary.minibatches == 10
    assert found.reports[-1] == (10, 10)


def test_unsteady_times_go_on_until_they_are_known_well_enough() -> None:
    # Every loss of the first ten minibatches is slow by a different amount; from then on all are steady.
    found = measured(None, slower=[4.0 * (n % 5) for n in range(20)])
    assert 10 < found.summary.minibatches < 100
    assert found.reports[10][1] > 10
    assert found.reports[-1] == (found.summary.minibatches, found.summary.minibatches)


def test_a_long_first_step_is_warm_up_enough() -> None:
    clock = FakeClock()
    model = nn.Sequential(Busy(clock, 1000, 0))
    calls: list[str] = []
    model.register_forward_pre_hook(lambda module, inputs: calls.append("plain"))
    chain = Steps(lambda values: model[0](values[-1]))
    measure(model, cast(Chain, chain), [torch.ones(2)], torch.sum, clock=clock, minibatches=1)
    assert calls == ["plain", "plain"]


def test_plain_step_tells_forward_from_backward() -> None:
    clock = FakeClock()
    assert plain_step(nn.Sequential(Busy(clock, 1, 10)), [torch.ones(2)], torch.sum, clock) == (1, 10)


def test_measuring_a_real_chain_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 2)
    )
    value = torch.randn(2, 1, 6, 6)
    model(value).sum().backward()
    chain = build_chain(model, [InputSpec(name="input", shape=(2, 1, 6, 6), dtype="float32")])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [parameter.grad for parameter in model.parameters()]
    random_state = torch.get_rng_state()

    summary = measure(model, chain, [value], torch.sum, clock=HostClock(), minibatches=2)

    assert len(summary.forward_ms) == len(chain.layers)
    assert all(time >= 0 for time in (*summary.forward_ms, *summary.backward_ms))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(now is before for now, before in zip([*model.parameters(), *model.buffers()], tensors, strict=True))
    assert all(parameter.grad is before for parameter, before in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert no_hooks_on(model)
    model.eval()
    assert model(value).shape == (2, 2)


def no_hooks_on(model: nn.Module) -> bool:
    return not any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        for module in model.modules()
    )


def test_the_model_is_restored_after_a_failure_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))

    def fail() -> None:
        with untouched(model):
            model(torch.randn(4, 2)).sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model[0].running_mean.tolist() == [0, 0]
    assert all(parameter.grad is None for parameter in model.parameters())


class Counts(nn.Module):
    """Replaces its buffer instead of changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(1))

    def forward(self, value: Tensor) -> Tensor:
        self.count = self.count + 1
        return value + self.count


def test_a_buffer_that_was_replaced_is_the_old_one_again() -> None:
    model = Counts()
    buffer = model.count
    with untouched(model):
        model(torch.ones(1))
        assert model.count.item() == 1
    assert model.count is buffer
    assert buffer.item() == 0


def test_overhead_is_measured_with_a_chain_of_trivial_layers() -> None:
    overhead = measure_overhead(HostClock(), 4)
    assert 0 <= overhead.forward_ms < 50
    assert 0 <= overhead.backward_ms < 50
