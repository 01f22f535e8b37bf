"""Real worker processes end with the parameters of the single-process reference, to the bit (design, section 4)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import plans
import reference
import training_models
from pd_format.profile import InputSpec
from pd_format.versions import lag_of
from pd_train.launch import launch
from pd_train.options import OptimizerOptions, RunOptions
from pd_train.seeding import epoch_order, minibatch_seed

MODELS = str(plans.HERE / "training_models.py")
INPUTS = (InputSpec(name="x", shape=(4, 1, 6, 6), dtype="float32"),)
SEED = 7

# Where a model is cut into one to four stages.
CUTS = {
    "bn_dropout": {1: [], 2: ["7"], 3: ["2", "8"], 4: ["1", "4", "9"]},
    "skip": {1: [], 2: ["a"], 3: ["a", "b"], 4: ["a", "b", "c"]},
}
OPTIMIZERS = {
    "sgd": OptimizerOptions("sgd", lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": OptimizerOptions("adam", lr=0.01),
}


def run_pipeline(run_dir: Path, model: str, config: str, options: OptimizerOptions, **changes: object) -> dict:
    data = changes.pop("data", "samples_26")
    in_flight = changes.pop("in_flight", None)
    run_dir.mkdir()
    plan = plans.plan_of(
        f"{MODELS}:{model}",
        INPUTS,
        config,
        CUTS[model][len(config.split("-"))],
        data=f"{MODELS}:{data}",
        in_flight=in_flight,
    )
    settings = {"epochs": 2, "sync": "bsp" if "-" not in config else "overlap", **changes}
    launch(
        RunOptions(plan=plan, run_dir=run_dir, data=plan.data, optimizer=options, seed=SEED, device="cpu", **settings),
        lambda event: None,
    )
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {"state": torch.load(run_dir / "model.pt"), "losses": [epoch["train_loss"] for epoch in metrics]}


def run_reference(model: str, config: str, options: OptimizerOptions, **changes: object) -> dict:
    torch.manual_seed(SEED)
    built = getattr(training_models, model)()
    replicas = [int(part) for part in config.split("-")]
    sync = changes.get("sync", "bsp" if len(replicas) == 1 else "overlap")
    names = [name for name, module in built.named_modules() if name and not list(module.children())]
    ends = [names.index(cut) + 1 for cut in CUTS[model][len(replicas)]] + [len(names)]
    depths = changes.get("in_flight") or plans.paper_depths(replicas)
    stages, first = [], 0
    for end, count, depth in zip(ends, replicas, depths, strict=True):
        stages.append(reference.ReferenceStage(names[first:end], count, depth, lag_of(count, str(sync))))
        first = end
    data, _ = getattr(training_models, str(changes.get("data", "samples_26")))()
    state, losses = reference.train(
        built, stages, data, 4, int(changes.get("epochs", 2)), options, SEED, changes.get("minibatches")
    )
    return {"state": state, "losses": losses}


def assert_equal(found: dict, expected: dict) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        assert torch.equal(found["state"][name], value), name
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", CUTS)
@pytest.mark.parametrize("config", ["1", "1-1", "1-1-1-1", "2-1-1", "1-2", "3-1", "2-3", "4"])
def test_workers_compute_what_the_reference_computes(config: str, model: str, optimizer: str, tmp_path: Path) -> None:
    options = OPTIMIZERS[optimizer]
    found = run_pipeline(tmp_path / "run", model, config, options)
    assert_equal(found, run_reference(model, config, options))


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        pytest.param("2-1-1", {"sync": "bsp"}, id="bsp in a replicated first stage"),
        pytest.param("3", {"sync": "overlap"}, id="overlap in a plan of one stage"),
        pytest.param("2", {"data": "samples_3"}, id="two workers, one minibatch in all"),
        pytest.param("2-2", {"data": "samples_3"}, id="two workers a stage, one minibatch in all"),
        pytest.param("1-1-1-1", {"data": "samples_8"}, id="fewer minibatches than the pipeline is deep"),
        pytest.param("2-1", {"epochs": 3, "minibatches": 10}, id="a cap in the middle of the second epoch"),
        pytest.param("1-1-1", {"in_flight": (5, 3, 1)}, id="deeper than the paper's depths"),
        pytest.param("1-1-1", {"in_flight": (1, 1, 1)}, id="model parallelism"),
    ],
)
def test_the_edges_of_a_segment(config: str, changes: dict, tmp_path: Path) -> None:
    options = OptimizerOptions("sgd", lr=0.05, momentum=0.9, lr_schedule="cosine")
    found = run_pipeline(tmp_path / "run", "bn_dropout", config, options, **changes)
    assert_equal(found, run_reference("bn_dropout", config, options, **changes))


@pytest.mark.parametrize("scaling", ["linear", "none"])
def test_the_learning_rate_follows_the_scaling(scaling: str, tmp_path: Path) -> None:
    options = OptimizerOptions("sgd", lr=0.05, lr_scaling=scaling, lr_schedule="step")
    found = run_pipeline(tmp_path / "run", "skip", "2-1", options)
    assert_equal(found, run_reference("skip", "2-1", options))


def test_one_worker_is_a_plain_loop(tmp_path: Path) -> None:
    found = run_pipeline(tmp_path / "run", "bn_dropout", "1", OPTIMIZERS["sgd"])
    torch.manual_seed(SEED)
    model = training_models.bn_dropout()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    images, labels = training_models.samples_26()[0].tensors
    for epoch in range(2):
        for b, indices in enumerate(epoch_order(26, SEED, epoch).split(4)):
            torch.manual_seed(minibatch_seed(SEED, epoch, b, 0))
            optimizer.zero_grad()
            cross_entropy(model(images[indices]), labels[indices]).backward()
            optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(found["state"][name], value), name
