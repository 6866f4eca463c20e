"""Training and scoring: shapes are learned, shuffled masks are not; ranks, resume, windows and
physical batches change what they may.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpvision.encoders.fixed import fixed_encoder
from dpvision.errors import ConfigError
from dpvision.eval.dense.job import train
from dpvision.eval.dense.mean_iou import measures
from dpvision.eval.dense.segmentation import Segmentation, predict
from dpvision.eval.dense.semantic_augment import resized
from dpvision.eval.dense.semantic_data import SemanticFolder
from dpvision.eval.dense.settings import DenseHardware, SegmentationSettings
from dpvision.eval.dense.upernet import Segmenter
from dpvision.train.distributed import Group

from .semantic_shapes import CLASSES, shapes, tiny_encoder

SETTINGS = SegmentationSettings(
    epochs=60,
    batch_size=4,
    crop_size=32,
    scale=(0.9, 1.2),
    photometric=False,
    learning_rate=6e-3,
    layer_decay=1.0,
    warmup_steps=5,
    channels=32,
    drop_path=0.0,
    dropout=0.0,
)
HARDWARE = DenseHardware(physical_batch_size=4, workers=1)
SHORT = replace(SETTINGS, epochs=5, warmup_steps=2, norm="group", channels=16)
ALONE = Group(0, 1, torch.device("cpu"))
NOTHING = SemanticFolder("nothing", (), CLASSES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SemanticFolder]:
    root = tmp_path_factory.mktemp("shapes")
    return {
        "train": shapes(root / "train", 4),
        "shuffled": shapes(root / "shuffled", 4, shuffled=True),
        "test": shapes(root / "test", 12, first=100),
    }


def task_of(
    folder: SemanticFolder,
    settings: SegmentationSettings = SETTINGS,
    hardware: DenseHardware = HARDWARE,
) -> Segmentation:
    return Segmentation(folder, folder, settings, hardware)


def trained(
    folder: SemanticFolder,
    settings: SegmentationSettings = SETTINGS,
    hardware: DenseHardware = HARDWARE,
    **more,
) -> Segmenter:
    model = task_of(NOTHING, settings).make(tiny_encoder())
    train(task_of(folder, settings, hardware), model, tiny_encoder(), **more)
    return model


def mean_iou(
    model: Segmenter, folder: SemanticFolder, settings: SegmentationSettings = SETTINGS
) -> float:
    return measures(task_of(folder, settings).count_pixels(model, tiny_encoder()))[0].value


@pytest.mark.slow
def test_shapes_are_learned_and_found_again_and_shuffled_masks_teach_nothing(
    folders: dict[str, SemanticFolder],
) -> None:
    model = trained(folders["train"], replace(SETTINGS, epochs=80))
    assert mean_iou(model, folders["train"]) > 0.8 and mean_iou(model, folders["test"]) > 0.6
    shuffled = trained(folders["shuffled"], replace(SETTINGS, epochs=80))
    assert mean_iou(shuffled, folders["train"]) < 0.4 and mean_iou(shuffled, folders["test"]) < 0.4


def test_on_one_scale_with_one_window_an_image_is_one_forward_pass(
    folders: dict[str, SemanticFolder],
) -> None:
    encoder = tiny_encoder()
    model = trained(folders["train"], SHORT)
    pixels = folders["test"].read(0).pixels_HWC[:32, :32]
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (encoder.mean, encoder.std))
    x = (torch.tensor(pixels).permute(2, 0, 1) / 255 - mean) / std
    with torch.no_grad():
        expected = model.logits(x[None])[0].argmax(0).numpy()
    np.testing.assert_array_equal(predict(model, encoder, pixels, SHORT), expected)


def test_answers_have_the_images_size_whatever_it_is(folders: dict[str, SemanticFolder]) -> None:
    model = task_of(NOTHING, SHORT).make(tiny_encoder()).eval()
    for height, width in ((40, 48), (17, 90), (200, 33), (8, 8), (3, 70)):
        pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        said = predict(model, tiny_encoder(), pixels, SHORT)
        assert said.shape == (height, width) and said.dtype == np.uint8 and said.max() < 3
        wide, tall = resized(width, height, 32)
        assert min(wide, tall) <= 32 and max(wide, tall) <= 128


def test_counts_are_those_of_the_answers_image_by_image(folders: dict[str, SemanticFolder]) -> None:
    model, test = trained(folders["train"], SHORT), folders["test"]
    hardware = replace(HARDWARE, workers=3, physical_batch_size=1)
    found = task_of(test, SHORT, hardware).count_pixels(model, tiny_encoder())
    assert found.shape == (12, 3, 3)
    for n in range(12):
        labelled = test.read(n)
        said = predict(model, tiny_encoder(), labelled.pixels_HWC, SHORT)
        for k in range(3):
            right, true, answered = found[n, :, k]
            assert true == (labelled.class_HW == k).sum() and answered == (said == k).sum()
            assert right == ((labelled.class_HW == k) & (said == k)).sum()


def test_a_training_goes_on_where_it_stopped_and_ends_in_the_same_weights(
    folders: dict[str, SemanticFolder], tmp_path: Path
) -> None:
    settings = replace(SHORT, dropout=0.2, drop_path=0.2, norm="batch", photometric=True)
    straight = trained(folders["train"], settings).state_dict()

    class Stop(Exception):
        pass

    def stop(text: str) -> None:
        if text.startswith("step 3 "):
            raise Stop

    with pytest.raises(Stop):
        trained(
            folders["train"],
            settings,
            replace(HARDWARE, checkpoint_every_s=0.0),
            work=tmp_path,
            progress=stop,
        )
    lines: list[str] = []
    resumed = trained(
        folders["train"],
        settings,
        replace(HARDWARE, workers=2),
        work=tmp_path,
        progress=lines.append,
    ).state_dict()
    assert lines[0].startswith("step 3 of 5")
    assert all(torch.equal(straight[name], value) for name, value in resumed.items())


def test_with_group_norm_the_physical_batch_changes_nothing_beyond_rounding(
    folders: dict[str, SemanticFolder],
) -> None:
    one, other = (
        trained(folders["train"], SHORT, DenseHardware(n, workers=1)).state_dict() for n in (4, 1)
    )
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-2, atol=2e-4, msg=name)


def test_the_encoder_itself_is_not_touched_and_is_where_training_starts(
    folders: dict[str, SemanticFolder],
) -> None:
    encoder = tiny_encoder()
    x = torch.randn(1, 3, 32, 32)
    before = encoder.poolings(x)["mean"]
    model = task_of(NOTHING, SHORT).make(encoder)
    assert encoder.backbone is not None
    ours = dict(encoder.backbone().named_parameters())
    assert torch.equal(model.backbone.patch_embed.weight, ours["network.patch_embed.weight"])
    train(task_of(folders["train"], SHORT), model, encoder)
    assert torch.equal(before, encoder.poolings(x)["mean"])
    assert not torch.equal(model.backbone.patch_embed.weight, ours["network.patch_embed.weight"]), (
        "the whole network is trained"
    )
    other = task_of(NOTHING, SHORT).make(tiny_encoder(seed=1))
    assert not torch.equal(other.backbone.patch_embed.weight, ours["network.patch_embed.weight"])


SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import torch
sys.path.insert(0, {root!r})
from tests.eval.dense.semantic_shapes import CLASSES, tiny_encoder
from dpvision.eval.dense.job import train
from dpvision.eval.dense.segmentation import Segmentation
from dpvision.eval.dense.settings import DenseHardware, SegmentationSettings
from dpvision.eval.dense.semantic_data import open_folder
from dpvision.train.distributed import join, leave
torch.set_num_threads(1)
group = join("cpu")
parts = [open_folder(Path(d) / "images", Path(d) / "masks", CLASSES) for d in sys.argv[1:3]]
task = Segmentation(*parts, {settings}, DenseHardware(1, workers=1))
model = task.make(tiny_encoder())
train(task, model, tiny_encoder(), group=group)
counts = task.count_pixels(model, tiny_encoder(), group=group)
np.save(f"{{sys.argv[3]}}/rank{{group.rank}}.npy", counts)
if group.is_main:
    torch.save(model.state_dict(), f"{{sys.argv[3]}}/weights.pt")
leave()
"""


