"""S2VT: says in words what a video shows (Venugopalan et al. 2015, "Sequence to Sequence - Video to Text").

    step        0        1     ...   49      50      51      52    ...   79
    first    frame 0  frame 1  ...          none    none    none   ...          LSTM over the frames, then over nothing
                |        |           |        |       |       |            |
    second    none     none    ...         <begin>    a      man   ...          LSTM over what the first one says,
                                              |       |       |            |    beside the word before
    output                                    a      man      is   ...   <end>

The paper unrolls both for 80 steps in total. Here they are 50 frames and 30 words unless told otherwise: a clip of MSVD
has some 30 frames when every tenth is taken, and a sentence 7 words in the mean.

While validating, the model also writes a caption of its own, each word of which follows from its own words so far. That
needs word embedding, second LSTM and output together, so they stay in one stage; a stage may end anywhere before.
"""

from __future__ import annotations

from torch import Tensor, nn, stack
from torch import cat as concatenated
from torch.nn.functional import pad

from pd_format.captions import SPECIAL_TOKENS
from pd_format.errors import UserError

__all__ = ["S2VT", "s2vt"]


def s2vt(
    vocabulary: int = 12594,
    frames: int = 50,
    words: int = 30,
    features: int = 4096,
    embedding: int = 500,
    hidden: int = 1000,
) -> nn.Module:
    """Build it, by default with the paper's sizes.

    Args:
        vocabulary: tokens that it knows, those of `pd_format.captions` included.
        frames: of each video; together with the words 80 in the paper.
        words: of each caption, one more for its end included.
        features: numbers that describe a frame.
        embedding: numbers that a frame or a word becomes.
        hidden: units of each LSTM.

    Raises:
        UserError: a size is out of range.
    """
    sizes = {"frames": frames, "words": words, "features": features, "embedding": embedding, "hidden": hidden}
    least = {"vocabulary": SPECIAL_TOKENS + 1}
    for name, size in {"vocabulary": vocabulary, **sizes}.items():
        if type(size) is not int or size < least.get(name, 1):
            raise UserError(f"s2vt: {name} is {size!r}; expected a whole number of at least {least.get(name, 1)}.")
    return S2VT(vocabulary, frames, words, features, embedding, hidden)


class S2VT(nn.Module):
    """See `s2vt` for the arguments."""

    def __init__(self, vocabulary: int, frames: int, words: int, features: int, embedding: int, hidden: int) -> None:
        super().__init__()
        #: The shape of a sample and its dtype, for each input.
        self.sample_inputs = {"features": ((frames, features), "float32"), "words": ((words,), "int64")}
        self.frame = nn.Linear(features, embedding)
        self.first = nn.LSTM(embedding, hidden, batch_first=True)
        self.word = nn.Embedding(vocabulary, embedding)
        self.second = nn.LSTM(hidden + embedding, hidden, batch_first=True)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, features: Tensor, words: Tensor) -> Tensor | dict[str, Tensor]:
        """Say for each word of a caption what the next one is.

        Args:
            features: of the frames, (B, frames, features).
            words: the caption behind its begin token, (B, words).

        Returns:
            Logits (B, words, vocabulary); in eval mode a dict with them as `logits` and, as `captions` (B, words), the
            tokens that the model chooses when it goes on from its own words; what stands after the end token is noise.
        """
        frames, steps = features.shape[1], words.shape[1]
        heard, _ = self.first(pad(self.frame(features), (0, 0, 0, steps)))  # (B, frames + words, hidden)
        _, state = self.second(pad(heard[:, :frames], (0, self.word.embedding_dim)))
        told = heard[:, frames:]  # (B, words, hidden)
        spoken, _ = self.second(concatenated([told, self.word(words)], 2), state)
        logits: Tensor = self.output(spoken)
        if self.training:
            return logits
        token = words[:, 0]
        captions = []
        for step in range(steps):
            heard_and_said = concatenated([told[:, step : step + 1], self.word(token).unsqueeze(1)], 2)
            spoken, state = self.second(heard_and_said, state)
            token = self.output(spoken[:, 0]).argmax(-1)
            captions.append(token)
        return {"logits": logits, "captions": stack(captions, 1)}
