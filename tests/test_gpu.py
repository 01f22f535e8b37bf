"""What only a GPU can show; `benchmarks/gpu_check.sh` runs these tests where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import plans
from pd_train.launch import launch
from pd_train.options import OptimizerOptions, RunOptions
from test_equality import CUTS, INPUTS, MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def train(run_dir: Path, config: str, device: str) -> dict[str, torch.Tensor]:
    run_dir.mkdir()
    cuts = CUTS["skip"][len(config.split("-"))]
    plan = plans.plan_of(f"{MODELS}:skip", INPUTS, config, cuts, data=f"{MODELS}:samples_26")
    options = RunOptions(
        plan=plan, run_dir=run_dir, data=plan.data, epochs=2, optimizer=OptimizerOptions("sgd", lr=0.05), device=device
    )
    launch(options, lambda event: None)
    state: dict[str, torch.Tensor] = torch.load(run_dir / "model.pt", weights_only=True)
    return state


@pytest.mark.parametrize("config", ["1", "2-1", "1-1-1"])
def test_workers_that_share_a_gpu_train_as_on_the_cpu(config: str, tmp_path: Path) -> None:
    on_gpu = train(tmp_path / "gpu", config, "cuda")
    again = train(tmp_path / "again", config, "cuda")
    on_cpu = train(tmp_path / "cpu", config, "cpu")
    for name, value in on_cpu.items():
        assert on_gpu[name].device.type == "cpu", "a model file can be loaded without a GPU"
        assert torch.equal(on_gpu[name], again[name]), name
        torch.testing.assert_close(on_gpu[name], value, rtol=1e-3, atol=1e-4)
