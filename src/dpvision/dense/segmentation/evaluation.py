"""Semantic segmentation on public images: UPerNet on a copy of an encoder, trained end to end,
scored by mIoU (ViP, Table 4 and A.4).

    settings = SegmentationSettings()
    model = make_segmenter(encoder, settings, num_classes=150)
    train_segmenter(model, encoder, train, settings, hardware, work=Path("work/vip"))
    counts = pixel_counts(model, encoder, test, settings)
    scores = segmentation_scores(encoder.name, counts, settings.words(hardware), "public")

Legend: N images, K classes, B records, C channels, H height, W width.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dpvision.data.ordered import ordered_map
from dpvision.data.transform import normalise
from dpvision.dense.backbone import dense_backbone
from dpvision.dense.dense_vit import layer_decay_groups
from dpvision.dense.segmentation.mean_iou import count_pixels, measures
from dpvision.dense.segmentation.semantic_augment import TrainingViews, View, resized
from dpvision.dense.segmentation.semantic_data import IGNORED, Labelled, SemanticFolder
from dpvision.dense.segmentation.settings import SegmentationSettings
from dpvision.dense.segmentation.sliding_window import likeliest, window_probabilities
from dpvision.dense.segmentation.upernet import Segmenter, segmentation_loss
from dpvision.dense.training_loop import Say, checked_steps, fit, seconds_a_step, synchronised
from dpvision.dense.training_settings import DenseHardware
from dpvision.encoders.encoder import Encoder
from dpvision.errors import ConfigError
from dpvision.eval.score import Score, Visibility
from dpvision.train.distributed import Group, all_reduce_vector


def checked_fit(
    encoder: Encoder,
    settings: SegmentationSettings,
    hardware: DenseHardware,
    num_images: int,
    group: Group,
) -> int:
    """Check the settings before training and return its number of steps.

    Raises:
        ConfigError: the encoder is not a plain vision transformer, the crop does not fit its
            patches, BatchNorm would see only one image, or as ``training_loop.checked_steps``.
    """
    patch = dense_backbone(encoder).patch_size
    side = settings.crop_size
    if side % patch or side < 2 * patch:
        rule = f"expected a multiple of {encoder.name}'s patch, {patch} px, and two at least"
        raise ConfigError(
            f"segmentation: crop_size={side}; {rule}. Use {max(2, round(side / patch)) * patch}."
        )
    steps = checked_steps(settings.training(), num_images, group.world_size)
    share = settings.batch_size // group.world_size
    smallest = share // math.ceil(share / hardware.physical_batch_size)
    synchronous = group.world_size > 1 and group.device.type == "cuda"
    if settings.norm == "batch" and smallest < 2 and not synchronous:
        got = (
            f"norm='batch' with {smallest} image in a forward pass "
            f"(batch_size={settings.batch_size}"
        )
        got += f", physical_batch_size={hardware.physical_batch_size})"
        raise ConfigError(
            f"segmentation: {got}; expected 2 or more. Use --segmentation.norm group, or a "
            "larger physical batch."
        )
    hardware.autocast(group.device)
    return steps


def make_segmenter(encoder: Encoder, settings: SegmentationSettings, num_classes: int) -> Segmenter:
    """Make a new UPerNet on a trainable copy of the encoder, on the CPU; a function of the
    encoder's weights and the seed.

    Raises:
        ConfigError: the encoder is not a plain vision transformer.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        patch = dense_backbone(encoder).patch_size
        backbone = dense_backbone(
            encoder,
            relative_positions=settings.relative_positions,
            drop_path=settings.drop_path,
            class_token=True,
            relative_grid=settings.crop_size // patch,
        )
        return Segmenter(
            backbone,
            num_classes,
            channels=settings.channels,
            dropout=settings.dropout,
            norm=settings.norm,
        )


def train_segmenter(
    model: Segmenter,
    encoder: Encoder,
    train: SemanticFolder,
    settings: SegmentationSettings,
    hardware: DenseHardware | None = None,
    *,
    work: Path | None = None,
    group: Group | None = None,
    progress: Say | None = None,
) -> None:
    """Train in place on ``group.device``; with a ``work`` folder a stopped training resumes. Raises
    as ``training_loop.fit``.
    """
    group = group or Group(0, 1, torch.device("cpu"))
    synchronised(model.to(group.device), group)
    views = TrainingViews(train, settings.augmentation(encoder))
    about = (
        f"{settings}, {train.name}, {len(train.classes.names)} classes, normalised by "
        f"{encoder.mean} {encoder.std}"
    )
    loss, groups = _loss(settings, group.device), _groups(model, settings)
    fit(
        model,
        views,
        loss,
        groups,
        settings.training(),
        hardware,
        work=work,
        group=group,
        about=about,
        lineage=encoder.lineage,
        progress=progress,
    )


