"""A run's features have one precision from its start to its end, whatever machine goes on with it;
its head is used in float32.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpvision.adapt.prepare import prepare
from dpvision.adapt.session import (
    adapt,
    feature_stream,
    new_head_session,
    resumed_head_session,
)
from dpvision.config import HeadConfig, RunConfig
from dpvision.data.loader import image_batches
from dpvision.data.store import Store
from dpvision.encoders import feature_precision
from dpvision.encoders.classifier import load_classifier
from dpvision.encoders.feature_file import texture_centre
from dpvision.encoders.feature_precision import in_precision
from dpvision.encoders.open import open_encoder
from dpvision.statement.statement import make_statement

from .lineage_runs import untrained_run
from .runs_of_heads import head_config, run_head, write_digits


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    past = {"epsilon": 2.0, "epsilon_rdp": 2.1, "delta": 1e-5, "steps": 4}
    return str(untrained_run(tmp_path_factory.mktemp("runs") / "encoder", "private", past))


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("stores") / "private", 0, 60)


@pytest.fixture(autouse=True)
def gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder's activation, of which bfloat16 is known on AVX-512 only: on all processors."""
    known = {*feature_precision._ONE_RESULT, "gelu"}
    monkeypatch.setattr(feature_precision, "_ONE_RESULT", known)


def _with(config: RunConfig, **encoder: object) -> RunConfig:
    assert isinstance(config.model, HeadConfig)
    changed = replace(config.model.encoder, **encoder)  # type: ignore[arg-type]
    return replace(config, model=replace(config.model, encoder=changed))


def _precision(config: RunConfig) -> str:
    assert isinstance(config.model, HeadConfig)
    return config.model.encoder.precision


def test_the_rows_and_the_centre_are_in_the_precision_of_the_config(
    private: Store, spec: str
) -> None:
    batches = image_batches(private, None, 8, open_encoder(spec).data, batch_size=32, workers=1)
    x_NCHW = torch.cat([x_BCHW for x_BCHW, *_ in batches])
    rows = {}
    for precision in ("float32", "bfloat16"):
        made = prepare(_with(head_config(private, "one_step", spec=spec), precision=precision))
        stream = feature_stream(made)
        encoder = in_precision(open_encoder(spec), precision)  # type: ignore[arg-type]
        rows[precision] = np.asarray(stream.feature_ND)
        with torch.inference_mode():
            wanted_ND = encoder(x_NCHW).numpy()
        assert np.allclose(rows[precision], wanted_ND, rtol=0, atol=1e-3 * np.abs(wanted_ND).max())
        assert stream.centre_D is not None
        assert torch.equal(stream.centre_D, texture_centre(encoder, "mean"))
    off = np.abs(rows["bfloat16"] - rows["float32"]).max() / np.abs(rows["float32"]).max()
    assert 1e-5 < off < 0.05


def test_a_run_keeps_the_precision_of_the_machine_that_started_it(
    private: Store, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def machine(has: bool) -> None:
        monkeypatch.setattr(feature_precision, "has_bfloat16", lambda device: has)

    config = head_config(private, "many_steps", spec=spec)
    for has, wanted in ((True, "bfloat16"), (False, "float32")):
        machine(has)
        root = tmp_path / wanted
        with new_head_session(config, root) as session:
            assert _precision(session.config) == wanted
        machine(not has)
        with resumed_head_session(root) as session:
            assert _precision(session.config) == wanted
            adapt(session)
        stated = make_statement(root, store_dir=private.path)
        assert f'"precision": "{wanted}"' in json.dumps(stated)
    # a run from before the setting
    machine(True)
    path = tmp_path / "float32" / "config.json"
    kept = json.loads(path.read_text())
    del kept["model"]["encoder"]["precision"]
    path.write_text(json.dumps(kept))
    with resumed_head_session(tmp_path / "float32") as session:
        assert _precision(session.config) == "float32" and session.finished


def test_the_head_of_bfloat16_features_is_used_in_float32(
    private: Store, spec: str, tmp_path: Path
) -> None:
    config = _with(head_config(private, "many_steps", spec=spec), precision="bfloat16")
    classifier = load_classifier(run_head(config, tmp_path / "run"))
    x_BCHW = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(classifier.features(x_BCHW), open_encoder(spec)(x_BCHW))
