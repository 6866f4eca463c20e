"""What the printed code computes: captions, reconstructions, and pixels of image files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from dpvision.checkpoint import load_checkpoint
from dpvision.config import DataConfig
from dpvision.data.transform import LibraryData, LibraryResize, preprocess_of
from dpvision.encoders.calibration import Calibration, save_calibration, weights_of
from dpvision.encoders.classifier import load_classifier
from dpvision.encoders.trained import load_model
from dpvision.export.to_onnx import pixels_code
from dpvision.export.write import export
from dpvision.models.captioner import Captioner
from dpvision.models.generate import generate
from dpvision.models.mae import MAE, losses
from dpvision.runs.folder import read_run

from ..captioners import image, make_tokenizer
from .models_to_export import CLASSES, MODELS, Copies, Made, make_exportable
from .test_formats import modelling

CAPTIONER, MAE_RUN = "captioner (`dpcap.*`)", "masked autoencoder (`vip.*`)"


def code_of(folder: Path) -> str:
    return (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]


def squares() -> torch.Tensor:
    pixels = np.stack([image(number)[0] for number in range(8)])
    x_BCHW = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    return ((x_BCHW - 0.5) / 0.25).float()


@pytest.mark.parametrize("to", ["safetensors", "onnx"])
def test_the_printed_code_writes_the_captions_of_generate(
    to: Any, made: Made, copied: Copies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(CAPTIONER, to, tmp_path / "out").folder
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    x_BCHW = squares()
    here: list[dict[str, Any]] = []
    for number in range(8):
        here.append({"image": Image.fromarray(image(number)[0])})
        exec(code_of(folder), here[-1])
    ids = [row for one in here for row in one["ids"]]
    model, _ = load_model(load_checkpoint(made(CAPTIONER)))
    assert isinstance(model, Captioner)
    model.eval()
    ours = [said.ids for (said,) in generate(model, model.encode(x_BCHW))]
    assert [tuple(row) for row in ids] == ours and len({*ours}) > 1
    if to == "onnx":
        texts = [make_tokenizer().decode(said) for said in ours]
        assert [one["texts"][0] for one in here] == texts and "a red square on the left" in texts


def test_transformers_reconstructs_as_the_run(made: Made, copied: Copies, tmp_path: Path) -> None:
    """Its loss, at the same masks and with normalised pixels too, is ours: the decoder, and the
    order of the pixels in a patch.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is of an extra")
    folder = copied(MAE_RUN, "transformers", tmp_path / "out").folder
    theirs = transformers.ViTMAEForPreTraining.from_pretrained(folder).eval()
    ours, _ = load_model(load_checkpoint(made(MAE_RUN)))
    assert isinstance(ours, MAE)
    generator = torch.Generator().manual_seed(2)
    x_BCHW = torch.randn(4, 3, 32, 32, generator=generator)
    order_BL = torch.rand(4, ours.num_patches, generator=generator)
    with torch.inference_mode():
        loss = theirs(x_BCHW, noise=order_BL).loss
        assert abs(loss - losses(ours, x_BCHW, order_BL).mean()) < 1e-6


IMAGES = [
    Image.fromarray(load_sample_images().images[0]).crop(box)
    for box in ((0, 0, 300, 300), (5, 9, 205, 327), (100, 40, 171, 82))
]
SIDES = [(20, 20), (25, 90), (51, 52), (64, 64), (102, 300), (103, 104)]


@pytest.mark.parametrize(
    "to", ["safetensors", "timm", pytest.param("onnx", marks=pytest.mark.slow)]
)
def test_a_calibrated_run_leaves_with_its_temperature_offset_and_thresholds(
    to: Any, tmp_path: Path
) -> None:
    """The probabilities are those of ``dpvision predict``; timm gives scores, the card the rest."""
    run, thresholds = make_exportable(tmp_path / "run", "classifier on our ViT, mean"), (0.2, 0.5)
    weights = weights_of(load_checkpoint(run), ema=False)
    x_BCHW = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    before = load_classifier(run).probabilities(x_BCHW)
    made = Calibration(weights, 2.5, 0.75, (*thresholds, 0.9), "of largest F1", {}, 1.0, 0.5)
    save_calibration(load_checkpoint(run), made)
    expected = load_classifier(run).probabilities(x_BCHW)
    assert (expected - before).abs().max() > 0.05
    if to == "onnx":
        pytest.importorskip("onnxscript", reason="onnxscript is of an extra")
    export(run, to, folder := tmp_path / "out")
    if to == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(folder / "model.onnx")
        found = torch.from_numpy(session.run(["probabilities"], {"images": x_BCHW.numpy()})[0])
    elif to == "timm":
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        found = (model(x_BCHW) / 2.5).sigmoid()
    else:
        found = modelling(folder).load(folder).probabilities(x_BCHW)
    torch.testing.assert_close(found.detach(), expected, atol=1e-6, rtol=0)
    card = (folder / "README.md").read_text()
    assert "the sigmoid of the scores divided by 2.5; a class is predicted above" in card
    assert f"0. `{CLASSES[0]}`, above 0.2\n1. `{CLASSES[1]}`, above 0.5\n" in card


@pytest.mark.parametrize(
    "data",
    [
        DataConfig(own_sizes=(32, 64, 128)),
        LibraryData(library=LibraryResize(146, keep_aspect=True)),
        LibraryData(library=LibraryResize(128, keep_aspect=False, filter="bilinear")),
    ],
    ids=["own sizes", "shorter side", "square"],
)
def test_the_code_for_onnx_makes_the_pixels_that_a_head_sees(data: DataConfig) -> None:
    """A file whose resolution is its own was enlarged to the largest: 22 of 60 other classes."""
    for file in [*IMAGES, *(Image.new("RGB", (w, h), (w, h, 9)) for w, h in SIDES)]:
        of_onnx: dict[str, Any] = {"image": file, "numpy": np}
        exec(pixels_code(128, data), of_onnx)
        expected = preprocess_of(128, data)(file)
        np.testing.assert_allclose(of_onnx["x_BCHW"][0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "data",
    [DataConfig(), DataConfig(resize=48), DataConfig(resize=48, crop="centre")],
    ids=["crop of the image", "resized", "crop of the resized"],
)
def test_files_become_the_same_pixels(data: DataConfig, made: Made, tmp_path: Path) -> None:
    """modelling.py and the code for ONNX: always. timm: where the square is the whole image; else
    within half a pixel.
    """
    run = make_exportable(tmp_path / "run", MAE_RUN, data=data)
    ours = preprocess_of(32, data)
    assert read_run(run)[1].data.resize == data.resize and MODELS[MAE_RUN].encoder.image_size == 32  # type: ignore[union-attr]
    here: dict[str, Any] = {}
    exec((export(run, "safetensors", tmp_path / "a").folder / "modelling.py").read_text(), here)
    exported = here["load"](tmp_path / "a")
    export(run, "timm", tmp_path / "b")
    model = timm.create_model(f"local-dir:{tmp_path / 'b'}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    for file in IMAGES:
        expected = ours(file)
        assert np.abs(exported.preprocess(file).numpy() - expected).max() < 1e-6
        of_onnx: dict[str, Any] = {"image": file, "numpy": np}
        exec(pixels_code(32, data), of_onnx)
        assert np.abs(of_onnx["x_BCHW"][0] - expected).max() < 1e-6
        off = np.abs(transform(file).numpy() - expected)
        square = file.width == file.height
        if (data.resize is not None and data.crop == "random") or (square and data.resize is None):
            assert off.max() < 1e-6
        else:
            assert off.mean() < 0.3, "of a standard deviation of 1"
