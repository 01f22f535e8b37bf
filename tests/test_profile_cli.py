from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from pd_format.layers.chain import build_chain
from pd_format.layers.factory import build_model
from pd_format.profile import read_profile
from pd_profile.cli import main

MODELS = """
import torch
from torch import nn

def cnn(channels=4):
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.Dropout(0.5),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * channels, 10))

class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 4)
    def forward(self, x, idx):
        return {"logits": self.b(torch.tanh(self.a(x))) + idx.unsqueeze(1)}

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.m, self.o = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
        self.o.weight = self.e.weight
    def forward(self, ids):
        return self.o(torch.tanh(self.m(self.e(ids))))

class Stops(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error, self.a = error, nn.Linear(16, 4)
    def forward(self, x):
        return run(self.a(x), self.error)

class Untrainable(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 4)
    def forward(self, x):
        h = torch.tanh(self.a(x))
        k = h * 2
        h += 1
        return k

def untrainable():
    return Untrainable()

@torch.fx.wrap
def run(value, error):
    if value.device.type != "meta":
        raise {"interrupt": KeyboardInterrupt, "memory": torch.OutOfMemoryError}[error]("CUDA out of memory. Tried")
    return value

def frozen():
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    return model

def no_logits():
    return nn.Sequential(nn.Linear(16, 4), nn.Flatten(0))

def two_inputs():
    return TwoInputs()

def tied():
    return Tied()

def stops(error):
    return Stops(error)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "net.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def profiled(*arguments: str) -> Result:
    result = run(*arguments, "--minibatches", "2", "--minibatch-size", "3")
    assert result.exit_code == 0, result.output
    return result


def test_a_precision_halves_what_crosses_and_is_recorded(folder: Path) -> None:
    result = profiled("net.py:cnn", "--data", "digits", "--precision", "bf16", "--threads", "1")
    profile = read_profile(folder / "profiles" / "cnn.json")
    assert profile.precision == "bf16"
    assert "1 thread), in bf16." in result.stderr
    whole = 3 * 4 * 8 * 8 * 2
    assert [layer.activation_bytes for layer in profile.layers] == [whole] * 4 + [whole // 4] * 2 + [0]
    assert profile.layers[0].stash_bytes == 3 * 8 * 8 * 2 + 4 * 9 * 2  # Its input and its weight, as copies.
    assert profile.layers[0].parameter_bytes == 4 * (9 + 1) * 4


def test_a_model_of_a_file_is_profiled_into_a_valid_record(folder: Path) -> None:
    result = profiled("net.py:cnn", "--data", "digits", "--model-arg", "channels=5", "--threads", "1")
    profile = read_profile(folder / "profiles" / "cnn.json")
    assert (profile.model.name, profile.model.factory, profile.model.kwargs) == ("cnn", "net.py:cnn", {"channels": 5})
    assert (profile.minibatch_size, profile.minibatches) == (3, 2)
    assert [(spec.name, spec.shape, spec.dtype) for spec in profile.inputs] == [("input", (3, 1, 8, 8), "float32")]
    assert (profile.data, profile.task, profile.precision) == ("digits", "classification", "fp32")
    assert (profile.device.kind, profile.device.estimated) == ("cpu", False)
    assert profile.device.name.endswith(", 1 thread")
    assert profile.device.versions["torch"] == torch.__version__
    assert [layer.name for layer in profile.layers] == ["0", "1", "2", "3", "4", "5", "6"]
    assert sum(layer.forward_ms for layer in profile.layers) > 0
    assert sum(layer.backward_ms for layer in profile.layers) > 0
    whole = 3 * 5 * 8 * 8 * 4
    assert [layer.activation_bytes for layer in profile.layers] == [whole] * 4 + [whole // 4] * 2 + [0]
    assert [layer.parameter_bytes for layer in profile.layers] == [200, 40, 0, 0, 0, 0, 3240]
    assert profile.layers[0].stash_bytes == 3 * 8 * 8 * 4
    assert all(layer.cut for layer in profile.layers)
    model = build_model(profile.model.factory, profile.model.kwargs)
    assert build_chain(model, profile.inputs).fingerprint == profile.model.fingerprint
    assert "7 layers" in result.stdout
    assert "an un-instrumented step takes" in result.stdout
    assert result.stdout.splitlines()[-1] == ("Wrote profiles/cnn.json. Next: pd-plan --machines 4 --bandwidth 10gbps")
    assert "Measured 2 minibatches in " in result.stderr
    assert sorted(path.name for path in folder.glob("profiles/*")) == ["cnn.json"]


def test_another_output_is_named_in_the_next_command(folder: Path) -> None:
    result = profiled("net.py:cnn", "--data", "digits", "--output", "deep/er/mine.json")
    assert "Next: pd-plan --profile deep/er/mine.json --machines 4 --bandwidth 10gbps" in result.stdout
    assert read_profile(folder / "deep" / "er" / "mine.json").model.name == "cnn"


def test_several_inputs_with_names_and_dtypes(folder: Path) -> None:
    profiled("net.py:two_inputs", "--input-shape", "idx=:int64", "--input-shape", "x=16")
    profile = read_profile(folder / "profiles" / "two_inputs.json")
    assert [(spec.name, spec.shape, spec.dtype) for spec in profile.inputs] == [
        ("x", (3, 16), "float32"),
        ("idx", (3,), "int64"),
    ]
    # x is used up by layer a; idx crosses every cut before the last layer.
    assert [layer.activation_bytes for layer in profile.layers][:2] == [3 * 8 * 4 + 3 * 8] * 2


def test_tied_parameters_forbid_the_cuts_between_them_and_a_note_says_so(folder: Path) -> None:
    result = profiled("net.py:tied", "--input-shape", "7:int64")
    profile = read_profile(folder / "profiles" / "tied.json")
    assert [layer.cut for layer in profile.layers] == [False, False, False, True]
    assert [layer.parameter_bytes for layer in profile.layers] == [50 * 16 * 4, (16 * 16 + 16) * 4, 0, 0]
    assert "e.weight" in result.stdout
    assert "o.weight" in result.stdout


def test_frozen_layers_have_no_backward_time_and_nothing_to_train(folder: Path) -> None:
    profiled("net.py:frozen")
    layers = read_profile(folder / "profiles" / "frozen.json").layers
    assert [layer.backward_ms > 0 for layer in layers] == [False, False, True]
    assert [layer.trainable_bytes for layer in layers] == [0, 0, (8 * 4 + 4) * 4]
    assert layers[0].parameter_bytes == (16 * 8 + 8) * 4


def test_a_torchvision_model_is_found_by_name(folder: Path) -> None:
    profiled("squeezenet1_1", "--input-shape", "3,32,32", "--model-arg", "num_classes=4")
    profile = read_profile(folder / "profiles" / "squeezenet1_1.json")
    assert profile.model.factory == "torchvision.models:squeezenet1_1"
    assert profile.layers[-1].op.startswith("flatten")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["vgg61"],
            "there is no model 'vgg61' here or among torchvision's classification models; the closest are vgg19, vgg16, vgg13.",
        ),
        (["net.py"], "'net.py' names a file; name its function too, as in net.py:build."),
        (["net.py:cnn", "--minibatches", "0"], "0 is not in the range x>=1."),
        (["net.py:cnn", "--minibatch-size", "-1"], "-1 is not in the range x>=1."),
        (["net.py:cnn", "--threads", "0"], "0 is not in the range x>=1."),
        (["net.py:cnn", "--model-arg", "channels"], "found 'channels'; expected NAME=VALUE"),
        (["net.py:cnn", "--input-shape", "1,8,x"], "found 'x' as a dimension in '1,8,x'"),
        (["net.py:cnn", "--data", "cifar"], "Data set 'cifar' is unknown; expected synthetic, "),
        (["net.py:cnn", "--device", "tpu"], "'tpu' is not one of 'auto', 'cpu', 'cuda'."),
        ([], "Missing argument 'MODEL'."),
    ],
)
def test_a_wrong_command_line_exits_with_2(folder: Path, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not (folder / "profiles").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.py:cnn"], "gone.py"),
        (["net.py:rnn"], "net.py:rnn: net.py holds no callable of that name"),
        (["net.py:cnn", "--model-arg", "width=3"], "net.py:cnn cannot be called with width=3"),
        (["net.py:cnn"], "as in --input-shape 1,32,32."),
        (["net.py:cnn", "--input-shape", "3,8,8"], "--input-shape"),
        (["net.py:cnn", "--input-shape", "1,9,99"], "(3, 1, 9, 99)"),
        (["net.py:no_logits"], "The model returns a tensor of shape (12,) and float32; classification expects"),
        (["net.py:untrainable"], "A plain training step of the model (forward, loss, backward) fails: one of"),
        (["net.py:stops", "--model-arg", "error=memory"], "Try a smaller one, as in --minibatch-size 1."),
        (["net.py:cnn", "--data", "digits", "--output", "net.py/x.json"], "net.py/x.json: cannot be written"),
    ],
)
def test_what_fails_exits_with_1_and_one_message(folder: Path, arguments: list[str], message: str) -> None:
    result = run(*arguments, "--minibatch-size", "3", "--minibatches", "1")
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert not (folder / "profiles").exists()


def test_a_place_that_cannot_be_written_to_is_refused_before_the_measurement(folder: Path) -> None:
    result = run("net.py:cnn", "--data", "digits", "--output", "net.py/x.json")
    assert result.stderr.startswith("Error: net.py/x.json: cannot be written, since ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error_not_a_fallback(folder: Path) -> None:
    result = run("net.py:cnn", "--data", "digits", "--device", "cuda")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: --device cuda: torch {torch.__version__} finds no GPU on this machine.")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_timed_by_its_own_clock(folder: Path) -> None:
    profiled("net.py:cnn", "--data", "digits", "--device", "cuda")
    profile = read_profile(folder / "profiles" / "cnn.json")
    assert (profile.device.kind, profile.device.name) == ("cuda", torch.cuda.get_device_name())
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in profile.layers)
    assert profile.layers[0].stash_bytes == 3 * 8 * 8 * 4


def test_ctrl_c_exits_with_130_and_leaves_no_file(folder: Path) -> None:
    result = run("net.py:stops", "--model-arg", "error=interrupt")
    assert result.exit_code == 128 + signal.SIGINT
    assert result.stderr.splitlines()[-1] == "Error: stopped by Ctrl-C; no profile was written."
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["net.py"]


def test_an_older_profile_survives_a_failure(folder: Path) -> None:
    profiled("net.py:cnn", "--data", "digits")
    before = (folder / "profiles" / "cnn.json").read_bytes()
    assert run("net.py:cnn", "--model-arg", "channels=0", "--data", "digits").exit_code == 1
    assert (folder / "profiles" / "cnn.json").read_bytes() == before


def test_help_shows_examples() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "  pd-profile vgg16 --minibatches 1000\n" in result.stdout


def modules_after(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after the code."""
    code += "\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_mistakes_are_answered_without_torch() -> None:
    loaded = modules_after(
        "from pd_profile.cli import main\n"
        "try: main(['resnet18', '--minibatches', '0'])\n"
        "except SystemExit as stopped: assert stopped.code == 2"
    )
    assert "pd_profile.options" in loaded
    assert not loaded & {"torch", "torchvision", "numpy", "rich"}


def test_what_pd_profile_imports() -> None:
    loaded = modules_after("import pd_profile.cli, pd_profile.profiling")
    assert "torch" in loaded
    assert not loaded & {"zmq", "msgpack", "pd_plan", "pd_train", "torchvision", "matplotlib"}
