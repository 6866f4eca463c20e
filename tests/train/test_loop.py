"""The loop: the budget is its condition, hardware does not change the result, nothing secret
repeats, nothing private leaks.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made import secrets

from dpvision import checkpoint
from dpvision.checkpoint import load_checkpoint
from dpvision.config import RunConfig, to_dict
from dpvision.errors import CheckpointError, ConfigError, DataError, PrivacyError
from dpvision.models import make_model
from dpvision.privacy.ledger_format import read_ledger
from dpvision.privacy.stream import secret_of
from dpvision.runs import folder
from dpvision.runs.run import Secrets
from dpvision.train import loop
from dpvision.train.loop import fit
from dpvision.train.start import new_session, resumed_session

pytestmark = pytest.mark.usefixtures("gates_once")


def _train(config: RunConfig, root: Path, keys: Secrets | None = None) -> dict[str, torch.Tensor]:
    with new_session(config, root) as session:
        assert fit(session, secrets=keys or secrets(), quiet=True)
    return load_checkpoint(root).model


@pytest.fixture(scope="module")
def one(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The conftest's run, complete; tests only read it."""
    root = tmp_path_factory.mktemp("one") / "run"
    _train(config, root)
    return root


def test_a_run_executes_exactly_the_planned_steps_and_says_so_everywhere(
    config: RunConfig, tmp_path: Path
) -> None:
    _train(config, tmp_path / "run")
    manifest = load_checkpoint(tmp_path / "run").manifest
    ledger = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert ledger.steps == manifest["ledger_steps"] == manifest["updates"] == config.privacy.steps
    assert ledger.digest == manifest["ledger_digest"]
    assert manifest["lineage"][-1]["guarantee"]["epsilon"] == pytest.approx(
        ledger.plan.spent(4).epsilon
    )
    with resumed_session(tmp_path / "run") as session:
        assert (
            fit(session, quiet=True) and session.run is not None and session.run.ledger.steps == 4
        )


@pytest.mark.parametrize(
    "change",
    [
        {"physical_batch_size": 1},
        {"physical_batch_size": 64},
        {"workers": 3},
        {"checkpoint_every_s": 0.0, "keep_checkpoints": 1},
    ],
)
def test_hardware_does_not_change_the_result_beyond_rounding(
    config: RunConfig, one: Path, tmp_path: Path, change: dict
) -> None:
    two = _train(replace(config, hardware=replace(config.hardware, **change)), tmp_path / "two")
    for name, value in load_checkpoint(one).model.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.slow
def test_compiled_blocks_do_not_change_the_result_beyond_rounding(
    config: RunConfig, tmp_path: Path
) -> None:
    config = replace(
        config, model=replace(config.model, encoder=replace(config.model.encoder, depth=2))
    )
    one = _train(config, tmp_path / "one")
    two = _train(replace(config, hardware=replace(config.hardware, compile=True)), tmp_path / "two")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_half_precision_moves_the_result_by_its_rounding_only(
    config: RunConfig, tmp_path: Path, precision: str, bits: int
) -> None:
    # SGD without noise: the weights' movement is then the sum of clipped gradients, and the
    # precision of these is what is compared.
    plain = replace(
        config,
        privacy=replace(config.privacy, guarantee="none", noise_multiplier=None),
        optim=replace(config.optim, name="sgd", learning_rate=0.1, weight_decay=0.0, momentum=0.0),
    )
    start = make_model(config.model, config.seed).state_dict()
    one = _train(plain, tmp_path / "one")
    two = _train(
        replace(plain, hardware=replace(plain.hardware, precision=precision)), tmp_path / "two"
    )
    moved = torch.cat([(one[name] - start[name]).flatten() for name in one])
    differs = torch.cat([(two[name] - one[name]).flatten() for name in one])
    assert 0 < differs.norm() < 5 * 2.0**-bits * moved.norm(), "about 2^-bits per rounding"


def test_the_seed_and_the_keys_do_change_the_result(
    config: RunConfig, one: Path, tmp_path: Path
) -> None:
    same = load_checkpoint(one).model
    for i, (changed, keys) in enumerate(
        [
            (replace(config, seed=1), secrets()),
            (config, secrets(draw=b"x" * 32)),
            (config, secrets(noise=b"x" * 32)),
        ]
    ):
        other = _train(changed, tmp_path / str(i), keys)
        assert not torch.allclose(
            other["encoder.blocks.0.mlp.0.weight"], same["encoder.blocks.0.mlp.0.weight"], atol=1e-3
        )


