"""Autocast in every stage, float32 values cast while they cross a cut, and one loss scale for all stages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import kit
import plans
import reference
import training_models
from pd_format.errors import UserError
from pd_format.layers.chain import Chain, build_chain
from pd_format.layers.precision import Precision, get_precision
from pd_format.layers.task import Classification
from pd_format.layers.values import map_tensors
from pd_format.profile import InputSpec
from pd_format.versions import Mode
from pd_train.check import check_precision, precision_warning
from pd_train.events import Event, Note
from pd_train.launch import launch
from pd_train.options import LossScaling, OptimizerOptions, RunOptions
from pd_train.seeding import epoch_order
from pd_train.torch_engine import TorchEngine
from pd_train.wire import Message, decode, encode

MODELS = str(plans.HERE / "training_models.py")
INPUTS = (InputSpec(name="x", shape=(4, 1, 6, 6), dtype="float32"),)
SEED = 7
SGD = OptimizerOptions("sgd", lr=0.05, momentum=0.9, weight_decay=1e-3)
BF16, FP16 = get_precision("bf16"), get_precision("fp16")
CPU = torch.device("cpu")
CUTS = {"stream": ["add", "b"], "bn_dropout": ["7"]}


def run(run_dir: Path, model: str, config: str, events: list[Event] | None = None, **changes: Any) -> dict[str, Tensor]:
    """Train by real workers, two epochs."""
    run_dir.mkdir()
    plan = plans.plan_of(f"{MODELS}:{model}", INPUTS, config, CUTS[model], data=f"{MODELS}:samples_26")
    settings = {"epochs": 2, "optimizer": SGD, "seed": SEED, "device": "cpu", "stall_timeout": 60.0, **changes}
    launch(RunOptions(plan, run_dir, plan.data, **settings), (events if events is not None else []).append)
    return torch.load(run_dir / "model.pt", weights_only=True)


def rounded(dtype: torch.dtype, *values: Tensor) -> tuple[Tensor, ...]:
    """What a cut does to the values that cross it."""
    return tuple(value.to(dtype).float() if value.dtype is torch.float32 else value for value in values)


def model_of(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(SEED)
    model: nn.Module = getattr(training_models, name)()
    model.cross = lambda *values: rounded(dtype, *values)
    return model


@pytest.mark.parametrize(
    ("model", "config", "stages"),
    [
        ("stream", "1-1-1", [["a"], ["b"], ["c", "d"]]),
        ("bn_dropout", "2-1", [["0", "1", "2", "3", "4", "5"], ["8", "11"]]),
    ],
)
def test_workers_compute_what_the_reference_computes(
    model: str, config: str, stages: list[list[str]], tmp_path: Path
) -> None:
    found = run(tmp_path / "run", model, config, precision="bf16")
    replicas = [int(part) for part in config.split("-")]
    expected, losses = reference.train(
        model_of(model, torch.bfloat16),
        [
            reference.ReferenceStage(names, count, depth)
            for names, count, depth in zip(stages, replicas, plans.paper_depths(replicas), strict=True)
        ],
        training_models.samples_26()[0],
        4,
        2,
        SGD,
        SEED,
        rules=reference.Rules(precision=torch.bfloat16),
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert value.dtype in (torch.float32, torch.int64)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [epoch["train_loss"] for epoch in metrics] == pytest.approx(losses, rel=1e-12)


def test_fp16_is_what_a_plain_loop_with_torchs_own_scaler_computes(tmp_path: Path) -> None:
    """The scale begins where gradients overflow and doubles after every second update, so that some are left out."""
    events: list[Event] = []
    scaling = LossScaling(initial=2.0**20, growth_interval=2)
    found = run(tmp_path / "run", "stream", "1-1-1", events, precision="fp16", mode=Mode(flush=2), loss_scaling=scaling)
    model = model_of("stream", torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    images, labels = training_models.samples_26()[0].tensors
    skipped = 0
    for epoch in range(2):
        batches = list(epoch_order(26, SEED, epoch).split(4))
        for first in range(0, len(batches), 2):
            optimizer.zero_grad()
            for indices in batches[first : first + 2]:
                with torch.autocast("cpu", torch.float16):
                    loss = cross_entropy(model(images[indices]), labels[indices])
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            for parameter in model.parameters():
                parameter.grad.div_(len(batches[first : first + 2]))
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            skipped += scaler.get_scale() < scale
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert 2 <= skipped < 8
    assert (report["skipped_updates"], report["loss_scale"]) == (skipped, scaler.get_scale())
    assert max(report["skipped_by_stage"]) == skipped
    notes = [event.text for event in events if isinstance(event, Note)]
    assert len(notes) == skipped
    assert "the update after minibatch 1 is left out, since gradients of stage" in notes[0]


class Mixed(nn.Module):
    """What crosses: float32, what autocast made, integers, a mask, a plain number and a dictionary of these."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        values = {"wide": x + self.a(x), "mask": x > 0, "count": x.shape[1]}
        narrow = self.b(values["wide"])
        mixed = (values["wide"] * values["mask"] + narrow)[rows] / values["count"]
        return self.c(mixed)


MIXED = (
    InputSpec(name="x", shape=(6, 16), dtype="float32"),
    InputSpec(name="rows", shape=(6,), dtype="int64"),
)


