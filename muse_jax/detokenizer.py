"""Token ids -> text as they come, and where a stop string ends it."""

from collections.abc import Sequence

from tokenizers import Tokenizer

UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet one."""


def is_text(value: str) -> bool:
    """Whether UTF-8 can hold it: Python's strings may have surrogates alone, from a terminal's broken bytes say."""
    return value.encode(errors="ignore").decode() == value


class Detokenizer:
    """The text of one sequence, which does not depend on when it is looked at.

    Special tokens are left out. Text is given away when no later token can change it and it cannot be the beginning of
    a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()):
        """Nothing decoded yet.

        Args:
            tokenizer: ids -> text.
            stop_strings: not empty, without UNFINISHED.
        """
        self._tokenizer = tokenizer
        self._stops = tuple(stop_strings)
        self._context: list[int] = []  # tokens before, for decoders that treat a text's beginning differently
        self._ids: list[int] = []  # tokens whose text may still change
        self._steady = ""  # the part of theirs that may not
        self._held = ""  # steady, but perhaps the beginning of a stop string
        self.stopped = False
        """A stop string was there; the text ends before it."""

    def add(self, token: int) -> str:
        """The text that another token brings."""
        self._ids.append(token)
        text = self._open()
        steady = text.rstrip(UNFINISHED)
        new = steady[len(self._steady) :]
        self._steady = steady
        if text == steady:
            self._context = self._ids if text else self._context + self._ids
            self._ids, self._steady = [], ""
        return self._give(self._held + new)

    def finish(self) -> str:
        """The rest, when there are no more tokens."""
        rest = self._held + self._open()[len(self._steady) :]
        self._ids, self._steady, self._held = [], "", ""
        return rest

    def _open(self) -> str:
        decode = self._tokenizer.decode
        return decode(self._context + self._ids)[len(decode(self._context)) :]

    def _give(self, text: str) -> str:
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        longest = max(map(len, self._stops), default=1) - 1
        held = next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
