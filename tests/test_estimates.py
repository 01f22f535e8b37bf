"""Estimated profiles: what is counted, what it is priced at, and what pd-profile makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

from pd_format.errors import UserError
from pd_format.layers.chain import build_chain
from pd_format.layers.task import get_task
from pd_format.profile import InputSpec, Profile, read_profile
from pd_profile.cli import main
from pd_profile.counting import Counter, Kind, Work
from pd_profile.estimating import LayerWork, count_work
from pd_profile.machines import MACHINES, Machine, parse_machine
from pd_profile.roofline import LAUNCH_MS, TRANSFORMED, Shares, work_ms
from pd_profile.sizes import stash_of

FLOAT, INDEX = 4, 8
V100 = MACHINES["v100"]


def test_a_machine_is_a_name_or_two_figures() -> None:
    assert parse_machine("v100") == Machine("NVIDIA V100 SXM2", 15.7, 900)
    assert parse_machine(" Titan_X") == MACHINES["titan-x"]
    own = parse_machine("memory_gbps=900, peak_tflops=15.7")
    assert (own.peak_tflops, own.memory_gbps) == (15.7, 900)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v200", "found 'v200'; expected v100, titan-x, k80, a100, h100, h200, rtx-4090, or figures as in"),
        ("peak_tflops=15.7", "memory_gbps is missing"),
        ("peak_tflops=15.7,memory=900", "found 'memory' in"),
        ("peak_tflops=1,peak_tflops=2,memory_gbps=3", "peak_tflops is given twice"),
        ("peak_tflops=-1,memory_gbps=3", "peak_tflops is '-1'; expected a number above 0"),
        ("peak_tflops=1,memory_gbps=nan", "memory_gbps is 'nan'"),
        ("peak_tflops=fast,memory_gbps=3", "peak_tflops is 'fast'"),
    ],
)
def test_a_machine_that_is_neither_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_machine(text)


def test_the_longer_of_computing_and_moving_counts_and_the_launch_on_top() -> None:
    machine = Machine("test", peak_tflops=10, memory_gbps=100)
    shares = Shares({(Kind.PRODUCT, False): 0.5, (Kind.WINOGRAD, True): 2.0}, bandwidth=0.5)

    def took(kind: Kind, backward: bool, flops: int, moved: int) -> float:
        return work_ms(Work(kind, backward, flops, moved), machine, shares) - LAUNCH_MS

    # 5 TFLOPS and 50 GB/s are reached: 10^10 operations take 2 ms, 10^8 bytes as long.
    assert took(Kind.PRODUCT, False, 10**10, 10**7) == pytest.approx(2.0)
    assert took(Kind.PRODUCT, False, 10**9, 10**8) == pytest.approx(2.0)
    assert took(Kind.MEMORY, False, 0, 10**8) == pytest.approx(2.0)
    # Winograd's own kernels run before and after: 20 TFLOPS, and each byte more than once.
    assert took(Kind.WINOGRAD, True, 10**10, 10**8) == pytest.approx(0.5 + TRANSFORMED * 2.0)


def counted(model: nn.Module, *specs: InputSpec) -> tuple[list[LayerWork], list[int]]:
    model.train()
    return count_work(model, build_chain(model, specs), specs, get_task("classification"))


def spec(*shape: int, dtype: str = "float32", name: str = "input") -> InputSpec:
    return InputSpec(name=name, shape=shape, dtype=dtype)


def test_a_linear_layer_multiplies_once_forward_and_twice_backward() -> None:
    layers, _ = counted(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), spec(5, 16))
    first, relu, second = layers
    # Multiplications and additions both count: 2 x 5 x 16 x 32. It reads x, weights and bias, and writes its result.
    assert first.forward == (Work(Kind.PRODUCT, False, 2 * 5 * 16 * 32, (5 * 16 + 16 * 32 + 32 + 5 * 32) * FLOAT),)
    # The model's input needs no gradient, so the first layer has the weights' alone, the last one both.
    assert sum(work.flops for work in first.backward) == 2 * 5 * 16 * 32
    assert sum(work.flops for work in second.backward) == 2 * 2 * 5 * 32 * 4
    assert relu.forward == (Work(Kind.MEMORY, False, 0, 2 * 5 * 32 * FLOAT),)
    # It is given the gradient and its own result, and makes another gradient.
    assert relu.backward == (Work(Kind.MEMORY, False, 0, 3 * 5 * 32 * FLOAT),)


def test_convolutions_are_told_apart() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.Conv2d(8, 4, 1),
        nn.Flatten(),
        nn.Linear(64, 2),
    )
    layers, _ = counted(model, spec(2, 3, 8, 8))
    assert [layer.forward[0].kind for layer in layers[:4]] == [
        Kind.THIN,
        Kind.WINOGRAD,
        Kind.CONVOLUTION,
        Kind.CONVOLUTION,
    ]
    work = layers[1].forward[0]
    assert work == Work(Kind.WINOGRAD, False, 2 * 2 * 64 * 8 * 8 * 9, (2 * 2 * 8 * 64 + 8 * 8 * 9) * FLOAT)
    back = next(each for each in layers[1].backward if each.backward)
    assert back.flops == 2 * work.flops
    # A view does nothing.
    assert layers[4].forward == ()


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 8, 3, groups=8, padding=1),
        nn.Conv2d(8, 16, 3, groups=2, stride=2),
        nn.ConvTranspose2d(8, 4, 3, stride=2),
        nn.Conv1d(8, 4, 5),
    ],
)
def test_a_convolution_s_backward_pass_is_twice_its_forward_pass(layer: nn.Module) -> None:
    flat = isinstance(layer, nn.Conv1d)
    first = nn.Conv1d(8, 8, 1) if flat else nn.Conv2d(8, 8, 1)
    model = nn.Sequential(first, layer, nn.Flatten(), nn.LazyLinear(2))
    shape = (2, 8, 12) if flat else (2, 8, 12, 12)
    model(torch.randn(shape))
    layers, _ = counted(model, spec(*shape))
    forward, backward = (sum(work.flops for work in works) for works in (layers[1].forward, layers[1].backward))
    assert backward == 2 * forward > 0


def test_an_embedding_reads_only_the_rows_that_it_returns() -> None:
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 4))
    layers, _ = counted(model, spec(3, 5, dtype="int64"))
    assert layers[0].forward == (Work(Kind.MEMORY, False, 0, 15 * INDEX + 2 * 15 * 8 * FLOAT),)


def test_batch_normalisation_reads_its_input_twice() -> None:
    layers, _ = counted(nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 100, 2)), spec(2, 4, 10, 10))
    moved = max(work.moved_bytes for work in layers[0].forward)
    assert moved == pytest.approx(3 * 2 * 4 * 100 * FLOAT, rel=0.1)


def test_tensors_with_data_that_meet_the_others_take_part_without() -> None:
    with Counter() as counter:
        total = torch.ones(4, device="meta") + torch.ones(4)
    assert total.is_meta
    assert counter.works[-1].moved_bytes == 3 * 4 * FLOAT


class _Mixed(nn.Module):
    """Skips, a constant, a tensor of its own making, a value that is used late, dropout, tied layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.ones(16))
        self.table = torch.arange(16.0)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)) * self.scale
        k = self.drop(self.norm(h)) + self.table * torch.rand(16)
        return self.out(torch.relu(self.b(k)) + h + x)


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


