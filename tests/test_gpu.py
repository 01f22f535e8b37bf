"""What only a GPU can show; `benchmarks/gpu_check.sh` runs these tests where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plans
from pd_format.layers.task import Classification
from pd_train.arrivals import Buffers
from pd_train.assembly import choose_device
from pd_train.launch import launch
from pd_train.options import OptimizerOptions, RunOptions
from pd_train.staging import open_staging
from pd_train.torch_engine import TorchEngine
from test_equality import CUTS, INPUTS, MODELS
from test_staging import layouts

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


def test_a_tensor_comes_back_from_a_gpu_as_it_went() -> None:
    staging = open_staging(choose_device("cuda", 0))
    assert staging is not None
    for tensor in layouts():
        there = staging.to_device(tensor)
        here = staging.to_host(there)
        event = staging.mark()
        assert event is not None
        event.synchronize()
        assert there.device == staging.device
        assert here.is_pinned() or not here.numel()
        assert torch.equal(here, tensor)
        assert here.requires_grad == there.requires_grad == tensor.requires_grad
        assert torch.equal(staging.finish(there.detach())[0], tensor)


def test_messages_land_in_page_locked_memory() -> None:
    choose_device("cuda", 0)
    assert torch.from_numpy(Buffers(pinned=True).new(3 << 20)).is_pinned()


class Middle(nn.Module):
    """A stage between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.layers(x),)


def test_after_the_first_minibatches_no_memory_is_taken_any_more() -> None:
    """A stage's passes and copies as a worker asks for them, three minibatches in flight."""
    device = choose_device("cuda", 0)
    staging, module = open_staging(device), Middle().to(device)
    assert staging is not None
    sets = [list(module.parameters())]
    engine = TorchEngine(module, sets, Classification(), device, first=False, staging=staging)  # type: ignore[arg-type]
    # As large messages arrive: in memory that torch does not know.
    arrived = [torch.from_numpy(Buffers(pinned=True).new(256 * 512 * 4)).view(torch.float32) for _ in range(2)]
    activations, gradients = (each.view(256, 512).fill_(0.5) for each in arrived)

    def minibatch(b: int) -> None:
        engine.forward(b, 0, (staging.to_device(activations.detach().requires_grad_()),), seed=b)
        leaves(staging.mark())
        if b >= 2:
            engine.backward(b - 2, 0, [staging.to_device(gradients)])
            leaves(staging.mark())
            engine.take_parameter_gradients(0)

    def leaves(event: object) -> None:
        event.synchronize()  # type: ignore[attr-defined]

    def taken() -> tuple[int, ...]:
        stats, of_host = torch.cuda.memory_stats(device), torch.cuda.host_memory_stats()
        return stats["num_device_alloc"], stats["reserved_bytes.all.current"], of_host.get("num_host_alloc", 0)

    for b in range(50):
        minibatch(b)
    before = taken()
    for b in range(50, 1050):
        minibatch(b)
    assert taken() == before
