"""What the printed code computes: captions, reconstructions, and pixels of image files."""

import io
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
from dpvision.data.decode import decode
from dpvision.data.transform import LibraryData, LibraryResize, preprocess_of
from dpvision.encoders.calibration import Calibration, save_calibration, weights_of
from dpvision.encoders.classifier import load_classifier
from dpvision.encoders.trained import load_model
from dpvision.export.modelling import to_rgb
from dpvision.export.to_onnx import pixels_code
from dpvision.export.write import export
from dpvision.models.captioner import Captioner
from dpvision.models.generate import generate
from dpvision.models.mae import MAE, losses
from dpvision.runs.folder import read_run

from ..captioners import image, make_tokenizer
from ..data.image_files import noise
from ..data.test_pixels import MANY, RAMP, oriented, raw_png, saved, tiff
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
    assert "takes the whole image, unless `--fit crop`" in (folder / "README.md").read_text()
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


PHOTO = Image.fromarray(noise(4, 9, 7))
DEEP_COLOUR = (noise(5, 8, 8).astype(np.uint16) << 8) + noise(6, 8, 8)
PALE = Image.fromarray(np.dstack([noise(7, 8, 8), noise(8, 8, 8)[..., 0]]))
FLOATS = np.linspace(-100, 5000, 64, dtype=np.float32).reshape(8, 8)
ODD = {
    **MANY,
    **{f"{kind} {k}": oriented(kind, k) for kind in ("JPEG", "PNG", "TIFF") for k in range(9)},
    **{f"{m} tiff": saved(PHOTO.convert(m), "TIFF") for m in ("1", "L", "P", "CMYK", "YCbCr")},
    **{f"{m} png": saved(PALE.convert(m), "PNG") for m in ("1", "L", "LA", "P", "RGB", "RGBA")},
    **{kind: saved(PALE, kind, lossless=True) for kind in ("WEBP", "GIF", "JPEG2000", "TIFF")},
    "grey jpeg": saved(PHOTO.convert("L"), "JPEG"),
    "12 bits in 16": raw_png(RAMP >> 4, 16),
    "grey of 2 bits": raw_png(RAMP >> 14, 2),
    "transparent colour": saved(PHOTO, "PNG", transparency=PHOTO.getpixel((0, 0))),
    "transparent grey": saved(PHOTO.convert("L"), "PNG", transparency=60),
    "transparent grey of 16 bits": raw_png(RAMP, 16, 0, ((b"tRNS", RAMP[0, 3].tobytes()[::-1]),)),
    "transparent colour of 16 bits": raw_png(
        DEEP_COLOUR, 16, 2, ((b"tRNS", DEEP_COLOUR[0, 0].astype(">u2").tobytes()),)
    ),
    "bmp without alpha": saved(
        Image.merge("RGBA", [*PALE.split()[:3], Image.new("L", (8, 8))]), "BMP"
    ),
    "bmp with alpha": saved(PALE, "BMP"),
    "tiff of 16 bits": saved(Image.fromarray(RAMP), "TIFF"),
    "signed 32 bits": saved(Image.fromarray(RAMP.astype(np.int32) * 9 - 50), "TIFF"),
    "signed": tiff(RAMP.astype(np.int16), 16, 1, ((339, 3, 2),)),
    "signed bytes": tiff(RAMP.astype(np.uint8), 8, 1, ((339, 3, 2),)),
    "unsigned 32 bits": tiff(RAMP.astype(np.uint32), 32, 1, ((339, 3, 1),)),
    "tiff of 8 bits, white is zero": tiff(RAMP.astype(np.uint8), 8, 0),
    "pgm of 16 bits": b"P5 8 8 65535\n" + RAMP.astype(">u2").tobytes(),
    "pgm of 12 bits": b"P5 8 8 4095\n" + (RAMP >> 4).astype(">u2").tobytes(),
    "16-bit colour": raw_png(DEEP_COLOUR, 16, 2),
    "floats": tiff(FLOATS, 32, 1, ((339, 3, 3),)),
    "floats of a stated range": tiff(
        FLOATS,
        32,
        1,
        ((339, 3, 3), (340, 11, 0), (341, 11, 4095)),  # type: ignore[arg-type]
    ),
    "lab": saved(Image.new("LAB", (8, 8), (99, 20, 30)), "TIFF"),
}
NOT_BY_PILLOW = {
    "clear colour of 4 bits",
    "transparent grey of 16 bits",
    "transparent colour of 16 bits",
    "signed",
    "signed bytes",
    "signed 32 bits",
    "lab",
}
"""What modelling.py refuses with every window."""


