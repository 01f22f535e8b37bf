"""Weights to start from: what is loaded, by whom, and what is refused in which words."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import kit
import plans
from pd_format.errors import UserError
from pd_format.jsonfile import write_record
from pd_format.profile import InputSpec
from pd_train.built import build_stage
from pd_train.cli import main
from pd_train.initial import find_weights, load_weights

MODELS = str(plans.HERE / "runtime_models.py")
INPUTS = (InputSpec(name="x", shape=(4, 16), dtype="float32"),)
CPU = torch.device("cpu")


def perceptron_plan(config: str = "1-1") -> Any:
    cuts = ["1"] if "-" in config else []
    return plans.plan_of(f"{MODELS}:perceptron", INPUTS, config, cuts, data=f"{MODELS}:numbers_17")


def saved(path: Path, state: object) -> Path:
    torch.save(state, path)
    return path


def weights_of(model: nn.Module) -> OrderedDict[str, Tensor]:
    state = model.state_dict()
    for number, tensor in enumerate(state.values()):
        tensor.fill_(number + 1)
    return state


def ids(tensors: Any) -> set[int]:
    return {id(tensor) for tensor in tensors}


@pytest.mark.parametrize("zipped", [True, False], ids=["mapped", "torch's old format"])
def test_a_stage_starts_from_its_part_of_the_file(zipped: bool, tmp_path: Path) -> None:
    state = weights_of(kit.K1())
    torch.save(state, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    for index, names in enumerate([["0.weight", "0.bias"], ["2.weight", "2.bias", "4.weight", "4.bias"]]):
        built = build_stage(perceptron_plan(), index, 0, CPU, str(tmp_path / "w.pt"))
        found = dict(built.module.named_parameters())
        assert list(found) == names
        assert all(torch.equal(found[name], state[name]) for name in names)
        # A mapped tensor must not be what trains: the file stays as it is.
        for parameter in built.parameters:
            parameter.data.zero_()
    assert torch.load(tmp_path / "w.pt", weights_only=True)["0.bias"][0] == 2


def test_what_the_worker_does_not_keep_is_never_read(tmp_path: Path) -> None:
    model = kit.K1()
    path = saved(tmp_path / "w.pt", weights_of(kit.K1()))
    load_weights(path, model, model.state_dict().keys(), ids(model[0].parameters()))
    assert [(name, p.is_meta) for name, p in model.named_parameters()] == [
        ("0.weight", False), ("0.bias", False), ("2.weight", True), ("2.bias", True), ("4.weight", True), ("4.bias", True),
    ]  # fmt: skip
    assert torch.equal(model[0].bias, torch.full((32,), 2.0))


def test_buffers_ties_and_tensors_that_no_layer_uses_are_loaded(tmp_path: Path) -> None:
    tied, normed = kit.K3(), kit.K4()
    for model in (tied, normed):
        path = saved(tmp_path / "w.pt", weights_of(type(model)()))
        load_weights(path, model, model.state_dict().keys(), ids([*model.parameters(), *model.buffers()]))
    assert tied.o.weight is tied.e.weight
    assert torch.equal(normed[1].running_var, torch.full((8,), 6.0))
    idle = nn.Sequential(nn.Linear(16, 4))
    idle.register_parameter("idle", nn.Parameter(torch.zeros(3)))
    load_weights(saved(tmp_path / "i.pt", weights_of(idle)), idle, idle.state_dict().keys(), ids(idle.parameters()))
    assert torch.equal(idle.idle, torch.ones(3))


def test_the_models_own_loading_hooks_run(tmp_path: Path) -> None:
    """Torchvision's vision transformers still read the names of their older files this way."""
    from torchvision.models.vision_transformer import MLPBlock

    block = MLPBlock(4, 8, 0.0)
    state = OrderedDict(
        (key.replace("0.", "linear_1.").replace("3.", "linear_2."), value) for key, value in weights_of(block).items()
    )
    load_weights(saved(tmp_path / "w.pt", state), block, block.state_dict().keys(), ids(block.parameters()))
    assert torch.equal(block[3].bias, torch.full((4,), 4.0))


