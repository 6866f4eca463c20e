"""Mistakes with frozen features and heads on them: planted, and caught. The ids are those of
docs/pitfalls.md, section "Features".
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpvision.adapt import prepare as prepare_module
from dpvision.adapt import session as session_module
from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.prepare import prepare
from dpvision.adapt.session import adapt, feature_stream, new_head_session
from dpvision.config import with_settings
from dpvision.data.store import Store
from dpvision.encoders import feature_file, feature_precision
from dpvision.encoders import open as open_module
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.feature_file import feature_array
from dpvision.encoders.feature_precision import in_precision, precision_for
from dpvision.encoders.identity import check_places
from dpvision.encoders.pooled import PooledNetwork, frozen
from dpvision.privacy.ledger_format import read_ledger

from ..adapt.runs_of_heads import head_config, write_digits
from ..eval.labelled import vit_encoder, write_store
from .planting import assert_refused, planted


def test_encoder_sees_batch(tmp_path: Path) -> None:
    config, base = (
        head_config(write_digits(tmp_path / "s", 0, 60), "prototypes", spec="pixels"),
        vit_encoder(),
    )

    def whitened(x_BCHW: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: (x_BD - x_BD.mean(0)) / (x_BD.std(0, correction=0) + 1)
            for name, x_BD in base.poolings(x_BCHW).items()
        }

    def check() -> None:
        assert_refused(lambda: prepare(config), "an encoder that sees its batch")

    encoder = replace(base, poolings=whitened)
    with_it = planted(
        open_module,
        "check_alone",
        lambda *args: ("mean", 32),
        "an encoder that sees its batch was accepted",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_module, "open_encoder", lambda *args, **more: encoder)
        check()
        patch.setattr(prepare_module, "check_places", lambda *args: None)  # sees it too
        with with_it:
            check()


def test_rounding_hides_place() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.GELU(approximate="tanh"))
    pooled = PooledNetwork(layers, lambda net, x_BCHW: net(x_BCHW))
    about = {"image_size": 9, "mean": (0.5,) * 3, "std": (0.5,) * 3, "family": "convnet"}
    encoder = frozen(pooled, "cpu", name="made", **about)

    def check() -> None:
        lowered = in_precision(encoder, "bfloat16")
        check_places(lowered, "mean", 32)  # sees nothing
        assert_refused(
            lambda: precision_for(encoder, "mean", "bfloat16", "cpu"),
            "an operation that may depend on its place",
        )

    check()
    with planted(feature_precision, "_unknown_operation", lambda *args: None, "was accepted"):
        check()


def test_unreadable_row_shifts(tmp_path: Path) -> None:
    store, encoder, rows = write_digits(tmp_path / "s", 0, 30), vit_encoder(), np.arange(30)
    whole = np.array(
        feature_array(encoder, "mean", 32, store, rows, keep=False, batch_size=8, workers=1)
    )
    with open(store.shard_paths[0], "r+b") as shard:
        shard.seek(int(store.index["offset"][11]))
        shard.write(b"\0" * int(store.index["size"][11]))

    def check() -> None:
        found = feature_array(encoder, "mean", 32, store, rows, keep=False, batch_size=8, workers=1)
        others = rows != 11
        assert found.shape == whole.shape and np.array_equal(found[others], whole[others]), (
            "a record has another's features"
        )
        assert np.isnan(found[11]).all(), "a record that does not decode has features"

    check()

    def dense(*args: object) -> object:
        rows_of = np.concatenate(list(real(*args)))
        kept = rows_of[~np.isnan(rows_of).any(axis=1)]
        return iter([np.concatenate([kept, rows_of[len(kept) :]])])

    real = feature_file._blocks
    with planted(feature_file, "_blocks", dense, "another's features"):
        check()


def test_release_without_charge(tmp_path: Path) -> None:
    store, names = write_digits(tmp_path / "s", 0, 200), iter("ab")

    def check() -> None:
        root = tmp_path / next(names)
        with new_head_session(head_config(store, "many_steps"), root) as session:
            adapt(session)
        ledger = read_ledger(root / "ledger.jsonl")
        assert ledger.steps == ledger.plan.steps, (
            "a head was made of releases that nobody was charged for"
        )

    def free(session: object) -> object:
        count = iter(range(1000))
        return lambda: next(count)

    check()
    with planted(session_module, "_charger", free, "nobody was charged for"):
        check()


def test_stale_features(tmp_path: Path) -> None:
    store, rows = write_digits(tmp_path / "s", 0, 20), np.arange(20)
    one, other = vit_encoder(), vit_encoder(seed=1)

    def check() -> None:
        first = np.array(feature_array(one, "mean", 32, store, rows, workers=1))
        assert not np.array_equal(
            feature_array(other, "mean", 32, store, rows, workers=1), first
        ), "another encoder's features were served"

    check()
    with planted(
        feature_file,
        "fingerprint",
        lambda encoder, device: encoder.name,
        "another encoder's features were served",
    ):
        check()


def test_private_statistics(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = list(rng.integers(0, 256, (240, 16, 16, 3), dtype=np.uint8))
    labels = [str(i % 10) for i in range(120)]
    public = write_store(tmp_path / "public", pixels[:120], labels)
    stores = [
        write_store(tmp_path / f"s{num}", pixels[120 : 120 + num], labels[:num], public=False)
        for num in (119, 120)
    ]

    def stream_of(store: Store) -> FeatureStream:
        settings = {"model.public_store": str(public.path)}
        return feature_stream(prepare(with_settings(head_config(store, "many_steps"), settings)))

    def check() -> None:
        one, other = (stream_of(store) for store in stores)
        for ours, theirs in ((one.centre_D, other.centre_D), (one.spread_D, other.spread_D)):
            assert ours is not None and theirs is not None
            assert torch.equal(ours, theirs), "one private record changes the statistics"

    real, mine = session_module.public_statistics, iter(stores)

    def of_private(encoder: Encoder, pooling: str, width: int, _: Store, **hardware: Any) -> Any:
        return real(encoder, pooling, width, next(mine), **hardware)

    check()
    with planted(session_module, "public_statistics", of_private, "changes the statistics"):
        check()
