"""Awkward models and data through real workers: what crosses a cut, what does not train, minibatches of any size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import plans
import reference
import runtime_models
from pd_format.errors import UserError
from pd_format.layers.factory import build_model
from pd_format.profile import InputSpec
from pd_format.versions import Mode
from pd_train.launch import launch
from pd_train.options import OptimizerOptions, RunOptions

MODELS = str(plans.HERE / "runtime_models.py")
KIT = str(plans.HERE / "kit.py")
SEED = 3
SGD = OptimizerOptions("sgd", lr=0.05, momentum=0.9, weight_decay=1e-2)


def spec(name: str = "x", shape: Sequence[int] = (4, 16), dtype: str = "float32") -> InputSpec:
    return InputSpec(name=name, shape=tuple(shape), dtype=dtype)


WHICH = spec("which", (4,), "int64")


class Run:
    """A pipeline's run, and what the single-process reference says that it must end with."""

    def __init__(
        self,
        run_dir: Path,
        factory: str,
        inputs: Sequence[InputSpec],
        config: str,
        cuts: Sequence[str],
        data: str,
        kwargs: Mapping[str, object] | None = None,
        **changes: object,
    ) -> None:
        run_dir.mkdir(exist_ok=True)
        self.factory, self.config, self.cuts, self.data = factory, config, cuts, data
        self.kwargs = dict(kwargs or {})
        self.plan = plans.plan_of(factory, inputs, config, cuts, data=f"{MODELS}:{data}", kwargs=kwargs)
        settings = {"epochs": 2, "optimizer": SGD, "seed": SEED, "device": "cpu", "stall_timeout": 60.0, **changes}
        self.options = RunOptions(plan=self.plan, run_dir=run_dir, data=self.plan.data, **settings)
        launch(self.options, lambda event: None)
        self.state: dict[str, Tensor] = torch.load(run_dir / "model.pt", weights_only=True)
        self.metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]

    def model(self) -> nn.Module:
        """The model as a worker begins with it."""
        torch.manual_seed(SEED)
        return build_model(self.factory, self.kwargs)

    def assert_as_reference(self, dataset: TensorDataset | None = None, buffers: bool = True) -> None:
        model = self.model()
        replicas = [stage.replicas for stage in self.plan.stages]
        # Modules in the order of the chain; a leaf holds its own parameters.
        names = [name for name, module in model.named_modules() if name]
        ends = [names.index(cut) + 1 for cut in self.cuts] + [len(names)]
        stages, first = [], 0
        for end, stage in zip(ends, self.plan.stages, strict=True):
            stages.append(reference.ReferenceStage(names[first:end], stage.replicas, stage.in_flight))
            first = end
        assert len(stages) == len(replicas)
        training = dataset or getattr(runtime_models, self.data)()[0]
        state, losses = reference.train(
            model,
            stages,
            training,
            self.plan.minibatch_size,
            self.options.epochs,
            self.options.optimizer,
            SEED,
            rules=reference.Rules(sync=self.options.mode.sync),
        )
        for name, value in state.items():
            assert torch.equal(self.state[name], value), name
        assert [epoch["train_loss"] for epoch in self.metrics] == pytest.approx(losses, rel=1e-12)


def perceptron_run(run_dir: Path, config: str, data: str = "numbers_40", **changes: object) -> Run:
    cuts = {1: [], 2: ["1"], 3: ["1", "3"]}[len(config.split("-"))]
    dtype = str(changes.pop("dtype", "float32"))
    kwargs = {"dtype": dtype, "frozen": str(changes.pop("frozen", ""))}
    size = int(str(changes.pop("minibatch_size", 4)))
    return Run(
        run_dir, f"{MODELS}:perceptron", [spec(shape=(size, 16), dtype=dtype)], config, cuts, data, kwargs, **changes
    )


@pytest.mark.parametrize("config", ["2-2", "3-2", "1-3"])
def test_stages_with_other_replica_counts_agree_on_who_talks_to_whom(config: str, tmp_path: Path) -> None:
    perceptron_run(tmp_path, config).assert_as_reference()


@pytest.mark.parametrize("frozen", ["0", "2 4", "0 2 4", "all but the last bias"])
@pytest.mark.parametrize("config", ["1-1", "2-1"])
def test_frozen_parameters_stay_as_they_are(frozen: str, config: str, tmp_path: Path) -> None:
    run = perceptron_run(tmp_path, config, frozen=frozen)
    run.assert_as_reference()
    changed = 0
    for name, parameter in run.model().named_parameters():
        assert parameter.requires_grad or torch.equal(run.state[name], parameter), name
        changed += not torch.equal(run.state[name], parameter)
    assert changed == {"0": 4, "2 4": 2, "0 2 4": 0, "all but the last bias": 1}[frozen]