def step_seconds(
    model: Segmenter,
    encoder: Encoder,
    train: SemanticFolder,
    settings: SegmentationSettings,
    hardware: DenseHardware,
    group: Group,
) -> float:
    """Return the seconds per step on this machine, measured on one forward and backward pass.
    Changes the model.
    """
    model.to(group.device)
    views, loss = (
        TrainingViews(train, settings.augmentation(encoder)),
        _loss(settings, group.device),
    )
    return seconds_a_step(model, views, loss, settings.training(), hardware) / group.world_size


@torch.inference_mode()
def predict(
    model: Segmenter,
    encoder: Encoder,
    pixels_HWC: np.ndarray,
    settings: SegmentationSettings,
    hardware: DenseHardware | None = None,
) -> np.ndarray:
    """Return the class of each pixel of an image, uint8 (H, W).

    The shorter side is resized to ``crop_size`` (the longer one to at most four times that),
    probabilities are averaged over windows and resized to the image's size.
    """
    hardware, device = hardware or DenseHardware(), next(model.parameters()).device
    height, width = pixels_HWC.shape[:2]
    x_CHW = _prepared(pixels_HWC, encoder, settings.crop_size).to(device)

    def network(x_BCHW: Tensor) -> Tensor:
        with hardware.autocast(device):
            return model.logits(x_BCHW)

    probability_KHW = window_probabilities(
        network,
        x_CHW,
        settings.crop_size,
        settings.window_stride,
        batch_size=max(1, hardware.physical_batch_size),
    )
    return likeliest(probability_KHW, (height, width)).to(torch.uint8).cpu().numpy()


def pixel_counts(
    model: Segmenter,
    encoder: Encoder,
    test: SemanticFolder,
    settings: SegmentationSettings,
    hardware: DenseHardware | None = None,
    *,
    group: Group | None = None,
    progress: Say | None = None,
) -> np.ndarray:
    """Return correct, true and predicted pixel counts by class of every test image, int64 (N, 3,
    K), on every rank.
    """
    hardware, group = (
        hardware or DenseHardware(),
        group or Group(0, 1, next(model.parameters()).device),
    )
    say = progress if progress is not None and group.is_main else (lambda text: None)
    num_classes = len(test.classes.names)
    count_N3K = np.zeros((len(test), 3, num_classes), dtype=np.int64)
    model.eval()
    mine: Sequence[int] = range(group.rank, len(test), group.world_size)
    images = ordered_map(test.read, mine, workers=hardware.workers, ahead=2 * hardware.workers)
    for done, (number, labelled) in enumerate(zip(mine, images, strict=True), 1):
        said = predict(model, encoder, labelled.pixels_HWC, settings, hardware)
        count_N3K[number] = count_pixels(labelled.class_HW, said, num_classes)
        say(f"scored {min(done * group.world_size, len(test)):,} of {len(test):,} test images")
    return all_reduce_vector(torch.from_numpy(count_N3K).double(), group).long().numpy()


def segmentation_scores(
    name: str, count_N3K: np.ndarray, how: str, visibility: Visibility
) -> list[Score]:
    """Return mIoU, pixel accuracy and mean class accuracy as scores; ``how`` describes the
    settings.

    Raises:
        DataError: no test pixel counts.
    """
    found, num = measures(count_N3K), len(count_N3K)
    return [
        Score(
            name,
            m.value,
            m.low,
            m.high,
            num,
            m.chance,
            f"segmentation, {m.name}, {how}",
            visibility,
        )
        for m in found
    ]


def answers(
    model: Segmenter,
    encoder: Encoder,
    test: SemanticFolder,
    numbers: Sequence[int],
    settings: SegmentationSettings,
) -> list[tuple[Labelled, np.ndarray]]:
    """Return some test images with their truth and the model's predictions, for display."""
    model.eval()
    return [
        (labelled, predict(model, encoder, labelled.pixels_HWC, settings))
        for labelled in map(test.read, numbers)
    ]


def _prepared(pixels_HWC: np.ndarray, encoder: Encoder, side: int) -> Tensor:
    width, height = resized(pixels_HWC.shape[1], pixels_HWC.shape[0], side)
    pixels = np.asarray(
        Image.fromarray(pixels_HWC).resize((width, height), Image.Resampling.BILINEAR)
    )
    x_CHW = np.empty((3, height, width), dtype=np.float32)
    normalise(pixels, encoder.mean, encoder.std, x_CHW)
    return torch.from_numpy(x_CHW)


def _groups(model: Segmenter, settings: SegmentationSettings) -> list[dict[str, Any]]:
    return layer_decay_groups(
        model.backbone,
        model.parameters(),
        learning_rate=settings.learning_rate,
        layer_decay=settings.layer_decay,
        weight_decay=settings.weight_decay,
    )


def _loss(
    settings: SegmentationSettings, device: torch.device
) -> Callable[[nn.Module, list[View]], Tensor]:
    def loss(model: nn.Module, views: list[View]) -> Tensor:
        x_BCHW, class_BHW = (torch.stack(part).to(device) for part in zip(*views, strict=True))
        return segmentation_loss(model, x_BCHW, class_BHW, settings.auxiliary_weight, IGNORED)

    return loss
