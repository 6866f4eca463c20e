"""What a step holds: nothing of the step before, and no more than the check before the first charge
made room for.
"""

import gc
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from measure import peak_bytes

from dpvision.config import MAEConfig, OptimConfig, RunConfig, ViTConfig
from dpvision.dp.clip import clipped_sum
from dpvision.dp.noise import privatize
from dpvision.models import make_model
from dpvision.privacy.stream import Key
from dpvision.train import loop, memory
from dpvision.train.distributed import Group, all_reduce_sum
from dpvision.train.loop import fit
from dpvision.train.memory import held_bytes, require_fit
from dpvision.train.objectives import loss_function
from dpvision.train.start import new_session
from dpvision.train.step import step_sum

pytestmark = pytest.mark.usefixtures("gates_once")

OPTIMIZERS = {
    "adamw": OptimConfig(learning_rate=1e-2),
    "adamw, averaged": OptimConfig(learning_rate=1e-2, ema_decay=0.9),
    "lamb": OptimConfig(name="lamb", learning_rate=1e-2),
    "sgd": OptimConfig(name="sgd", learning_rate=1e-2, momentum=0.9),
    "sgd without momentum": OptimConfig(name="sgd", learning_rate=1e-2, momentum=0.0, average=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_session_keeps_from_step_to_step_is_counted(
    name: str, config: RunConfig, tmp_path: Path
) -> None:
    config = replace(config, optim=OPTIMIZERS[name], privacy=replace(config.privacy, steps=1))
    with new_session(config, tmp_path / "run") as session:
        fit(session, quiet=True)
        counts = {key for key in session.optimizer.tensors() if key.endswith("/step")}
        kept = [
            value for key, value in session.optimizer.tensors().items() if key not in counts
        ] + list((session.ema or {}).values())
        assert sum(value.nbytes for value in kept) == held_bytes(config, session.model)


def test_nothing_of_a_step_lives_through_the_next(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched_sum(step: int, session: Any, key: Any, **more: Any) -> Any:
        gc.collect()
        alive.append(sum(ref() is not None for ref in held))
        total, metrics = step_sum(step, session, key, **more)
        held.extend(weakref.ref(value) for value in total.grads.values())
        return total, metrics

    def watched_noise(*args: Any, **kwargs: Any) -> Any:
        gradient = privatize(*args, **kwargs)
        held.extend(weakref.ref(value) for value in gradient.grads.values())
        return gradient

    monkeypatch.setattr(loop, "step_sum", watched_sum)
    monkeypatch.setattr(loop, "privatize", watched_noise)
    with new_session(config, tmp_path / "run") as session:
        fit(session, quiet=True)
    assert len(alive) == config.privacy.steps and held and alive == [0] * len(alive)


@pytest.fixture
def wide(config: RunConfig) -> RunConfig:
    """A wide model of few tokens, so that parameters outweigh activations; full batches of 60."""
    model = MAEConfig(
        encoder=ViTConfig(image_size=16, patch_size=8, depth=2, width=256, num_heads=2),
        decoder_depth=1,
        decoder_width=256,
        decoder_num_heads=2,
    )
    return replace(
        config,
        model=model,
        privacy=replace(config.privacy, expected_batch_size=60, sampling="full_batch"),
        hardware=replace(config.hardware, physical_batch_size=60),
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_check_makes_room_for_a_whole_step(
    ranks: int, wide: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of one full pass after the first."""
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: None)
    with new_session(wide, tmp_path / "run") as session:
        cpu, loss_fn = session.group.device, session.loss_fn

        def step(number: int) -> None:
            total, _ = step_sum(number, session, Key.for_tests(b"k" * 32))
            total = all_reduce_sum(total, Group(0, ranks, cpu))
            session.optimizer.step(
                privatize(total, session.plan, number, Key.for_tests(b"n" * 32)), 1e-2
            )

        step(0)
        needed = peak_bytes(lambda: step(1)) + held_bytes(wide, session.model)
        checked = peak_bytes(lambda: require_fit(wide, session.model, loss_fn, cpu))
    parameters = 4 * sum(p.numel() for p in session.model.parameters())
    assert needed <= checked + 0.1 * parameters, "the check holds less than a step"
    assert checked <= needed + 2 * parameters, "the check refuses what fits"


def test_one_pass_is_freed_before_the_next(wide: RunConfig, tmp_path: Path) -> None:
    """Beside the total, in float64, a step holds the gradients of one pass, not of two."""
    peaks = []
    for passes in (1, 3):
        config = replace(
            wide,
            privacy=replace(wide.privacy, expected_batch_size=60),
            hardware=replace(wide.hardware, physical_batch_size=60 // passes),
        )
        with new_session(config, tmp_path / f"run{passes}") as session:
            key = Key.for_tests(b"k" * 32)
            step_sum(0, session, key)
            peaks.append(peak_bytes(lambda key=key, of=session: step_sum(1, of, key)))
            parameters = sum(p.numel() for p in session.model.parameters())
    assert peaks[1] <= peaks[0] + 0.5 * parameters


def test_the_check_runs_at_the_physical_batch_size(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(len(args[2].record_id_B))
        return clipped_sum(*args, **kwargs)

    monkeypatch.setattr(memory, "clipped_sum", watched)
    require_fit(config, make_model(config.model, 0), loss_function(config), torch.device("cpu"))
    assert seen == [config.hardware.physical_batch_size]
