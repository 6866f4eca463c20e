"""What an encoder sees of procedural scenes: ridge probes of their attributes, on public scenes of
numbers that no training store has.
"""

import numpy as np
import torch

from dpvision.config import DataConfig
from dpvision.data.transform import normalise
from dpvision.encoders.pooled import PooledNetwork
from dpvision.eval.probes.ridge import fit_ridge
from dpvision.synthetic.scenes import ATTRIBUTES, Scene, make_scene

FIRST_FIT, FIRST_TEST = 10_000_000, 20_000_000


def scenes(first: int, num: int, size_px: int) -> list[Scene]:
    return [make_scene(i, size_px) for i in range(first, first + num)]


def pixels(made: list[Scene]) -> torch.Tensor:
    """Normalised images, float32 (N, 3, S, S)."""
    size = made[0].image.shape[0]
    x = np.empty((len(made), 3, size, size), dtype=np.float32)
    normalise(np.stack([scene.image for scene in made]), DataConfig().mean, DataConfig().std, x)
    return torch.from_numpy(x)


def attribute_probes(
    encoder: PooledNetwork, fit: list[Scene], test: list[Scene]
) -> dict[str, float]:
    """Accuracy in percent of every attribute and their mean, by pooling."""
    with torch.inference_mode():
        features = [
            {
                name: torch.cat(parts).numpy()
                for name, parts in _poolings(encoder, pixels(made)).items()
            }
            for made in (fit, test)
        ]
    found = {}
    for pooling in features[0]:
        values = []
        for name in ATTRIBUTES:
            fit_N, test_N = (
                np.array([scene.attributes[name] for scene in made]) for made in (fit, test)
            )
            probe = fit_ridge(features[0][pooling], fit_N)
            values.append(100 * float((probe.predict(features[1][pooling]) == test_N).mean()))
            found[f"{name}, {pooling}"] = values[-1]
        found[f"mean of attributes, {pooling}"] = float(np.mean(values))
    return found


def _poolings(encoder: PooledNetwork, x_BCHW: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    parts: dict[str, list[torch.Tensor]] = {}
    for part in x_BCHW.split(500):
        for name, x_BD in encoder.poolings(part).items():
            parts.setdefault(name, []).append(x_BD)
    return parts
