"""Detection and instance segmentation on public images: Mask R-CNN on a copy of an encoder, trained
end to end (ViP, Table 4, A.4).

    task = open_detection(files, settings, hardware, recompute=False, say=print)
    model = task.make(encoder)
    train(task, model, encoder, work=Path("work/vip"))
    found = task.detect(model, encoder, task.test.images)

Legend: B images, N detections, C channels, S side of the square, H height, W width (px).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import paste_masks_in_image

from dpvision.data.keys import StepKey
from dpvision.data.ordered import ordered_map
from dpvision.encoders.encoder import Encoder
from dpvision.errors import DataError
from dpvision.eval.dense.coco_data import CocoImage, CocoSet, check_apart, load_coco, mask_tools
from dpvision.eval.dense.coco_scores import Found, Kind, average_precisions
from dpvision.eval.dense.crops import (
    DetectionExample,
    Placement,
    example,
    fitted,
    jittered,
    square,
)
from dpvision.eval.dense.dense_vit import dense_backbone, plain_vit
from dpvision.eval.dense.detector import Detector, FeaturePyramid, detection_loss
from dpvision.eval.dense.job import DenseTask, Scored
from dpvision.eval.dense.settings import CocoFiles, DenseHardware, DetectionSettings
from dpvision.eval.dense.sheets import detection_sheet, save_sheet, shown_images
from dpvision.eval.dense.training_loop import REPEAT, Say
from dpvision.train.distributed import Group, answered

KINDS: tuple[Kind, ...] = ("box", "mask")


def open_detection(
    files: CocoFiles,
    settings: DetectionSettings,
    hardware: DenseHardware,
    recompute: bool,
    say: Say,
) -> "Detection":
    """Read both files of annotations. Raises as ``load_coco`` and ``check_apart``."""
    sets = []
    for annotations, images in files.parts():
        say(f"reading {annotations.name}")
        sets.append(load_coco(annotations, images, allow_missing=files.allow_missing))
    train, test = sets
    check_apart(train, test)
    return Detection(train, test, settings, hardware, recompute)


@dataclass(frozen=True)
class Detection(DenseTask):
    """Boxes and masks, scored by COCO's average precision."""

    train: CocoSet
    test: CocoSet
    settings: DetectionSettings
    hardware: DenseHardware
    recompute: bool = False
    """Whether to recompute the encoder's blocks in the backward pass: less memory, a third more
    time.
    """

    @property
    def num_trained(self) -> int:
        return sum(bool(image.learned) for image in self.train.images)

    @property
    def notes(self) -> list[str]:
        """Notes on images and objects that are left out or count only partly."""
        made = [f"{part.name}: {note}" for part in (self.train, self.test) for note in part.notes]
        idle = len(self.train.images) - self.num_trained
        bare = sum(thing.outline is None for image in self.train.images for thing in image.learned)
        short = sum(not image.has_masks for image in self.test.images)
        if idle:
            made.append(f"{self.train.name}: {idle:,} images without objects are not trained on")
        if bare:
            made.append(
                f"{self.train.name}: {bare:,} objects have a box and no mask: they train boxes only"
            )
        if short:
            made.append(
                f"{self.test.name}: {short:,} images have objects without mask and do not count "
                "for AP mask"
            )
        return made

    def make(self, encoder: Encoder) -> Detector:
        settings, cfg = self.settings, plain_vit(encoder).cfg
        settings.check_patch(cfg.patch_size, encoder.name)
        side, depth = settings.image_size // cfg.patch_size, cfg.depth
        quarters = tuple(sorted({(i + 1) * depth // 4 - 1 for i in range(4)} - {-1}))
        vit = dense_backbone(
            encoder,
            window=min(settings.window, side),
            relative_grid=side,
            class_token=False,
            checkpointing=self.recompute,
            global_blocks=quarters if settings.global_blocks is None else settings.global_blocks,
            drop_path=settings.drop_path,
            relative_positions=settings.relative_positions,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            pyramid = FeaturePyramid(vit, settings.channels)
            return Detector(pyramid, self.train.num_classes, encoder.mean, encoder.std, settings)

    def images(self, encoder: Encoder) -> "TrainingCrops":
        """Return the training images that have objects other than crowds.

        Raises:
            DataError: there are none.
        """
        chosen = tuple(image for image in self.train.images if image.learned)
        if not chosen:
            raise DataError(
                f"detection: {self.train.name} has no image with an object (without crowds); "
                "expected some. Use another file."
            )
        settings = self.settings
        return TrainingCrops(
            chosen, settings.image_size, settings.jitter, encoder.mean, settings.seed
        )

    def loss(self, model: nn.Module, examples: Sequence[DetectionExample]) -> Tensor:
        return detection_loss(model, examples)

    def about(self, encoder: Encoder) -> str:
        return (
            f"detection, {self.train.name}, {self.train.num_classes} classes, "
            f"{self.train.num_objects} objects, {self.settings.words()}"
        )

    def protocol(self, measure: str) -> str:
        return f"detection, {self.settings.words(self.hardware)}, {measure}"

    def score(self, model: nn.Module, encoder: Encoder, group: Group, say: Say) -> Scored | None:
        found = self.detect(model, encoder, self.test.images, group=group, progress=say)
        if not group.is_main:
            return None
        measures = [
            measure
            for kind in KINDS
            for measure in average_precisions(
                self.test, found, kind, resamples=self.settings.resamples, progress=say
            )
        ]
        return Scored(measures, [found[i] for i in shown_images(self.test)])

    def draw(self, path: Path, predictions: dict[str, list[Any]]) -> list[Path]:
        written = []
        for number, found in enumerate(predictions.values(), 1):
            several = len(predictions) > 1
            file = path.with_stem(f"{path.stem}-{number}") if several else path
            save_sheet(detection_sheet(self.test, found), file)
            written.append(file)
        return written

    def look(self, say: Say) -> None:
        everything, workers = [*self.train.images, *self.test.images], self.hardware.workers
        read = ordered_map(lambda p: p.read().shape, everything, workers=workers, ahead=4 * workers)
        for done, _ in enumerate(read):
            if done % 100 == 0:
                say(f"read {done:,} of {len(everything):,} images")

    @torch.no_grad()
    def detect(
        self,
        model: nn.Module,
        encoder: Encoder,
        images: Sequence[CocoImage],
        *,
        group: Group | None = None,
        progress: Say | None = None,
    ) -> list[Found]:
        """Return the detections in each image. Under torchrun each rank computes a part, and all
        ranks get all results.

        Raises:
            DataError: an image cannot be read.
        """
        model.eval()
        group, side = group or Group(0, 1, torch.device("cpu")), self.settings.image_size
        device, hardware = next(model.parameters()).device, self.hardware
        mine = images[group.rank :: group.world_size]

        def load(image: CocoImage) -> tuple[CocoImage, Placement, Tensor]:
            place = fitted(image.height, image.width, side)
            return image, place, square(image.read(), place, side, encoder.mean)

        found: list[Found] = []
        batch: list[tuple[CocoImage, Placement, Tensor]] = []
        size, workers = hardware.physical_batch_size, hardware.workers
        loaded = ordered_map(load, mine, workers=workers, ahead=max(2 * workers, size))
        for done, one in enumerate(loaded, 1):
            batch.append(one)
            if len(batch) == size or done == len(mine):
                with hardware.autocast(device):
                    answers = model([x.to(device) for *_, x in batch])
                found += [
                    in_image(answer, image, place)
                    for answer, (image, place, _) in zip(answers, batch, strict=True)
                ]
                batch = []
                if progress is not None:
                    progress(f"{done * group.world_size:,} of {len(images):,} test images")
        if group.world_size == 1:
            return found
        parts: list[list[Found]] = [[] for _ in range(group.world_size)]
        answered(partial(dist.all_gather_object, parts, found), REPEAT)
        return [parts[i % group.world_size][i // group.world_size] for i in range(len(images))]


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
    # One at a time: a mask of a photograph of 12 megapixels takes 48 MB.
    for n in keep.nonzero()[:, 0].tolist():
        mask_HW = paste_masks_in_image(
            mask_N1SS[n : n + 1], box_N4[n : n + 1], (image.height, image.width)
        )[0, 0]
        runs.append(tools.encode(np.asfortranarray((mask_HW > 0.5).numpy().astype(np.uint8))))
    label_N, score_N = answer["labels"].cpu()[keep] - 1, answer["scores"].float().cpu()[keep]
    return Found(inside_N4[keep].numpy(), label_N.numpy(), score_N.numpy(), tuple(runs))
