"""S2VT and the task captioning: cuts, padding, captions of its own; from a folder of clips to sentences."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.nn.functional import cross_entropy

import clips
import kit
from pd_format.captions import BEGIN, END, PADDING
from pd_format.errors import UserError
from pd_format.layers.chain import Chain, build_chain
from pd_format.layers.models.s2vt import S2VT, s2vt
from pd_format.layers.task import get_task
from pd_format.profile import InputSpec
from pd_plan.cli import main as pd_plan
from pd_profile.cli import main as pd_profile
from pd_train.cli import main as pd_train
from pd_train.datasets.msvd import CaptionedVideos, load_msvd
from pd_train.meteor import Meteor, check_meteor

task = get_task("captioning")

TINY = {"vocabulary": 20, "frames": 4, "words": 5, "features": 8, "embedding": 6, "hidden": 10}
CLIPS = {"vocabulary": 20, "frames": 6, "words": 7, "features": clips.WIDTH, "embedding": 16, "hidden": 48}


def tiny() -> tuple[S2VT, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = s2vt(**TINY)
    assert isinstance(model, S2VT)
    words = torch.randint(20, (3, 5))
    words[:, 0] = BEGIN
    return model, [torch.randn(3, 4, 8), words]


def chain_of(model: S2VT, inputs: list[torch.Tensor]) -> Chain:
    return build_chain(model, kit.specs(features=inputs[0], words=inputs[1]))


# The model


def test_stages_give_the_gradients_of_the_whole_model_and_its_captions() -> None:
    model, inputs = tiny()
    chain = chain_of(model, inputs)
    ends = [index for index, cut in enumerate(chain.cuts[:-1]) if cut]
    assert [chain.layers[end].name for end in ends][:3] == ["frame", "pad", "first"]
    for cuts in (ends, *([end] for end in ends)):
        kit.assert_split_equals_whole(model, chain, cuts, inputs)


def test_what_makes_a_caption_word_by_word_stays_in_one_stage() -> None:
    chain = chain_of(*tiny())
    names = [layer.name for layer in chain.layers]
    assert not any(chain.cuts[names.index("second") : names.index("output")])
    assert {"word", "second:2"} < set(names[names.index("second") : names.index("output")])


def test_a_caption_is_what_teacher_forcing_with_it_says() -> None:
    model, (features, words) = tiny()
    # Large weights, so that another word before makes for another word after.
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    model.eval()
    with torch.no_grad():
        captions = model(features, words)["captions"]
        again = model(features, torch.cat([words[:, :1], captions[:, :-1]], 1))
    assert len(set(captions.flatten().tolist())) > 3
    assert torch.equal(again["logits"].argmax(-1), captions)
    assert torch.equal(again["captions"], captions)


def test_the_paper_s_sizes_are_the_default() -> None:
    with torch.device("meta"):
        model = s2vt()
    assert isinstance(model, S2VT)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["frame.weight"] == (500, 4096)
    assert shapes["word.weight"] == (12594, 500)
    assert (model.first.hidden_size, model.second.hidden_size) == (1000, 1000)
    assert model.sample_inputs["features"][0][0] + model.sample_inputs["words"][0][0] == 80


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"vocabulary": 4}, "vocabulary is 4; .* at least 5"), ({"words": "7"}, "words is '7'; .* at least 1")],
)
def test_a_size_out_of_range_is_refused(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=f"s2vt: {message}"):
        s2vt(**sizes)  # type: ignore[arg-type]


# The task


def test_padding_counts_neither_for_the_loss_nor_for_the_accuracy() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 6, requires_grad=True)
    tokens = torch.tensor([[5, END, PADDING, PADDING], [4, 5, 4, END]])
    counted = tokens != PADDING
    loss = task.loss(logits, tokens)
    assert torch.equal(loss, cross_entropy(logits[counted], tokens[counted]))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient[~counted].any()
    right = torch.nn.functional.one_hot(tokens, 6).float()
    right[0, 1] = right[0, 1].roll(1)
    assert task.correct(right, tokens) == 1.5
    assert task.correct({"logits": right.roll(1, -1)}, tokens) == 0


def test_predictions_are_the_captions_where_the_model_makes_some() -> None:
    model, inputs = tiny()
    output = model.eval()(*inputs)
    assert torch.equal(task.predictions(output), output["captions"])  # type: ignore[attr-defined]
    assert torch.equal(task.predictions(output["logits"]), output["logits"].argmax(-1))  # type: ignore[attr-defined]


def test_random_targets_hold_no_padding() -> None:
    targets = task.random_targets(torch.empty(50, 4, 3), torch.Generator().manual_seed(0))
    assert set(targets.flatten().tolist()) == {1, 2}


def test_one_label_a_sample_is_no_caption() -> None:
    with pytest.raises(UserError, match=r"captioning expects logits of shape \(B, steps, vocabulary\)"):
        task.loss(torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64))


# From a folder to sentences


def run(command: object, *arguments: object) -> str:
    result = CliRunner().invoke(command, [str(each) for each in arguments])  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    return result.output


def planned(folder: Path, data: Path, task: str = "captioning") -> Path:
    """Profile a small S2VT and plan three stages."""
    sizes = [text for name, value in CLIPS.items() for text in ("--model-arg", f"{name}={value}")]
    profile, plan = folder / "s2vt.json", folder / "plan.json"
    run(
        pd_profile, "s2vt", *sizes, "--task", task, "--data", f"msvd:{data}",
        "--minibatch-size", 4, "--minibatches", 3, "--device", "cpu", "--output", profile,
    )  # fmt: skip
    run(pd_plan, "--profile", profile, "--config", "1-1-1", "--bandwidth", "10gbps", "--output", plan)
    return plan


def datasets(folder: Path) -> tuple[CaptionedVideos, CaptionedVideos]:
    inputs = [
        InputSpec(name="features", shape=(4, 6, clips.WIDTH), dtype="float32"),
        InputSpec(name="words", shape=(4, 7), dtype="int64"),
    ]
    return load_msvd(str(folder), "msvd", inputs, CLIPS["vocabulary"])


def captions_of(model: S2VT, validation: CaptionedVideos) -> torch.Tensor:
    features, words, _ = validation.rows(torch.arange(len(validation)))
    with torch.no_grad():
        captions: torch.Tensor = model.eval()(features, words)["captions"]
    return captions


class Trained:
    """A run of three stages on clips, and its model."""

    def __init__(self, folder: Path) -> None:
        self.clips = clips.write_clips(folder / "clips")
        self.plan = planned(folder, self.clips)
        run(
            pd_train, "--plan", self.plan, "--run-dir", folder / "run", "--epochs", 25, "--target-accuracy", 0.97,
            "--optimizer", "adam", "--lr", 0.01, "--device", "cpu", "--threads", 1,
        )  # fmt: skip
        self.weights = folder / "run" / "model.pt"
        self.metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        self.model = S2VT(**CLIPS)
        self.untrained = captions_of(self.model, datasets(self.clips)[1])
        self.model.load_state_dict(torch.load(self.weights, weights_only=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    torch.manual_seed(0)
    return Trained(tmp_path_factory.mktemp("s2vt"))


def test_a_pipeline_learns_to_say_what_clips_show(trained: Trained) -> None:
    _, validation = datasets(trained.clips)
    _, _, targets = validation.rows(torch.arange(len(validation)))
    assert json.loads(trained.plan.read_text())["config"] == "1-1-1"
    assert trained.metrics[-1]["validation_accuracy"] >= 0.97

    def exact(captions: torch.Tensor) -> float:
        ends = (targets == END).int().argmax(1)
        return sum(
            bool((c[: end + 1] == t[: end + 1]).all()) for c, t, end in zip(captions, targets, ends, strict=True)
        ) / len(targets)

    assert exact(trained.untrained) == 0
    assert exact(captions_of(trained.model, validation)) > 0.8


def test_the_metric_of_the_data_set_judges_the_sentences_of_each_video(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []

    class Judge:
        def __enter__(self) -> Judge:
            return self

        def __exit__(self, *exception: object) -> None:
            told.append("closed")

        def score(self, hypotheses: list[str], references: list[list[str]]) -> float:
            told.extend([hypotheses[0], references[0], len(hypotheses)])
            return 0.5

    monkeypatch.setattr("pd_train.datasets.msvd.Meteor", Judge)
    _, validation = datasets(trained.clips)
    _, _, targets = validation.rows(torch.arange(len(validation)))
    assert validation.metric("meteor", list(targets)) == 0.5
    assert told == ["a man cuts the apple", ["a man cuts the apple"], 36, "closed"]
    with pytest.raises(UserError, match="--metric perplexity: captions are judged by meteor, accuracy or loss"):
        validation.check_metric("perplexity")


def _missing() -> str:
    try:
        check_meteor()
    except UserError as error:
        return str(error)
    return ""


needs_meteor = pytest.mark.skipif(bool(_missing()), reason=_missing())


@pytest.fixture(scope="module")
def judge() -> Iterator[Meteor]:
    """One for all tests: it takes seconds to start."""
    with Meteor() as judge:
        yield judge


@needs_meteor
def test_training_raises_meteor_far_above_an_untrained_model_s(
    trained: Trained, judge: Meteor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = run(
        pd_train, "--plan", trained.plan, "--run-dir", tmp_path / "run", "--init-from", trained.weights, "--epochs", 1,
        "--minibatches", 1, "--lr", 0, "--metric", "meteor", "--target-metric", 0.294, "--device", "cpu", "--threads", 1,
    )  # fmt: skip
    assert re.search(r"target 0.2940 +│ reached in", output)
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    monkeypatch.setattr("pd_train.datasets.msvd.Meteor", lambda: contextlib.nullcontext(judge))
    _, validation = datasets(trained.clips)
    untrained = validation.metric("meteor", list(trained.untrained))
    assert line["validation_meteor"] > max(0.5, 4 * untrained)


@needs_meteor
def test_meteor_is_the_score_that_the_package_itself_gives(judge: Meteor) -> None:
    right = [["a man cuts a tomato", "someone is slicing vegetables"], ["a cat is playing a piano"]]
    score = judge.score(["a man is slicing a tomato", "a cat plays ||| the piano"], right)
    assert score == pytest.approx(0.4244140380813382)
    assert judge.score(["", "x"], right) == 0


def test_captions_need_a_task_that_knows_of_padding(tmp_path: Path) -> None:
    data = clips.write_clips(tmp_path / "clips", copies=2, validation=(1,))
    plan = planned(tmp_path, data, task="classification")
    result = CliRunner().invoke(pd_train, ["--plan", str(plan), "--run-dir", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert re.search("holds captions, and the plan's task is 'classification'", " ".join(result.stderr.split()))
