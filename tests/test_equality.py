"""Real worker processes end with the parameters of the single-process reference, to the bit (design, section 4)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import plans
import reference
import training_models
from pd_format.profile import InputSpec
from pd_format.versions import Mode, least_group
from pd_train.check import settle_mode
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
    rules = changes.pop("rules", None) or default_rules(config)
    recompute = bool(changes.pop("recompute", False))
    run_dir.mkdir()
    plan = plans.plan_of(
        f"{MODELS}:{model}",
        INPUTS,
        config,
        CUTS[model][len(config.split("-"))],
        data=f"{MODELS}:{data}",
        in_flight=in_flight,
    )
    stages = tuple(stage.model_copy(update={"recompute": recompute}) for stage in plan.stages)
    plan = plan.model_copy(update={"stages": stages})
    launch(
        RunOptions(
            plan=plan,
            run_dir=run_dir,
            data=plan.data,
            epochs=changes.pop("epochs", 2),
            optimizer=options,
            seed=SEED,
            device="cpu",
            stall_timeout=60.0,
            mode=settle_mode(plan, Mode(rules.weights, rules.sync, rules.flush, rules.group)),
            clip_stage_norm=rules.clip_stage_norm,
            clip_norm=rules.clip_norm,
            **changes,
        ),
        lambda event: None,
    )
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "state": torch.load(run_dir / "model.pt", weights_only=True),
        "losses": [epoch["train_loss"] for epoch in metrics],
    }


def default_rules(config: str) -> reference.Rules:
    return reference.Rules(sync="overlap" if "-" in config else "bsp")


def run_reference(model: str, config: str, options: OptimizerOptions, **changes: object) -> dict:
    torch.manual_seed(SEED)
    built = getattr(training_models, model)()
    replicas = [int(part) for part in config.split("-")]
    rules = changes.get("rules") or default_rules(config)
    names = [name for name, module in built.named_modules() if name and not list(module.children())]
    ends = [names.index(cut) + 1 for cut in CUTS[model][len(replicas)]] + [len(names)]
    depths = changes.get("in_flight") or plans.paper_depths(replicas)
    if rules.weights == "2bw" and rules.group is None:
        rules = dataclasses.replace(rules, group=least_group(replicas, depths))
    stages, first = [], 0
    for end, count, depth in zip(ends, replicas, depths, strict=True):
        stages.append(reference.ReferenceStage(names[first:end], count, depth))
        first = end
    data, _ = getattr(training_models, str(changes.get("data", "samples_26")))()
    epochs = int(changes.get("epochs", 2))
    state, losses = reference.train(built, stages, data, 4, epochs, options, SEED, changes.get("minibatches"), rules)
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
        pytest.param("2-1-1", {"rules": reference.Rules(sync="bsp")}, id="bsp in a replicated first stage"),
        pytest.param("3", {"rules": reference.Rules()}, id="overlap in a plan of one stage"),
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
    found = run_pipeline(tmp_path / "run", "bn_dropout", config, options, **dict(changes))
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


CONFIGS = ["1", "1-1", "1-1-1-1", "2-1-1", "1-2", "3-1", "2-3", "4"]
MODES = {
    "vertical-sync": reference.Rules(weights="vertical-sync"),
    "none": reference.Rules(weights="none"),
    "2bw": reference.Rules(weights="2bw"),
    "flush": reference.Rules(flush=3),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_mode_computes_what_the_reference_computes(config: str, mode: str, tmp_path: Path) -> None:
    model, optimizer = ("bn_dropout", "sgd") if len(config) % 2 else ("skip", "adam")
    found = run_pipeline(tmp_path / "run", model, config, OPTIMIZERS[optimizer], rules=MODES[mode])
    assert_equal(found, run_reference(model, config, OPTIMIZERS[optimizer], rules=MODES[mode]))


@pytest.mark.parametrize(
    ("config", "rules", "in_flight"),
    [
        pytest.param(
            "1-2", reference.Rules(weights="vertical-sync", sync="bsp"), None, id="vertical sync without overlap"
        ),
        pytest.param("2-1", reference.Rules(weights="vertical-sync"), (5, 3), id="vertical sync, deeper"),
        pytest.param("2-1-1", reference.Rules(weights="none", sync="bsp"), None, id="naive without overlap"),
        pytest.param("1-1", reference.Rules(weights="none"), (4, 3), id="naive, deeper"),
        pytest.param("1-1-1", reference.Rules(weights="2bw", group=5), None, id="2bw, a group of 5"),
        pytest.param("3", reference.Rules(flush=2), None, id="a flush with fewer minibatches than replicas"),
        pytest.param("2-1", reference.Rules(flush=100), None, id="a flush longer than the epoch"),
    ],
)
def test_the_edges_of_a_mode(config: str, rules: reference.Rules, in_flight: tuple, tmp_path: Path) -> None:
    changes = {"rules": rules, "in_flight": in_flight}
    found = run_pipeline(tmp_path / "run", "bn_dropout", config, OPTIMIZERS["sgd"], **changes)
    assert_equal(found, run_reference("bn_dropout", config, OPTIMIZERS["sgd"], **changes))


@pytest.mark.parametrize(
    ("config", "rules"),
    [
        ("1-1", reference.Rules(clip_stage_norm=0.3)),
        ("2-1", reference.Rules(clip_stage_norm=0.3)),
        ("2-2", reference.Rules(clip_stage_norm=0.1, weights="2bw")),
        ("2-1", reference.Rules(clip_norm=0.3, flush=4)),
        ("1-1-1", reference.Rules(clip_norm=0.1, flush=7)),
    ],
)
def test_clipping_takes_the_norm_that_it_says(config: str, rules: reference.Rules, tmp_path: Path) -> None:
    """To 1e-6: a shard adds up squares piece by piece, so the norm's last bit may differ from the reference's."""
    found = run_pipeline(tmp_path / "run", "skip", config, OPTIMIZERS["sgd"], rules=rules)
    expected = run_reference("skip", config, OPTIMIZERS["sgd"], rules=rules)
    loose = run_reference(
        "skip", config, OPTIMIZERS["sgd"], rules=dataclasses.replace(rules, clip_stage_norm=None, clip_norm=None)
    )
    for name, value in expected["state"].items():
        torch.testing.assert_close(found["state"][name], value, rtol=1e-6, atol=1e-6)
    assert any((found["state"][name] - value).abs().max() > 1e-3 for name, value in loose["state"].items())


def test_a_flush_is_a_plain_loop_over_joined_minibatches(tmp_path: Path) -> None:
    found = run_pipeline(tmp_path / "run", "skip", "2-1", OPTIMIZERS["sgd"], rules=reference.Rules(flush=3))
    torch.manual_seed(SEED)
    model = training_models.skip()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    images, labels = training_models.samples_26()[0].tensors
    for epoch in range(2):
        for indices in epoch_order(26, SEED, epoch).split(3 * 4):
            optimizer.zero_grad()
            cross_entropy(model(images[indices]), labels[indices]).backward()
            optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found["state"][name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model", CUTS)
@pytest.mark.parametrize("config", ["1", "2-1-1", "1-2"])
def test_recomputation_changes_no_number(config: str, model: str, tmp_path: Path) -> None:
    """The same dropout masks, and BatchNorm statistics that the second forward pass leaves alone."""
    found = run_pipeline(tmp_path / "run", model, config, OPTIMIZERS["sgd"], recompute=True)
    assert_equal(found, run_reference(model, config, OPTIMIZERS["sgd"]))
