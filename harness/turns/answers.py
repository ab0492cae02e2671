"""How an answer is compared with that of the undivided server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TOLERANCE = 2e-5
"""How much log-probabilities in float32 may differ by rounding. At most 2.9e-6 were seen."""
NUM_LOGPROBS = 5
"""The most likely tokens whose log-probabilities are asked for at each position."""


@dataclass(frozen=True)
class Answer:
    """Tokens, the log-probabilities of the most likely ones at each position, and the prompt tokens that came from elsewhere.

    `num_external` of them were loaded and `num_local` were in a cache; `None` if the server does not say.
    """

    tokens: Sequence[int]
    logprobs: Sequence[Mapping[int, float]]
    num_local: int | None = None
    num_external: int | None = None


@dataclass(frozen=True)
class Comparison:
    """`problem` is empty for equal answers. `error` is the largest difference of log-probabilities, `first_error` that of the
    first token. `is_tied`: two tokens are equally likely within the tolerance, and each server chose another one.
    """

    problem: str
    error: float
    first_error: float
    is_tied: bool


def compare(expected: Answer, found: Answer, tolerance: float) -> Comparison:
    """Compare two greedy answers.

    They are equal if both servers give the chosen tokens the same log-probabilities, within `tolerance`, at each position up to
    the first one at which they choose different tokens. So a different token is accepted only if both are about equally likely
    on both servers. What follows it answers another text and is not compared.
    """
    errors: list[float] = []

    def result(problem: str = "", *, is_tied: bool = False) -> Comparison:
        return Comparison(problem, max(errors, default=0.0), max(errors[:1], default=0.0), is_tied)

    if len(found.tokens) != len(expected.tokens):
        return result(f"{len(expected.tokens)} tokens expected, {len(found.tokens)} found")
    for at, (one, other) in enumerate(zip(expected.tokens, found.tokens, strict=True)):
        right, ours = expected.logprobs[at], found.logprobs[at]
        missing = [token for token in (one, other) if token not in right or token not in ours]
        errors.append(max((abs(right[token] - ours[token]) for token in {one, other} - set(missing)), default=0.0))
        if missing or errors[-1] > tolerance:
            off = "which is unlikely on the other server" if missing else f"off by {errors[-1]:.2g}"
            return result(
                f"token {at + 1} of the answer: expected {one} ({_shown(right)}), found {other} ({_shown(ours)}), {off}"
            )
        if one != other:
            return result(is_tied=True)
    return result()


def _shown(logprobs: Mapping[int, float]) -> str:
    best = sorted(logprobs.items(), key=lambda each: -each[1])[:2]
    return ", ".join(f"{token}: {logprob:.5f}" for token, logprob in best)
