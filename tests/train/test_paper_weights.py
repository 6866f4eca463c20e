"""Runs that start from the papers' files: what they start with, what stays as loaded, and what is
refused before a step is charged.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made import secrets

import dpvision
from dpvision.checkpoint import load_checkpoint
from dpvision.config import (
    CaptionerConfig,
    ClassifierConfig,
    CrossDecoderConfig,
    MAEConfig,
    RunConfig,
    ViTConfig,
)
from dpvision.data.tokenizer import scene_captions, train_tokenizer
from dpvision.encoders.open import open_encoder
from dpvision.encoders.starting_weights import adapted, open_parent
from dpvision.errors import CheckpointError, ConfigError, PrivacyError
from dpvision.models.captioner import losses as caption_losses
from dpvision.models.mae import losses as mae_losses
from dpvision.train.loop import fit
from dpvision.train.start import check_run, new_session, resumed_session

from ..encoders import paper_files as files

pytestmark = pytest.mark.usefixtures("gates_once")

VIT = ViTConfig(image_size=16, patch_size=4, depth=1, width=16, num_heads=2, mlp_ratio=2.0)
VOCAB_SIZE = 180
DECLARED = "ViP-Syn; CC-BY-NC 4.0; drawn by this test"


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def autoencoder(
    config: RunConfig, tmp_path: Path
) -> Callable[..., tuple[RunConfig, files.Tensors]]:
    """A private run of a masked autoencoder from a file of ViP, and the file's tensors."""

    def make(*, trained: bool = False, **file: Any) -> tuple[RunConfig, files.Tensors]:
        tensors = files.mae_file(**{"width": 16, "depth": 1, "grid": 4, "trained": trained} | file)
        path = files.write(tmp_path / "vip_syn.safetensors", tensors)
        positions = "loaded" if trained else "fixed"
        model = MAEConfig(
            encoder=replace(VIT, positions=positions),
            decoder_depth=1,
            decoder_width=16,
            decoder_num_heads=2,
        )
        return replace(
            config, model=model, init_from=f"vip:{path}@heads=2,2", public_weights=DECLARED
        ), tensors

    return make


@pytest.mark.parametrize("trained", [False, True])
def test_a_private_autoencoder_starts_from_vips_whole_file(autoencoder, images, tmp_path, trained):
    config, tensors = autoencoder(trained=trained)
    noise_BL = torch.rand(3, 16, generator=torch.Generator().manual_seed(1))
    with new_session(config, tmp_path / "run", open_parent) as session:
        x_BCHW = images.double()
        truth_B = files.mae_losses(files.double(tensors), x_BCHW, noise_BL, 2, 2, visible=4)
        with torch.no_grad():
            torch.testing.assert_close(
                mae_losses(session.model, images, noise_BL).double(), truth_B, atol=1e-5, rtol=0
            )
        entry = session.lineage[0]
        assert entry["store_id"] == "weights:vip:vip_syn.safetensors"
        assert entry["visibility"] == "public" and entry["licence"] == "CC-BY-NC 4.0"
        assert str(tmp_path) not in str(session.lineage), "no path of this machine"
        before = session.model.encoder.patch_embed.weight.detach().clone()
        assert fit(session, secrets=secrets(), quiet=True)
        assert not torch.equal(session.model.encoder.patch_embed.weight, before)
        with torch.no_grad():
            truth_BD = session.model.encoder(images)[:, 1:].mean(1)
    kept = load_checkpoint(tmp_path / "run")
    assert ("encoder.position_LD" in kept.model) == ("decoder_position_LD" in kept.model) == trained
    if trained:
        position_LD = tensors["pos_embed"][0, 1:]
        assert torch.equal(kept.model["encoder.position_LD"], position_LD)
        torch.testing.assert_close(kept.ema["encoder.position_LD"], position_LD)
    for ema in (False, True):
        encoder = open_encoder(tmp_path / "run", ema=ema)
        found_BD = encoder(images)
    torch.testing.assert_close(dpvision.load(tmp_path / "run")(images), truth_BD)
    assert not torch.equal(found_BD, truth_BD)


def test_a_run_with_loaded_positions_resumes(autoencoder, tmp_path):
    config, tensors = autoencoder(trained=True)
    with new_session(config, tmp_path / "run", open_parent) as session:
        assert fit(session, secrets=secrets(), quiet=True)
    with resumed_session(tmp_path / "run", open_parent=open_parent) as session:
        assert torch.equal(session.model.encoder.position_LD, tensors["pos_embed"][0, 1:])


@pytest.mark.parametrize(
    ("file", "change", "error", "words"),
    [
        (
            {"decoder": None},
            {},
            CheckpointError,
            "lacks decoder_embed, mask_token, decoder_blocks, decoder_norm, head; expected the "
            "whole model.*a file with its decoder",
        ),
        ({}, {"num_heads": 4}, CheckpointError, r"encoder\.num_heads=2; expected 4"),
        (
            {"trained": True},
            {"positions": "fixed"},
            CheckpointError,
            r"encoder\.positions='loaded'; expected 'fixed'.*--model\.encoder\.positions",
        ),
        (
            {"trained": True, "grid": 2},
            {},
            CheckpointError,
            r"encoder\.image_size=8; expected 16.*--model\.encoder\.image-size",
        ),
    ],
)
def test_a_file_that_does_not_fit_the_run_is_refused(autoencoder, file, change, error, words):
    config, _ = autoencoder(**file)
    config = replace(
        config, model=replace(config.model, encoder=replace(config.model.encoder, **change))
    )
    with pytest.raises(error, match=words):
        check_run(config, open_parent)