@pytest.mark.parametrize(
    ("window", "refused"),
    [
        (None, {"floats", "floats of a stated range"}),
        ((0.0, 4095.0), {"16-bit colour"}),
        ((10.5, 3000.25), {"16-bit colour"}),
        ((-1000.0, 70000.0), {"16-bit colour"}),
    ],
)
def test_modelling_reads_odd_files_as_dpvision_or_refuses(
    window: tuple[float, float] | None, refused: set[str]
) -> None:
    """Of 12 bits without the window all images became one class; transparency was black."""
    found = set()
    for kind, data in ODD.items():
        try:
            made = to_rgb(Image.open(io.BytesIO(data)), window)
        except ValueError as error:
            assert "expected what Pillow alone reads as dpvision does" in str(error)
            found.add(kind)
            continue
        np.testing.assert_array_equal(np.asarray(made), decode(data, window=window), err_msg=kind)
    assert found == NOT_BY_PILLOW | refused


@pytest.mark.parametrize("to", ["timm", "transformers"])
def test_the_code_of_a_card_opens_odd_files(
    to: Any, made: Made, copied: Copies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed for all but 8-bit RGB, and left them turned; the card says which files differ."""
    folder = copied(name := "classifier on our ViT, class token", to, tmp_path / "out").folder
    card, classifier = (folder / "README.md").read_text(), load_classifier(made(name))
    assert "make 8-bit RGB files of such images first" in card
    photo, exif = Image.fromarray(noise(4, 32, 32)), Image.Exif()
    exif[0x0112] = 6
    alike = {
        "turned": saved(photo, "PNG", exif=exif),
        "grey": saved(photo.convert("L"), "PNG"),
        "palette": saved(photo.quantize(9), "PNG"),
        "CMYK": saved(photo.convert("CMYK"), "TIFF"),
    }
    deep = Image.fromarray(np.arange(1024, dtype=np.uint16).reshape(32, 32) * 64)
    alpha = Image.merge("RGBA", [*photo.split(), photo.getchannel(0)])
    others = {"alpha": saved(alpha, "PNG"), "16 bits": saved(deep, "PNG")}
    monkeypatch.chdir(folder)
    for kind, data in (alike | others).items():
        (folder / "photo.jpg").write_bytes(data)
        exec(code_of(folder), scope := {})
        x_BCHW = torch.from_numpy(classifier.preprocess(data))[None]
        off = (scope["logit_BK"] - classifier(x_BCHW)).abs().max()
        assert (off < 1e-5) == (kind in alike), (kind, off)


def test_modelling_uses_the_declared_window(tmp_path: Path) -> None:
    run = make_exportable(tmp_path / "run", MAE_RUN, more={"window": [0, 4095]})
    folder = export(run, "safetensors", tmp_path / "out").folder
    model = modelling(folder).load(folder)
    expected = preprocess_of(32, DataConfig(), (0, 4095))(data := ODD["12 bits in 16"])
    pixels = model.preprocess(Image.open(io.BytesIO(data))).numpy()
    assert np.abs(pixels - expected).max() < 1e-6 and np.ptp(pixels) > 2


def test_modelling_refuses_a_loaded_image_that_may_have_lost_samples() -> None:
    image = Image.open(io.BytesIO(raw_png(DEEP_COLOUR, 16, 2)))
    image.load()
    with pytest.raises(ValueError, match=r"a PNG that is loaded.*Pass Image.open\(file\) itself"):
        to_rgb(image, [0, 4095])