def test_an_empty_draw_is_a_step_like_any_other(config: RunConfig, tmp_path: Path) -> None:
    rare = replace(config, privacy=replace(config.privacy, expected_batch_size=0.01, steps=3))
    weights = _train(rare, tmp_path / "run")
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").steps == 3
    assert all(torch.isfinite(w).all() for w in weights.values())


CRASH = """
import json, os, signal, sys
from pathlib import Path
from dpvision.config import RunConfig, from_dict
from dpvision.train import loop, start

real, root, last = loop.privatize, Path(sys.argv[2]), 0

def killed(total, plan, step, key, **owners):
    if step + 1 == last:
        assert "torch._dynamo" not in sys.modules, "PyTorch's compiler was imported"
        os.kill(os.getpid(), signal.SIGKILL)
    return real(total, plan, step, key, **owners)

loop.privatize = killed
start.check_gates = lambda *_: None  # for time: other tests are about them
config = from_dict(RunConfig, json.loads(Path(sys.argv[1]).read_text()))
for last in (1, 3):  # each in a process of its own, which need not import again
    if os.fork() == 0:
        opened = start.resumed_session(root) if root.exists() else start.new_session(config, root)
        with opened as session:
            loop.fit(session, quiet=True)
        sys.exit("it was not killed")
    status = os.wait()[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
"""


def test_killed_at_any_step_it_goes_on_and_no_charged_step_is_lost(
    config: RunConfig, tmp_path: Path
) -> None:
    """Nor do start and steps import PyTorch's compiler: two seconds."""
    config = replace(config, hardware=replace(config.hardware, checkpoint_every_s=0.0))
    root = tmp_path / "run"
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(tmp_path / "config.json"), str(root)],
        capture_output=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    with resumed_session(root) as session:
        assert session.run is not None
        assert session.run.ledger.steps == 3 and session.updates == 1, (
            "steps 1 and 3 were charged, only step 2 reached the weights"
        )
        assert fit(session, quiet=True)
    manifest = load_checkpoint(root).manifest
    assert manifest["ledger_steps"] == 4 and manifest["updates"] == 2


def test_a_resumed_run_repeats_neither_draws_nor_noise(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bytes, bytes]] = []
    real_sum, real_noise = loop.step_sum, loop.privatize
    monkeypatch.setattr(
        loop, "step_sum", lambda *a, **b: (seen.append((a[-1], b"")), real_sum(*a, **b))[1]
    )
    monkeypatch.setattr(
        loop,
        "privatize",
        lambda *a, **owners: (seen.append((b"", a[-1])), real_noise(*a, **owners))[1],
    )
    for run in ("one", "two"):
        with new_session(config, tmp_path / run) as session:
            fit(session, quiet=True)
    draws, noises = {secret_of(d) for d, _ in seen if d}, {secret_of(n) for _, n in seen if n}
    assert len(draws) == 2 and len(noises) == 2 and all(len(k) == 32 for k in draws | noises)
    for file in (tmp_path).rglob("*"):
        if file.is_file():
            blob = file.read_bytes()
            assert not any(key in blob or key.hex().encode() in blob for key in draws | noises), (
                f"a secret key lies in {file}"
            )


def test_sigterm_saves_and_stops_and_resume_completes(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.privatize

    def stop_at_two(
        total: object, plan: object, number: int, key: bytes, **owners: object
    ) -> object:
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(total, plan, number, key, **owners)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "privatize", stop_at_two)
    with new_session(config, tmp_path / "run") as session:
        assert not fit(session, quiet=True)
    assert load_checkpoint(tmp_path / "run").manifest["updates"] == 2
    monkeypatch.undo()
    with resumed_session(tmp_path / "run") as session:
        assert fit(session, quiet=True) and session.updates == 4


