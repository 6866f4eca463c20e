"""Leave out images that are too small, or far from square."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpvision.curate.record import Record
from dpvision.errors import ConfigError


@dataclass(frozen=True)
class Size:
    """Step ``size``."""

    name: ClassVar[str] = "size"
    decodes: ClassVar[bool] = True
    min_side_px: int = 64
    """Shorter side of the smallest image that is kept."""
    max_aspect: float = 3.0
    """Longest image that is kept: longer side divided by shorter."""

    def __post_init__(self) -> None:
        if not self.min_side_px >= 1 or not 1 <= self.max_aspect < float("inf"):
            raise ConfigError(
                f"size: min_side_px={self.min_side_px}, max_aspect={self.max_aspect}; expected at "
                "least 1 pixel, and a ratio from 1. Use 64 and 3."
            )

    def opened(self) -> Callable[[Sequence[Record]], None]:
        """See ``RecordStep``."""
        return self._apply

    def _apply(self, records: Sequence[Record]) -> None:
        for record in records:
            short, long = sorted(record.pixels().shape[:2])
            if short < self.min_side_px:
                record.leave_out(f"below {self.min_side_px} pixels")
            elif long > self.max_aspect * short:
                record.leave_out(f"longer than {self.max_aspect:g} to 1")