@pytest.mark.parametrize(("dtype", "data"), [("bfloat16", "bfloats"), ("float16", "halves")])
def test_sixteen_bits_stay_sixteen_bits(dtype: str, data: str, tmp_path: Path) -> None:
    run = perceptron_run(tmp_path, "1-2", data, dtype=dtype)
    run.assert_as_reference()
    assert {value.dtype for value in run.state.values()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("config", ["1-1", "2-1", "2"])
def test_a_parameter_without_a_gradient_is_left_alone(config: str, tmp_path: Path) -> None:
    cuts = [] if config == "2" else ["p"]
    sync = "bsp" if config == "2" else "overlap"
    inputs = [spec(shape=(2, 16)), spec("which", (2,), "int64")]
    run = Run(tmp_path, f"{KIT}:K9", inputs, config, cuts, "choices", mode=Mode(sync=sync))
    run.assert_as_reference()


def test_none_numbers_and_nested_tuples_cross_a_cut(tmp_path: Path) -> None:
    run = Run(tmp_path, f"{MODELS}:odd_values", [spec()], "1-1-1", ["a", "odd"], "numbers_17")
    run.assert_as_reference()


def test_a_dict_crosses_a_cut_and_is_the_output(tmp_path: Path) -> None:
    inputs = [spec(), spec("idx", (4,), "int64")]
    run = Run(tmp_path, f"{KIT}:K6", inputs, "1-1", ["gt"], "dicts")
    assert run.metrics[0]["validation_accuracy"] is not None
    run.cuts = ["a"]
    run.assert_as_reference(runtime_models.with_choice(18))


def test_an_input_of_the_last_layer_alone_reaches_it(tmp_path: Path) -> None:
    inputs = [spec(), spec("mask", (4, 16))]
    run = Run(tmp_path, f"{MODELS}:late_mask", inputs, "1-1-1", ["a", "b"], "masks")
    run.assert_as_reference()


def test_sequences_may_be_as_long_as_they_like(tmp_path: Path) -> None:
    run = Run(tmp_path, f"{MODELS}:words", [spec("ids", (4, 8), "int64")], "1-1", ["e"], "sequences")
    data = runtime_models.sequences()[1]
    model = run.model()
    model.load_state_dict(run.state)
    losses = []
    with torch.no_grad():
        for indices in torch.arange(len(data)).split(4):
            ids, labels = data.rows(indices)
            losses.append(cross_entropy(model(ids), labels).item() * len(indices))
    assert run.metrics[-1]["validation_loss"] == pytest.approx(sum(losses) / len(data), rel=1e-6)


def test_tied_parameters_train_in_one_stage_and_are_refused_across_two(tmp_path: Path) -> None:
    run = Run(tmp_path, f"{MODELS}:tied_words", [spec("ids", (4, 8), "int64")], "1", [], "sequences")
    assert torch.equal(run.state["e.weight"], run.state["o.weight"])
    assert not torch.equal(run.state["e.weight"], run.model().get_parameter("e.weight"))
    with pytest.raises(UserError, match=r"e\.weight.*o\.weight"):
        Run(tmp_path, f"{MODELS}:tied_words", [spec("ids", (4, 8), "int64")], "1-1", ["m"], "sequences")


@pytest.mark.parametrize("config", ["1", "2", "2-1"])
def test_a_short_minibatch_weighs_as_many_samples_as_it_has(config: str, tmp_path: Path) -> None:
    """17 samples in minibatches of 8: the last one has a single sample."""
    sync = "bsp" if "-" not in config else "overlap"
    run = perceptron_run(tmp_path, config, "numbers_17", minibatch_size=8, mode=Mode(sync=sync))
    run.assert_as_reference()
    assert [epoch["minibatches"] for epoch in run.metrics] == [3, 3]
    images, labels = runtime_models.numbers_17()[1].tensors
    model = run.model()
    model.load_state_dict(run.state)
    with torch.no_grad():
        output = model(images)
    assert run.metrics[-1]["validation_loss"] == pytest.approx(cross_entropy(output, labels).item(), rel=1e-5)
    assert run.metrics[-1]["validation_accuracy"] == (output.argmax(1) == labels).sum().item() / len(labels)


@pytest.mark.parametrize(("config", "data"), [("1-1", "numbers_3"), ("2", "numbers_1"), ("2-2", "numbers_1")])
def test_fewer_samples_than_one_minibatch_are_trained_on(config: str, data: str, tmp_path: Path) -> None:
    sync = "bsp" if "-" not in config else "overlap"
    run = perceptron_run(tmp_path, config, data, minibatch_size=8, mode=Mode(sync=sync))
    run.assert_as_reference()
    assert [epoch["minibatches"] for epoch in run.metrics] == [1, 1]


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        ("numbers_0", {}, "train: .* holds 0 samples.*minibatches of 8"),
        ("no_validation", {}, "validation: .* holds 0 samples.*minibatches of 8"),
        ("numbers_3", {"drop_last": True}, "train: .* holds 3 samples, fewer than one minibatch of 8"),
    ],
)
def test_too_few_samples_are_refused_with_both_numbers(data: str, changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        perceptron_run(tmp_path, "2-1", data, minibatch_size=8, **changes)


def test_replicas_of_the_first_stage_see_every_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = perceptron_run(tmp_path / "run", "3-1", "noting", minibatch_size=7, epochs=1)
    seen = [sorted(map(int, path.read_text().split())) for path in tmp_path.glob("seen-*.txt")]
    assert sorted(len(each) for each in seen) == [14, 15, 21]
    assert sorted(index for each in seen for index in each) == list(range(50))
    run.assert_as_reference(runtime_models.numbers(50))