def test_losses_norms_and_batch_sizes_stay_under_confidential(one: Path) -> None:
    private = [
        json.loads(line)
        for line in (one / "confidential" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(private) == 4 and all(np.isfinite(line["loss"]) for line in private)
    secret = {
        str(line[key])
        for line in private
        for key in ("loss", "grad_norm_mean", "grad_norm_median", "step_s", "images_per_s", "time")
    }
    for file in one.rglob("*"):
        if (
            file.is_file()
            and "confidential" not in file.relative_to(one).parts
            and file.suffix in (".json", ".jsonl")
        ):
            text = file.read_text()
            assert not any(value in text for value in secret), file
    public = [json.loads(line) for line in (one / "progress.jsonl").read_text().splitlines()]
    assert all(set(line) == {"step", "epsilon_at_most"} for line in public)


def test_a_run_without_guarantee_on_a_private_store_lies_wholly_under_confidential(
    config: RunConfig, tmp_path: Path
) -> None:
    plain = replace(
        config,
        privacy=replace(
            config.privacy, guarantee="none", noise_multiplier=None, max_grad_norm=None
        ),
    )
    with new_session(plain, tmp_path / "run") as session:
        fit(session, quiet=True)
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"confidential", ".lock"}
    lineage = load_checkpoint(tmp_path / "run").manifest["lineage"]
    assert lineage[-1]["guarantee"] is None
    with (
        pytest.raises(PrivacyError, match="without a guarantee"),
        new_session(replace(config, init_from=str(tmp_path / "run")), tmp_path / "x"),
    ):
        pass
    assert not (tmp_path / "x").exists()


def test_a_private_parent_is_accepted_and_named(
    config: RunConfig, one: Path, tmp_path: Path
) -> None:
    parent = load_checkpoint(one).model
    with new_session(replace(config, init_from=str(one)), tmp_path / "two") as session:
        assert torch.equal(
            session.model.state_dict()["encoder.blocks.0.mlp.0.weight"],
            parent["encoder.blocks.0.mlp.0.weight"],
        )
        fit(session, quiet=True)
    lineage = load_checkpoint(tmp_path / "two").manifest["lineage"]
    assert [entry["guarantee"]["steps"] for entry in lineage] == [4, 4]


def test_a_run_folder_in_use_or_taken_is_refused(config: RunConfig, tmp_path: Path) -> None:
    with new_session(config, tmp_path / "run"):
        with pytest.raises(CheckpointError, match="in use"), resumed_session(tmp_path / "run"):
            pass
        with pytest.raises(CheckpointError, match="in use"), new_session(config, tmp_path / "run"):
            pass
    with (
        pytest.raises(CheckpointError, match="holds a run already"),
        new_session(config, tmp_path / "run"),
    ):
        pass
    with (
        pytest.raises(CheckpointError, match="holds no run"),
        resumed_session(tmp_path / "elsewhere"),
    ):
        pass


def test_a_store_of_another_size_than_declared_is_refused_before_anything_is_charged(
    config: RunConfig, tmp_path: Path
) -> None:
    wrong = replace(config, privacy=replace(config.privacy, dataset_size=61))
    with (
        pytest.raises(DataError, match="declared dataset_size=61"),
        new_session(wrong, tmp_path / "run"),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="--data"),
        new_session(replace(config, data=replace(config.data, store=None)), tmp_path / "run"),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_found_before_the_first_step(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000))
    with (
        pytest.raises(CheckpointError, match="two checkpoints"),
        new_session(config, tmp_path / "run"),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_stops_the_run_and_resume_goes_on(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def full(folder: Path, **settings: bool) -> Iterator[Path]:
        raise OSError(28, "No space left on device")
        yield folder

    with new_session(config, tmp_path / "run") as session:
        monkeypatch.setattr(checkpoint, "new_folder", full)
        with pytest.raises(CheckpointError, match="No space left"):
            fit(session, quiet=True)
    monkeypatch.undo()
    with resumed_session(tmp_path / "run") as session:
        assert fit(session, quiet=True)
    manifest = load_checkpoint(tmp_path / "run").manifest
    assert manifest["ledger_steps"] == 4 and manifest["updates"] == 0, (
        "all steps were charged, none reached a saved weight"
    )


def test_an_older_ledger_copied_back_is_refused(
    config: RunConfig, tmp_path: Path, scenes: Path
) -> None:
    root = tmp_path / "run"
    with new_session(config, root) as session:
        assert session.run is not None
        path = session.run.ledger.path
        early = path.read_bytes()
        fit(session, quiet=True)
    path.write_bytes(early)
    with pytest.raises(PrivacyError), resumed_session(root):
        pass
    path.write_bytes((root / "ledger.jsonl").read_bytes())
