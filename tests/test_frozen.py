"""Frozen parts cost nothing: no backward pass and no gradient sent where nothing before trains, no copies, no change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plans
import reference
import runtime_models
from pd_format.layers.factory import build_model
from pd_format.layers.task import Classification
from pd_format.layers.values import tensors_in
from pd_format.profile import InputSpec
from pd_format.versions import sets_needed
from pd_train.built import build_stage
from pd_train.launch import launch
from pd_train.options import OptimizerOptions, RunOptions
from pd_train.torch_engine import TorchEngine
from pd_train.weights import ParameterSets

MODELS = str(plans.HERE / "runtime_models.py")
INPUTS = (InputSpec(name="x", shape=(4, 16), dtype="float32"),)
# Anything that touches a frozen parameter would change it: decay and momentum do so without a gradient.
SGD = OptimizerOptions("sgd", lr=0.05, momentum=0.9, weight_decay=0.1)


def engines(frozen: str, recompute: bool = False) -> list[tuple[TorchEngine, ParameterSets]]:
    """The stages 0-1, 2-3 and 4 of the perceptron at the paper's depths."""
    plan = plans.plan_of(f"{MODELS}:perceptron", INPUTS, "1-1-1", ["1", "3"], kwargs={"frozen": frozen})
    options = RunOptions(plan, Path(), "synthetic", 1)
    made = []
    for index in range(3):
        built = build_stage(plan, index, 0, torch.device("cpu"))
        sets = ParameterSets(built.parameters, sets_needed(options.versions(index)))
        engine = TorchEngine(built.module, sets.sets, Classification(), torch.device("cpu"), recompute=recompute)
        made.append((engine, sets))
    return made


@pytest.mark.parametrize("recompute", [False, True])
def test_stages_before_all_that_trains_run_no_backward_pass(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, last = engines("0 2", recompute)
    # Nothing to copy, though the depths of the first two ask for three and two sets.
    assert [[len(one) for one in sets.sets] for _, sets in (first, second, last)] == [[0] * 3, [0] * 2, [2]]
    values: tuple[Any, ...] = (torch.randn(4, 16),)
    for engine, _ in (first, second):
        values = tuple(value.detach() if isinstance(value, Tensor) else value for value in values)
        values = engine.forward(0, 0, values, seed=1)
        assert not any(tensor.requires_grad for tensor in tensors_in(values))
        # Only the module's own tensors are held: no graph, no inputs to run it again with.
        own = {id(tensor) for tensor in engine._module.parameters()}
        assert all(id(tensor) in own for tensor in engine.held())
    last[0].forward_loss(0, 0, values, torch.zeros(4, dtype=torch.int64), seed=1)
    assert last[0].backward(0, 0, None) == []
    assert all(gradient is not None for gradient in last[0].take_parameter_gradients(0))

    def refuse(*arguments: object) -> None:
        raise AssertionError("a pass ran")

    monkeypatch.setattr(torch.autograd, "backward", refuse)
    monkeypatch.setattr(nn.Module, "__call__", refuse)
    assert second[0].backward(0, 0, []) == []
    assert first[0].backward(0, 0, []) == []


def run(run_dir: Path, factory: str, config: str, cut: str, **kwargs: object) -> dict[str, Any]:
    run_dir.mkdir()
    plan = plans.plan_of(f"{MODELS}:{factory}", INPUTS, config, [cut], data=f"{MODELS}:numbers_40", kwargs=kwargs)
    options = RunOptions(plan, run_dir, plan.data, 1, optimizer=SGD, device="cpu", seed=3, stall_timeout=60.0)
    launch(options, lambda event: None)
    return {
        "sent": json.loads((run_dir / "report.json").read_text())["training_bytes_sent"],
        "state": torch.load(run_dir / "model.pt", weights_only=True),
    }


def test_no_gradient_and_no_parameter_of_a_frozen_stage_is_sent(tmp_path: Path) -> None:
    """40 samples of 32 numbers cross the cut; replicas of stage 0 would exchange 544 parameters in five rounds."""
    activations = 40 * 32 * 4
    trained = run(tmp_path / "trained", "perceptron", "2-1", "1")
    frozen = run(tmp_path / "frozen", "perceptron", "2-1", "1", frozen="0")
    assert trained["sent"] > 2 * activations + 5 * 2 * 544 * 4
    # What is left are activations and labels, and the headers of 10 messages each way, of announcements and of scores.
    assert activations < frozen["sent"] < activations + 40 * 8 + 50 * 120


@pytest.mark.parametrize("kept", [True, False])
def test_frozen_batch_norm_follows_the_models_own_mode(kept: bool, tmp_path: Path) -> None:
    found = run(tmp_path / "run", "tuned", "1-1", "body.3", kept=kept)["state"]
    torch.manual_seed(3)
    model = build_model(f"{MODELS}:tuned", {"kept": kept})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stages = [
        reference.ReferenceStage(["body.0", "body.1", "body.2", "body.3"], 1, 2),
        reference.ReferenceStage(["mid", "head"], 1, 1),
    ]
    expected, _ = reference.train(model, stages, runtime_models.numbers_40()[0], 4, 1, SGD, 3)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    changed = {name for name in before if not torch.equal(found[name], before[name])}
    statistics = {f"body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    trained = {"mid.weight", "mid.bias", "head.weight", "head.bias"}
    assert changed == (trained if kept else trained | statistics)
