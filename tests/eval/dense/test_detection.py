"""The detector: what it learns from, what it answers in an image's own pixels, and that it finds
what it was shown.
"""

import copy
import math
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpvision.config import ViTConfig
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.pooled import pooled_network
from dpvision.errors import ConfigError, DataError
from dpvision.eval.dense.coco_data import CocoImage, CocoSet, load_coco
from dpvision.eval.dense.crops import DetectionExample, fitted
from dpvision.eval.dense.detection import Detection, in_image
from dpvision.eval.dense.detector import LEVELS, Detector, detection_losses
from dpvision.eval.dense.job import train
from dpvision.eval.dense.settings import DenseHardware, DetectionSettings
from dpvision.models.layers import init_weights
from dpvision.models.vit import ViT
from dpvision.train.distributed import Group

from .coco_shapes import changed, write_shapes

tools = pytest.importorskip("faster_coco_eval.core.mask", reason="needs the extra `dense`")

SETTINGS = DetectionSettings(
    epochs=2,
    batch_size=4,
    image_size=48,
    jitter=(1.0, 1.0),
    learning_rate=5e-3,
    layer_decay=0.9,
    warmup_steps=2,
    window=0,
    drop_path=0.0,
    channels=16,
    hidden=64,
    anchors=32,
    proposals=32,
    regions=24,
    detections=20,
    resamples=5,
)
HARDWARE = DenseHardware(physical_batch_size=4, workers=1)
NOTHING = CocoSet("nothing", ((1, "a"), (2, "b"), (3, "c")), (), ())


def make_encoder(depth: int = 2, patch: int = 8) -> Encoder:
    with torch.random.fork_rng():
        vit = ViT(ViTConfig(image_size=32, patch_size=patch, depth=depth, width=32, num_heads=2))
    init_weights(vit, torch.Generator().manual_seed(0))
    return Encoder(
        "e",
        32,
        (0.5,) * 3,
        (0.25,) * 3,
        lambda x: {},
        "transformer",
        backbone=lambda: pooled_network(copy.deepcopy(vit)),
    )


def task_of(
    images: CocoSet, settings: DetectionSettings = SETTINGS, hardware: DenseHardware = HARDWARE
) -> Detection:
    return Detection(images, images, settings, hardware)


def made(settings: DetectionSettings = SETTINGS, **kw) -> Detector:
    return task_of(NOTHING, settings).make(make_encoder(**kw))


def examples(tmp_path: Path, num: int = 3) -> list[DetectionExample]:
    pictures = load_coco(*write_shapes(tmp_path / "pictures", num, width=48))
    crops = task_of(pictures).images(make_encoder())
    return [crops.load(i, 0) for i in range(num)]


def bilinear(x_HW: np.ndarray, y: float, x: float) -> float:
    y, x = min(max(y, 0.0), x_HW.shape[0] - 1.0), min(max(x, 0.0), x_HW.shape[1] - 1.0)
    top, left = min(int(y), x_HW.shape[0] - 2), min(int(x), x_HW.shape[1] - 2)
    (a, b), (c, d) = x_HW[top : top + 2, left : left + 2]
    return (1 + top - y) * ((1 + left - x) * a + (x - left) * b) + (y - top) * (
        (1 + left - x) * c + (x - left) * d
    )


