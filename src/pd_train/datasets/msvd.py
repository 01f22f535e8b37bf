"""Videos and their captions: MSVD, the Microsoft video description corpus, or any other in the same form.

FOLDER/features/VIDEO.npy     what a network said of the video's frames, (frames, numbers a frame)
FOLDER/captions.csv           see `pd_train.datasets.captions`
FOLDER/train.txt, val.txt, test.txt     which video is for what; may be left out
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pd_format.captions import SPECIAL_TOKENS
from pd_format.errors import UserError
from pd_format.layers.inputs import dtype_of
from pd_format.profile import InputSpec
from pd_train.datasets.captions import Vocabulary, read_captions, read_split
from pd_train.meteor import Meteor, check_meteor

__all__ = ["CaptionedVideos", "load_msvd"]

Captions = Mapping[str, Sequence[Sequence[str]]]


class CaptionedVideos(Dataset[Any]):
    """Videos, each with one of its captions: (features, words, targets).

    Features (frames, numbers a frame) are read when they are asked for. Of a video with more frames than the model
    takes, that many at equal distances are used; one with fewer is followed by zeros. Words and targets (steps,) are
    tokens: the words behind a begin token, and before an end token.

    Args:
        folder: of the features.
        pairs: which video and which of its captions each sample is.
        captions: of each video.
        vocabulary: of the training captions.
        inputs: of the model, features and words.
    """

    def __init__(
        self,
        folder: Path,
        pairs: Sequence[tuple[str, int]],
        captions: Captions,
        vocabulary: Vocabulary,
        inputs: Sequence[InputSpec],
    ) -> None:
        self._folder = folder
        self._pairs = pairs
        self._captions = captions
        self._vocabulary = vocabulary
        self._frames, self._width = inputs[0].shape[1:]
        self._dtype = dtype_of(inputs[0])
        self._steps = inputs[1].shape[1]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        video, number = self._pairs[index]
        words, targets = self._vocabulary.encode(self._captions[video][number], self._steps)
        return self._features(video), torch.tensor(words), torch.tensor(targets)

    def rows(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Many samples, stacked."""
        return tuple(torch.stack(column) for column in zip(*map(self.__getitem__, indices.tolist()), strict=True))

    def check_metric(self, name: str) -> None:
        """See `pd_train.measured.MeasuredDataset`.

        Raises:
            UserError: there is no such metric, or something is missing.
        """
        if name != "meteor":
            raise UserError(f"--metric {name}: captions are judged by meteor, accuracy or loss.")
        check_meteor()

    def metric(self, name: str, predictions: Sequence[Tensor]) -> float:
        """METEOR of the captions that a model made, against all captions of each video."""
        written = [" ".join(self._vocabulary.decode(tokens.tolist())) for tokens in predictions]
        right = [[" ".join(words) for words in self._captions[video]] for video, _ in self._pairs]
        with Meteor() as judge:
            return judge.score(written, right)

    def _features(self, video: str) -> Tensor:
        path = self._folder / f"{video}.npy"
        stored = _open(path, self._width)
        count = min(len(stored), self._frames)
        # The middle of each of `count` equal parts of the video.
        chosen = [(2 * part + 1) * len(stored) // (2 * count) for part in range(count)]
        read = torch.from_numpy(stored[chosen].astype(numpy.float32))
        if not read.isfinite().all():
            raise UserError(f"{path}: holds numbers that are not finite; compute the features of this video again.")
        features = torch.zeros(self._frames, self._width, dtype=self._dtype)
        features[:count] = read
        return features


def load_msvd(
    path: str, name: str, inputs: Sequence[InputSpec], classes: int | None
) -> tuple[CaptionedVideos, CaptionedVideos]:
    """Make the training data set, every caption of every video, and the one for validation, a sample a video.

    A validation sample has the video's first caption. The vocabulary is made of the training captions alone, and no
    test video is in either.

    Args:
        path: the folder.
        name: what `--data` says.
        inputs: of the model: features (frames, numbers a frame), and words.
        classes: tokens that the model knows.

    Raises:
        UserError: something is missing or broken, or does not fit the model.
    """
    if len(inputs) != 2 or len(inputs[0].shape) != 3 or len(inputs[1].shape) != 2 or inputs[1].dtype != "int64":
        found = ", ".join(f"{spec.name} {'x'.join(map(str, spec.shape[1:]))} {spec.dtype}" for spec in inputs)
        raise UserError(
            f"The model takes {found}; --data {name} has features (frames x numbers a frame, floating point) and "
            "words (int64), as the model s2vt takes them."
        )
    if classes is None or classes <= SPECIAL_TOKENS:
        raise UserError(
            f"The model's vocabulary has {classes} tokens; --data {name} needs more than the {SPECIAL_TOKENS} that "
            "are no words. Give the model more, as with --model-arg vocabulary=12594 of pd-profile s2vt."
        )
    folder = Path(path)
    features = folder / "features"
    if not features.is_dir():
        raise UserError(
            f"--data {name}: there is no folder {features}; expected the features of each video in "
            f"{features / 'VIDEO.npy'}, and captions in {folder / 'captions.csv'}."
        )
    captions = read_captions(folder / "captions.csv", {path.stem for path in features.glob("*.npy")})
    split = read_split(folder, captions)
    for video in (*split.train, *split.validation):
        _open(features / f"{video}.npy", inputs[0].shape[2])
    vocabulary = Vocabulary((words for video in split.train for words in captions[video]), classes)
    every = [(video, number) for video in split.train for number in range(len(captions[video]))]
    first = [(video, 0) for video in split.validation]
    return (
        CaptionedVideos(features, every, captions, vocabulary, inputs),
        CaptionedVideos(features, first, captions, vocabulary, inputs),
    )


def _open(path: Path, width: int) -> numpy.ndarray[Any, Any]:
    """The features of a video, still on disk.

    Raises:
        UserError: the file is none, or holds something else.
    """
    try:
        stored = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from None
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: is no array of numpy ({error}); compute the features of this video again.") from None
    if not isinstance(stored, numpy.ndarray):
        raise UserError(f"{path}: holds several arrays; expected one of frames x {width} floating-point numbers.")
    if stored.ndim != 2 or stored.dtype.kind != "f" or len(stored) == 0:
        found = f"{'x'.join(map(str, stored.shape)) or 'one number'} {stored.dtype}"
        raise UserError(f"{path}: holds {found}; expected frames x {width} floating-point numbers, a frame or more.")
    if stored.shape[1] != width:
        raise UserError(
            f"{path}: has {stored.shape[1]} numbers a frame; the model takes {width}. Use features of that size, or "
            f"profile the model for these, as with --model-arg features={stored.shape[1]} of pd-profile s2vt."
        )
    return stored
