"""Semantic segmentation on public images: UPerNet on a copy of an encoder, trained end to end,
scored by mIoU (ViP, Table 4 and A.4).

    task = open_segmentation(folders, settings, hardware, num_shown=0, say=print)
    model = task.make(encoder)
    train(task, model, encoder, work=Path("work/vip"))
    counts = task.count_pixels(model, encoder)

A test image of any size is predicted by square windows that overlap, whose class probabilities are
averaged.

Legend: N images, K classes, B records or windows, C channels, H height, W width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.data.ordered import ordered_map
from dpvision.data.transform import normalise
from dpvision.encoders.encoder import Encoder
from dpvision.errors import ConfigError
from dpvision.eval.dense.dense_vit import dense_backbone, plain_vit
from dpvision.eval.dense.job import DenseTask, Scored
from dpvision.eval.dense.mean_iou import class_iou, count_pixels, measures
from dpvision.eval.dense.semantic_augment import TrainingViews, View, resized
from dpvision.eval.dense.semantic_data import (
    IGNORED,
    SemanticFolder,
    load_classes,
    open_ade20k,
    open_folder,
)
from dpvision.eval.dense.settings import DenseHardware, MaskFolders, SegmentationSettings
from dpvision.eval.dense.sheets import SheetRow, render_sheet, save_sheet
from dpvision.eval.dense.training_loop import Say
from dpvision.eval.dense.upernet import Segmenter, segmentation_loss
from dpvision.train.distributed import Group, all_reduce_vector

_CLASSES_AT_ONCE = 16


def open_segmentation(
    folders: MaskFolders,
    settings: SegmentationSettings,
    hardware: DenseHardware,
    num_shown: int,
    say: Say,
) -> "Segmentation":
    """Open and check all images and masks.

    Raises:
        ConfigError: images are in both sets, or as ``MaskFolders.parts``.
        DataError: as ``open_folder``, ``open_ade20k`` and ``load_classes``.
    """
    place, parts = folders.parts()
    if parts is None:
        train, test = open_ade20k(place, workers=hardware.workers, progress=say)
    else:
        classes = load_classes(place, folders.ignore_ids)
        train, test = (
            open_folder(*part, classes, workers=hardware.workers, progress=say) for part in parts
        )
        shared = {image.resolve() for image, _ in train.files} & {
            image.resolve() for image, _ in test.files
        }
        if shared:
            raise ConfigError(
                f"evaluate: {len(shared):,} images are in both training and test, such as "
                f"{min(shared)}; expected disjoint sets. Split the folders."
            )
    return Segmentation(train, test, settings, hardware, num_shown)


@dataclass(frozen=True)
class Segmentation(DenseTask):
    """A class per pixel, scored by mIoU."""

    train: SemanticFolder
    test: SemanticFolder
    settings: SegmentationSettings
    hardware: DenseHardware
    num_shown: int = 0
    """Number of test images on the contact sheet."""

    @property
    def notes(self) -> list[str]:
        note = self.train.classes.note()
        return [] if note is None else [note]

    @property
    def shown(self) -> list[int]:
        """Test images of the contact sheet, evenly spread over the folder, so not hand-picked."""
        num = min(self.num_shown, len(self.test))
        return [i * len(self.test) // num for i in range(num)]

    def make(self, encoder: Encoder) -> Segmenter:
        settings, patch = self.settings, plain_vit(encoder).cfg.patch_size
        settings.check_patch(patch, encoder.name)
        backbone = dense_backbone(
            encoder,
            relative_positions=settings.relative_positions,
            drop_path=settings.drop_path,
            class_token=True,
            relative_grid=settings.crop_size // patch,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            return Segmenter(
                backbone,
                self.train.num_classes,
                channels=settings.channels,
                dropout=settings.dropout,
                norm=settings.norm,
            )

    def images(self, encoder: Encoder) -> TrainingViews:
        return TrainingViews(self.train, self.settings, (encoder.mean, encoder.std))

    def loss(self, model: nn.Module, examples: Sequence[View]) -> Tensor:
        device = next(model.parameters()).device
        x_BCHW, class_BHW = (torch.stack(part).to(device) for part in zip(*examples, strict=True))
        return segmentation_loss(model, x_BCHW, class_BHW, self.settings.auxiliary_weight, IGNORED)

    def about(self, encoder: Encoder) -> str:
        return (
            f"{self.settings}, {self.train.name}, {self.train.num_classes} classes, normalised by "
            f"{encoder.mean} {encoder.std}"
        )

    def protocol(self, measure: str) -> str:
        return f"segmentation, {measure}, {self.settings.words(self.hardware)}"

    def check(self, encoder: Encoder, group: Group) -> int:
        """Refuse BatchNorm over a single image, too."""
        steps = super().check(encoder, group)
        share = self.settings.batch_size // group.world_size
        smallest = share // math.ceil(share / self.hardware.physical_batch_size)
        synchronous = group.world_size > 1 and group.device.type == "cuda"
        if self.settings.norm == "batch" and smallest < 2 and not synchronous:
            raise ConfigError(
                f"segmentation: norm='batch' with {smallest} image in a forward pass "
                f"(batch_size={self.settings.batch_size}, "
                f"physical_batch_size={self.hardware.physical_batch_size}); expected 2 or more. "
                "Use --segmentation.norm group, or a larger physical batch."
            )
        return steps

    def score(self, model: nn.Module, encoder: Encoder, group: Group, say: Say) -> Scored | None:
        count_N3K = self.count_pixels(model, encoder, group=group, progress=say)
        if not group.is_main:
            return None
        names, iou_K = self.test.classes.names, class_iou(count_N3K.sum(axis=0))
        finite = {k: float(v) for k, v in zip(names, iou_K, strict=True) if np.isfinite(v)}
        predictions = [
            predict(model, encoder, self.test.read(number).pixels_HWC, self.settings)
            for number in self.shown
        ]
        return Scored(measures(count_N3K), predictions, {"class_iou": finite})

    def draw(self, path: Path, predictions: dict[str, list[Any]]) -> list[Path]:
        rows = [
            SheetRow(*self.test.read(number), tuple(own[n] for own in predictions.values()))
            for n, number in enumerate(self.shown)
        ]
        save_sheet(render_sheet(rows, self.test.classes.names, list(predictions)), path)
        return [path]

    def count_pixels(
        self,
        model: nn.Module,
        encoder: Encoder,
        *,
        group: Group | None = None,
        progress: Say | None = None,
    ) -> np.ndarray:
        """Return correct, true and predicted pixel counts by class of every test image, int64 (N,
        3, K), on every rank.
        """
        group = group or Group(0, 1, next(model.parameters()).device)
        say = progress if progress is not None and group.is_main else (lambda text: None)
        count_N3K = np.zeros((len(self.test), 3, self.test.num_classes), dtype=np.int64)
        model.eval()
        mine: Sequence[int] = range(group.rank, len(self.test), group.world_size)
        workers = self.hardware.workers
        images = ordered_map(self.test.read, mine, workers=workers, ahead=2 * workers)
        for done, (number, labelled) in enumerate(zip(mine, images, strict=True), 1):
            said = predict(model, encoder, labelled.pixels_HWC, self.settings, self.hardware)
            count_N3K[number] = count_pixels(labelled.class_HW, said, self.test.num_classes)
            finished = min(done * group.world_size, len(self.test))
            say(f"scored {finished:,} of {len(self.test):,} test images")
        return all_reduce_vector(torch.from_numpy(count_N3K).double(), group).long().numpy()


@torch.inference_mode()
def predict(
    model: nn.Module,
    encoder: Encoder,
    pixels_HWC: np.ndarray,
    settings: SegmentationSettings,
    hardware: DenseHardware | None = None,
) -> np.ndarray:
    """Return the class of each pixel of an image, uint8 (H, W).

    The shorter side is resized to ``crop_size`` (the longer one to at most four times that),
    probabilities are averaged over windows and resized to the image's size.
    """
    assert isinstance(model, Segmenter)
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


def window_starts(length: int, window: int, stride: int) -> list[int]:
    """Return the start of each window along one side: ``stride`` apart, the last one aligned with
    the end.

    >>> window_starts(683, 512, 341)
    [0, 171]
    """
    count = max(0, math.ceil((length - window) / stride)) + 1
    return [min(i * stride, max(length - window, 0)) for i in range(count)]


def window_probabilities(
    network: Callable[[Tensor], Tensor],
    x_CHW: Tensor,
    window: int,
    stride: int,
    *,
    batch_size: int = 8,
) -> Tensor:
    """Return each pixel's class probabilities, averaged over the windows that contain it, float32
    (K, H, W).

    Args:
        network: function from x_BCHW of side ``window`` to logits (B, K, window, window).
        x_CHW: normalised; a side shorter than the window is padded with zeros, which the result
            does not include.
        stride: 1 to ``window``.
        batch_size: windows in one pass.
    """
    height, width = x_CHW.shape[-2:]
    x_CHW = F.pad(x_CHW, (0, max(0, window - width), 0, max(0, window - height)))
    tall, wide = x_CHW.shape[-2:]
    places = [
        (top, left)
        for top in window_starts(tall, window, stride)
        for left in window_starts(wide, window, stride)
    ]
    total, seen_HW = torch.empty(0), x_CHW.new_zeros(tall, wide, dtype=torch.float32)
    for b in range(0, len(places), batch_size):
        here = places[b : b + batch_size]
        cut = torch.stack(
            [x_CHW[:, top : top + window, left : left + window] for top, left in here]
        )
        probability_BKHW = network(cut).float().softmax(dim=1)
        if not len(total):
            total = probability_BKHW.new_zeros(probability_BKHW.shape[1], tall, wide)
        for (top, left), probability_KHW in zip(here, probability_BKHW, strict=True):
            total[:, top : top + window, left : left + window] += probability_KHW
            seen_HW[top : top + window, left : left + window] += 1
    return (total / seen_HW)[:, :height, :width]


def likeliest(probability_KHW: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the most likely class of each pixel after bilinear resizing to (height, width), int64,
    a few classes at a time.
    """
    best, number = torch.empty(0), torch.empty(0)
    for k in range(0, len(probability_KHW), _CLASSES_AT_ONCE):
        some = probability_KHW[None, k : k + _CLASSES_AT_ONCE]
        if tuple(some.shape[-2:]) != size:
            some = F.interpolate(some, size=size, mode="bilinear", align_corners=False)
        value, which = some[0].max(dim=0)
        if k == 0:
            best, number = value, which
        else:
            better = value > best
            best, number = torch.where(better, value, best), torch.where(better, which + k, number)
    return number


def _prepared(pixels_HWC: np.ndarray, encoder: Encoder, side: int) -> Tensor:
    width, height = resized(pixels_HWC.shape[1], pixels_HWC.shape[0], side)
    pixels = np.asarray(
        Image.fromarray(pixels_HWC).resize((width, height), Image.Resampling.BILINEAR)
    )
    x_CHW = np.empty((3, height, width), dtype=np.float32)
    normalise(pixels, encoder.mean, encoder.std, x_CHW)
    return torch.from_numpy(x_CHW)
