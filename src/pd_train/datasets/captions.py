"""Captions of videos: their file, their words as tokens, and who is trained on which.

A folder of captioned videos says in `captions.csv` what each shows, a sentence a line, any number of lines a video:

    video,sentence
    vid1,a man is slicing a tomato
    vid1,"someone, with a knife, cuts vegetables"

`train.txt`, `val.txt` and `test.txt` beside it, one video a line, say which split a video belongs to.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pd_format.captions import BEGIN, END, PADDING, SPECIAL_TOKENS, UNKNOWN
from pd_format.errors import UserError

__all__ = ["Split", "Vocabulary", "read_captions", "read_split", "words_of"]

HEADINGS = frozenset({"video", "video_id", "videoid", "id", "name"})
"""What the first column of a file with a heading may be called, in any case."""

MSVD_SPLIT = (1200, 100, 670)
"""Videos for training, validation and test, in the data set's own order (Venugopalan et al. 2015)."""

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


class Split(NamedTuple):
    """The names of the videos of each part."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...]


class Vocabulary:
    """The words that captions are made of, each with its token: the most frequent ones, equally frequent ones by name.

    Args:
        captions: those that it is made from, as words.
        size: tokens at most, the special ones included.
    """

    def __init__(self, captions: Iterable[Sequence[str]], size: int) -> None:
        counts = Counter(word for words in captions for word in words)
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        self.words = ordered[: max(0, size - SPECIAL_TOKENS)]
        self._tokens = {word: token for token, word in enumerate(self.words, SPECIAL_TOKENS)}

    def encode(self, words: Sequence[str], steps: int) -> tuple[list[int], list[int]]:
        """What a model is given and what it should say, `steps` tokens each; a longer caption is cut short."""
        tokens = [self._tokens.get(word, UNKNOWN) for word in words[: steps - 1]]
        rest = [PADDING] * (steps - 1 - len(tokens))
        return [BEGIN, *tokens, *rest], [*tokens, END, *rest]

    def decode(self, tokens: Iterable[int]) -> list[str]:
        """The words up to the end token. One that the vocabulary does not hold is `<unk>`; other tokens say nothing."""
        words = []
        for token in tokens:
            if token == END:
                break
            if token == UNKNOWN:
                words.append("<unk>")
            elif SPECIAL_TOKENS <= token < SPECIAL_TOKENS + len(self.words):
                words.append(self.words[token - SPECIAL_TOKENS])
        return words


def words_of(sentence: str) -> list[str]:
    """The words of a sentence in lower case, without punctuation."""
    return _WORD.findall(sentence.lower().replace("\u2019", "'"))


def read_captions(path: Path, videos: Collection[str]) -> dict[str, list[list[str]]]:
    """Read the captions of each video, as words, in the order of the file.

    Args:
        path: of the file.
        videos: those that there are features of.

    Raises:
        UserError: there is no such file or nothing in it; a line has another form, no words, or names another video.
    """
    captions: dict[str, list[list[str]]] = {}
    for line, fields in _rows(path):
        if not captions and fields[0].strip().lower() in HEADINGS and fields[0] not in videos:
            continue
        place = f"{path}, line {line}"
        if len(fields) != 2:
            raise UserError(
                f"{place}: found {len(fields)} columns; expected two, video and sentence. A sentence with a comma "
                'stands in quotes: vid1,"a man, slowly, sits down".'
            )
        video = fields[0].strip()
        if video not in videos:
            raise UserError(
                f"{place}: there are no features of video {video!r}; expected them in "
                f"{path.parent / 'features' / f'{video}.npy'}. Add the file, or take the video's captions out."
            )
        words = words_of(fields[1])
        if not words:
            raise UserError(f"{place}: the sentence {fields[1]!r} has no words; take the line out.")
        captions.setdefault(video, []).append(words)
    if not captions:
        raise UserError(f"{path}: holds no captions; expected lines of the form VIDEO,SENTENCE.")
    return captions


def read_split(folder: Path, captions: Mapping[str, object]) -> Split:
    """Who is trained on which: as the folder's files say, else MSVD's own split, else 80, 10 and 10 percent.

    MSVD is known by its 1970 videos; their order is that of the numbers in their names. Any other set of videos is
    split in the order of a hash of the names, so that it is the same everywhere.

    Args:
        folder: with `train.txt`, `val.txt` and perhaps `test.txt`, or with none of them.
        captions: of the videos.

    Raises:
        UserError: one of two files is missing, a video stands in two of them or has no captions; a split is empty.
    """
    files = [folder / f"{part}.txt" for part in ("train", "val", "test")]
    if any(path.exists() for path in files):
        for path in files[:2]:
            if not path.exists():
                raise UserError(
                    f"{path}: is missing; with files that split the videos, train.txt and val.txt are needed, one "
                    "video a line. Without any of them the videos are split 80:10:10."
                )
        seen: dict[str, str] = {}
        parts = [_read_names(path, captions, seen) if path.exists() else () for path in files]
        return Split(*parts)
    names = sorted(captions, key=_natural)
    if len(names) == sum(MSVD_SPLIT):
        train, validation, _ = MSVD_SPLIT
    else:
        names.sort(key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())
        validation = max(1, len(names) // 10)
        train = len(names) - 2 * validation if len(names) >= 10 else len(names) - validation
    if train < 1:
        raise UserError(
            f"{folder}: holds captions of {len(names)} video; expected at least 2, one to train and one to validate on."
        )
    return Split(tuple(names[:train]), tuple(names[train : train + validation]), tuple(names[train + validation :]))


def _read_names(path: Path, captions: Mapping[str, object], seen: dict[str, str]) -> tuple[str, ...]:
    names = []
    for line, text in enumerate(_text(path).splitlines(), 1):
        name = text.strip()
        if not name:
            continue
        place = f"{path}, line {line}"
        if name in seen:
            raise UserError(f"{place}: video {name!r} stands in {seen[name]} too; a video belongs to one split.")
        if name not in captions:
            raise UserError(f"{place}: there are no captions of video {name!r}; add some, or take the line out.")
        seen[name] = f"{path.name}, line {line}"
        names.append(name)
    if not names and path.name != "test.txt":
        raise UserError(f"{path}: names no video; expected one a line.")
    return tuple(names)


def _rows(path: Path) -> Iterable[tuple[int, list[str]]]:
    """The lines of a CSV file that hold anything, each with its number."""
    reader = csv.reader(_text(path).splitlines(keepends=True), strict=True)
    try:
        for fields in reader:
            if any(field.strip() for field in fields):
                yield reader.line_num, fields
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}; expected VIDEO,SENTENCE.") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; expected captions, one VIDEO,SENTENCE a line.") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: is no UTF-8 text; save the file as UTF-8.") from None


def _natural(name: str) -> list[tuple[int, int | str]]:
    """A key that puts vid2 before vid10."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"([0-9]+)", name) if part]
