"""Embeddings follow from one image each, bit by bit."""

from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import dpvision
from dpvision.curate.embedding import NUM_ROWS, Embedding, unit
from dpvision.curate.record import about
from dpvision.curate.semantic_duplicates import SemanticDuplicates
from dpvision.encoders import open as encoders_open
from dpvision.encoders.identity import weights_digest
from dpvision.encoders.open import open_encoder, open_frozen
from dpvision.errors import ConfigError
from dpvision.synthetic.scenes import make_scene

from ..data.image_files import encode, noise
from .searches import records

FILES = [encode(make_scene(k, 40 + k).image) for k in range(NUM_ROWS + 5)] + [encode(noise(3))]


def embedded(files: list[bytes], step: Embedding, at_once: int) -> list[np.ndarray]:
    act, found = step.opened(), records(files)
    for start in range(0, len(found), at_once):
        act(found[start : start + at_once])
    return [record.facts["embedding"] for record in found]


@pytest.mark.parametrize(
    "encoder", ["hog", "pixels", pytest.param("scattering", marks=pytest.mark.slow)]
)
def test_an_embedding_is_the_same_alone_in_company_and_on_any_number_of_threads(
    encoder: str,
) -> None:
    step, files = Embedding(encoder), FILES if encoder == "hog" else FILES[:6]
    together = embedded(files, step, len(files))
    threads = torch.get_num_threads()
    try:
        for number, at_once in ((1, 1), (2, 7), (4, len(files))):
            torch.set_num_threads(number)
            other = embedded(files, step, at_once)
            assert torch.get_num_threads() == number
            assert all(np.array_equal(a, b) for a, b in zip(together, other, strict=True))
    finally:
        torch.set_num_threads(threads)
    backwards = embedded(files[::-1], step, len(files))[::-1]
    assert all(np.array_equal(a, b) for a, b in zip(together, backwards, strict=True))


def test_every_pass_has_the_same_number_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of a matrix product follow the number of rows, on some machines."""
    real, seen = encoders_open.open_frozen, []

    def opened(*args):
        encoder, config = real(*args)
        return replace(
            encoder, poolings=lambda x: seen.append(len(x)) or encoder.poolings(x)
        ), config

    monkeypatch.setattr(encoders_open, "open_frozen", opened)
    embedded(FILES, Embedding(), 5)
    embedded(FILES[:1], Embedding(), 1)
    assert len(seen) > 5 and set(seen) == {NUM_ROWS}


def test_it_is_the_encoders_feature_of_length_one() -> None:
    encoder = open_encoder("hog")
    x_BCHW = torch.from_numpy(np.stack([encoder.preprocess(data) for data in FILES[:4]]))
    feature_BD = encoder(x_BCHW)
    wanted = (feature_BD / feature_BD.norm(dim=1, keepdim=True)).numpy()
    found = np.stack(embedded(FILES[:4], Embedding(), 4))
    assert found.dtype == np.float16 and np.abs(found - wanted).max() < 1e-3


def test_numbers_that_are_not_finite_and_zeros_give_zeros() -> None:
    for bad in (0.0, np.nan, np.inf):
        assert not unit(np.array([bad, 0, 0], dtype=np.float32)).any()
    assert not unit(np.array([np.nan, 1, 0], dtype=np.float32)).any()
    for scale in (1e-38, 1.0, 3e38):
        x = unit(np.array([0.6, 0.8], dtype=np.float32) * np.float32(scale))
        assert np.allclose(x.astype(float), [0.6, 0.8], atol=1e-3)


def test_what_is_stated_of_an_encoder_is_its_name_and_digest_not_its_place(tmp_path) -> None:
    assert Embedding().stated() == {"encoder": "hog"}
    path = tmp_path / "weights.safetensors"
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=0)
    save_file(model.state_dict(), path)
    step = SemanticDuplicates(encoder=f"timm:vit_tiny_patch16_224@{path}")
    said = about(step)
    assert str(tmp_path) not in str(said) and said["encoder"].startswith(
        "timm:vit_tiny_patch16_224"
    )
    assert said["encoder"].endswith(weights_digest(dpvision.load(step.encoder)))


def test_an_encoder_that_has_seen_private_images_is_refused(monkeypatch) -> None:
    def seen(*args):
        encoder, config = open_frozen(*args)
        return replace(encoder, lineage=({"visibility": "private"},)), config

    monkeypatch.setattr("dpvision.encoders.open.open_frozen", seen)
    for step in (Embedding(), SemanticDuplicates()):
        with pytest.raises(ConfigError, match="has seen private images"):
            about(step)
    with pytest.raises(ConfigError, match="has seen private images"):
        Embedding().opened()


def test_an_unknown_encoder_is_refused() -> None:
    with pytest.raises(ConfigError, match="encoder: 'hug'"):
        Embedding("hug").opened()