def test_a_file_is_declared_or_refused(autoencoder):
    config, _ = autoencoder()
    assert check_run(config, open_parent)[3][0]["declared"]["by"] == "operator"
    with pytest.raises(PrivacyError, match="--public-weights"):
        check_run(replace(config, public_weights=None), open_parent)
    with pytest.raises(ConfigError, match=r"data: mean=.*Pass --data.mean 0\.485"):
        check_run(replace(config, data=replace(config.data, mean=(0.5, 0.5, 0.5))), open_parent)


@pytest.fixture
def captioner(config: RunConfig, tmp_path: Path) -> tuple[RunConfig, files.Tensors]:
    """A private run of a captioner from a file of DP-Cap, and the file's tensors."""
    tensors = files.dpcap_file(width=16, depth=1, decoder_depth=1, grid=4, vocab_size=VOCAB_SIZE)
    path = files.write(tmp_path / "dpcap.safetensors", tensors)
    words = {word for caption in scene_captions(50) for word in caption.split()}
    vocabulary = files.write_vocabulary(tmp_path / "vocab.txt", sorted(words), VOCAB_SIZE)
    encoder = replace(VIT, qkv_bias=False, train_cls=False)
    return replace(
        config,
        model=CaptionerConfig(
            encoder=encoder,
            decoder=CrossDecoderConfig(depth=1, width=16, num_heads=4),
            vocab_size=VOCAB_SIZE,
            num_tokens=24,
        ),
        data=replace(config.data, tokenizer=str(vocabulary)),
        init_from=f"dpcap:{path}@heads=2,4@{vocabulary}",
        public_weights=DECLARED,
    ), tensors


def test_a_private_captioner_starts_from_dpcaps_file_with_its_words(captioner, images, tmp_path):
    config, tensors = captioner
    bert_BL = torch.tensor([[101, 110, 1, 102, 0], [101, 150, 102, 0, 0], [101, 2, 104, 105, 102]])
    ours_BL = torch.tensor([[1, 110, 101, 2, 0], [1, 150, 2, 0, 0], [1, 102, 104, 105, 2]])
    with new_session(config, tmp_path / "run", open_parent) as session:
        truth_B = files.caption_losses(files.double(tensors), images.double(), bert_BL, 2, 4)
        with torch.no_grad():
            found_B = caption_losses(session.model, images, ours_BL).double()
        torch.testing.assert_close(found_B, truth_B, atol=1e-5, rtol=0)
        assert fit(session, secrets=secrets(), quiet=True)
    kept = load_checkpoint(tmp_path / "run")
    assert b'"WordPiece"' in kept.files["tokenizer.json"]
    again = replace(
        config, init_from=str(tmp_path / "run"), public_weights=None
    )  # the run's own words, from the same vocabulary file
    assert check_run(again, open_parent)[0].steps == config.privacy.steps


def test_dpcaps_file_needs_its_vocabulary_and_no_other(captioner, tmp_path):
    config, _ = captioner
    start, _, vocabulary = config.init_from.rpartition("@")
    with pytest.raises(CheckpointError, match=r"no tokenizer; .*dpcap:FILE@vocab\.txt"):
        check_run(replace(config, init_from=start), open_parent)
    other = tmp_path / "bpe.json"
    train_tokenizer(scene_captions(300), 300).save(other)
    model = replace(config.model, vocab_size=300)
    changed = replace(config, model=model, data=replace(config.data, tokenizer=str(other)))
    with pytest.raises(CheckpointError, match=r"another tokenizer .* vocabulary of --init-from"):
        check_run(changed, open_parent)
    with pytest.raises(CheckpointError, match="byte-pair encoding of 300 entries; expected BERT's"):
        check_run(replace(config, init_from=f"{start}@{other}"), open_parent)
    assert Path(vocabulary).exists()


def test_an_autoencoder_takes_dpcaps_encoder_as_in_the_papers_table_7(captioner):
    config, _ = captioner
    model = MAEConfig(
        encoder=config.model.encoder, decoder_depth=1, decoder_width=16, decoder_num_heads=2
    )
    changed = replace(
        config,
        model=model,
        data=replace(config.data, tokenizer=None),
        init_from=config.init_from.rpartition("@")[0],
    )
    assert check_run(changed, open_parent)[3][0]["store_id"] == "weights:dpcap:dpcap.safetensors"


@pytest.mark.parametrize("kind", ["vip", "dpcap"])
def test_a_classifier_starts_from_a_papers_encoder(autoencoder, captioner, images, tmp_path, kind):
    if kind == "vip":
        config, tensors = autoencoder(trained=True, decoder=None)
    else:
        config, tensors = captioner
    base = replace(
        config,
        model=ClassifierConfig(encoder=VIT, num_classes=8, pooling="mean"),
        data=replace(config.data, tokenizer=None),
    )
    start = adapted(base, config.init_from)
    with new_session(start, tmp_path / "run", open_parent) as session:
        model = session.model
        truth_BD = files.encoder_blocks(files.double(tensors), images.double(), 2)[-1][:, 1:].mean(
            1
        )
        with torch.no_grad():
            found_BD = model.features(images).double()
        torch.testing.assert_close(found_BD, truth_BD, atol=1e-5, rtol=0)
        assert fit(session, secrets=secrets(), quiet=True)
    with torch.no_grad():
        torch.testing.assert_close(
            dpvision.load(tmp_path / "run")(images), model.features(images), atol=1e-5, rtol=0
        )