def without(*names: str) -> Callable[[dict[str, Any]], object]:
    return lambda state: {key: value for key, value in state.items() if key not in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("2.bias"), "Of its keys 1 is missing: 2.bias. It must hold"),
        (
            without("0.weight", "0.bias", "2.weight", "2.bias"),
            "4 are missing: 0.weight, 0.bias, 2.weight and 1 more",
        ),
        (lambda s: {**s, "extra": torch.ones(1)}, "1 is unexpected: extra"),
        (
            lambda s: {**s, "4.weight": torch.ones(10, 32)},
            r"1 is of another shape: 4.weight (10, 32) where the model has (4, 32)",
        ),
        (
            lambda s: {**{f"x.{k}": v for k, v in s.items()}, "4.bias": torch.ones(2)},
            "5 are missing: 0.weight, 0.bias, 2.weight and 2 more; 6 are unexpected: x.0.weight, x.0.bias, x.2.weight "
            "and 3 more; 1 is of another shape: 4.bias (2,) where the model has (4,)",
        ),
        (lambda s: {f"module.{k}": v for k, v in s.items()}, "save model.module.state_dict()"),
        (
            lambda s: {"model": s, "epoch": 3},
            "holds more than tensors: 'model', 'epoch' are none. Expected a plain state dict: "
            "torch.save(model.state_dict(), 'weights.pt'). If the weights are its 'model', save that part alone.",
        ),
        (lambda s: list(s.values()), "holds a list; expected a plain state dict"),
        (lambda s: kit.K1(), "reading it would call kit.K1, and such a file can run any code, so it is refused."),
    ],
)
def test_what_does_not_fit_is_listed(change: Callable[[Any], object], message: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pt", change(dict(kit.K1().state_dict())))
    with pytest.raises(UserError) as caught:
        build_stage(perceptron_plan(), 0, 0, CPU, str(path))
    assert message in str(caught.value)


class Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pt", {"0.weight": Payload(tmp_path / "mark")})
    with pytest.raises(UserError, match=r"reading it would call \w+\.mkdir, and such a file can run any code"):
        build_stage(perceptron_plan(), 0, 0, CPU, str(path))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("size", [0, 300])
def test_a_damaged_file_is_named(size: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pt", kit.K1().state_dict())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"w\.pt cannot be read: it is damaged, or torch\.save did not write it"):
        build_stage(perceptron_plan(), 0, 0, CPU, str(path))


def test_torchvisions_weights_are_taken_from_the_cache_and_never_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    factory = "torchvision.models:squeezenet1_1"
    expected = tmp_path / "hub" / "checkpoints" / "squeezenet1_1-b8a52dc0.pth"
    with pytest.raises(UserError, match=f"expected {re.escape(str(expected))}, which is not there") as caught:
        find_weights("torchvision:DEFAULT", factory)
    assert "https://download.pytorch.org/models/squeezenet1_1-b8a52dc0.pth" in str(caught.value)
    expected.parent.mkdir(parents=True)
    expected.write_bytes(b"weights")
    assert find_weights("torchvision:IMAGENET1K_V1", factory) == expected
    with pytest.raises(UserError, match="torchvision has for squeezenet1_1: IMAGENET1K_V1, DEFAULT"):
        find_weights("torchvision:V9", factory)
    with pytest.raises(UserError, match=r"comes from net\.py:build, not from torchvision; name a file"):
        find_weights("torchvision:DEFAULT", "net.py:build")


def test_a_run_goes_on_from_what_another_run_wrote(tmp_path: Path) -> None:
    """Through workers: with a rate of 0 the second run ends with the weights of the first."""
    write_record(tmp_path / "plan.json", perceptron_plan("2-1"))
    command = ["--plan", str(tmp_path / "plan.json"), "--device", "cpu", "--run-dir"]
    assert CliRunner().invoke(main, [*command, str(tmp_path / "a")]).exit_code == 0
    weights = str(tmp_path / "a" / "model.pt")
    again = [*command, str(tmp_path / "b"), "--init-from", weights, "--lr", "0", "--seed", "5"]
    result = CliRunner().invoke(main, again)
    assert result.exit_code == 0, result.output
    first, second = (torch.load(tmp_path / run / "model.pt", weights_only=True) for run in "ab")
    assert all(torch.equal(first[key], second[key]) for key in first)
    torch.manual_seed(5)
    assert not torch.equal(first["0.weight"], kit.K1()[0].weight)
    missing = CliRunner().invoke(main, [*command, str(tmp_path / "c"), "--init-from", "gone.pt"])
    assert missing.exit_code == 1
    assert "--init-from gone.pt: there is no such file on this host" in missing.stderr
