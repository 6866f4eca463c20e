"""A run without any training: what one start writes, refuses and finds again."""

import json
import shutil
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from dpvision.checkpoint import list_checkpoints, load_checkpoint
from dpvision.config import PrivacyConfig, RunConfig
from dpvision.data.open import open_store
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import CheckpointError, ConfigError, DataError, PrivacyError
from dpvision.privacy.account import set_cap
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.runs import run as run_module
from dpvision.runs.folder import require_confidential
from dpvision.runs.lineage import runs_with_these_weights
from dpvision.runs.run import Run, Secrets, Stopped, new_run
from dpvision.statement.statement import read_evidence
from dpvision.weights import contents

PRIVACY = PrivacyConfig(
    dataset_size=40, expected_batch_size=10, steps=3, max_grad_norm=1.0, noise_multiplier=3.0
)
WEIGHTS = {"weight": torch.arange(6.0).view(2, 3)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    write_scenes(tmp_path / "scenes", 40, 16, workers=1, public=False)
    return open_store(tmp_path / "scenes")


@pytest.fixture
def plan() -> DPPlan:
    return make_plan(PRIVACY)


@pytest.fixture
def config(store: Store) -> RunConfig:
    base = RunConfig(recipe="a test's", privacy=PRIVACY)
    return replace(base, data=replace(base.data, store=str(store.path)))


def _charged(run: Run, steps: int) -> None:
    for _ in range(steps):
        run.ledger.append()


def test_a_run_that_stopped_goes_on_with_what_it_was_charged(
    tmp_path: Path, store: Store, plan: DPPlan, config: RunConfig
) -> None:
    root = tmp_path / "runs" / "first"
    with new_run(
        root, config, plan, store, [], num_bytes=1, secluded=False, files={"more.json": {"a": 1}}
    ) as run:
        _charged(run, 2)
        assert (
            run.save(WEIGHTS, updates=1, chosen={"of": 3}) == root / "checkpoints" / "step-00000002"
        )
        with (
            pytest.raises(CheckpointError, match="in use"),
            Stopped.read(root).resumed(store, [], num_bytes=1),
        ):
            pass
    assert json.loads((root / "more.json").read_bytes()) == {"a": 1}
    stopped = Stopped.read(root, {"workers": 2})
    assert stopped.plan == plan and stopped.config == replace(
        config, hardware=replace(config.hardware, workers=2)
    )
    assert stopped.checkpoint is not None and stopped.checkpoint.manifest["updates"] == 1
    assert stopped.checkpoint.manifest["chosen"] == {"of": 3} and torch.equal(
        stopped.checkpoint.model["weight"], WEIGHTS["weight"]
    )
    with stopped.resumed(store, [], num_bytes=1) as again:
        assert (
            again.ledger.steps == 2 and again.folder.run_id == stopped.checkpoint.manifest["run_id"]
        )
        _charged(again, 1)
        again.save(WEIGHTS, updates=2)
    assert load_checkpoint(root).manifest["ledger_steps"] == 3
    assert (root / "ledger.jsonl").read_bytes() == again.ledger.path.read_bytes()


def test_what_is_refused_leaves_the_name_free(
    tmp_path: Path, store: Store, plan: DPPlan, config: RunConfig
) -> None:
    root = tmp_path / "runs" / "first"
    assert plan.epsilon is not None
    set_cap(store.path, plan.epsilon / 2, plan.delta)
    begun = new_run(
        root, config, plan, store, [], num_bytes=1, secluded=False, files={"more.json": {}}
    )
    with pytest.raises(PrivacyError, match="cap"), begun:
        pass
    assert not root.exists()
    with (
        pytest.raises(CheckpointError, match="GB free"),
        new_run(root, config, plan, store, [], num_bytes=1 << 60, secluded=False),
    ):
        pass
    assert not root.exists()


def test_code_whose_version_cannot_be_read_charges_nothing(
    tmp_path: Path, store: Store, plan: DPPlan, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by PYTHONPATH alone, for example: the first checkpoint would fail after its steps were
    charged.
    """
    root = tmp_path / "runs" / "first"
    with new_run(root, config, plan, store, [], num_bytes=1, secluded=False) as run:
        _charged(run, 1)
    before = run.ledger.path.read_bytes()

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(run_module, "version", version)
    run_module.code_versions.cache_clear()
    other = tmp_path / "runs" / "second"
    for begun in (
        new_run(other, config, plan, store, [], num_bytes=1, secluded=False),
        Stopped.read(root).resumed(store, [], num_bytes=1),
    ):
        with (
            pytest.raises(
                ConfigError, match=r"dpvision is found by its path alone .*Run pip install"
            ),
            begun,
        ):
            pass
    assert (
        not other.exists()
        and run.ledger.path.read_bytes() == before
        and len(list((store.path.parent / "LEDGERS").rglob("*.jsonl"))) == 1
    )


def test_another_store_another_runs_checkpoint_and_an_older_ledger_are_refused(
    tmp_path: Path, store: Store, plan: DPPlan, config: RunConfig
) -> None:
    roots = [tmp_path / "runs" / name for name in ("first", "second")]
    for root in roots:
        with new_run(root, config, plan, store, [], num_bytes=1, secluded=False) as run:
            _charged(run, 2)
            manifest = run.save(WEIGHTS, updates=2) / "manifest.json"
    write_scenes(tmp_path / "others", 41, 16, workers=1, public=False)
    with pytest.raises(DataError, match="not the store of this run"):
        Stopped.read(roots[0]).require_store(open_store(tmp_path / "others"))
    manifest.write_text(manifest.read_text().replace('"ledger_steps": 2', '"ledger_steps": 3'))
    resumed = Stopped.read(roots[1]).resumed(store, [], num_bytes=1)
    with (
        pytest.raises(PrivacyError, match="2 steps, yet a checkpoint was written after 3"),
        resumed,
    ):
        pass
    shutil.rmtree(roots[0] / "checkpoints")
    shutil.copytree(roots[1] / "checkpoints", roots[0] / "checkpoints")
    with pytest.raises(CheckpointError, match="of another run"):
        Stopped.read(roots[0])


def test_without_a_guarantee_new_weights_are_remembered(
    tmp_path: Path, store: Store, config: RunConfig
) -> None:
    start, made = torch.arange(4096.0).view(64, 64), torch.arange(4096.0).view(64, 64).sin()
    free = make_plan(replace(PRIVACY, guarantee="none", noise_multiplier=0.0))
    root = tmp_path / "runs" / "free"
    with new_run(root, config, free, store, [], num_bytes=1, secluded=False) as run:
        _charged(run, 1)
        run.save({"kept": start, "made": made}, updates=1, start=contents([start]))
    assert not (root / "checkpoints").exists() and list_checkpoints(root / "confidential"), (
        "a private store's run without a guarantee is private"
    )
    assert [entry["run_id"] for entry in runs_with_these_weights(store, [made])] == [
        run.folder.run_id
    ]
    assert runs_with_these_weights(store, [start]) == []


def test_as_many_checkpoints_are_kept_as_the_config_says(
    tmp_path: Path, store: Store, plan: DPPlan, config: RunConfig
) -> None:
    config = replace(config, hardware=replace(config.hardware, keep_checkpoints=2))
    with new_run(tmp_path / "run", config, plan, store, [], num_bytes=1, secluded=False) as run:
        for step in range(3):
            _charged(run, 1)
            run.save(WEIGHTS, updates=step + 1)
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == [
        "step-00000002",
        "step-00000003",
    ]


def test_keys_differ_at_every_start_and_are_not_shown() -> None:
    first, second = Secrets(), Secrets()
    assert len(
        {key.secret() for keys in (first, second) for key in (keys.draw, keys.noise)}
    ) == 4 and "b'" not in repr(first)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ({"max_records_per_unit": 3, "num_units": 30}, "num_units=30, max_records_per_unit=3"),
        ({"sampling_unit": "person", "num_units": 40}, "sampling_unit=person"),
        ({"sampling": "full_batch", "expected_batch_size": 40}, "sampling=full_batch"),
        ({"dataset_size": 80}, "dataset_size=80"),
        ({"expected_batch_size": 20}, "expected_batch_size=20"),
        ({"max_grad_norm": 2.0}, r"max_grad_norm=2\.0"),
        ({"clipping": "automatic"}, "clipping=automatic"),
        ({"steps": 4}, "steps=4"),
        ({"delta": 1e-6}, "delta=1e-06"),
        ({"guarantee": "none", "max_grad_norm": None, "noise_multiplier": None}, "guarantee=none"),
    ],
)
def test_settings_that_are_not_the_plans_are_neither_resumed_nor_reported(
    tmp_path: Path,
    store: Store,
    plan: DPPlan,
    config: RunConfig,
    edit: dict[str, object],
    named: str,
) -> None:
    """The settings determine what is drawn and clipped, the plan what that costs: editing one file
    alone would make them disagree.
    """
    root = tmp_path / "runs" / "first"
    with new_run(root, config, plan, store, [], num_bytes=1, secluded=False) as run:
        _charged(run, 2)
        run.save(WEIGHTS, updates=2)
    assert Stopped.read(root).plan == plan and read_evidence(root).ledger.steps == 2
    file = root / "config.json"
    saved = json.loads(file.read_bytes())
    saved["privacy"] |= edit
    file.write_text(json.dumps(saved))
    for read in (Stopped.read, read_evidence):
        with pytest.raises(
            PrivacyError, match=rf"config\.json: .*{named}.*expected what the run's plan has"
        ):
            read(root)


def test_a_confidential_path_is_judged_where_it_leads(tmp_path: Path) -> None:
    """``confidential/../leak.csv`` was taken."""
    inside, outside = tmp_path / "confidential", tmp_path / "shared"
    inside.mkdir(), outside.mkdir()
    (outside / "confidential").symlink_to(outside)
    (outside / "link").symlink_to(inside)
    for taken in (inside / "x.csv", inside / "new/x.csv", outside / "link" / "x.csv"):
        require_confidential(taken, "predict", "predictions")
    for left in (
        "confidential/../x.csv",
        "confidential/a/../../x.csv",
        "shared/confidential/x.csv",
    ):
        with pytest.raises(ConfigError, match="expected a folder called confidential in its path"):
            require_confidential(tmp_path / left, "predict", "predictions")
