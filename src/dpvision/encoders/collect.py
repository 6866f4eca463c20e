"""Features of a store's records by several encoders, from one pass over the store.

Legend: N records, B images of a batch, D feature dimension, C channels, H height, W width.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dpvision.config import DataConfig
from dpvision.data.loader import image_batches
from dpvision.data.store import Store
from dpvision.encoders.encoder import FeatureFunction
from dpvision.errors import DataError

Progress = Callable[[int], None]
"""Called after each batch with the number of images done so far."""


@torch.inference_mode()
def collect_features(
    functions: dict[str, FeatureFunction],
    store: Store,
    data: DataConfig,
    image_size: int,
    *,
    rows: np.ndarray | None = None,
    batch_size: int = 256,
    workers: int = 2,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> tuple[dict[tuple[str, str], Tensor], Tensor, Tensor]:
    """Compute features of a store's images under the evaluation transform. Images that do not
    decode are left out.

    Args:
        functions: by name; their weights must be on ``device``.
        data: preprocessing of the images.
        rows: int64 positions in the store; if None, all.

    Returns:
        Features x_ND, float32, by (function's name, feature's name); label_N, int64 (-1 without a
        label); row_N, int64. All on the CPU.

    Raises:
        DataError: no image could be read.
    """
    total = store.num_records if rows is None else len(rows)
    found: dict[tuple[str, str], Tensor] = {}
    label_N, row_N, done = (
        torch.empty(total, dtype=torch.int64),
        torch.empty(total, dtype=torch.int64),
        0,
    )
    for x_BCHW, row_B, label_B in image_batches(
        store, rows, image_size, data, batch_size=batch_size, workers=workers
    ):
        here = slice(done, done + len(x_BCHW))
        label_N[here], row_N[here] = label_B, row_B
        x_BCHW = x_BCHW.to(device)
        for function_name, function in functions.items():
            for name, x_BD in function(x_BCHW).items():
                if (function_name, name) not in found:
                    found[function_name, name] = torch.empty(total, x_BD.shape[1])
                found[function_name, name][here] = x_BD.float().cpu()
        done = here.stop
        if progress is not None:
            progress(done)
    if done == 0:
        raise DataError(
            f"features: {store.path} has no readable image among {total}; expected one or more. "
            "Import the source again."
        )
    return {key: x_ND[:done] for key, x_ND in found.items()}, label_N[:done], row_N[:done]
