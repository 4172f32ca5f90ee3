"""What `generate` and `stream` return."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """How much of what a draft proposed the model would have said itself."""

    accepted: list[np.ndarray]
    """int32 [steps] of each sequence: tokens that each of its steps brought it, 1 to W (0 where the logits were NaN):
    those of the draft that were right and one of the model's own. What a stop or max_new_tokens cut off is included."""
    width: int
    """Nodes of each tree, W."""

    @property
    def histogram(self) -> np.ndarray:
        """int64 [W + 1]: how many steps of all sequences brought 0, 1, ... W tokens."""
        return np.bincount(np.concatenate(self.accepted), minlength=self.width + 1)

    @property
    def by_position(self) -> np.ndarray:
        """fp64 [W - 1]: in which share of the steps the draft's token 1, 2, ... W - 1 places later was accepted; NaN
        if there was no step."""
        counts = self.histogram
        further = counts[::-1].cumsum()[::-1]  # steps that brought at least so many
        with np.errstate(invalid="ignore"):
            return further[2:] / further[0]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns."""

    tokens: list[list[int]]
    """Generated ids of each sequence, the stop id included, and those in which a stop string lies."""
    texts: list[str] | None
    """Theirs, without special tokens, up to the stop string; None if the model has no tokenizer."""
    finish_reasons: list[str]
    """"stop" (a stop id), "stop_string", "length" (max_new_tokens), or "nan" (the logits were NaN; that token is not
    kept)."""
    steps: int
    """Decode steps after the prefill."""
    guarantee: str
    """`muse_jax.guarantee` of the model's devices: "bitwise", or "not bitwise: ..."."""
    log_probs: list[np.ndarray] | None = None
    """fp32 [n] of each sequence: log-probability of each of its n tokens by the model alone, the reference's bits."""
    top_tokens: list[np.ndarray] | None = None
    """int32 [n, logprobs]: the most probable tokens in each one's place, ties to the lowest ids."""
    top_log_probs: list[np.ndarray] | None = None
    """fp32 [n, logprobs]: theirs."""
    acceptance: Acceptance | None = None
    """With a draft."""

    @property
    def tokens_per_step(self) -> float | None:
        """With a draft: tokens that a step brought a sequence on average, only those that were kept."""
        if self.acceptance is None or not (steps := sum(map(len, self.acceptance.accepted))):
            return None
        return sum(max(len(tokens) - 1, 0) for tokens in self.tokens) / steps  # the first is the prefill's


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What `stream` yields: the next n tokens of one sequence."""

    sequence: int
    """Which prompt's."""
    tokens: list[int]
    """n ids; none where a sequence's last chunk only brings the rest of its text, or its end."""
    text: str | None
    """What can be said of the text: bytes that are no whole character yet, and what may be the beginning of a stop
    string, come with a later chunk. None if the model has no tokenizer."""
    finish_reason: str | None
    """As in `Generation`, in a sequence's last chunk."""
    log_probs: np.ndarray | None = None
    """fp32 [n], as in `Generation`, like the next two."""
    top_tokens: np.ndarray | None = None
    """int32 [n, logprobs]."""
    top_log_probs: np.ndarray | None = None
    """fp32 [n, logprobs]."""
