"""Minibatches: which samples, in which order, in which form, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from pd_format.errors import UserError
from pd_format.profile import InputSpec
from pd_train.data import Minibatch, MinibatchLoader
from pd_train.datasets.loading import load_datasets
from pd_train.seeding import epoch_order, minibatch_seed, sample_seed, seed_generators, seed_host_generators

X = InputSpec(name="x", shape=(4, 3), dtype="float32")
A = InputSpec(name="a", shape=(4, 2), dtype="float32")
B = InputSpec(name="b", shape=(4,), dtype="int64")


def numbered(samples: int) -> TensorDataset:
    """Sample i holds the number i everywhere, its label too."""
    numbers = torch.arange(samples)
    return TensorDataset(numbers[:, None].expand(-1, 3).float(), numbers)


class Listed(Dataset[Any]):
    """What a function says of each index."""

    def __init__(self, samples: int, make: Callable[[int], object]) -> None:
        self.samples = samples
        self.make = make

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> object:
        return self.make(index)


def loader(
    dataset: Any, *, inputs: tuple[InputSpec, ...] = (X,), size: int = 4, seed: int = 0, **options: Any
) -> MinibatchLoader:
    return MinibatchLoader(dataset, inputs, size, seed=seed, **{"shuffle": True, **options})


def labels(minibatch: Minibatch) -> list[int]:
    assert isinstance(minibatch.targets, torch.Tensor)
    return minibatch.targets.tolist()


def same(left: Minibatch, right: Minibatch) -> bool:
    pairs = [*zip(left.inputs, right.inputs, strict=True), (left.targets, right.targets)]
    return left.samples == right.samples and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("dataset", [numbered(101), Listed(101, lambda i: (torch.full((3,), float(i)), i))])
def test_replicas_see_every_sample_exactly_once_an_epoch(dataset: Any, replicas: int) -> None:
    loaders = [loader(dataset, size=10) for _ in range(replicas)]
    for epoch in range(2):
        seen = [labels(loaders[b % replicas].load(epoch, b)) for b in range(loaders[0].minibatches)]
        assert [len(part) for part in seen] == [10] * 10 + [1]
        assert sorted(chain(*seen)) == list(range(101))


def test_the_order_is_the_public_one_and_differs_between_epochs_and_seeds() -> None:
    subject = loader(numbered(9), seed=7)
    order = epoch_order(9, 7, 3)
    assert [labels(subject.load(3, b)) for b in (2, 0, 1)] == [
        order[8:].tolist(),
        order[:4].tolist(),
        order[4:8].tolist(),
    ]
    orders = {tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_order_stays_what_it_was_in_earlier_versions() -> None:
    assert epoch_order(8, 0, 0).tolist() == [3, 2, 5, 7, 6, 0, 4, 1]
    assert sample_seed(0, 0, 0) == 9087291651299649614
    assert minibatch_seed(0, 1, 2, 3) == 7198798757899995650


def test_without_shuffling_the_order_is_the_data_sets_own() -> None:
    subject = loader(numbered(6), shuffle=False)
    assert [labels(subject.load(epoch, b)) for epoch in (0, 1) for b in (0, 1)] == [[0, 1, 2, 3], [4, 5]] * 2


def test_a_short_last_minibatch_is_kept_unless_dropped() -> None:
    kept, dropped = loader(numbered(50), size=8), loader(numbered(50), size=8, drop_last=True)
    assert (kept.minibatches, kept.samples) == (7, 50)
    assert kept.load(0, 6).samples == 2
    assert (dropped.minibatches, dropped.samples) == (6, 48)
    with pytest.raises(IndexError):
        dropped.load(0, 6)


def test_tensors_read_at_once_equal_samples_read_one_by_one() -> None:
    tensors = numbered(20)
    chosen = Subset(tensors, [3, 1, 4, 15, 9, 2, 6])
    for b in range(2):
        at_once = loader(chosen).load(1, b)
        assert same(at_once, loader(Listed(7, lambda i: chosen[i])).load(1, b))


def augmented(index: int) -> tuple[torch.Tensor, int]:
    noise = torch.rand(1) + random.random() + float(numpy.random.rand())
    return torch.full((3,), index) + noise, index


@pytest.mark.parametrize("wrap", [lambda dataset: dataset, lambda dataset: Subset(dataset, range(12))])
def test_augmentation_depends_on_seed_epoch_and_index_alone(wrap: Callable[[Any], Any]) -> None:
    dataset = wrap(Listed(12, augmented))
    torch.rand(5)
    first = loader(dataset).load(2, 1)
    random.random()
    assert same(first, loader(dataset).load(2, 1))
    other_sizes = loader(dataset, size=3)
    values = {int(label): value for value, label in zip(first.inputs[0], first.targets, strict=True)}
    for b in range(4):
        other = other_sizes.load(2, b)
        for value, label in zip(other.inputs[0], labels(other), strict=True):
            if label in values:
                assert torch.equal(value, values[label])
    in_order = loader(dataset, shuffle=False)
    assert not torch.equal(in_order.load(0, 0).inputs[0], in_order.load(1, 0).inputs[0])


def test_a_plain_loop_can_draw_the_same_augmentation() -> None:
    subject = loader(Listed(12, augmented), seed=5, size=1)
    index = int(epoch_order(12, 5, 2)[3])
    seed_host_generators(sample_seed(5, 2, index))
    assert torch.equal(augmented(index)[0], subject.load(2, 3).inputs[0][0])


@pytest.mark.parametrize("dataset", [numbered(12), Listed(12, augmented)])
def test_loading_leaves_the_generators_where_they_were(dataset: Any) -> None:
    seed_host_generators(3)
    expected = (torch.rand(1).item(), random.random(), numpy.random.rand())
    seed_host_generators(3)
    loader(dataset).load(0, 0)
    assert (torch.rand(1).item(), random.random(), numpy.random.rand()) == expected


def test_generators_are_restored_when_a_sample_fails() -> None:
    def fail(index: int) -> object:
        raise OSError("disk")

    seed_host_generators(3)
    expected = torch.rand(1).item()
    seed_host_generators(3)
    with pytest.raises(OSError, match="disk"):
        loader(Listed(3, fail)).load(0, 0)
    assert torch.rand(1).item() == expected


def a_of(index: int) -> torch.Tensor:
    return torch.full((2,), float(index))


@pytest.mark.parametrize(
    ("inputs", "make"),
    [
        ((A,), lambda i: (a_of(i), i)),
        ((A,), lambda i: [a_of(i), i]),
        ((A,), lambda i: ([a_of(i)], i)),
        ((A,), lambda i: {"a": a_of(i), "anything": i}),
        ((A,), lambda i: {"label": i, "image": a_of(i)}),
        ((A,), lambda i: {"x": a_of(i), "y": i}),
        ((A, B), lambda i: ((a_of(i), i), i)),
        ((A, B), lambda i: (a_of(i), i, i)),
        ((A, B), lambda i: ([a_of(i)], (i,), i)),
        ((A, B), lambda i: {"b": i, "labels": i, "a": a_of(i)}),
        ((A, B), lambda i: ({"b": i, "a": a_of(i)}, i)),
    ],
)
def test_nothing_of_a_sample_is_lost_whatever_its_structure(
    inputs: tuple[InputSpec, ...], make: Callable[[int], object]
) -> None:
    minibatch = loader(Listed(4, make), inputs=inputs, shuffle=False).load(0, 0)
    assert labels(minibatch) == [0, 1, 2, 3]
    expected = (torch.stack([a_of(i) for i in range(4)]), torch.arange(4))
    assert len(minibatch.inputs) == len(inputs)
    for found, wanted in zip(minibatch.inputs, expected, strict=False):
        assert torch.equal(found, wanted)


def test_several_tensors_of_a_tensor_data_set_are_inputs_but_for_the_last() -> None:
    dataset = TensorDataset(torch.zeros(4, 2), torch.arange(4), torch.ones(4))
    minibatch = loader(dataset, inputs=(A, B), shuffle=False).load(0, 0)
    assert [tuple(value.shape) for value in minibatch.inputs] == [(4, 2), (4,)]
    assert torch.equal(minibatch.targets, torch.ones(4))


@pytest.mark.parametrize(
    ("inputs", "make", "message"),
    [
        ((A,), lambda i: (a_of(i), i, i), "holds 2 inputs and a label: .*; the model takes 1: 'a'"),
        ((A, B), lambda i: (a_of(i), i), "holds 1 inputs and a label: .*; the model takes 2: 'a', 'b'"),
        ((A,), a_of, r"holds tensor of 4x2 float32 after stacking; expected \(input, label\)"),
        ((A,), lambda i: (a_of(i),), r"expected \(input, label\)"),
        ((A,), lambda i: {"a": a_of(i), "b": i, "c": i}, "the keys 'a', 'b', 'c'; expected one key for each input"),
        ((A, B), lambda i: {"a": a_of(i), "c": i}, r"model \('a', 'b'\) and one more for the label"),
        ((A,), lambda i: {"a": a_of(i)}, "and one more for the label"),
        ((A,), lambda i: (a_of(i).double(), i), r"gives float64 for input 'a'; .* with float32.*torch\.float32"),
        ((A,), lambda i: (a_of(i)[None], i), "the shape 1x2 a sample for input 'a'; the model was profiled with 2"),
        ((A,), lambda i: ("text", i), r"gives \(str, .*for input|the model takes 1"),
        (
            (A,),
            lambda i: {"a": a_of(i), "y": i} | ({"more": i} if i == 2 else {}),
            r"sample 0 holds \{a: tensor of 2 float32, y: int\}, sample 2 \{a: .*, more: int\}",
        ),
        ((A,), lambda i: (object(), i), r"cannot be stacked to a minibatch: sample 0 holds \(object, int\)"),
        (
            (A,),
            lambda i: (torch.zeros(2 + i // 2), i),
            r"sample 0 holds \(tensor of 2 float32, int\), sample 2 \(tensor of 3 float32, int\)",
        ),
    ],
)
def test_samples_that_do_not_fit_are_refused_with_what_was_found(
    inputs: tuple[InputSpec, ...], make: Callable[[int], object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        loader(Listed(4, make), inputs=inputs, shuffle=False).load(0, 0)


def test_a_tensor_data_set_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(UserError, match="gives int64 for input 'x'; the model was profiled with float32"):
        loader(TensorDataset(torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4))).load(0, 0)


def test_too_few_samples_are_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match="holds 0 samples; expected at least 1 for minibatches of 8"):
        loader(numbered(0), size=8)
    with pytest.raises(UserError, match=r"holds 3 samples, fewer than one minibatch of 8, and --drop-last"):
        loader(numbered(3), size=8, drop_last=True)
    assert loader(numbered(3), size=8).load(0, 0).samples == 3


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def test_a_data_set_without_length_or_index_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"Endless\) can only be read from front to back.*how many minibatches"):
        loader(Endless())
    with pytest.raises(UserError, match=r"WithoutLength\) has no length.*how many minibatches"):
        loader(WithoutLength())


IMAGE = InputSpec(name="x", shape=(32, 1, 8, 8), dtype="float32")


def of_shape(*shape: int, dtype: str = "float32") -> tuple[InputSpec, ...]:
    return (InputSpec(name="x", shape=(32, *shape), dtype=dtype),)


def test_digits_are_real_split_by_class_and_normalised() -> None:
    pytest.importorskip("sklearn")
    train, validation = load_datasets("digits", (IMAGE,), 10, 32)
    assert (len(train), len(validation)) == (1442, 355)
    images, digits = train.tensors
    assert images.shape == (1442, 1, 8, 8)
    std, mean = torch.std_mean(images)
    assert (float(std), float(mean)) == pytest.approx((1, 0), abs=1e-5)
    other_images, other_digits = validation.tensors
    assert abs(float(other_images.mean())) > 1e-6, "normalised with the train split's figures, not its own"
    for digit in range(10):
        assert int((other_digits == digit).sum()) == int(((digits == digit).sum() + (other_digits == digit).sum()) // 5)


def test_digits_follow_the_models_input() -> None:
    pytest.importorskip("sklearn")
    grey = load_datasets("digits", (IMAGE,), 10, 32)[0][0][0]
    flat = load_datasets("digits", of_shape(64), 10, 32)[0][0][0]
    assert torch.equal(flat, grey.flatten())
    colour = load_datasets("digits:32", of_shape(3, 32, 32), 10, 32)[0][0][0]
    assert colour.shape == (3, 32, 32)
    assert torch.equal(colour[0], colour[2])
    assert load_datasets("digits", of_shape(1, 8, 8, dtype="bfloat16"), 10, 32)[0][0][0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "shape", "classes", "message"),
    [
        ("digits", (3, 32, 32), 10, "takes samples of 3x32x32; --data digits has 1x8x8 .* --data digits:32 has that"),
        ("digits:16", (3, 32, 32), 10, "takes samples of 3x32x32; --data digits:16 has 1x16x16"),
        ("digits", (10,), 10, "takes samples of 10; --data digits has 1x8x8 .* or 64 numbers"),
        ("digits", (1, 8, 8), 4, "tells 4 classes apart; --data digits has 10"),
        (
            "digits:0",
            (1, 8, 8),
            10,
            "'digits:0' is unknown; expected synthetic, synthetic:SAMPLES, digits, digits:SIZE",
        ),
        ("digits:big", (1, 8, 8), 10, "'digits:big' is unknown"),
        ("synthetic:-1", (1, 8, 8), 10, "'synthetic:-1' is unknown"),
        ("mnist", (1, 8, 8), 10, "'mnist' does not say where it is"),
        ("nowhere/data.py:load", (1, 8, 8), 10, "there is no file nowhere/data.py"),
    ],
)
def test_data_that_is_not_there_or_does_not_fit_is_refused(
    name: str, shape: tuple[int, ...], classes: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_datasets(name, of_shape(*shape), classes, 32)


def test_missing_scikit_learn_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"pip install scikit-learn"):
        load_datasets("digits", (IMAGE,), 10, 32)


def test_synthetic_samples_depend_on_their_number_alone() -> None:
    inputs = (InputSpec(name="x", shape=(8, 3), dtype="float32"), InputSpec(name="ids", shape=(8, 5), dtype="int64"))
    train, validation = load_datasets("synthetic", inputs, 7, 8)
    assert (len(train), len(validation)) == (800, 80)
    x, ids, label = train[3]
    again = load_datasets("synthetic:20", inputs, 7, 8)[0][3]
    assert all(torch.equal(a, b) for a, b in zip((x, ids, label), again, strict=True))
    assert not torch.equal(x, train[4][0])
    assert not torch.equal(train[0][0], validation[0][0])
    batches = MinibatchLoader(train, inputs, 8, seed=0, shuffle=True)
    loaded = [batches.load(0, b) for b in range(100)]
    assert sorted(set(chain(*map(labels, loaded)))) == list(range(7))
    assert {int(value) for batch in loaded for value in batch.inputs[1].unique()} == {0, 1}
    everything = torch.cat([batch.inputs[0] for batch in loaded])
    assert torch.std_mean(everything)[0].item() == pytest.approx(1, abs=0.1)


def test_synthetic_samples_have_as_many_labels_as_the_model_wants() -> None:
    x, labels = load_datasets("synthetic", (IMAGE,), 7, 8, label_shape=(3, 2))[0][0]
    assert (x.shape, labels.shape) == ((1, 8, 8), (3, 2))


def test_synthetic_validation_is_never_empty() -> None:
    assert [len(part) for part in load_datasets("synthetic:3", (IMAGE,), 10, 32)] == [3, 1]


OWN = """
import torch
from torch.utils.data import TensorDataset

