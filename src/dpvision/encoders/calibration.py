"""Temperature and thresholds of a run's classifier, in RUN/calibration.json beside its checkpoints.

They are made from public images by ``eval.probes.calibrate``, so they cost no privacy. The file
names the weights that it is for by their digest: other weights need a calibration of their own.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpvision.checkpoint import Checkpoint
from dpvision.data.store import Store
from dpvision.errors import CheckpointError
from dpvision.files import write_json
from dpvision.strict_json import parse_json

FORMAT = "dpvision-calibration-1"
CALIBRATION = "calibration.json"


@dataclass(frozen=True)
class Calibration:
    """What turns scores into probabilities, and probabilities into decisions."""

    weights: str
    """SHA-256 of the file of the head's or classifier's weights."""
    temperature: float
    """Divides the scores; above 0."""
    offset: float
    """Subtracted from the scores first; 0 with the softmax loss."""
    thresholds: tuple[float, ...] | None
    """Probability above which each class of a multi-label run is predicted; None for one class per
    image.
    """
    rule: str | None
    """How the thresholds were chosen."""
    store: dict[str, Any]
    """The public store: name, store_id, split, licence, and the number of its images that were
    used.
    """
    loss_before: float
    """Mean negative log likelihood of an image's labels without calibration."""
    loss_after: float

    def fitted_on(self, store: Store) -> bool:
        """Return whether a store may hold the images that were used: it is of the same import, and
        not the other half of a split (``data.split``).
        """
        split, other = store.meta.get("split") or {}, self.store.get("split") or {}
        halves = {split.get("half"), other.get("half")} == {"a", "b"}
        apart = halves and split | {"half": ""} == other | {"half": ""}
        return self.store.get("store_id") == store.store_id and not apart


def calibration_path(checkpoint: Checkpoint) -> Path:
    """Return the path of the file of a checkpoint's run."""
    return checkpoint.path.absolute().parent.parent / CALIBRATION


def weights_of(checkpoint: Checkpoint, ema: bool) -> str:
    """Return the SHA-256 of the file of a checkpoint's weights, or of its averaged weights."""
    return checkpoint.manifest["tensors"][f"{'ema' if ema else 'model'}.safetensors"]


def save_calibration(checkpoint: Checkpoint, made: Calibration) -> Path:
    """Write the file, and return its path. Raises CheckpointError if it cannot be written."""
    path = calibration_path(checkpoint)
    write_json(path, {"format": FORMAT, **asdict(made)})
    return path


def read_calibration(checkpoint: Checkpoint, ema: bool, num_classes: int) -> Calibration | None:
    """Return the calibration of a checkpoint's weights, or None if the run has none.

    Raises:
        CheckpointError: the file cannot be read, has other content than ``Calibration``, or is for
            other weights.
    """
    path = calibration_path(checkpoint)
    remedy = "Repeat `dpvision calibrate`, or delete the file for uncalibrated scores."
    try:
        values = parse_json(path.read_bytes())
        found = _checked(values, num_classes)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"calibration: {path} ({type(error).__name__}: {error}); expected {FORMAT}, for "
            f"{num_classes} classes. {remedy}"
        ) from None
    if found.weights != weights_of(checkpoint, ema):
        raise CheckpointError(
            f"calibration: {path} is for other weights than {checkpoint.path}"
            f"{', averaged' if ema else ''}; expected its own. {remedy}"
        )
    return found


def _checked(values: Any, num_classes: int) -> Calibration:
    """Return the content of the file. Raises ValueError, KeyError or TypeError for another one."""
    if values.pop("format") != FORMAT:
        raise ValueError("another format")
    found = Calibration(**values)
    if not (0 < found.temperature < math.inf and -math.inf < found.offset < math.inf):
        raise ValueError(f"temperature={found.temperature}, offset={found.offset}")
    if not isinstance(found.store, dict):
        raise ValueError("store is not an object")
    if found.thresholds is None:
        return found
    if len(found.thresholds) != num_classes or not all(0 <= t <= 1 for t in found.thresholds):
        raise ValueError(f"thresholds={found.thresholds}")
    return Calibration(**values | {"thresholds": tuple(found.thresholds)})
