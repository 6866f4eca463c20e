"""Settings of caption generation."""

import math
from dataclasses import dataclass
from typing import Literal

from dpvision.config.models import EOS_ID
from dpvision.errors import ConfigError


@dataclass(frozen=True)
class GenerateSettings:
    """Settings of caption generation. "Words" are tokens."""

    method: Literal["greedy", "beam", "sample"] = "greedy"
    """Greedy (most likely token at each step), beam (beam search) or sample (random tokens)."""
    num: int = 1
    """Captions per image: the best of a beam search, best first, or independent samples."""
    beams: int = 4
    """Width of the beam search."""
    length_penalty: float = 1.0
    """Beam search ranks by log probability / length^PENALTY, the end included: 1 gives minus the
    training loss, 0 the probability, which prefers short captions.
    """
    temperature: float = 1.0
    """Sampling temperature, which divides the logits; below 1 prefers likelier tokens."""
    top_k: int | None = None
    """Sample from the K most likely tokens; if omitted, from all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this total probability (Holtzman et al. 2020)."""
    min_words: int = 1
    """Minimum number of tokens, without the prompt."""
    max_words: int | None = None
    """Maximum number of tokens, without the prompt; if omitted, the model's maximum."""
    prompt: tuple[int, ...] = ()
    """Tokens that every caption starts with, without BOS."""

    def __post_init__(self) -> None:
        for name, fits, rule, remedy in (
            (
                "method",
                self.method in ("greedy", "beam", "sample"),
                "'greedy', 'beam' or 'sample'",
                "Use greedy for speed.",
            ),
            ("beams", self.beams >= 1, "at least 1", "Use 4."),
            ("num", self.num >= 1, "at least 1", "Use 1."),
            (
                "num",
                self.method != "greedy" or self.num == 1,
                "1 with the greedy method",
                "Use --method beam or --method sample.",
            ),
            (
                "num",
                self.method != "beam" or self.num <= self.beams,
                f"at most beams={self.beams}",
                "Use more beams.",
            ),
            ("length_penalty", 0 <= self.length_penalty < math.inf, "0 or more", "Use 1."),
            (
                "temperature",
                0 < self.temperature < math.inf,
                "a positive number",
                "Use 1, or the greedy method for the limit of 0.",
            ),
            (
                "top_k",
                self.top_k is None or self.top_k >= 1,
                "at least 1",
                "Omit it for all words.",
            ),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1", "Use 1 for all words."),
            ("min_words", self.min_words >= 0, "0 or more", "Use 1."),
            (
                "max_words",
                self.max_words is None or self.max_words >= max(1, self.min_words),
                "at least 1 and min_words",
                "Omit it.",
            ),
        ):
            if not fits:
                raise ConfigError(
                    f"caption: {name}={getattr(self, name)!r}; expected {rule}. {remedy}"
                )

    def longest(self, num_tokens: int, vocab_size: int) -> int:
        """Return the maximum number of tokens that a model of length ``num_tokens`` can add to the
        prompt, without EOS.

        Raises:
            ConfigError: the prompt is too long or has unknown tokens; ``min_words`` or
                ``max_words`` exceeds the model's length.
        """
        room = num_tokens - 2 - len(self.prompt)
        if room < 1:
            raise ConfigError(
                f"caption: prompt of {len(self.prompt)} tokens; expected at most "
                f"{num_tokens - 3}. Shorten it."
            )
        strange = [token for token in self.prompt if not EOS_ID < token < vocab_size]
        if strange:
            raise ConfigError(
                f"caption: prompt has tokens {strange[:5]}; expected {EOS_ID + 1} to "
                f"{vocab_size - 1}. Encode it with the run's tokenizer."
            )
        for name in ("min_words", "max_words"):
            if (getattr(self, name) or 0) > room:
                raise ConfigError(
                    f"caption: {name}={getattr(self, name)}; expected at most {room}, the "
                    "model's maximum. Lower it."
                )
        return room if self.max_words is None else self.max_words