def pair():
    data = TensorDataset(torch.zeros(4, 3), torch.zeros(4))
    return data, data

def one():
    return pair()[0]

def endless():
    return pair()[0], (number for number in range(3))

def failing():
    raise FileNotFoundError("no folder 'images'")
"""


def test_own_data_comes_from_a_function_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    train, validation = load_datasets(f"{tmp_path}/own.py:pair", (X,), None, 4)
    assert (len(train), len(validation)) == (4, 4)
    for function, message in [
        ("one", r"own.py:one: the function returned TensorDataset; expected two data sets, \(train, validation\)"),
        ("endless", r"own.py:endless, validation: The data set \(generator\) can only be read from front to back"),
        ("failing", r"FileNotFoundError: no folder 'images' \(.*own.py, line 16\)"),
        ("pairs", "own.py"),
    ]:
        with pytest.raises(UserError, match=message):
            load_datasets(f"{tmp_path}/own.py:{function}", (X,), None, 4)


def test_the_example_of_own_data_makes_fresh_noise_each_epoch() -> None:
    pytest.importorskip("sklearn")
    example = Path(__file__).parent.parent / "examples" / "own_data.py"
    train, validation = load_datasets(f"{example}:noisy_digits", (IMAGE,), 10, 32)
    in_order = MinibatchLoader(train, (IMAGE,), 32, seed=0, shuffle=False)
    assert not torch.equal(in_order.load(0, 0).inputs[0], in_order.load(1, 0).inputs[0])
    assert MinibatchLoader(validation, (IMAGE,), 32, seed=0, shuffle=False).load(0, 0).samples == 32


def test_seeding_reaches_all_generators_of_the_host() -> None:
    drawn = []
    for seed in (2**63 - 1, 2**63 - 1, 1):
        seed_generators(seed)
        drawn.append((torch.rand(1).item(), random.random(), numpy.random.rand()))
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[1], drawn[2], strict=True))


def test_minibatch_seeds_differ_in_every_part_and_fit_63_bits() -> None:
    seeds = {minibatch_seed(*parts) for parts in numpy.ndindex(3, 3, 3, 3)}
    assert len(seeds) == 81
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert 0 <= minibatch_seed(-5, 0, 0, 0) < 2**63
