"""Loss functions of the recipes: (model, batch, key) -> one float32 loss per record, each a function of that record alone.

Legend: B records, V views, C channels, H height, W width, L patches.
"""

import torch
from torch import Tensor, nn

from dpvision.config import ClassifierConfig, RunConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import LossFn
from dpvision.models import classifier, mae


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


def classification_losses(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    """Cross-entropy of each record against its label, the mean over its views (augmentation multiplicity, De et al. 2022).

    The views' losses are averaged before the record's gradient is clipped, so a record costs the same whatever the number of its views. A
    record whose label is no class of the model contributes exactly zero (``models.classifier.losses``).

    Returns:
        losses_B, float32.
    """
    assert isinstance(model, classifier.Classifier) and batch.label_B is not None
    return classifier.losses(model, batch.image_BVCHW, batch.label_B)


def loss_function(config: RunConfig) -> LossFn:
    """The loss of a run's model."""
    return {"mae": mae_losses, "classifier": classification_losses}[config.model.kind]


def example_batch(config: RunConfig, num_records: int = 4) -> Batch:
    """Public batch of random pictures, and of labels for a classifier, in the shapes of a run; for the separability gate."""
    size = config.model.encoder.image_size
    generator = torch.Generator().manual_seed(config.seed)
    number_B = torch.arange(1, num_records + 1)
    return Batch(
        record_id_B=number_B,
        valid_B=torch.ones(num_records, dtype=torch.bool),
        image_BVCHW=torch.randn(num_records, config.data.views, 3, size, size, generator=generator),
        label_B=number_B % config.model.num_classes if isinstance(config.model, ClassifierConfig) else None,
    )