@pytest.mark.parametrize(("model", "shape"), [(_Mixed, (6, 16)), (_cnn, (4, 3, 8, 8))])
def test_what_autograd_saves_is_the_same_with_and_without_data(model: type[nn.Module], shape: tuple[int, ...]) -> None:
    real = model().train()
    chain = build_chain(real, [spec(*shape)])
    expected, _ = stash_of(real, chain, [torch.randn(shape)])
    assert sum(expected) > 0
    assert count_work(real, chain, [spec(*shape)], get_task("classification"))[1] == expected


def test_gradients_that_meet_are_added_and_the_loss_belongs_to_the_last_layer() -> None:
    layers, _ = counted(_Mixed(), spec(6, 16))
    assert any(work.kind is Kind.MEMORY for work in layers[-1].forward)
    assert all(layer.forward for layer in layers)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 10))\n"
        "class Looks(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x if x.sum() > 0 else -x\n"
        "def looks():\n"
        "    return nn.Sequential(nn.Linear(64, 10), Looks(), nn.Linear(10, 10))\n"
        "def no_logits():\n"
        "    return nn.Sequential(nn.Linear(64, 4), nn.Flatten(0))\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def estimated(machine: str) -> Profile:
    result = run("net.py:net", "--estimate", machine, "--minibatch-size", "256")
    assert result.exit_code == 0, result.output
    return read_profile(Path("profiles/net.json"))


def test_an_estimate_says_so_and_for_which_machine(folder: Path) -> None:
    result = run("net.py:net", "--estimate", "titan-x")
    assert result.exit_code == 0, result.output
    assert "Estimating net, 4 layers, for NVIDIA Titan X (Pascal), 11 TFLOPS, 480 GB/s." in result.output
    assert "Estimated, not measured" in result.output
    profile = read_profile(folder / "profiles" / "net.json")
    assert (profile.device.estimated, profile.device.kind, profile.minibatches) == (True, "cuda", 0)
    assert profile.device.name == MACHINES["titan-x"].description
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in profile.layers)
    assert all(layer.forward_ms_std == layer.backward_ms_std == 0 for layer in profile.layers)