class Halves:
    """A model in two stages, in one process; what crosses the cut goes through frames."""

    def __init__(self, model: nn.Module, inputs: Sequence[InputSpec], cut: str, precision: Precision, **options: Any):
        self.chain: Chain = build_chain(model, inputs)
        names = [layer.name for layer in self.chain.layers]
        self.cut = names.index(cut)
        self.sent: list[int] = []
        """Bytes of the tensors of each message."""
        self.stages = [self.chain.stage(0, self.cut), self.chain.stage(self.cut + 1, len(names) - 1)]
        self.parameters = [list(stage.parameters()) for stage in self.stages]
        self.engines = [
            TorchEngine(stage, [own], Classification(), CPU, precision=precision, first=first, **options)
            for stage, own, first in zip(self.stages, self.parameters, (True, False), strict=True)
        ]

    def travel(self, body: Any) -> Any:
        frames = encode(Message("forward", 0, 0, 0, body), "run")
        self.sent.append(sum(len(frame) for frame in frames[1:]))
        return decode(frames, "run").body

    def train(self, values: tuple[Tensor, ...], labels: Tensor) -> list[Tensor | None]:
        """A step; the gradients of all parameters."""
        arrived = self.travel(self.engines[0].forward(0, 0, values, SEED))
        self.engines[1].forward_loss(0, 0, arrived, labels, SEED)
        answer = self.engines[1].backward(0, 0, None)
        self.engines[0].backward(0, 0, self.travel(answer))
        return [gradient for engine in self.engines for gradient in engine.take_parameter_gradients(0)]


def mixed_minibatch() -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(6, 16, generator=generator), torch.randperm(6, generator=generator)), torch.arange(6) % 4


@pytest.mark.parametrize("precision", [BF16, FP16], ids=["bf16", "fp16"])
def test_float32_values_travel_in_two_bytes_an_element_and_so_do_their_gradients(precision: Precision) -> None:
    halves = Halves(Mixed(), MIXED, "b", precision)
    values, labels = mixed_minibatch()
    gradients = halves.train(values, labels)
    numbers, mask, rows = 6 * 16 * 2, 6 * 16, 6 * 8
    # wide and narrow, then the mask and the rows as they are; back come the gradients of the first two.
    assert halves.sent == [2 * numbers + mask + rows, 2 * numbers]
    assert halves.sent[0] == halves.chain.crossing_bytes(halves.cut, precision)
    assert halves.sent[0] + 2 * numbers == halves.chain.crossing_bytes(halves.cut)
    assert all(gradient.dtype is torch.float32 for gradient in gradients)


def test_validation_travels_in_two_bytes_an_element_too() -> None:
    halves = Halves(Mixed(), MIXED, "b", BF16)
    values, labels = mixed_minibatch()
    arrived = halves.travel(halves.engines[0].evaluate(0, values, None))
    halves.engines[1].evaluate(0, arrived, labels)
    assert halves.sent == [halves.chain.crossing_bytes(halves.cut, BF16)]


def test_a_stage_goes_on_with_the_types_that_the_model_gave_its_values() -> None:
    model = Mixed()
    halves = Halves(model, MIXED, "b", BF16)
    values, labels = mixed_minibatch()
    met: list[list[torch.dtype]] = []

    def look(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        met.append([each.dtype for each in arguments if isinstance(each, Tensor)])

    halves.stages[1].register_forward_pre_hook(look)
    halves.train(values, labels)
    (dtypes,) = met
    assert sorted(map(str, dtypes)) == ["torch.bfloat16", "torch.bool", "torch.float32", "torch.int64"]


def test_a_stage_recomputes_under_the_same_autocast() -> None:
    torch.manual_seed(SEED)
    model = Mixed()
    values, labels = mixed_minibatch()
    once, twice = (Halves(model, MIXED, "b", BF16, recompute=flag).train(values, labels) for flag in (False, True))
    assert all(map(torch.equal, once, twice))


def test_a_model_of_another_type_is_left_as_it_is() -> None:
    """Its bfloat16 values are not widened, and float64 travels whole."""
    halves = Halves(kit.K1().to(torch.bfloat16), [InputSpec(name="input", shape=(5, 16), dtype="bfloat16")], "1", BF16)
    gradients = halves.train((torch.randn(5, 16).bfloat16(),), torch.arange(5) % 4)
    assert halves.sent == [5 * 32 * 2] * 2
    assert all(gradient.dtype is torch.bfloat16 for gradient in gradients)
    double = (torch.ones(3, dtype=torch.float64), None, 2.5)
    crossed = BF16.narrow(double)
    assert BF16.widen(crossed) == double
    assert BF16.widen(crossed)[0] is double[0]


def test_narrowing_rounds_once_and_keeps_every_nesting() -> None:
    values = ({"h": torch.randn(3), "n": (torch.arange(2), None)}, [torch.randn(2).bfloat16()], "text", True)
    crossed = FP16.narrow(values)
    expected = map_tensors(lambda each: rounded(torch.float16, each)[0], values)
    widened = FP16.widen(crossed)
    assert repr(widened) == repr(expected)
    assert repr(FP16.widen(FP16.narrow(widened))) == repr(widened)


def test_fp16_wants_a_moment_at_which_all_stages_agree() -> None:
    with pytest.raises(UserError, match=r"asynchronous pipeline has no moment .*--flush N.*bf16"):
        check_precision("fp16", Mode())
    check_precision("fp16", Mode(flush=4))
    check_precision("bf16", Mode("2bw"))
    with pytest.raises(UserError, match="--weights none"):
        check_precision("bf16", Mode("none"))


def test_another_precision_than_the_plans_is_told() -> None:
    plan = plans.plan_of(f"{MODELS}:stream", INPUTS, "1-1-1", CUTS["stream"])
    assert precision_warning(RunOptions(plan, Path("run"), "digits", 1)) is None
    warning = precision_warning(RunOptions(plan, Path("run"), "digits", 1, precision="bf16"))
    assert "times and bytes are for fp32, and the run computes in bf16" in str(warning)
