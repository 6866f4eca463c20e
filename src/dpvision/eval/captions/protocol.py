"""What a test of captioners is: the store that it needs unseen, the name of its data, and a run that yields scores."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpvision.data.store import Store
from dpvision.eval.captions.open_captioner import OpenCaptioner
from dpvision.eval.captions.settings import Fit
from dpvision.eval.score import Score


@dataclass(frozen=True)
class Asking:
    """How captioners are asked, the same in all tests."""

    fit: Fit = "squash"
    """How images become square."""
    other_images: bool = True
    """Whether compositional tests also ask the captioner about another image: what the captions alone give away."""
    batch_size: int = 32
    workers: int = 2
    progress: Callable[[str], None] | None = None


class CaptionProtocol(ABC):
    """A way to measure captioners. Frozen dataclasses whose fields are data and settings."""

    @property
    @abstractmethod
    def test_data(self) -> str:
        """The name of the data, as files of scores have it."""

    @property
    def needs(self) -> Store | None:
        """The store whose images the captioner must not have been trained on; if None, the images are from elsewhere."""
        return None

    @abstractmethod
    def run(self, askers: Sequence[OpenCaptioner], how: Asking) -> list[Score]:
        """Scores of the captioner, the first of ``askers``, and of its untrained control, if that is the second."""
