"""Loss functions of the recipes: (model, batch, key) -> one float32 loss per record, each a function of that record alone.

Legend: B records, V views, C channels, H height, W width, L patches.
"""

import torch
from torch import Tensor, nn

from dpvision.config import RunConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import LossFn
from dpvision.models import mae


def mae_losses(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    """Masked-autoencoder loss of each record, the mean over its views; masks are keyed by (seed, step, record id, view).

    Returns:
        losses_B, float32.
    """
    assert isinstance(model, mae.MAE)
    views = batch.image_BVCHW.shape[1]
    orders = [key.bits(batch.record_id_B, f"mask.{v}", model.num_patches) for v in range(views)]
    # All views in one pass: a record's views are rows side by side, which is also the cheaper form to clip.
    losses_BV = mae.losses(model, batch.image_BVCHW.flatten(0, 1), torch.stack(orders, dim=1).flatten(0, 1))
    return losses_BV.unflatten(0, (-1, views)).mean(1)


def loss_function(config: RunConfig) -> LossFn:
    """The loss of a run's model."""
    return {"mae": mae_losses}[config.model.kind]


def example_batch(config: RunConfig, num_records: int = 4) -> Batch:
    """Public batch of random pictures in the shapes of a run, for the separability gate."""
    size = config.model.encoder.image_size
    generator = torch.Generator().manual_seed(config.seed)
    return Batch(
        record_id_B=torch.arange(1, num_records + 1),
        valid_B=torch.ones(num_records, dtype=torch.bool),
        image_BVCHW=torch.randn(num_records, config.data.views, 3, size, size, generator=generator),
    )
