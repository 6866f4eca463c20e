"""Mistakes with what leaves: planted, and caught. The ids are those of docs/pitfalls.md, section
"What leaves".
"""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dp_accounting
import pytest
import runs
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from zoo import KEY, class_losses, make_batch

from dpvision.checkpoint import (
    find_checkpoint,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    state_tensors,
)
from dpvision.config import RunConfig
from dpvision.data.store import Store
from dpvision.dp import clip, one_pass, separable
from dpvision.dp.clip import clipped_sum
from dpvision.dp.separable import check_separable
from dpvision.encoders import weights_file
from dpvision.errors import DPVisionError, PrivacyError
from dpvision.eval.score_file import read_scores
from dpvision.files import write_json
from dpvision.models import make_model
from dpvision.optim import ema
from dpvision.optim.ema import update_ema
from dpvision.privacy import composition
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.runs import lineage as lineages
from dpvision.runs.folder import RunFolder
from dpvision.runs.lineage import inherit, undeclared_weights
from dpvision.statement import guarantee, statement
from dpvision.statement.statement import make_statement
from dpvision.statement.verify import verify_statement
from dpvision.train import log, loop, start
from dpvision.train.log import RunLog, StepMetrics
from dpvision.train.loop import fit, save

from .conftest import NewRun
from .planting import assert_refused, caught, planted