def test_all_but_the_times_are_those_of_a_measured_profile(folder: Path) -> None:
    profile = estimated("v100")
    assert run("net.py:net", "--minibatches", "1", "--minibatch-size", "256", "--device", "cpu").exit_code == 0
    measured = read_profile(folder / "profiles" / "net.json")
    assert profile.model == measured.model
    assert profile.inputs == measured.inputs
    times = {"forward_ms": 0, "backward_ms": 0, "forward_ms_std": 0, "backward_ms_std": 0}
    for ours, theirs in zip(profile.layers, measured.layers, strict=True):
        assert ours.model_copy(update=times) == theirs.model_copy(update=times)


def test_a_machine_with_twice_the_figures_takes_half_the_time_but_for_launches(folder: Path) -> None:
    slow, fast = estimated("peak_tflops=0.01,memory_gbps=1"), estimated("peak_tflops=0.02,memory_gbps=2")
    for one, two in zip(slow.layers, fast.layers, strict=True):
        assert two.forward_ms < one.forward_ms
    launches = 20 * LAUNCH_MS
    totals = [sum(layer.compute_ms for layer in profile.layers) for profile in (slow, fast)]
    assert totals[1] == pytest.approx(totals[0] / 2, abs=launches)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--minibatches", "5"), "--minibatches says how to measure, and --estimate measures nothing"),
        (("--device", "auto"), "--device says how to measure"),
        (("--threads", "1"), "--threads says how to measure"),
        (("--precision", "bf16"), "--precision bf16 can be measured only"),
    ],
)
def test_what_says_how_to_measure_is_refused(folder: Path, option: tuple[str, ...], message: str) -> None:
    result = run("net.py:net", "--estimate", "v100", *option)
    assert result.exit_code == 2
    assert message in result.output
    assert not (folder / "profiles").exists()


def test_an_unknown_machine_is_refused_with_those_that_are_known() -> None:
    result = run("vgg16", "--estimate", "v1000")
    assert result.exit_code == 2
    assert "Invalid value for '--estimate': found 'v1000'; expected v100, titan-x" in result.output


def test_a_model_that_looks_at_data_is_refused_with_the_way_out(folder: Path) -> None:
    result = run("net.py:looks", "--estimate", "v100")
    assert result.exit_code == 1
    assert "This model cannot be estimated" in result.output
    assert "leave --estimate out" in result.output


def test_a_model_that_does_not_fit_its_task_is_refused_as_ever(folder: Path) -> None:
    result = run("net.py:no_logits", "--estimate", "v100")
    assert result.exit_code == 1
    assert "classification expects floating-point logits" in result.output


def test_a_failing_step_is_no_failure_of_the_counter() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 4))
    chain = build_chain(model, [spec(5, 16)])
    with pytest.raises(UserError, match="cannot be estimated"):
        count_work(model, chain, [spec(5, 8)], get_task("classification"))


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.out = kind(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x)[0])


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_a_recurrent_layer_is_one_operation_and_keeps_its_gates(kind: type[nn.RNNBase], gates: int) -> None:
    layers, stash_bytes = counted(_Recurrent(kind), spec(5, 30, 8))
    # What else runs makes the first state.
    (work,) = (work for work in layers[0].forward if work.flops)
    assert (work.kind, work.flops) == (Kind.PRODUCT, 2 * 5 * 30 * gates * 16 * (8 + 16))
    assert max(work.flops for work in layers[0].backward) == 2 * work.flops
    # Its input, its output, and of each step the gates and the cell; states of one step besides.
    steps = 5 * 30 * FLOAT
    assert stash_bytes[0] == pytest.approx(steps * (8 + 16 + (gates + 1) * 16), rel=0.05)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.scaled_dot_product_attention(*self.inputs(x).chunk(3, dim=-1)))


def test_an_attention_is_one_operation_and_stores_no_matrix() -> None:
    layers, stash_bytes = counted(_Attention(), spec(2, 100, 8))
    place = next(place for place, layer in enumerate(layers) if layer.forward and layer.forward[0].flops == 640_000)
    assert layers[place].forward == (Work(Kind.PRODUCT, False, 2 * 2 * 2 * 100 * 100 * 8, 4 * 2 * 100 * 8 * FLOAT),)
    assert max(work.flops for work in layers[place].backward) == 2.5 * 640_000
    assert sum(stash_bytes) < 2 * 100 * 100 * FLOAT
