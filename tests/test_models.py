"""The language model of this project and models of torchvision: cut anywhere, and through all three programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import pd_plan.cli
import pd_profile.cli
import pd_train.cli
from kit import assert_split_equals_whole
from pd_format.errors import UserError
from pd_format.layers.chain import Chain, build_chain
from pd_format.layers.factory import build_model
from pd_format.layers.models.gpt import gpt
from pd_format.profile import InputSpec

CONTEXT = 12


def small_gpt(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return gpt(**{"layers": 2, "width": 16, "heads": 2, "context": CONTEXT, "vocabulary": 40, **changes})


def chain_of(model: nn.Module, shape: tuple[int, ...], dtype: str = "float32") -> Chain:
    return build_chain(model, [InputSpec(name="x", shape=shape, dtype=dtype)])


def test_the_default_size_with_gpt2s_vocabulary_is_that_of_gpt2_small() -> None:
    with torch.device("meta"):
        model = gpt(vocabulary=50257, tied=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


def test_initial_weights_are_those_of_gpt2() -> None:
    torch.manual_seed(0)
    model = gpt(layers=8, width=128, heads=4, context=256)
    std = {name: float(parameter.detach().std()) for name, parameter in model.named_parameters()}
    for name in ("embedding.weight", "positions", "head.weight", "blocks.3.widen.weight"):
        assert std[name] == pytest.approx(0.02, rel=0.05)
    for name in ("blocks.3.attention.out.weight", "blocks.3.narrow.weight"):
        assert std[name] == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert std["blocks.3.widen.bias"] == 0.0


def test_a_token_is_predicted_from_those_before_it_only() -> None:
    model = small_gpt().eval()
    tokens = torch.arange(CONTEXT).repeat(2, 1)
    tokens[1, 7] = 39
    one, other = model(tokens)
    assert torch.equal(one[:7], other[:7])
    assert not torch.equal(one[7:], other[7:])
    torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5])


def test_gpt_is_the_same_wherever_it_is_cut() -> None:
    model = small_gpt()
    chain = chain_of(model, (3, CONTEXT), "int64")
    assert all(chain.cuts)
    tokens = torch.randint(40, (3, CONTEXT), generator=torch.Generator().manual_seed(0))
    for cut in range(len(chain.layers) - 1):
        assert_split_equals_whole(model, chain, [cut], [tokens])
    names = [layer.name for layer in chain.layers]
    # Only the residual stream crosses a cut between blocks.
    for last in ("dropout", "blocks.0.add:2", "blocks.1.add:2"):
        cut = names.index(last)
        assert len(chain.crossing(cut)) == 1
        assert chain.crossing_bytes(cut) == 3 * CONTEXT * 16 * 4


def test_a_tied_head_keeps_the_model_in_one_stage() -> None:
    chain = chain_of(small_gpt(tied=True), (3, CONTEXT), "int64")
    assert not any(chain.cuts[:-1])
    assert any("head" in note and "embedding" in note for note in chain.notes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 100, "heads": 12}, "width 100 is no multiple of heads 12"),
        ({"layers": 0}, "layers is 0; expected a whole number of at least 1"),
        ({"context": 8.5}, "context is 8.5"),
        ({"vocabulary": True}, "vocabulary is True"),
        ({"dropout": 1}, "dropout is 1; expected a number from 0 to below 1"),
        ({"tied": "yes"}, "tied is 'yes'; expected true or false"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        gpt(**sizes)


@pytest.mark.parametrize(("name", "kwargs"), [("vit_b_16", {"image_size": 32}), ("swin_t", {})])
def test_transformers_of_torchvision_are_the_same_in_two_stages(name: str, kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = build_model(f"torchvision.models:{name}", {"num_classes": 4, **kwargs})
    chain = chain_of(model, (2, 3, 32, 32))
    middle = next(cut for cut in range(len(chain.layers) // 2, len(chain.layers)) if chain.cuts[cut])
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert_split_equals_whole(model, chain, [middle], [images])


def run(program: Any, *arguments: object) -> None:
    result = CliRunner().invoke(program.main, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output


GPT = ["layers=2", "width=16", "heads=2", f"context={CONTEXT}"]


@pytest.mark.parametrize(
    ("model", "sizes", "options"),
    [
        ("gpt", GPT, ["--data", "text:corpus.txt"]),
        ("vit_b_16", ["image_size=32"], ["--data", "synthetic:6", "--input-shape", "3,32,32"]),
        ("swin_t", ["num_classes=10"], ["--data", "synthetic:6", "--input-shape", "3,32,32"]),
        # The paper's (section 5), s2vt apart, which has tests of its own.
        ("vgg16", [], ["--data", "synthetic:6", "--input-shape", "3,32,32"]),
        ("alexnet", ["num_classes=10"], ["--data", "synthetic:6", "--input-shape", "3,64,64"]),
        ("resnet50", ["num_classes=10"], ["--data", "synthetic:6", "--input-shape", "3,64,64"]),
        ("inception_v3", ["num_classes=10", "init_weights=false"], ["--data", "synthetic:6"]),
    ],
)
def test_profile_plan_and_train_in_two_stages(
    model: str, sizes: list[str], options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("to be or not to be, that is the question. " * 4)
    arguments = [each for size in sizes for each in ("--model-arg", size)]
    run(pd_profile.cli, model, *arguments, *options, "--minibatch-size", 2, "--minibatches", 1, "--device", "cpu")
    run(pd_plan.cli, "--config", "1-1", "--bandwidth", "1gbps")
    run(pd_train.cli, "--run-dir", "run", "--minibatches", 3, "--lr", 1e-3, "--device", "cpu")
    plan = json.loads(Path("plan.json").read_text())
    (line,) = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert len(plan["stages"]) == 2
    assert line["minibatches"] == 3
    if model == "gpt":
        assert plan["task"] == "language-modeling"
        assert plan["inputs"] == [{"name": "tokens", "shape": [2, CONTEXT], "dtype": "int64"}]
        assert line["validation_perplexity"] == pytest.approx(math.exp(line["validation_loss"]))
    state = torch.load("run/model.pt")
    build_model(plan["model"]["factory"], plan["model"]["kwargs"]).load_state_dict(state)
