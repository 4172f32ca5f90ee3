"""Errors that collect every problem they know of, so that one run shows the user all that has to change."""

from collections.abc import Iterable
from typing import Any

_SHOWN = 40  # a checkpoint can be wrong in a thousand places; the message stays readable, `problems` has them all


class ProblemsError(ValueError):
    """A ValueError made of a headline and a list of problems, one line each."""

    def __init__(self, headline: str, problems: Iterable[str]):
        """Builds the message; `headline` says what failed, without a colon at the end."""
        self.headline = headline
        self.problems: tuple[str, ...] = tuple(problems)
        lines = [f"  - {problem}" for problem in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"  ... and {len(self.problems) - _SHOWN} more (all in this error's .problems)")
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{headline}: {count}", *lines]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by the two arguments, because the message is made of them."""
        return type(self), (self.headline, self.problems)


class ConfigError(ProblemsError):
    """A configuration that the library cannot run."""


class CheckpointError(ProblemsError):
    """Weights, configuration or tokenizer files that are missing, damaged or of another model."""