@pytest.mark.slow
def test_two_processes_under_torchrun_train_and_score_as_one(tmp_path: Path) -> None:
    four, test = shapes(tmp_path / "train", 4), shapes(tmp_path / "test", 5, first=100)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[3]), settings=repr(SHORT)))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    command += [str(tmp_path / "train"), str(tmp_path / "test"), str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (np.load(tmp_path / f"rank{rank}.npy") for rank in (0, 1))
    np.testing.assert_array_equal(first, second)
    one = trained(four, SHORT, DenseHardware(1, workers=1))
    for name, value in torch.load(tmp_path / "weights.pt").items():
        torch.testing.assert_close(value, one.state_dict()[name], rtol=1e-2, atol=2e-4, msg=name)
    alone = task_of(test, SHORT).count_pixels(one, tiny_encoder())
    np.testing.assert_array_equal(first[:, 1], alone[:, 1])
    assert np.abs(first - alone).sum() <= 0.02 * alone.sum()


def test_scores_say_how_they_came_about(folders: dict[str, SemanticFolder]) -> None:
    counts = np.stack([np.full((4, 3), 10), np.full((4, 3), 10), np.full((4, 3), 10)], axis=1)
    assert [(m.value, m.num_images) for m in measures(counts)] == [(1.0, 4)] * 3
    default = task_of(folders["test"], SegmentationSettings(norm="group"))
    assert "GroupNorm, dropout" in default.protocol("mIoU")
    words = f"segmentation, mIoU, {SegmentationSettings().words()}"
    assert task_of(folders["test"], SegmentationSettings()).protocol("mIoU") == words.replace(
        "BatchNorm", "BatchNorm over 4 images a pass"
    )
    for part in (
        "segmentation, mIoU, UPerNet of the encoder's width, BatchNorm, dropout 0.1, auxiliary "
        "loss x 0.4, drop path 0.1",
        "relative positions, AdamW, lr 0.0001, layer decay 0.65, decay 0.05, 100 epochs, 1,500 "
        "warm-up steps, then linear to 0, batch 16",
        "512 px crops at 0.5-2 with at most 0.75 of one class, flip, colour distortion",
        "windows of 512 px every 341 px",
    ):
        assert part in words
    default = SegmentationSettings()
    changed = [
        replace(default, **{name: value})
        for name, value in {
            "epochs": 3,
            "batch_size": 2,
            "crop_size": 64,
            "scale": (1.0, 1.0),
            "flip": False,
            "photometric": False,
            "max_class_share": 1.0,
            "learning_rate": 1e-3,
            "layer_decay": 0.5,
            "weight_decay": 0.1,
            "betas": (0.9, 0.95),
            "warmup_steps": 3,
            "max_grad_norm": 1.0,
            "drop_path": 0.0,
            "relative_positions": False,
            "channels": 64,
            "dropout": 0.0,
            "auxiliary_weight": 0.0,
            "norm": "group",
            "stride": 100,
            "seed": 4,
        }.items()
    ]
    assert (
        len({s.words() for s in [default, *changed]})
        == len(changed) + 1
        == len(SegmentationSettings.__dataclass_fields__) + 1
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"crop_size": 1}, "crop_size=1"),
        ({"scale": (2.0, 1.0)}, "scale"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"layer_decay": 0.0}, "layer_decay=0.0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"stride": 513}, "stride=513"),
        ({"norm": "layer"}, "norm='layer'"),
        ({"max_class_share": 0.0}, "max_class_share"),
        ({"epochs": -1.0}, "epochs=-1.0"),
        ({"channels": 0}, "channels=0"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"drop_path": 1.0}, "drop_path"),
        ({"auxiliary_weight": float("inf")}, "auxiliary_weight"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_settings_out_of_range_are_named(change: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SegmentationSettings(**change)


def test_what_cannot_be_trained_is_said_before_the_first_step(
    folders: dict[str, SemanticFolder],
) -> None:
    encoder, four = tiny_encoder(), folders["train"]
    eight = replace(four, files=four.files * 2)

    def check(settings: SegmentationSettings, physical: int = 4) -> int:
        hardware = replace(HARDWARE, physical_batch_size=physical)
        return task_of(eight, settings, hardware).check(encoder, ALONE)

    assert check(SETTINGS) == 120
    with pytest.raises(
        ConfigError,
        match=r"crop_size=30; expected a multiple of tiny's patch, 8 px, and two at least. Use 32",
    ):
        task_of(NOTHING, replace(SETTINGS, crop_size=30)).make(encoder)
    with pytest.raises(ConfigError, match="Use 16"):
        task_of(NOTHING, replace(SETTINGS, crop_size=8)).make(encoder)
    with pytest.raises(ConfigError, match="1 image in a forward pass"):
        check(SETTINGS, 1)
    with pytest.raises(ConfigError, match="1 image in a forward pass"):
        check(replace(SETTINGS, batch_size=5), 2)
    assert check(replace(SETTINGS, norm="group"), 1) == 120
    with pytest.raises(ConfigError, match="warmup_steps=1500"):
        check(replace(SETTINGS, warmup_steps=1500))
    with pytest.raises(ConfigError, match="not a plain vision transformer"):
        task_of(NOTHING, SETTINGS).make(fixed_encoder("hog", 32))
