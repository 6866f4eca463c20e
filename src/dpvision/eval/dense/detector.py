"""Mask R-CNN with ViTDet's heads on the simple feature pyramid, from torchvision's parts (He et al.
2017; Li et al. 2022).

The pyramid (ViTDet, section 3 and appendix A.2) has four scales of the transformer's last map:

    patch / 4   deconvolution 2 x 2, LayerNorm, GELU, deconvolution 2 x 2
    patch / 2   deconvolution 2 x 2
    patch       the map itself
    2 patch     2 x 2 max pooling

Each is projected to C channels by a 1 x 1 and a 3 x 3 convolution, each followed by a LayerNorm
over the channels. A fifth scale, for proposals only, subsamples the fourth by two. There is no
top-down path and no lateral connection.

Proposals: two 3 x 3 convolutions. Boxes: four 3 x 3 convolutions and one linear layer of 1,024.
Masks: four 3 x 3 convolutions and a deconvolution to 28 x 28. A LayerNorm over the channels follows
each convolution of the box and mask heads. Three anchors per position (1:2, 1:1, 2:1) with a side
of eight strides.

Inputs are already padded squares, so that scales are exact.

Legend: B images, N objects or detections, C channels, D width of the transformer, H height, W
width, S side of the square, M side of a region's mask (px).
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import MultiScaleRoIAlign

from dpvision.eval.dense.crops import DetectionExample
from dpvision.eval.dense.dense_vit import DenseViT
from dpvision.eval.dense.settings import HeadSizes

_RATIOS = (0.5, 1.0, 2.0)
_ANCHOR_STRIDES = 8
_BOX_SIDE, _MASK_SIDE = 7, 14
SAMPLING_RATIO = 0
"""As in detectron2: a bin of a region is the mean over ceil(height / side) x ceil(width / side)
points, not over 2 x 2.
"""

LEVELS = ("0", "1", "2", "3")
"""Names of the scales for regions, finest first; "pool" is the fifth."""


class FeaturePyramid(nn.Module):
    """A transformer with its pyramid, as a backbone for torchvision's detectors."""

    def __init__(self, vit: DenseViT, channels: int = 256) -> None:
        super().__init__()
        self.vit, self.out_channels = vit, channels
        width = vit.width
        finer: list[nn.Module] = [
            nn.ConvTranspose2d(width, width // 2, 2, 2),
            LayerNorm2d(width // 2),
            nn.GELU(),
        ]
        scales: list[tuple[list[nn.Module], int]] = [
            ([*finer, nn.ConvTranspose2d(width // 2, width // 4, 2, 2)], width // 4),
            ([nn.ConvTranspose2d(width, width // 2, 2, 2)], width // 2),
            ([], width),
            ([nn.MaxPool2d(2, 2)], width),
        ]
        self.scales = nn.ModuleList(
            nn.Sequential(
                *first,
                nn.Conv2d(have, channels, 1, bias=False),
                LayerNorm2d(channels),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                LayerNorm2d(channels),
            )
            for first, have in scales
        )

    @property
    def strides(self) -> tuple[float, ...]:
        """Strides of the five scales, in pixels."""
        patch = self.vit.patch_size
        return (patch / 4, patch / 2, patch, 2 * patch, 4 * patch)

    def forward(self, x_BCHW: Tensor) -> "OrderedDict[str, Tensor]":
        """Return maps by name, finest first, float32 (B, C, H / stride, W / stride); H and W must
        be multiples of twice the patch.
        """
        (last,) = self.vit(x_BCHW, (self.vit.depth - 1,))
        # Anchors take their dtype from the maps: in bfloat16 a box near 1,000 px would be off by 4
        # px.
        maps = OrderedDict(
            (name, scale(last).float()) for name, scale in zip(LEVELS, self.scales, strict=True)
        )
        maps["pool"] = F.max_pool2d(maps[LEVELS[-1]], 1, 2)
        return maps


class Detector(GeneralizedRCNN):
    """Maps images to boxes, classes and masks; in training to losses."""

    def __init__(
        self,
        pyramid: FeaturePyramid,
        num_classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        sizes: HeadSizes,
    ) -> None:
        """Make the detector.

        Args:
            num_classes: without the background.
            mean, std: normalisation of the transformer's images.
        """
        channels = sizes.channels
        anchors = AnchorGenerator(
            tuple((int(_ANCHOR_STRIDES * stride),) for stride in pyramid.strides),
            (_RATIOS,) * len(pyramid.strides),
        )
        proposals = RegionProposalNetwork(
            anchors,
            _InFloat32(RPNHead(channels, len(_RATIOS), conv_depth=2)),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=sizes.anchors,
            positive_fraction=0.5,
            nms_thresh=0.7,
            pre_nms_top_n={"training": 2 * sizes.proposals, "testing": sizes.proposals},
            post_nms_top_n={"training": sizes.proposals, "testing": sizes.proposals},
        )
        convs = [channels] * 4
        heads = _Heads(
            MultiScaleRoIAlign(list(LEVELS), _BOX_SIDE, sampling_ratio=SAMPLING_RATIO),
            FastRCNNConvFCHead(
                (channels, _BOX_SIDE, _BOX_SIDE), convs, [sizes.hidden], norm_layer=LayerNorm2d
            ),
            _InFloat32(FastRCNNPredictor(sizes.hidden, num_classes + 1)),
            fg_iou_thresh=0.5,
            bg_iou_thresh=0.5,
            batch_size_per_image=sizes.regions,
            positive_fraction=0.25,
            bbox_reg_weights=None,
            score_thresh=0.05,
            nms_thresh=0.5,
            detections_per_img=sizes.detections,
            mask_roi_pool=MultiScaleRoIAlign(
                list(LEVELS), _MASK_SIDE, sampling_ratio=SAMPLING_RATIO
            ),
            mask_head=MaskRCNNHeads(channels, convs, 1, norm_layer=LayerNorm2d),
            mask_predictor=_InFloat32(MaskRCNNPredictor(channels, channels, num_classes + 1)),
        )
        super().__init__(pyramid, proposals, heads, _Squares(mean, std))

    @property
    def pyramid(self) -> FeaturePyramid:
        """Transformer with its pyramid."""
        found = self.backbone
        assert isinstance(found, FeaturePyramid)
        return found


def detection_losses(model: nn.Module, examples: Sequence[DetectionExample]) -> dict[str, Tensor]:
    """Return Mask R-CNN's five losses by name, each averaged over the samples from the images of
    this forward pass.

    Images without objects count for the proposals and the classes; objects without a mask for
    everything but the masks.
    """
    device = next(model.parameters()).device
    images = [e.x_CSS.to(device, non_blocking=True) for e in examples]
    targets = [
        {"boxes": e.box_N4, "labels": e.label_N, "masks": e.mask_NSS, "has_mask": e.has_mask_N}
        for e in examples
    ]
    return model(
        images,
        [
            {name: value.to(device, non_blocking=True) for name, value in target.items()}
            for target in targets
        ],
    )


def detection_loss(model: nn.Module, examples: Sequence[DetectionExample]) -> Tensor:
    """Return the sum of ``detection_losses``, a scalar."""
    return torch.stack([loss.float() for loss in detection_losses(model, examples).values()]).sum()


class _Squares(nn.Module):
    """Replaces torchvision's resizing: normalises prepared squares, and leaves the heads' masks
    unchanged.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean, self.std = tuple(mean), tuple(std)

    def forward(self, images: list[Tensor], targets: Any = None) -> tuple[ImageList, Any]:
        x_BCSS = torch.stack(list(images))
        mean, std = (x_BCSS.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        return ImageList((x_BCSS - mean) / std, [tuple(x.shape[-2:]) for x in images]), targets

    def postprocess(
        self, result: list[dict[str, Tensor]], image_shapes: Any, original_image_sizes: Any
    ) -> list[dict[str, Tensor]]:
        return result


class _InFloat32(nn.Module):
    """A module whose outputs are converted to float32 under autocast, because boxes are decoded
    from them.
    """

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Any) -> Any:
        return _float(self.part(x))


def _float(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float()
    return type(value)(_float(each) for each in value)


class _Heads(RoIHeads):
    """torchvision's heads, extended to objects that have a box and no mask."""

    def forward(
        self,
        features: "OrderedDict[str, Tensor]",
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        if not self.training or targets is None:
            return super().forward(features, proposals, image_shapes, targets)
        proposals, matched, label, regression = self.select_training_samples(proposals, targets)
        logits, deltas = self.box_predictor(
            self.box_head(self.box_roi_pool(features, proposals, image_shapes))
        )
        class_loss, box_loss = fastrcnn_loss(logits, deltas, label, regression)
        chosen = [_with_mask(*each) for each in zip(matched, label, targets, strict=True)]
        regions = [part[rows] for part, rows in zip(proposals, chosen, strict=True)]
        of = [part[rows] for part, rows in zip(matched, chosen, strict=True)]
        mask_logits = self.mask_predictor(
            self.mask_head(self.mask_roi_pool(features, regions, image_shapes))
        )
        mask_loss = maskrcnn_loss(
            mask_logits, regions, [t["masks"] for t in targets], [t["labels"] for t in targets], of
        )
        return [], {"loss_classifier": class_loss, "loss_box_reg": box_loss, "loss_mask": mask_loss}


def _with_mask(matched: Tensor, label: Tensor, target: dict[str, Tensor]) -> Tensor:
    """Return the rows of the regions matched to an object with a mask."""
    has = target["has_mask"]
    if not len(has):
        return torch.zeros(0, dtype=torch.int64, device=label.device)
    return torch.where((label > 0) & has[matched])[0]
