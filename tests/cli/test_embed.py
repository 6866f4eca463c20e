"""`dpvision embed`: every encoder's name, its own poolings, and one clear error."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.cli import main
from dpvision.data.store import Store
from dpvision.encoders.open import open_encoder

from ..adapt.lineage_runs import untrained_run
from ..adapt.runs_of_heads import write_digits


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("stores") / "digits", 0, 6, public=True)


@pytest.mark.parametrize("name", ["pixels", "hog", "patches", "random:", "timm:test_resnet"])
def test_embed_opens_every_encoder_with_its_default_pooling(
    name: str, store: Store, tmp_path: Path
) -> None:
    if name == "random:":
        name += str(untrained_run(tmp_path / "run", "public", None))
    out = tmp_path / "features.npz"
    assert main(["embed", name, str(store.path), str(out), "--workers", "1"]) == 0
    encoder = open_encoder(name)
    image = encoder.preprocess(Image.open(io.BytesIO(store.read(3))))
    expected = encoder(torch.from_numpy(image)[None])[0]
    np.testing.assert_allclose(np.load(out)["features"][3], expected, atol=1e-5)


def test_a_wrong_pooling_or_encoder_is_one_clear_error(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "features.npz"
    for encoder, more, said in (
        (
            "hog",
            ["--pooling", "2x2"],
            "pooling='2x2'; expected one of ['hog'] with hog. Use one of them, or omit it.",
        ),
        ("hogs", [], "'hogs'; expected a run folder, random:RUN"),
    ):
        assert main(["embed", encoder, str(store.path), str(out), *more]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1 and not out.exists()
