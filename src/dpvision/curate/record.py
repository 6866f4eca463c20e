"""One image on its way through the steps of curation, and what a step is."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from dpvision.data.decode import decode
from dpvision.data.sample import Sample


class Record:
    """One image of a source; ``reason`` is why it is left out, and later steps do not see it."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.reason: str | None = None
        self.facts: dict[str, np.ndarray[Any, Any]] = {}
        self._pixels_HWC: np.ndarray | None = None

    def pixels(self) -> np.ndarray:
        """Return the pixels that a training read gives, uint8 (H, W, 3), not writable.

        Raises:
            BadImage: see ``data.decode.decode``.
        """
        if self._pixels_HWC is None:
            self._pixels_HWC = decode(self.sample.image)
            self._pixels_HWC.flags.writeable = False
        return self._pixels_HWC

    def leave_out(self, reason: str) -> None:
        self.reason = reason

    def change_image(self, data: bytes) -> None:
        """Replace the image's bytes; they are then copied to the result."""
        self.sample = self.sample._replace(image=data, place=None)
        self._pixels_HWC = None


class RecordStep(Protocol):
    """A frozen dataclass of settings. What becomes of a record depends on that record alone."""

    name: ClassVar[str]

    def opened(self) -> Callable[[Sequence[Record]], None]:
        """Load what the step needs, once a process; the result changes records in place."""