@pytest.mark.parametrize(("head", "side"), [("box_roi_pool", 7), ("mask_roi_pool", 14)])
def test_a_bin_of_a_region_is_the_mean_over_as_many_points_as_it_has_pixels(
    head: str, side: int
) -> None:
    """detectron2's sampling ratio of 0; with 2 x 2 points, a large region would skip most of its
    pixels.
    """
    pool = getattr(made().roi_heads, head)
    generator = torch.Generator().manual_seed(0)
    maps = OrderedDict(
        (name, torch.randn(1, 1, 256 >> k, 256 >> k, generator=generator))
        for k, name in enumerate(LEVELS)
    )
    left, top, right, bottom = 10.0, 30.0, 1010.0, 990.0  # of 1024 px, on the coarsest level
    with torch.no_grad():
        found = pool(maps, [torch.tensor([[left, top, right, bottom]])], [(1024, 1024)])[
            0, 0
        ].numpy()
    x_HW, stride = maps[LEVELS[-1]][0, 0].double().numpy(), 32
    height, width = (bottom - top) / stride / side, (right - left) / stride / side
    rows, columns = math.ceil(height), math.ceil(width)
    assert rows > 2
    expected = np.array(
        [
            [
                np.mean(
                    [
                        bilinear(
                            x_HW,
                            top / stride + (i + (r + 0.5) / rows) * height,
                            left / stride + (j + (c + 0.5) / columns) * width,
                        )
                        for r in range(rows)
                        for c in range(columns)
                    ]
                )
                for j in range(side)
            ]
            for i in range(side)
        ]
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


def losses(model: Detector, some: list[DetectionExample]) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(3)  # which anchors and regions are drawn
        return detection_losses(model.train(), some)


def mask_gradients(model: Detector) -> list[torch.Tensor]:
    heads = model.roi_heads
    return [
        p.grad
        for part in (heads.mask_head, heads.mask_predictor)
        for p in part.parameters()
        if p.grad is not None
    ]


def test_objects_without_mask_teach_boxes_and_no_masks(tmp_path: Path) -> None:
    model, some = made(), examples(tmp_path)
    bare = [
        e._replace(has_mask_N=torch.zeros_like(e.has_mask_N), mask_NSS=torch.zeros_like(e.mask_NSS))
        for e in some
    ]
    with_masks, without = losses(model, some), losses(model, bare)
    for name in ("loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg"):
        assert torch.equal(with_masks[name], without[name]), name
    assert with_masks["loss_mask"] > 0.3 and without["loss_mask"] == 0
    torch.stack(list(without.values())).sum().backward()
    assert all((g == 0).all() for g in mask_gradients(model)), (
        "not even a wrong mask was learned from"
    )
    model.zero_grad()
    torch.stack(list(with_masks.values())).sum().backward()
    assert any((g != 0).any() for g in mask_gradients(model))


def test_of_two_objects_the_one_with_a_mask_teaches_it(tmp_path: Path) -> None:
    """The mask loss of an image with a masked and a bare object is that of the masked one: its
    other mask may be anything.
    """
    model, (first, *_) = made(), examples(tmp_path)
    half = first._replace(has_mask_N=torch.tensor([True, False]))
    other = half._replace(mask_NSS=torch.stack([first.mask_NSS[0], 1 - first.mask_NSS[1]]))
    assert torch.equal(losses(model, [half])["loss_mask"], losses(model, [other])["loss_mask"])
    assert not torch.equal(losses(model, [first])["loss_mask"], losses(model, [half])["loss_mask"])


def test_images_without_objects_teach_that_there_is_nothing(tmp_path: Path) -> None:
    model, (first, *_) = made(), examples(tmp_path)
    nothing = first._replace(
        box_N4=first.box_N4[:0],
        label_N=first.label_N[:0],
        mask_NSS=first.mask_NSS[:0],
        has_mask_N=first.has_mask_N[:0],
    )
    for some in ([nothing], [nothing, first], [first, nothing]):
        found = losses(model, some)
        assert all(torch.isfinite(value) for value in found.values())
        assert found["loss_classifier"] > 0 and found["loss_objectness"] > 0
        assert (found["loss_box_reg"] == 0) is (len(some) == 1) or found["loss_box_reg"] >= 0
    assert losses(model, [nothing])["loss_box_reg"] == 0 == losses(model, [nothing])["loss_mask"]


def test_bfloat16_gives_the_losses_of_float32_up_to_rounding(tmp_path: Path) -> None:
    model, some = made(), examples(tmp_path)
    plain = losses(model, some)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = losses(model, some)
    for name in ("loss_objectness", "loss_rpn_box_reg", "loss_classifier"):
        assert rounded[name].dtype == torch.float32
        torch.testing.assert_close(rounded[name], plain[name], rtol=0.1, atol=0.02)


def test_a_fresh_detector_is_a_function_of_the_seed_and_takes_the_encoders_weights() -> None:
    one, two, other = made(), made(), made(replace(SETTINGS, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    vit = make_encoder().backbone().network
    assert torch.equal(one.pyramid.vit.blocks[0].mlp[0].weight, vit.blocks[0].mlp[0].weight)
    assert torch.equal(one.pyramid.vit.patch_embed.weight, other.pyramid.vit.patch_embed.weight)
    assert not torch.equal(one.pyramid.scales[0][0].weight, other.pyramid.scales[0][0].weight)


@pytest.mark.parametrize(
    ("depth", "quarters"), [(12, [2, 5, 8, 11]), (4, [0, 1, 2, 3]), (2, [0, 1]), (1, [0])]
)
def test_global_blocks_end_the_quarters_and_windows_fit_the_image(
    depth: int, quarters: list[int]
) -> None:
    vit = made(replace(SETTINGS, window=14, image_size=128), depth=depth).pyramid.vit
    assert [i for i, block in enumerate(vit.blocks) if block.window == 0] == quarters
    assert {block.window for block in vit.blocks} <= {0, 14}
    small = made(replace(SETTINGS, window=14, global_blocks=()), depth=depth).pyramid.vit
    assert {block.window for block in small.blocks} == {6}, "48 px are 6 patches of 8"
    assert all(len(block.row_RK) == 11 for block in small.blocks)


def test_an_answer_comes_in_the_images_own_pixels_and_padding_holds_nothing(tmp_path: Path) -> None:
    """An image of 64 x 32 in a square of 48: a scale of 3/4, rows from 24 on are padding."""
    image = CocoImage(1, tmp_path / "p.png", 32, 64, ())
    answer = {
        "boxes": torch.tensor(
            [[12.0, 6.0, 36.0, 18.0], [0.0, 12.0, 24.0, 36.0], [0.0, 30.0, 20.0, 40.0]]
        ),
        "labels": torch.tensor([1, 3, 2]),
        "scores": torch.tensor([0.9, 0.8, 0.7]),
        "masks": torch.ones(3, 1, 28, 28),
    }
    found = in_image(answer, image, fitted(32, 64, 48))
    np.testing.assert_allclose(found.box_N4, [[16, 8, 48, 24], [0, 16, 32, 32]], atol=1e-5)
    assert found.label_N.tolist() == [0, 2] and len(found.runs) == 2
    for run, (left, top, right, bottom) in zip(found.runs, found.box_N4, strict=True):
        rows, columns = np.nonzero(tools.decode(run))
        assert run["size"] == [32, 64]
        assert abs(columns.min() - left) <= 1 and abs(columns.max() + 1 - right) <= 1
        assert abs(rows.min() - top) <= 1 and abs(rows.max() + 1 - bottom) <= 1


def test_masks_are_pasted_one_at_a_time_and_are_those_pasted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.models.detection.roi_heads import paste_masks_in_image

    rng = torch.Generator().manual_seed(0)
    corner_N2 = 30 * torch.rand(6, 2, generator=rng)
    box_N4 = torch.cat([corner_N2, corner_N2 + 2 + 14 * torch.rand(6, 2, generator=rng)], dim=1)
    mask_N1SS = torch.rand(6, 1, 28, 28, generator=rng)
    answer = {
        "boxes": box_N4,
        "labels": torch.ones(6, dtype=torch.int64),
        "scores": torch.ones(6),
        "masks": mask_N1SS,
    }
    together = (paste_masks_in_image(mask_N1SS, box_N4, (48, 48))[:, 0] > 0.5).numpy()
    nums: list[int] = []

    def counted(masks: torch.Tensor, *rest) -> torch.Tensor:
        nums.append(len(masks))
        return paste_masks_in_image(masks, *rest)

    monkeypatch.setattr("dpvision.eval.dense.detection.paste_masks_in_image", counted)
    found = in_image(answer, CocoImage(1, tmp_path / "p.png", 48, 48, ()), fitted(48, 48, 48))
    np.testing.assert_array_equal(np.stack([tools.decode(run) for run in found.runs]), together)
    assert nums == [1] * 6 and 0 < together.mean() < 1


def test_two_ranks_answer_for_all_images_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpvision.eval.dense import detection

    task = task_of(load_coco(*write_shapes(tmp_path, 5, width=48)))
    images = task.test.images
    with torch.no_grad():
        model = made()
        model.roi_heads.score_thresh = 0.0  # an untrained one is sure of nothing
        whole = task.detect(model, make_encoder(), images)
    shares: list[list] = [[], []]

    def gather(into: list, mine: list) -> None:
        """What rank 0 gets, once rank 1 has been here."""
        shares[len(shares[1]) == 0] = mine
        into[:] = shares if shares[0] else [mine, mine]

    monkeypatch.setattr(detection.dist, "all_gather_object", gather)
    for rank in (1, 0):
        group = Group(rank, 2, torch.device("cpu"))
        both = task.detect(model, make_encoder(), images[: 5 if rank == 0 else 4], group=group)
    assert len(both) == len(whole) == 5 and len(whole[0].label_N) > 0
    for one, other in zip(both, whole, strict=True):
        np.testing.assert_allclose(one.box_N4, other.box_N4, atol=1e-3)


@pytest.mark.slow
def test_a_stopped_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    pictures, encoder = load_coco(*write_shapes(tmp_path / "pictures", 6, width=48)), make_encoder()
    settings = replace(SETTINGS, epochs=4, drop_path=0.3, jitter=(0.5, 1.5), batch_size=3)
    hardware = DenseHardware(physical_batch_size=2, workers=2, checkpoint_every_s=0.0)
    task, straight = task_of(pictures, settings, hardware), made(settings)
    train(task, straight, encoder)

    def stop(text: str) -> None:
        if text.startswith("step 6 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(task, made(settings), encoder, work=tmp_path / "work", progress=stop)
    said: list[str] = []
    again = made(settings)
    train(task, again, encoder, work=tmp_path / "work", progress=said.append)
    assert said[0].startswith("step 6 of 8"), "five were kept"
    for (name, p), q in zip(straight.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("wrong", [{"seed": 1}, {"image_size": 64}, {"jitter": (0.5, 1.0)}])
def test_another_training_is_not_gone_on_with(tmp_path: Path, wrong: dict) -> None:
    from dpvision.errors import CheckpointError

    pictures, encoder, settings = (
        load_coco(*write_shapes(tmp_path / "pictures", 4, width=48)),
        make_encoder(),
        replace(SETTINGS, warmup_steps=0),
    )
    first = task_of(pictures, replace(settings, epochs=1))
    train(first, made(settings), encoder, work=tmp_path / "work")
    other = replace(settings, epochs=1, **wrong)
    with pytest.raises(CheckpointError, match="Choose another --work"):
        train(task_of(pictures, other), made(other), encoder, work=tmp_path / "work")


def test_crowds_and_empty_images_are_not_trained_on(tmp_path: Path) -> None:
    file, images = write_shapes(tmp_path, 3)

    def change(given: dict) -> None:
        given["annotations"] = given["annotations"][
            :3
        ]  # the third image has none, the second has one, a crowd
        given["annotations"][2]["iscrowd"] = 1

    pictures = load_coco(changed(file, change), images)
    crops = task_of(pictures).images(make_encoder())
    assert task_of(pictures).num_trained == len(crops) == 1
    assert [image.id for image in crops.images] == [1] and len(crops.load(0, 0).label_N) == 2
    nothing = replace(pictures, images=pictures.images[1:])
    with pytest.raises(DataError, match="no image with an object"):
        task_of(nothing).images(make_encoder())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"image_size": 0}, "image_size=0"),
        ({"jitter": (0.0, 1.0)}, r"jitter=\(0.0, 1.0\); expected 0 < low <= high"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"layer_decay": 1.5}, "layer_decay=1.5"),
        ({"drop_path": 1.0}, "drop_path=1.0"),
        ({"window": -1}, "window=-1"),
        ({"regions": 0}, "regions=0; expected at least 1"),
        ({"epochs": 0}, "epochs=0"),
        ({"resamples": -1}, "resamples=-1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(wrong: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DetectionSettings(**wrong)


def test_sides_and_encoders_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"image_size=50 with patches of 8 px; expected a multiple of 16. Use 48"
    ):
        made(replace(SETTINGS, image_size=50))
    with pytest.raises(ConfigError, match="expected a run of one"):
        task_of(NOTHING).make(replace(make_encoder(), backbone=None))


def test_every_setting_that_learns_is_in_the_words() -> None:
    changes = {
        "epochs": 3,
        "batch_size": 2,
        "image_size": 64,
        "jitter": (0.5, 1.0),
        "learning_rate": 1e-3,
        "layer_decay": 0.5,
        "weight_decay": 0.2,
        "warmup_steps": 7,
        "step_at": (0.5,),
        "max_grad_norm": 1.0,
        "drop_path": 0.2,
        "window": 7,
        "global_blocks": (1,),
        "relative_positions": False,
        "channels": 8,
        "hidden": 8,
        "anchors": 8,
        "proposals": 8,
        "regions": 8,
        "detections": 8,
        "seed": 4,
    }
    assert set(DetectionSettings.__dataclass_fields__) - set(changes) == {"resamples"}
    words = {DetectionSettings().words()} | {
        replace(DetectionSettings(), **{name: value}).words() for name, value in changes.items()
    }
    assert len(words) == 1 + len(changes)


@pytest.mark.slow
def test_it_finds_what_it_was_shown_and_not_where_classes_were_shuffled(tmp_path: Path) -> None:
    """Four images of two coloured rectangles, learned by heart; with wrong classes it finds them
    and calls them wrong.
    """
    encoder, settings = make_encoder(), replace(SETTINGS, epochs=400, warmup_steps=5)
    test = load_coco(*write_shapes(tmp_path / "truth", 4, height=48, width=48, seed=1))
    ap = {}
    for shuffled in (False, True):
        pictures = load_coco(
            *write_shapes(
                tmp_path / str(shuffled), 4, height=48, width=48, seed=1, shuffled=shuffled
            )
        )
        task, model = Detection(pictures, test, settings, HARDWARE), made(settings)
        train(task, model, encoder)
        scored = task.score(model, encoder, Group(0, 1, torch.device("cpu")), print)
        assert scored is not None
        ap[shuffled] = {measure.name: measure.value for measure in scored.measures}
    assert (
        ap[False]["AP50 box"] > 0.95 and ap[False]["AP box"] > 0.65 and ap[False]["AP mask"] > 0.65
    )
    assert ap[True]["AP50 box"] < 0.3 and ap[True]["AP mask"] < 0.3
