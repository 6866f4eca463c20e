"""Detection and instance segmentation on public images: Mask R-CNN on a copy of an encoder, trained
end to end (ViP, Table 4, A.4).

    settings = DetectionSettings()
    model = make_detector(encoder, settings, num_classes=80)
    train_detector(model, encoder, train, settings, hardware, work=Path("work/vip"))
    found = detect(model, encoder, test, settings, hardware)
    scores = detection_scores(encoder, test, found, settings, visibility="public")

Legend: B images, N detections, C channels, S side of the square, H height, W width (px).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchvision.models.detection.roi_heads import paste_masks_in_image

from dpvision.data.keys import StepKey
from dpvision.data.ordered import ordered_map
from dpvision.dense.backbone import dense_backbone
from dpvision.dense.dense_vit import layer_decay_groups
from dpvision.dense.detection.coco_data import CocoImage, CocoSet, mask_tools
from dpvision.dense.detection.coco_scores import Found, Kind, average_precisions
from dpvision.dense.detection.crops import (
    DetectionExample,
    Placement,
    example,
    fitted,
    jittered,
    square,
)
from dpvision.dense.detection.detector import Detector, detection_loss
from dpvision.dense.detection.feature_pyramid import FeaturePyramid
from dpvision.dense.detection.settings import DetectionSettings
from dpvision.dense.training_loop import Say, checked_steps, fit
from dpvision.dense.training_settings import DenseHardware
from dpvision.encoders.encoder import Encoder
from dpvision.errors import ConfigError, DataError
from dpvision.eval.score import Score, Visibility
from dpvision.train.distributed import Group

KINDS: tuple[Kind, ...] = ("box", "mask")


def make_detector(
    encoder: Encoder,
    settings: DetectionSettings,
    num_classes: int,
    *,
    recompute: bool = False,
    device: str | torch.device = "cpu",
) -> Detector:
    """Make a new detector on a copy of the encoder, a function of the encoder and
    ``settings.seed``.

    Args:
        recompute: whether to recompute the encoder's blocks in the backward pass: less memory, a
            third more time.

    Raises:
        ConfigError: the encoder is not a plain vision transformer, or its patches do not tile the
            square.
    """
    plain = dense_backbone(encoder)
    depth, patch, side = plain.depth, plain.patch_size, settings.image_size
    if side % (2 * patch):
        raise ConfigError(
            f"detection: image_size={side} with patches of {patch} px; expected a multiple of "
            f"{2 * patch}. Use {max(1, round(side / (2 * patch))) * 2 * patch}."
        )
    quarters = tuple(sorted({(i + 1) * depth // 4 - 1 for i in range(4)} - {-1}))
    vit = dense_backbone(
        encoder,
        window=min(settings.window, side // patch),
        relative_grid=side // patch,
        class_token=False,
        checkpointing=recompute,
        global_blocks=quarters if settings.global_blocks is None else settings.global_blocks,
        drop_path=settings.drop_path,
        relative_positions=settings.relative_positions,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = Detector(
            FeaturePyramid(vit, settings.channels),
            num_classes,
            encoder.mean,
            encoder.std,
            settings.heads(),
        )
    return model.to(device)


@dataclass(frozen=True)
class TrainingCrops:
    """Images with objects under large-scale jitter, for the training loop."""

    images: tuple[CocoImage, ...]
    side: int
    jitter: tuple[float, float]
    mean: tuple[float, float, float]
    seed: int

    def __len__(self) -> int:
        return len(self.images)

    def load(self, number: int, epoch: int) -> DetectionExample:
        """Return an image with its objects, a function of (seed, epoch, image). Raises DataError if
        it cannot be read.
        """
        image = self.images[number]
        place = jittered(image, StepKey(self.seed, epoch), self.side, self.jitter)
        return example(image, image.read(), place, self.side, self.mean)


def training_crops(train: CocoSet, encoder: Encoder, settings: DetectionSettings) -> TrainingCrops:
    """Return the images of ``train`` that have objects other than crowds.

    Raises:
        DataError: there are none.
    """
    chosen = tuple(image for image in train.images if image.learned)
    if not chosen:
        raise DataError(
            f"detection: {train.name} has no image with an object (without crowds); expected "
            "some. Use another file."
        )
    return TrainingCrops(chosen, settings.image_size, settings.jitter, encoder.mean, settings.seed)


def parameter_groups(model: Detector, settings: DetectionSettings) -> list[dict]:
    """Return AdamW's groups, with rates that fall towards the encoder's input."""
    return layer_decay_groups(
        model.pyramid.vit,
        model.parameters(),
        learning_rate=settings.learning_rate,
        layer_decay=settings.layer_decay,
        weight_decay=settings.weight_decay,
    )


def train_detector(
    model: Detector,
    encoder: Encoder,
    train: CocoSet,
    settings: DetectionSettings,
    hardware: DenseHardware,
    *,
    work: Path | None = None,
    group: Group | None = None,
    progress: Say | None = None,
) -> None:
    """Train in place; with a ``work`` folder a stopped training resumes. Raises as
    ``training_loop.fit``.
    """
    crops = training_crops(train, encoder, settings)
    checked_steps(settings.training(), len(crops), group.world_size if group is not None else 1)
    about = (
        f"detection, {train.name}, {len(train.classes)} classes, {train.num_objects} objects, "
        f"{settings.words()}"
    )
    fit(
        model,
        crops,
        detection_loss,
        parameter_groups(model, settings),
        settings.training(),
        hardware,
        work=work,
        group=group,
        about=about,
        lineage=encoder.lineage,
        progress=progress,
    )


@torch.no_grad()
def detect(
    model: Detector,
    encoder: Encoder,
    images: Sequence[CocoImage],
    settings: DetectionSettings,
    hardware: DenseHardware,
    *,
    group: Group | None = None,
    progress: Say | None = None,
) -> list[Found]:
    """Return the detections in each image. Under torchrun each rank computes a part, and all ranks
    get all results.

    Raises:
        DataError: an image cannot be read.
    """
    model.eval()
    device, side, group = (
        next(model.parameters()).device,
        settings.image_size,
        group or Group(0, 1, torch.device("cpu")),
    )
    mine = images[group.rank :: group.world_size]

    def load(image: CocoImage) -> tuple[CocoImage, Placement, Tensor]:
        place = fitted(image.height, image.width, side)
        return image, place, square(image.read(), place, side, encoder.mean)

    found: list[Found] = []
    batch: list[tuple[CocoImage, Placement, Tensor]] = []
    size = hardware.physical_batch_size
    for i, loaded in enumerate(
        ordered_map(load, mine, workers=hardware.workers, ahead=max(2 * hardware.workers, size))
    ):
        batch.append(loaded)
        if len(batch) == size or i == len(mine) - 1:
            with hardware.autocast(device):
                answers = model([x.to(device) for *_, x in batch])
            found += [
                in_image(answer, image, place)
                for answer, (image, place, _) in zip(answers, batch, strict=True)
            ]
            batch = []
            if progress is not None:
                progress(f"{(i + 1) * group.world_size:,} of {len(images):,} test images")
    if group.world_size == 1:
        return found
    parts: list[list[Found]] = [[] for _ in range(group.world_size)]
    dist.all_gather_object(parts, found)
    return [parts[i % group.world_size][i // group.world_size] for i in range(len(images))]


def in_image(answer: dict[str, Tensor], image: CocoImage, place: Placement) -> Found:
    """Convert a detector's output for a square to the image's pixels, without detections in the
    padding.
    """
    across, down = place.width / image.width, place.height / image.height
    box_N4 = answer["boxes"].float().cpu() / torch.tensor([across, down, across, down])
    limits = torch.tensor(
        [image.width, image.height, image.width, image.height], dtype=torch.float32
    )
    inside_N4 = box_N4.clamp(min=0).minimum(limits)
    keep = (inside_N4[:, 2] > inside_N4[:, 0]) & (inside_N4[:, 3] > inside_N4[:, 1])
    tools, mask_N1SS, runs = mask_tools(), answer["masks"].float().cpu(), list[dict[str, Any]]()
    for n in keep.nonzero()[
        :, 0
    ].tolist():  # one at a time: a mask of a photograph of 12 megapixels takes 48 MB
        mask_HW = paste_masks_in_image(
            mask_N1SS[n : n + 1], box_N4[n : n + 1], (image.height, image.width)
        )[0, 0]
        runs.append(tools.encode(np.asfortranarray((mask_HW > 0.5).numpy().astype(np.uint8))))
    label_N, score_N = answer["labels"].cpu()[keep] - 1, answer["scores"].float().cpu()[keep]
    return Found(inside_N4[keep].numpy(), label_N.numpy(), score_N.numpy(), tuple(runs))


def detection_scores(
    name: str,
    test: CocoSet,
    found: Sequence[Found],
    settings: DetectionSettings,
    hardware: DenseHardware,
    *,
    visibility: Visibility,
    progress: Say | None = None,
) -> list[Score]:
    """Return COCO's average precisions of boxes and masks as scores; chance is 0, the score of no
    detections.
    """
    words = settings.words(hardware)
    return [
        Score(
            name,
            p.value,
            p.low,
            p.high,
            p.num_images,
            0.0,
            f"detection, {words}, {p.name}",
            visibility,
        )
        for kind in KINDS
        for p in average_precisions(
            test, found, kind, resamples=settings.resamples, progress=progress
        )
    ]
