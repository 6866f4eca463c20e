"""Kinds of heads: one file and one entry each, and the configs of runs from before they had
settings of their own.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made import secrets

from dpvision.adapt.fit import KINDS
from dpvision.adapt.heads.kind import Fitted, HeadKind, Task
from dpvision.adapt.heads.prototypes import prototypes
from dpvision.adapt.prepare import prepare
from dpvision.adapt.session import adapt, new_head_session, resumed_head_session
from dpvision.checkpoint import load_checkpoint
from dpvision.config import RunConfig, from_dict, to_dict, with_settings
from dpvision.config.heads import HEADS, Moments
from dpvision.config.resolve import resolve, with_head
from dpvision.data.store import Store
from dpvision.errors import ConfigError
from dpvision.statement.statement import make_statement

from .runs_of_heads import head_config, write_digits

OLD = Path(__file__).parent / "old_head_configs.json"
"""Settings ``model`` of runs written before heads had settings of their own."""


@dataclass(frozen=True)
class ScaledSettings(Moments):
    """Settings of a sixth head."""

    summary = "Prototypes times a factor."
    steps = 3
    factor: float = 2.0


class Scaled(HeadKind):
    name = "scaled"
    fewest_releases = 2

    def fit(self, task: Task) -> Fitted:
        head = prototypes(task.stream, task.releases, feature_norm=task.settings.feature_norm)
        return Fitted(replace(head, weight_KD=head.weight_KD * task.settings.factor))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return write_digits(tmp_path / "stores" / "mine", 0, 200)


def test_a_sixth_head_needs_its_file_and_its_settings_only(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registered as the five are, it is planned, checked, trained, charged, stated and read again
    with its own setting; and the setting is not any other head's.
    """
    monkeypatch.setitem(HEADS, "scaled", ScaledSettings)
    monkeypatch.setitem(KINDS, "scaled", Scaled())
    config = with_head(head_config(store), "scaled")
    weights = []
    for factor in (1.0, 4.0):
        asked = resolve(config, {"model.factor": factor})
        assert from_dict(RunConfig, to_dict(asked)) == asked
        root = tmp_path / f"run-{factor}"
        with new_head_session(asked, root) as session:
            assert session.plan.steps == 3
            adapt(session, secrets=secrets())
        weights.append(load_checkpoint(root).model["weight"])
        statement = make_statement(root)
        assert statement["settings"]["model"]["head"] == "scaled"
        assert statement["settings"]["model"]["factor"] == factor
    assert torch.equal(weights[1], 4 * weights[0]) and weights[0].any()
    with pytest.raises(ConfigError, match="steps=1; expected 2 or more with head='scaled'"):
        prepare(with_settings(config, {"privacy.steps": 1}))
    with pytest.raises(
        ConfigError, match=r"model\.factor=3\.0 is not read: prototypes has no such"
    ):
        resolve(head_config(store, "prototypes"), {"model.factor": 3.0})
    with pytest.raises(ConfigError, match=r"model\.loss='softmax' is not read: scaled takes no"):
        resolve(config, {"model.loss": "softmax"})


@pytest.mark.parametrize("name", json.loads(OLD.read_text()))
def test_settings_of_old_runs_are_read_and_those_that_the_head_has_not_are_left_out(
    name: str, store: Store
) -> None:
    old: dict[str, Any] = json.loads(OLD.read_text())[name]
    values = to_dict(head_config(store)) | {"model": old}
    config = from_dict(RunConfig, values)
    new = to_dict(config)["model"]
    later = {"public_store": None, "encoder": old["encoder"] | {"precision": "auto"}}
    assert new.items() <= (old | later).items() and from_dict(RunConfig, to_dict(config)) == config
    steps, start = {"loss", "bias"}, {"init", "init_scale"}
    lacks = {
        "one_step": start | {"iterate", "feature_norm"},
        "many_steps": {"feature_norm"},
        "least_squares": steps | start | {"iterate"},
        "feature_covariance": start,
        "prototypes": steps | start | {"iterate"},
        "auto": set(),
    }
    assert old.keys() - new.keys() == lacks[old["head"]]


def test_a_stopped_run_with_an_old_config_goes_on(store: Store, tmp_path: Path) -> None:
    """Its folder's config has the settings of all heads, as files had before."""
    root = tmp_path / "run"
    with new_head_session(head_config(store, "prototypes"), root):
        pass
    path = root / "config.json"
    config = json.loads(path.read_text())
    extra = {"loss": "sigmoid", "bias": 0.0, "init": "zero", "init_scale": 1.0, "iterate": "last"}
    config["model"] |= extra
    path.write_text(json.dumps(config))
    with resumed_head_session(root) as session:
        adapt(session)
    kept = load_checkpoint(root).manifest["config"]["model"]
    assert kept["head"] == "prototypes" and not kept.keys() & extra.keys()
