"""A run of a head: the ledger is charged before each release and true after any crash; what is
saved is what predicts.
"""

import io
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import gaussian_mechanism
from made import secrets
from PIL import Image
from sklearn.linear_model import Ridge

from dpvision.adapt import release
from dpvision.adapt import session as session_module
from dpvision.adapt.defaults import MOST_STEPS, with_rate
from dpvision.adapt.prepare import prepare
from dpvision.adapt.session import adapt, new_head_session, resumed_head_session
from dpvision.checkpoint import load_checkpoint
from dpvision.config import HeadConfig, OptimConfig, RunConfig, with_settings
from dpvision.config.heads import HEADS
from dpvision.config.plain import setting
from dpvision.config.resolve import with_head
from dpvision.data.loader import image_batches
from dpvision.data.open import open_store
from dpvision.data.store import Store
from dpvision.dp.clip import ClippedSum
from dpvision.dp.noise import DPGradient
from dpvision.encoders.classifier import load_classifier
from dpvision.encoders.feature_file import texture_centre
from dpvision.encoders.fixed import fixed_encoder
from dpvision.encoders.open import open_frozen
from dpvision.errors import CheckpointError, ConfigError, DataError, PrivacyError
from dpvision.eval.probes.own_head import score_own_head
from dpvision.privacy.ledger import set_cap
from dpvision.privacy.ledger_format import read_ledger
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.stream import Key
from dpvision.statement.statement import make_statement
from dpvision.statement.verify import verify_statement

from ..eval.labelled import write_store
from .lineage_runs import untrained_run
from .runs_of_heads import head_config, run_head, write_digits


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("stores") / "private", 0, 1200)


@pytest.fixture(scope="module")
def public_test(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("stores") / "test", 1200, 1797, public=True)


