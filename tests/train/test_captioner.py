"""Runs of a captioner: the gates hold for every variant, clipping is exact, words go with the
weights, the surgery takes what it should.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made import key

from dpvision.checkpoint import load_checkpoint
from dpvision.config import (
    CaptionerConfig,
    CrossDecoderConfig,
    CrossMAEConfig,
    DataConfig,
    HardwareConfig,
    MAEConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
)
from dpvision.data.importer import import_samples
from dpvision.data.keys import StepKey
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.data.tokenizer import CaptionTokenizer, train_tokenizer
from dpvision.dp.clip import clipped_sum
from dpvision.dp.route import _ROUTES
from dpvision.dp.separable import check_separable
from dpvision.dp.support import check_exact
from dpvision.errors import CheckpointError, ConfigError, DataError
from dpvision.models import make_model
from dpvision.models.captioner import Captioner
from dpvision.synthetic.scenes import make_scene
from dpvision.train.loop import fit
from dpvision.train.objectives import example_batch, loss_function
from dpvision.train.start import new_session, resumed_session
from dpvision.train.step import step_sum

pytestmark = pytest.mark.usefixtures("gates_once")

NUM_RECORDS = 80
ENCODER = ViTConfig(
    image_size=16, patch_size=4, depth=1, width=16, num_heads=2, qkv_bias=False, train_cls=False
)
DECODER = CrossDecoderConfig(depth=1, width=16, num_heads=2)
KEY = StepKey(0, 0)


def sentences(num: int) -> list[str]:
    return [make_scene(i, 16).caption for i in range(num)]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("words") / "words.json"
    train_tokenizer(sentences(500), 300).save(file)
    return file


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_scenes(tmp_path_factory.mktemp("data") / "scenes", NUM_RECORDS, 16, public=False)


@pytest.fixture
def config(store: Store, words: Path) -> RunConfig:
    return RunConfig(
        recipe="dpcap.micro",
        privacy=PrivacyConfig(
            dataset_size=NUM_RECORDS,
            expected_batch_size=20,
            steps=3,
            max_grad_norm=0.5,
            noise_multiplier=2.0,
        ),
        model=CaptionerConfig(encoder=ENCODER, decoder=DECODER, vocab_size=300, num_tokens=24),
        data=DataConfig(
            store=str(store.path),
            tokenizer=str(words),
            horizontal_flip=False,
            crop_scale=(0.8, 1.0),
        ),
        optim=OptimConfig(learning_rate=1e-2, schedule="linear", decay_horizon=2.0, warmup_steps=1),
        hardware=HardwareConfig(device="cpu", physical_batch_size=7, workers=1),
    )


def with_model(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, model=replace(config.model, **changes))


def train(config: RunConfig, root: Path) -> Path:
    with new_session(config, root) as session:
        assert fit(session, quiet=True)
    return root


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_way_through_the_network_is_found_on_public_records_alone(
    config: RunConfig, tmp_path: Path, precision: str
) -> None:
    config = with_model(replace(config, data=replace(config.data, views=2)), parallel_rate=0.5)
    config = replace(config, hardware=replace(config.hardware, precision=precision))
    with new_session(config, tmp_path / "run") as session:
        found = set(_ROUTES[session.model])
        assert fit(session, quiet=True)
        assert len(found) == 1 and set(_ROUTES[session.model]) == found


VARIANTS: dict[str, dict[str, Any]] = {
    "cap": {},
    "cappa": {"parallel_rate": 0.5},
    "cap_mae": {"reconstruction_weight": 0.5},
    "all": {"parallel_rate": 0.5, "reconstruction_weight": 0.5},
    "decoder": {"train_encoder": False},
}


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_passes_both_gates(config: RunConfig, variant: str, views: int) -> None:
    config = replace(
        with_model(config, **VARIANTS[variant]), data=replace(config.data, views=views)
    )
    model, loss_fn = make_model(config.model, 0), loss_function(config)
    check_separable(loss_fn, model, example_batch(config), KEY)
    check_exact(loss_fn, model, example_batch(config), KEY)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_pass_equals_single_records(config: RunConfig, variant: str) -> None:
    config = with_model(config, **VARIANTS[variant])
    model, loss_fn, batch = (
        make_model(config.model, 0),
        loss_function(config),
        example_batch(config, 5),
    )
    fast = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=0.5)
    slow = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=0.5, method="vmap")
    torch.testing.assert_close(fast.norms_B, slow.norms_B, rtol=1e-4, atol=1e-6)
    for name, value in slow.grads.items():
        torch.testing.assert_close(fast.grads[name], value, rtol=1e-4, atol=1e-5)


def test_the_warm_start_passes_both_gates(config: RunConfig) -> None:
    config = replace(config, model=CrossMAEConfig(encoder=ENCODER, decoder=DECODER))
    model, loss_fn = make_model(config.model, 0), loss_function(config)
    check_separable(loss_fn, model, example_batch(config), KEY)
    check_exact(loss_fn, model, example_batch(config), KEY)


@pytest.mark.slow
def test_a_run_resumes_and_its_words_go_with_the_weights(
    config: RunConfig, words: Path, tmp_path: Path
) -> None:
    root = train(config, tmp_path / "run")
    checkpoint = load_checkpoint(root)
    kept = CaptionTokenizer.load(checkpoint.path / "tokenizer.json")
    assert kept.digest == CaptionTokenizer.load(words).digest
    with resumed_session(root) as session:
        assert session.words is not None and session.updates == 3
        assert fit(session, quiet=True)
    (checkpoint.path / "tokenizer.json").write_text(words.read_text() + " ")
    with pytest.raises(CheckpointError, match="altered"):
        load_checkpoint(root)


def test_physical_batches_change_nothing(config: RunConfig, tmp_path: Path) -> None:
    totals = []
    with new_session(config, tmp_path / "run") as session:
        for size, workers in ((5, 1), (64, 2)):
            hardware = replace(config.hardware, physical_batch_size=size, workers=workers)
            settings = replace(config, hardware=hardware)
            totals.append(
                step_sum(
                    0,
                    replace(session, config=settings, plan=session.plan.another_run()),
                    key(b"d" * 32),
                )[0]
            )
    for name, value in totals[0].grads.items():
        torch.testing.assert_close(totals[1].grads[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_loss_falls_when_it_may(config: RunConfig, tmp_path: Path) -> None:
    """Without noise, words that say nothing of the image are learned within seconds: the mean loss
    falls below half of log V.
    """
    privacy = PrivacyConfig(
        dataset_size=NUM_RECORDS,
        expected_batch_size=40,
        steps=60,
        max_grad_norm=None,
        guarantee="none",
    )
    config = replace(
        config, privacy=privacy, hardware=replace(config.hardware, physical_batch_size=64)
    )
    root = train(config, tmp_path / "run")
    lines = (root / "confidential" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert np.mean(losses[:2]) > 0.9 * np.log(300) and np.mean(losses[-5:]) < 0.5 * np.log(300)


@pytest.mark.slow
def test_surgery_takes_encoder_and_decoder_and_leaves_the_words_fresh(
    config: RunConfig, tmp_path: Path
) -> None:
    public = write_scenes(tmp_path / "public", 30, 16, public=True)
    start = replace(
        config,
        model=CrossMAEConfig(encoder=ENCODER, decoder=DECODER),
        privacy=PrivacyConfig(
            dataset_size=public.num_records,
            expected_batch_size=10,
            steps=3,
            max_grad_norm=None,
            guarantee="none",
        ),
        data=replace(config.data, store=str(public.path), tokenizer=None),
    )
    warm = train(start, tmp_path / "warm")
    taken = load_checkpoint(warm).model
    with new_session(replace(config, init_from=str(warm)), tmp_path / "cap") as session:
        fresh = make_model(config.model, config.seed).state_dict()
        for name, value in session.model.state_dict().items():
            from_parent = name.split(".")[0] in ("encoder", "decoder")
            assert torch.equal(value, taken[name] if from_parent else fresh[name]), name
            if from_parent and value.dim() > 1:
                assert not torch.equal(value, fresh[name]), (
                    "the warm start did not move it, so the test shows nothing"
                )
    vip = replace(
        config,
        model=MAEConfig(encoder=ENCODER, decoder_depth=1, decoder_width=16, decoder_num_heads=2),
        data=replace(config.data, tokenizer=None),
        init_from=str(warm),
    )
    with new_session(vip, tmp_path / "vip") as session:
        assert torch.equal(
            session.model.encoder.patch_embed.weight, taken["encoder.patch_embed.weight"]
        )
    both = with_model(
        replace(config, init_from=str(warm)), reconstruction_weight=1.0, parallel_rate=0.5
    )
    with new_session(both, tmp_path / "both") as session:
        assert isinstance(session.model, Captioner) and session.model.patch_head is not None
        assert torch.equal(
            session.model.patch_head.linear.weight, taken["patch_head.linear.weight"]
        )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"decoder": replace(DECODER, num_heads=4)}, "decoder.num_heads"),
        pytest.param(
            {"encoder": replace(ENCODER, num_heads=4)}, "encoder.num_heads", marks=pytest.mark.slow
        ),
        pytest.param(
            {"decoder": replace(DECODER, depth=2)}, "decoder.depth", marks=pytest.mark.slow
        ),
    ],
)
def test_a_parent_of_other_sizes_is_refused(
    config: RunConfig, tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    root = train(config, tmp_path / "run")
    with (
        pytest.raises(CheckpointError, match=name),
        new_session(with_model(replace(config, init_from=str(root)), **change), tmp_path / "n"),
    ):
        pass


@pytest.mark.slow
def test_a_captioner_goes_on_only_with_its_own_words(config: RunConfig, tmp_path: Path) -> None:
    root = train(config, tmp_path / "run")
    other = tmp_path / "other.json"
    train_tokenizer([caption.replace("star", "comet") for caption in sentences(500)], 300).save(
        other
    )
    changed = replace(config, init_from=str(root), data=replace(config.data, tokenizer=str(other)))
    with (
        pytest.raises(CheckpointError, match="another tokenizer"),
        new_session(changed, tmp_path / "next"),
    ):
        pass
    frozen = with_model(replace(config, init_from=str(root)), train_encoder=False)
    before = load_checkpoint(root).model
    after = load_checkpoint(train(frozen, tmp_path / "decoder")).model
    assert all(
        torch.equal(after[name], value)
        for name, value in before.items()
        if name.startswith("encoder.")
    )
    assert not torch.equal(after["word_head.weight"], before["word_head.weight"])


def test_refusals_come_before_anything_is_charged(
    config: RunConfig, words: Path, store: Store, tmp_path: Path
) -> None:
    def refused(config: RunConfig, kind: type[Exception], match: str) -> None:
        with pytest.raises(kind, match=match), new_session(config, tmp_path / "run"):
            pass
        assert not (tmp_path / "run").exists()

    refused(
        replace(config, data=replace(config.data, tokenizer=None)), ConfigError, "tokenizer=None"
    )
    refused(
        replace(config, data=replace(config.data, tokenizer=str(tmp_path / "no.json"))),
        DataError,
        "no.json",
    )
    refused(with_model(config, vocab_size=301), ConfigError, "vocab-size 300")
    bare = [
        Sample(f"{i}", store.read(i), {"caption": "a disc"} if i else {})
        for i in range(NUM_RECORDS)
    ]
    without = import_samples(bare, tmp_path / "without")
    refused(
        replace(config, data=replace(config.data, store=str(without.path))),
        DataError,
        "1 of 80 records have no caption",
    )
