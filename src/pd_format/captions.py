"""The tokens of a caption that are no words; a model's vocabulary begins with them."""

from __future__ import annotations

__all__ = ["BEGIN", "END", "PADDING", "SPECIAL_TOKENS", "UNKNOWN"]

PADDING = 0
"""Behind a caption's end, so that all of a minibatch are of one length; never counted."""
BEGIN = 1
"""What the first word follows."""
END = 2
UNKNOWN = 3
"""A word that the vocabulary does not hold."""
SPECIAL_TOKENS = 4
"""How many there are: the token of the first word."""
