"""The interface of captioner tests: the name of the data, the store that must be unseen, and a
method that returns scores.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpvision.data.store import Store
from dpvision.eval.captions.open_captioner import OpenCaptioner
from dpvision.eval.captions.settings import Fit
from dpvision.eval.score import Score


@dataclass(frozen=True)
class Asking:
    """Settings shared by all tests."""

    fit: Fit = "squash"
    """How to make images square."""
    other_images: bool = True
    """Whether compositional tests also pair captions with other images, to measure what text alone
    reveals.
    """
    batch_size: int = 32
    workers: int = 2
    progress: Callable[[str], None] | None = None


class CaptionProtocol(ABC):
    """A test of captioners: a frozen dataclass whose fields are data and settings."""

    @property
    @abstractmethod
    def test_data(self) -> str:
        """Name of the data in files of scores."""

    @property
    def needs(self) -> Store | None:
        """The store whose images must not have been trained on, or None if the images are not from
        a store.
        """
        return None

    @abstractmethod
    def run(self, askers: Sequence[OpenCaptioner], how: Asking) -> list[Score]:
        """Return scores of the captioner, the first of ``askers``, and of its untrained baseline,
        if there is a second.
        """
