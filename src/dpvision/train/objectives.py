"""Loss functions of the recipes: (model, batch, key) -> one float32 loss per record, each a
function of that record alone.

Legend: B records, V views, C channels, H height, W width, L patches.
"""

import torch
from torch import Tensor, nn

from dpvision.config import BOS_ID, EOS_ID, PAD_ID, CaptionerConfig, ClassifierConfig, RunConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import LossFn
from dpvision.models import captioner, classifier, cross_mae, mae


def mae_losses(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    """Masked-autoencoder loss of each record, the mean over its views; masks are keyed by (seed,
    step, record id, view).

    Returns:
        losses_B, float32.
    """
    assert isinstance(model, mae.MAE | cross_mae.CrossMAE)
    # All views in one pass: a record's views are adjacent rows, which is also cheaper to clip.
    x_BCHW, order_BL = batch.image_BVCHW.flatten(0, 1), _patch_orders(batch, key, model.num_patches)
    losses = (
        mae.losses(model, x_BCHW, order_BL)
        if isinstance(model, mae.MAE)
        else cross_mae.losses(model, x_BCHW, order_BL)
    )
    return losses.unflatten(0, (-1, batch.image_BVCHW.shape[1])).mean(1)


def caption_losses(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    """Captioning loss of each record, the mean over its views, each with its own caption.

    The choice of views predicted in parallel (CapPa) is keyed by (seed, step, record id, view), as
    are the masks of a second loss.

    Returns:
        losses_B, float32.
    """
    assert isinstance(model, captioner.Captioner) and batch.token_BVL is not None
    views, cfg = batch.image_BVCHW.shape[1], model.cfg
    parallel = order = None
    if cfg.parallel_rate > 0:
        parallel = (key.uniform(batch.record_id_B, "parallel", views) < cfg.parallel_rate).flatten()
    if cfg.reconstruction_weight > 0:
        order = _patch_orders(batch, key, model.encoder.num_patches)
    losses = captioner.losses(
        model, batch.image_BVCHW.flatten(0, 1), batch.token_BVL.flatten(0, 1), parallel, order
    )
    return losses.unflatten(0, (-1, views)).mean(1)


def _patch_orders(batch: Batch, key: StepKey, num_patches: int) -> Tensor:
    """Random keys of the patches of every view, (B x V, L)."""
    orders = [
        key.bits(batch.record_id_B, f"mask.{v}", num_patches)
        for v in range(batch.image_BVCHW.shape[1])
    ]
    return torch.stack(orders, dim=1).flatten(0, 1)


def classification_losses(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    """Cross-entropy of each record against its label or labels, the mean over its views
    (augmentation multiplicity, De et al. 2022).

    The views' losses are averaged before the record's gradient is clipped, so the number of views
    does not change the privacy cost. A record whose label is not a class of the model contributes
    exactly zero (``models.classifier.losses``).

    Returns:
        losses_B, float32.
    """
    assert isinstance(model, classifier.Classifier)
    return classifier.losses(model, batch.image_BVCHW, batch.label_B, batch.label_BV)


def loss_function(config: RunConfig) -> LossFn:
    """Return the loss function for a run's model."""
    kinds = {
        "mae": mae_losses,
        "classifier": classification_losses,
        "cross_mae": mae_losses,
        "captioner": caption_losses,
    }
    return kinds[config.model.kind]


def example_batch(config: RunConfig, num_records: int = 4) -> Batch:
    """Make a public batch of random images in the shapes of a run, with labels or captions if the
    model needs them; for the gates.
    """
    size, views, cfg = config.model.encoder.image_size, config.views, config.model
    generator = torch.Generator().manual_seed(config.seed)
    number_B = torch.arange(1, num_records + 1)
    image_BVCHW = torch.randn(num_records, views, 3, size, size, generator=generator)
    labels = _random_labels(cfg, number_B, generator) if isinstance(cfg, ClassifierConfig) else None
    by_view = labels is not None and config.privacy.unit.draws_people
    return Batch(
        record_id_B=number_B,
        valid_B=torch.ones(num_records, dtype=torch.bool),
        image_BVCHW=image_BVCHW,
        token_BVL=_random_captions(cfg, num_records * views, generator).unflatten(0, (-1, views))
        if isinstance(cfg, CaptionerConfig)
        else None,
        label_B=None if by_view else labels,
        # A person's images may differ in their labels.
        label_BV=torch.stack([labels.roll(v, 0) for v in range(views)], dim=1)
        if by_view and labels is not None
        else None,
    )


def _random_labels(cfg: ClassifierConfig, number_B: Tensor, generator: torch.Generator) -> Tensor:
    if not cfg.multi_label:
        return number_B % cfg.num_classes
    return torch.randint(
        0, 2, (len(number_B), cfg.num_classes), dtype=torch.uint8, generator=generator
    )


def _random_captions(cfg: CaptionerConfig, num: int, generator: torch.Generator) -> Tensor:
    """Captions of random tokens and lengths, int64 (num, L); the first has the full length."""
    token = torch.randint(EOS_ID + 1, cfg.vocab_size, (num, cfg.num_tokens), generator=generator)
    last = torch.randint(2, cfg.num_tokens, (num, 1), generator=generator)
    last[0] = cfg.num_tokens - 1
    place = torch.arange(cfg.num_tokens)
    token[:, 0] = BOS_ID
    return token.where(place < last, torch.where(place == last, EOS_ID, PAD_ID))