@pytest.mark.parametrize("head", [*HEADS, None])
def test_every_head_spends_its_releases_learns_and_is_opened_again(
    private: Store, public_test: Store, tmp_path: Path, head: str | None
) -> None:
    root = run_head(head_config(private, head), tmp_path / "run")
    manifest, ledger = load_checkpoint(root).manifest, read_ledger(root / "ledger.jsonl")
    plan = ledger.plan
    assert ledger.steps == manifest["ledger_steps"] == manifest["updates"] == plan.steps
    exact = gaussian_mechanism.get_sigma_gaussian(4.0, 1 / 2400)
    assert plan.noise.multiplier / plan.steps**0.5 == pytest.approx(exact, rel=1e-6), (
        "analytic Gaussian, not rounded up"
    )
    assert plan.spent(ledger.steps).epsilon <= 4.0 and plan.spent(
        ledger.steps
    ).epsilon == pytest.approx(4.0, abs=1e-6)
    lines = [json.loads(line) for line in (root / "progress.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, plan.steps + 1))
    accuracy, *_ = score_own_head(root, public_test, workers=1)
    assert accuracy.value > 0.5 and accuracy.visibility == "public", "chance is 0.1"


def test_patches_take_the_largest_of_their_resolutions_up_to_the_one_asked_for(
    private: Store,
) -> None:
    config = head_config(private, "prototypes", spec="patches")
    assert isinstance(config.model, HeadConfig)
    asked = [replace(config.model.encoder, image_size=size) for size in (8, 32, 100, 300)]
    assert [open_frozen(encoder, "cpu")[1].image_size for encoder in asked] == [
        32,
        32,
        64,
        224,
    ]
    saved = prepare(replace(config, model=replace(config.model, encoder=asked[2]))).model.encoder
    assert saved.image_size == 64, "the run's config has the actual one"


def test_what_predicts_is_what_was_saved_on_what_one_image_shows(
    private: Store, public_test: Store, tmp_path: Path
) -> None:
    root = run_head(head_config(private, "prototypes"), tmp_path / "run")
    classifier = load_classifier(root)
    saved = load_checkpoint(root).model
    x_BCHW, row_B, _ = next(
        image_batches(public_test, None, 8, classifier.data, batch_size=64, workers=1)
    )
    x_BD = x_BCHW.flatten(1)
    x_BD = x_BD - saved["centre"]
    assert (
        torch.allclose(saved["centre"], texture_centre(fixed_encoder("pixels", 8), "pixels"))
        and saved["centre"].abs().sum() > 0
    )
    expected = (x_BD / x_BD.norm(dim=1, keepdim=True)) @ saved["weight"].T + saved["bias"]
    assert torch.allclose(classifier(x_BCHW), expected, atol=1e-5)
    image = Image.open(io.BytesIO(public_test.read(int(row_B[3]))))
    assert torch.allclose(
        classifier(torch.from_numpy(classifier.preprocess(image))[None])[0], expected[3], atol=1e-5
    )


def test_without_noise_least_squares_is_ridge_regression(private: Store, tmp_path: Path) -> None:
    config = head_config(private, "least_squares", epsilon=None)
    root = run_head(config, tmp_path / "run")
    assert (
        not (root / "checkpoints").exists() and (root / "confidential" / "checkpoints").exists()
    ), "no guarantee, private images"
    classifier = load_classifier(root)
    found = [
        (x.flatten(1), label)
        for x, _, label in image_batches(
            private, None, 8, classifier.data, batch_size=400, workers=1
        )
    ]
    x_ND, label_N = (torch.cat(part) for part in zip(*found, strict=True))
    raw_ND, x_ND = x_ND, x_ND - classifier.head.centre
    x_ND = x_ND / x_ND.norm(dim=1, keepdim=True)
    oracle = Ridge(alpha=1e-6 * len(x_ND), fit_intercept=False).fit(
        x_ND.double(), torch.eye(10).double()[label_N]
    )
    theirs = torch.from_numpy(oracle.predict(x_ND.double())).argmax(1)
    assert float((classifier.head(raw_ND).argmax(1) == theirs).float().mean()) > 0.99


def _killed(config: RunConfig, root: Path, last: int) -> None:
    """A child process that is killed after release ``last`` was charged and before anything of it
    is kept.
    """
    child = os.fork()
    if child == 0:
        try:
            real = release.privatize

            def killed(
                total: ClippedSum, plan: DPPlan, step: int, key: Key, **settings: Any
            ) -> DPGradient:
                if step + 1 == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(total, plan, step, key, **settings)

            release.privatize = killed
            run_head(config, root)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_killed_between_charge_and_checkpoint_the_ledger_is_true_and_the_rest_is_spent(
    private: Store, public_test: Store, tmp_path: Path
) -> None:
    config = head_config(private, "many_steps", epsilon=8.0)
    config = replace(config, privacy=replace(config.privacy, steps=6))
    _killed(config, tmp_path / "run", 2)
    with resumed_head_session(tmp_path / "run") as session:
        assert (
            session.charged_before == session.run.ledger.steps == 2
            and session.run.ledger.restarts == 1
            and not session.finished
        )
        adapt(session)
    manifest, ledger = (
        load_checkpoint(tmp_path / "run").manifest,
        read_ledger(tmp_path / "run" / "ledger.jsonl"),
    )
    assert ledger.steps == manifest["ledger_steps"] == 6 and manifest["updates"] == 4, (
        "two were paid for and lost"
    )
    assert manifest["lineage"][-1]["guarantee"]["epsilon"] == pytest.approx(
        ledger.plan.spent(6).epsilon
    )
    assert score_own_head(tmp_path / "run", public_test, workers=1)[0].value > 0.5
    for _ in range(2):  # a resume that finds nothing left to do, and a report after it
        with resumed_head_session(tmp_path / "run") as session:
            assert session.finished
        statement = tmp_path / "run" / "statement.json"
        statement.write_text(json.dumps(make_statement(tmp_path / "run", store_dir=private.path)))
        found = verify_statement(statement, tmp_path / "run", private.path)
        assert "failed" not in {check.status for check in found}, found


def test_killed_after_a_checkpoint_the_run_goes_on_from_it(
    private: Store, public_test: Store, tmp_path: Path
) -> None:
    config = head_config(private, "many_steps", epsilon=8.0)
    config = replace(
        config,
        privacy=replace(config.privacy, steps=6),
        hardware=replace(config.hardware, checkpoint_every_s=0.0),
    )
    root = tmp_path / "run"
    _killed(config, root, 4)
    saved = load_checkpoint(root)
    assert saved.manifest["updates"] == 3 and saved.optimizer is not None and load_classifier(root)
    steps: list[int] = []
    with resumed_head_session(root) as session:
        assert (session.charged_before, session.updates, session.lost, session.finished) == (
            4,
            3,
            1,
            False,
        )
        adapt(session, on_step=steps.append)
        assert session.finished and session.unsaved() == 0
    assert steps == [5, 6]
    after = load_checkpoint(root)
    assert (
        after.manifest["ledger_steps"] == 6
        and after.manifest["updates"] == 5
        and after.optimizer is None
    ), "one was paid for and lost"
    assert score_own_head(root, public_test, workers=1)[0].value > 0.5
    history = make_statement(root)["history"]
    assert (history["steps_in_weights"], history["steps_wasted"]) == (5, 1)


def test_killed_at_the_last_release_the_head_of_those_before_is_kept(
    private: Store, tmp_path: Path
) -> None:
    config = head_config(private, "many_steps", epsilon=8.0)
    config = replace(
        config,
        privacy=replace(config.privacy, steps=3),
        hardware=replace(config.hardware, checkpoint_every_s=0.0),
    )
    _killed(config, tmp_path / "run", 3)
    with resumed_head_session(tmp_path / "run") as session:
        assert session.finished and session.lost == 1 and session.updates == 2


def test_a_head_whose_only_release_was_charged_and_lost_is_refused_with_what_to_do(
    private: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(
            session_module, "save", dies
        )  # SIGKILL is tested above; here the same place, without another process
        with (
            pytest.raises(KeyboardInterrupt),
            new_head_session(head_config(private, "one_step"), tmp_path / "run") as session,
        ):
            adapt(session)
    with (
        pytest.raises(PrivacyError, match=r"1 of 1 releases .* charged and lost.*another --name"),
        resumed_head_session(tmp_path / "run"),
    ):
        pass


def test_a_run_that_goes_on_uses_new_keys_and_writes_none(
    private: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    real = session_module.Releases

    def spied(plan, charge, draw, noise, **more):
        seen.extend([draw, noise])
        return real(plan, charge, draw, noise, **more)

    monkeypatch.setattr(session_module, "Releases", spied)
    for name in ("a", "b"):
        run_head(head_config(private, "prototypes"), tmp_path / name)
    assert len({key.secret() for key in seen}) == 4
    files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(
        key.secret() in blob or key.secret().hex().encode() in blob
        for key in seen
        for blob in files
    )


def test_a_record_that_does_not_decode_stays_and_contributes_nothing(tmp_path: Path) -> None:
    store = write_digits(tmp_path / "s", 0, 300)
    with open(store.shard_paths[0], "r+b") as shard:
        shard.seek(int(store.index["offset"][7]))
        shard.write(b"\0" * int(store.index["size"][7]))
    config = head_config(open_store(store.path), "prototypes")
    root = run_head(config, tmp_path / "run")
    assert json.loads((root / "confidential" / "head.json").read_text())["without_features"] == 1
    outside = [
        f
        for f in root.rglob("*")
        if f.is_file() and "confidential" not in f.relative_to(root).parts
    ]
    assert not any(
        "without_features" in f.read_text() for f in outside if f.suffix in (".json", ".jsonl")
    )


def test_features_are_computed_once_for_all_heads(private: Store, tmp_path: Path) -> None:
    run_head(head_config(private, "prototypes"), tmp_path / "a")
    done: list[int] = []
    with new_head_session(head_config(private, "one_step"), tmp_path / "b") as session:
        adapt(session, progress=done.append)
    assert not done


def test_the_owners_cap_refuses_before_an_image_is_read(tmp_path: Path) -> None:
    store = write_digits(tmp_path / "s", 0, 100)
    set_cap(store.path, 1.0, 1e-3)
    with (
        pytest.raises(PrivacyError, match="cap: total epsilon"),
        new_head_session(head_config(store, "one_step"), tmp_path / "run"),
    ):
        pass
    assert (
        not (tmp_path / "run").exists() and not (store.path / "confidential" / "features").exists()
    )


def test_a_run_of_ours_as_the_encoder_brings_its_lineage(
    private: Store, public_test: Store, tmp_path: Path
) -> None:
    spec = untrained_run(
        tmp_path / "parent",
        "private",
        {"epsilon": 2.0, "epsilon_rdp": 2.1, "delta": 1e-5, "steps": 4},
    )
    root = run_head(head_config(private, "prototypes", spec=str(spec)), tmp_path / "run")
    lineage = load_checkpoint(root).manifest["lineage"]
    assert [entry["store_id"] for entry in lineage] == ["5ea1", private.store_id] and lineage[0][
        "guarantee"
    ]["epsilon"] == 2.0
    tainted = untrained_run(tmp_path / "tainted", "private", None)
    with pytest.raises(PrivacyError, match="without a guarantee"):
        prepare(head_config(private, "prototypes", spec=str(tainted)))
    assert prepare(head_config(private, "prototypes", spec="hog")).lineage == []
    spec.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="Give its location with encoder="):
        load_classifier(root)
    load_classifier(root, encoder=str(tmp_path / "moved"))
    other = untrained_run(tmp_path / "other", "public", None, seed=9)
    with pytest.raises(CheckpointError, match="other weights"):
        load_classifier(root, encoder=str(other))


def test_bad_settings_are_refused_before_anything_is_charged(
    private: Store, tmp_path: Path
) -> None:
    good = head_config(private, "many_steps")
    assert isinstance(good.model, HeadConfig)

    def with_model(**changes: object) -> RunConfig:
        return replace(good, model=replace(good.model, **changes))  # type: ignore[arg-type]

    def with_size(count: int) -> RunConfig:
        return replace(
            good, privacy=replace(good.privacy, dataset_size=count, expected_batch_size=count)
        )

    nothing = replace(good.model.encoder, spec=None)
    cases: list[tuple[RunConfig, type[Exception], str]] = [
        (replace(good, data=replace(good.data, store=None)), ConfigError, "--data STORE"),
        (with_model(encoder=nothing), ConfigError, "no encoder.*--encoder patches"),
        (with_model(num_classes=None), ConfigError, "num_classes is not declared.*--num-classes"),
        (with_model(num_classes=9), DataError, "label=9.*outside"),
        (
            with_model(encoder=replace(good.model.encoder, spec="timm:resnet18")),
            ConfigError,
            "has no weights on this machine.*@FILE",
        ),
        (
            with_model(encoder=replace(good.model.encoder, spec="nothing")),
            ConfigError,
            "'nothing'; expected a run folder",
        ),
        (
            with_model(encoder=replace(good.model.encoder, pooling="cls")),
            ConfigError,
            "pooling='cls'",
        ),
        (
            with_settings(good, {"model.iterate": "ema"}),
            ConfigError,
            "ema_decay=None with iterate='ema'",
        ),
        (with_size(1), DataError, "operator only: 1200 can take part.*--dataset-size 1200"),
        (with_size(1300), DataError, "declared dataset_size=1300"),
        (
            replace(with_head(good, "one_step"), privacy=replace(good.privacy, steps=60)),
            ConfigError,
            "steps=60; expected 1",
        ),
    ]
    for config, kind, said in cases:
        with pytest.raises(kind, match=said):
            prepare(config)
    store = write_store(
        tmp_path / "one",
        [np.full((8, 8, 3), i, np.uint8) for i in range(9)],
        ["0"] * 9,
        public=False,
    )
    with pytest.raises(DataError, match="one class only"):
        prepare(head_config(store, "prototypes"))
    store = write_store(
        tmp_path / "none",
        [np.full((8, 8, 3), i, np.uint8) for i in range(9)],
        [None] * 9,
        public=False,
    )
    with pytest.raises(DataError, match="9 of 9 records have no label"):
        prepare(head_config(store, "prototypes"))


def test_several_processes_are_refused(private: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2; expected 1"):
        prepare(head_config(private, "one_step"))


def test_auto_goes_by_declared_numbers_alone_and_says_why(private: Store) -> None:
    made = prepare(head_config(private, epsilon=4.0))
    assert made.model.head in HEADS and made.model.choice.reason
    richer = prepare(head_config(private, epsilon=None))
    preset = HEADS[richer.model.head]
    assert (
        richer.config.optim == with_rate(preset.optim, richer.plan)
        and richer.plan.steps == MOST_STEPS
        and setting(richer.config, "model.loss") == "softmax"
    )
    noisy = head_config(private)
    noisy = replace(
        noisy, privacy=replace(noisy.privacy, target_epsilon=None, noise_multiplier=2.0)
    )
    with pytest.raises(ConfigError, match="expected a target epsilon"):
        prepare(noisy)


@pytest.mark.slow
def test_iterates_are_chosen_by_the_config(private: Store, tmp_path: Path) -> None:
    config = head_config(private, "many_steps")
    optim: OptimConfig = replace(config.optim, ema_decay=0.5)
    weights = {}
    for iterate in ("last", "average", "ema"):
        made = replace(with_settings(config, {"model.iterate": iterate}), optim=optim)
        with new_head_session(made, tmp_path / iterate) as session:
            adapt(session, secrets=secrets())
        weights[iterate] = load_checkpoint(tmp_path / iterate)
    last, average, ema = (weights[name].model["weight"] for name in ("last", "average", "ema"))
    assert (
        not torch.allclose(last, average)
        and not torch.allclose(last, ema)
        and not torch.allclose(average, ema)
    )
    saved = weights["last"].ema
    assert saved is not None and torch.equal(saved["weight"], ema), (
        "the average lies beside the last one, too"
    )