class Averaging(nn.Module):
    """Keeps a running mean of its images, by hand and of no use in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(192, 5)
        self.register_buffer("mean", torch.zeros(192))

    def forward(self, x):
        x = x.flatten(1)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.body(x)


def test_buffers_updated() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 5))

    def check_buffers(model: nn.Module, max_grad_norm: float | None) -> None:
        before = copy.deepcopy(model.state_dict())
        clipped_sum(
            class_losses,
            model,
            make_batch(4),
            KEY,
            max_grad_norm=max_grad_norm,
            check_separability=False,  # which refuses such a model
        )
        torch.testing.assert_close(
            model.state_dict(), before, rtol=0, atol=0, msg="the data are left in a buffer"
        )

    def check_gate() -> None:
        assert_refused(
            lambda: check_separable(class_losses, net(), make_batch(4), KEY), "batch statistics"
        )

    # A clipped sum compares parameters and buffers itself.
    for module, model, max_grad_norm, words in (
        (clip, net(), None, "the data are left in a buffer"),
        (one_pass, Averaging(), 0.1, "writes to a parameter"),
    ):
        check_buffers(model, max_grad_norm)
        with planted(module, "copied_buffers", lambda model: dict(model.named_buffers()), words):
            check_buffers(model, max_grad_norm)
    check_gate()
    # Not recognised by their class they are still measured ...
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(separable, "check_module", lambda name, module: None)
        check_gate()
        # ... and only without the measurement they would pass.
        with planted(torch, "equal", lambda a, b: True, "batch statistics was accepted"):
            patch.setattr(separable, "_ROW_TOLERANCE", float("inf"))
            patch.setattr(separable, "differs", lambda a, b: False)
            check_gate()


def test_ema_unnoised(new_run: NewRun) -> None:
    """Against the recursion over the weights that each noisy update leaves behind."""

    def check() -> None:
        with new_run() as session:
            decay = session.config.optim.ema_decay
            expected = state_tensors(session.model)["mask_token"].clone()
            apply, updates = session.optimizer.step, 0

            def follow(gradient, learning_rate):
                nonlocal expected, updates
                before = session.model.mask_token.detach().clone()
                apply(gradient, learning_rate)
                after = session.model.mask_token.detach()
                torch.testing.assert_close(
                    after, before - learning_rate * gradient.grads["mask_token"]
                )
                kept = min(decay, (1 + updates) / (10 + updates))
                expected, updates = kept * expected + (1 - kept) * after, updates + 1

            session.optimizer.step = follow
            fit(session, quiet=True)
            torch.testing.assert_close(
                session.ema["mask_token"],
                expected,
                msg="the average is not that of the released weights",
            )

    noise: dict[str, torch.Tensor] = {}

    def remember_noise(total, plan, step, key, **owners):
        gradient = privatize(total, plan, step, key, **owners)
        noise.update(
            {
                n: gradient.grads[n] - value / plan.expected_batch_size
                for n, value in total.grads.items()
            }
        )
        return gradient

    def of_clean_weights(average, model, decay, updates):
        clean = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in clean.named_parameters():
                p += 0.1 * noise[name]  # takes back what the learning rate of 0.1 made of the noise
        return update_ema(average, clean, decay, updates)

    def twice_a_step(average, model, decay, updates):
        return update_ema(update_ema(average, model, decay, updates), model, decay, updates)

    privatize = loop.privatize
    check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "privatize", remember_noise)
        for mistake in (of_clean_weights, twice_a_step):
            with planted(
                ema, "update_ema", mistake, "the average is not that of the released weights"
            ):
                check()


SECRETS = StepMetrics(
    loss=0.123456789,
    batch_size=987654,
    grad_norm_mean=3.21987654,
    grad_norm_median=2.71654321,
    clip_fraction=0.765432101,
    num_non_finite=456789,
    step_s=0.0314159265,
)


def test_checkpoint_by_the_clock(new_run: NewRun, config: RunConfig) -> None:
    """How far a run gets in some minutes depends on the sizes of its batches."""

    def check() -> None:
        often = replace(config, hardware=replace(config.hardware, checkpoint_every_s=0.0))
        with new_run(often) as session:
            fit(session, quiet=True)
            found = [path.name for path in session.run.folder.root.glob("checkpoints/*")]
        assert found == [f"step-{session.plan.steps:08d}"], (
            "a checkpoint that the clock asked for may leave"
        )

    check()
    with planted(
        RunFolder,
        "checkpoints",
        lambda folder, *, timed=False: folder.base / "checkpoints",
        "the clock asked for may leave",
    ):
        check()


def test_private_loss_public_file(tmp_path: Path, plan: DPPlan) -> None:
    def fresh() -> Path:
        folder = tmp_path / f"case{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return folder

    def check_log(kind: type[RunLog]) -> None:
        base = fresh()
        (base / "confidential").mkdir()
        with kind(base, base / "confidential", plan, 0, quiet=True, private=True) as written:
            written.step(0, SECRETS)
        texts = {p: p.read_text(errors="replace") for p in base.rglob("*") if p.is_file()}
        public = "".join(text for path, text in texts.items() if "confidential" not in path.parts)
        assert '"step": 1' in public, "progress is not told"
        for name, value in vars(SECRETS).items():
            assert str(value) not in public, f"{name} is in a public file"
            assert any(str(value) in text for text in texts.values()), f"{name} is told to nobody"

    def check_scores() -> None:
        folder = fresh()
        runs.make_store(folder / "store")
        run = runs.make_run(
            folder / "run", folder / "store", privacy=replace(runs.PRIVACY, steps=2), charged=2
        )
        write_json(
            run / "scores.json", [runs.score_entry("encoder", 0.41, "k-NN, mean", "private")]
        )
        try:
            scores = make_statement(run)["scores"]
        except PrivacyError:
            return
        assert all(score["visibility"] == "public" for score in scores), (
            "a private score is in the statement"
        )

    class Chatty(RunLog):
        def step(self, step: int, metrics: StepMetrics) -> None:
            super().step(step, metrics)
            log._line(self._public, {"step": step, "loss": metrics.loss})

    check_log(RunLog)
    with caught("loss is in a public file"):
        check_log(Chatty)
    check_scores()
    with planted(statement, "_public_scores", read_scores, "a private score is in the statement"):
        check_scores()


def entry(store_id: str, visibility: str, guaranteed: bool) -> dict[str, Any]:
    plan = make_plan(replace(runs.PRIVACY, steps=1)).to_dict()
    guarantee = (
        {"epsilon": 1.0, "epsilon_rdp": 1.0, "delta": 1e-5, "steps": 1, "plan": plan}
        if guaranteed
        else None
    )
    return {
        "store_id": store_id,
        "visibility": visibility,
        "licence": None,
        "run_id": "parent",
        "guarantee": guarantee,
    }


def test_lineage_lost_in_a_file(tmp_path: Path, config: RunConfig, new_run: NewRun) -> None:
    none = replace(config.privacy, guarantee="none", noise_multiplier=None, max_grad_norm=None)
    with new_run(replace(config, privacy=none)) as session:
        session.run.ledger.append()
        with torch.no_grad():
            for parameter in session.model.parameters():
                parameter.add_(0.01)
        file = save(session) / "model.safetensors"
        trained, store = load_file(file), session.store
    copied = tmp_path / "copied.safetensors"
    copied.write_bytes(file.read_bytes())
    save_file(trained, tmp_path / "exported.safetensors")
    unknown = undeclared_weights("weights")

    def check() -> None:
        for path in (file, copied, tmp_path / "exported.safetensors"):
            weights = weights_file.open_weights(path, unknown)
            try:
                exported = list(weights.lineage) == [
                    unknown
                ]  # what the file carries has to do, where it carries anything
                lineages.inherit(
                    weights.lineage,
                    store,
                    make_plan(config.privacy),
                    declaration="A; B; C" if exported else None,
                    tensors=weights.tensors.values() if path.name == "exported.safetensors" else (),
                )
            except PrivacyError:
                continue
            raise AssertionError(f"tainted weights of {path.name} were accepted as public")

    check()
    with planted(
        weights_file,
        "unpack",
        lambda path: (load_file(path), None),
        "weights of copied.safetensors were accepted",
    ):
        check()
    with planted(
        lineages,
        "runs_with_these_weights",
        lambda store, tensors: [],
        "weights of exported.safetensors were accepted",
    ):
        check()


def test_parents_left_out(tmp_path: Path) -> None:
    runs.make_store(tmp_path / "store")
    parent = runs.make_run(tmp_path / "parent", tmp_path / "store", run_id="parent")
    parents = tuple(read_manifest(find_checkpoint(parent))["lineage"])
    child = runs.make_run(tmp_path / "child", tmp_path / "store", run_id="child", parents=parents)
    two = dp_accounting.get_epsilon_gaussian(
        runs.PRIVACY.noise_multiplier / (2 * runs.STEPS) ** 0.5, 1 / (2 * runs.PRIVACY.dataset_size)
    )

    def check() -> None:
        found = make_statement(child, tuning="none")["guarantee"]
        for name in ("epsilon", "epsilon_unamplified"):
            assert found[name] == pytest.approx(two), f"{name} is not that of both runs"
        alone = guarantee.figures_of(((make_plan(runs.PRIVACY), runs.STEPS),), fixed=True)
        assert found["epsilon_rdp"] > alone["epsilon_rdp"], "the Renyi bound is that of one run"
        assert found["attack"]["coin_accuracy"] > alone["attack"]["coin_accuracy"], (
            "the bound on attacks is that of one run"
        )

    check()
    with planted(
        guarantee, "runs_on", lambda lineage, store_id: (), "epsilon is not that of both runs"
    ):
        check()
    one = composition.curve
    with planted(
        guarantee,
        "curve",
        lambda parts, fprs, fixed: one(parts[:1], fprs, fixed=fixed),
        "bound on attacks is that of one run",
    ):
        check()


def test_kept_after_private_images(tmp_path: Path) -> None:
    runs.make_store(tmp_path / "store")
    runs.make_store(tmp_path / "public", "public")
    parent = runs.make_run(tmp_path / "parent", tmp_path / "store", run_id="parent")
    lineage = tuple(read_manifest(find_checkpoint(parent))["lineage"])
    none = replace(runs.PRIVACY, guarantee="none", noise_multiplier=None, max_grad_norm=None)
    made = make_statement(
        runs.make_run(
            tmp_path / "child",
            tmp_path / "public",
            privacy=none,
            run_id="child",
            charged=2,
            parents=lineage,
        )
    )
    assert made["headline"].startswith("Differential privacy with epsilon")
    private = runs.make_run(
        tmp_path / "private",
        tmp_path / "store",
        privacy=none,
        run_id="private",
        charged=2,
        parents=lineage,
    )

    def check() -> None:
        assert_refused(lambda: make_statement(private), "Do not release it")
        made["history"]["lineage"][-1]["visibility"] = "private"
        write_json(tmp_path / "forged.json", made)
        failed = {
            found.name
            for found in verify_statement(tmp_path / "forged.json")
            if found.status == "failed"
        }
        assert "figures" in failed, "the headline of private images passes"

    check()
    with planted(
        statement,
        "shaped_in_confidence",
        lambda lineage: False,
        "headline of private images passes",
    ):
        check()


def test_tainted_parent(tmp_path: Path, scenes: Store, config: RunConfig, new_run: NewRun) -> None:
    own = scenes.store_id
    good = [
        entry("5701e1", "private", True),
        entry("5701e2", "public", False),
        entry(own, "private", True),
    ]
    tainted = {
        "another private store": [entry("5701e1", "private", False)],
        "this store": [entry(own, "private", False)],
        "this store, then called public": [entry(own, "public", False)],
        "a grandparent": [entry("5701e1", "private", False), *good],
    }

    def start_from(lineage: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Lineage in the manifest of a run that starts from a parent with ``lineage``."""
        folder = tmp_path / f"parent{len(list(tmp_path.iterdir()))}"
        about = {
            "run_id": "parent",
            "ledger_steps": 1,
            "updates": 1,
            "config": {},
            "plan": {},
            "ledger_digest": "",
            "lineage": lineage,
        }
        save_checkpoint(folder, about, state_tensors(make_model(config.model, 1)))
        with new_run(replace(config, init_from=str(folder))) as session:
            session.run.ledger.append()
            return load_checkpoint(save(session)).manifest["lineage"]

    def check() -> None:
        for what, lineage in tainted.items():
            try:
                start_from(lineage)
            except DPVisionError as error:
                assert "without a guarantee" in str(error), error
                continue
            raise AssertionError(f"a parent tainted by {what} was accepted")
        assert start_from(good)[:-1] == good, "a store behind the weights is not named"

    def last_only(lineage, store, plan, **more):
        inherit(lineage[-1:], store, plan, **more)
        return lineage

    def by_visibility(lineage, store, plan, **more):
        return inherit(lineage, SimpleNamespace(store_id="?", path=store.path), plan, **more)

    def last_named(lineage, store, plan, **more):
        return inherit(lineage, store, plan, **more)[-1:]

    check()
    for mistake, words in (
        (
            lambda lineage, store, plan, **more: lineage,
            "tainted by another private store was accepted",
        ),
        (last_only, "tainted by a grandparent was accepted"),
        (by_visibility, "tainted by this store, then called public was accepted"),
        (last_named, "a store behind the weights is not named"),
    ):
        with planted(start, "inherit", mistake, words):
            check()
