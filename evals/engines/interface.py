"""What every generation engine takes and gives."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Raises:
        ValueError: a value is out of its range.
    """

    n: int = 1
    """Responses per prompt."""
    max_tokens: int = 512
    """Length limit of a response, in tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1:
            raise ValueError(f"n ({self.n}) and max_tokens ({self.max_tokens}) must be at least 1")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature ({self.temperature}) must not be negative, top_p ({self.top_p}) lie in (0, 1]"
            )


@dataclass(frozen=True)
class Sample:
    """One response to one prompt."""

    prompt_ids: list[int]
    token_ids: list[int]
    """Generated tokens, the end-of-sequence token included."""
    logprobs: list[float]
    """Natural log-probability of each token under the distribution at the sampling temperature, before top-p."""
    text: str
    """The decoded response without special tokens."""
    truncated: bool
    """Cut at the length limit before an end-of-sequence token."""


@dataclass(frozen=True)
class Request:
    """One response that is wanted: the prompt, and the response's place in that prompt's group."""

    prompt: str
    index: int


class Engine(ABC):
    """Generates responses with the current weights of one model."""

    @abstractmethod
    def sample(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        """One sample per request, in their order; `params.n` is not read.

        Each draws from a stream of its own (`sample_seed`), whatever else is asked for with it.

        Raises:
            ValueError: a prompt is empty, or prompt and response together exceed the model's context.
        """

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over weights, all parameters by their Transformers names, and forget what was cached under old ones."""

    def sleep(self) -> None:  # noqa: B027  not every engine has memory to give back
        """Give memory back while a trainer needs it. The next `update_weights` wakes the engine."""

    def close(self) -> None:  # noqa: B027
        """Release what the process would otherwise hold to its end. The engine cannot be used after."""

    def generate(self, prompts: Sequence[str], params: SamplingParams) -> list[list[Sample]]:
        """`params.n` samples per prompt, in the order of the prompts.

        Raises:
            ValueError: as `sample`.
        """
        requests = [Request(prompt, index) for prompt in prompts for index in range(params.n)]
        samples = self.sample(requests, params)
        return [samples[start : start + params.n] for start in range(0, len(samples), params.n)]


def sample_seed(seed: int, prompt: str, index: int) -> np.random.SeedSequence:
    """Seed of one response, from the run's seed, the prompt and the response's place in its group.

    It does not depend on what else is in the batch, so work may be cut, resumed and reordered.
    """
    return np.random.SeedSequence([seed, zlib.crc32(prompt.encode()), index])
