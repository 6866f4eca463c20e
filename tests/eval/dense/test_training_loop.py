"""The loop for dense predictions: schedule, order, physical batches, ranks and resume change
nothing that they must not change.
"""

import itertools
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpvision.errors import CheckpointError, ConfigError
from dpvision.eval.dense.settings import DenseHardware, DenseTrainSettings
from dpvision.eval.dense.training_loop import checked_steps, fit, rate_factor, seconds_a_step

from .dense_numbers import Numbers, groups_of, loss, make_model

SETTINGS = DenseTrainSettings(epochs=6, batch_size=4, warmup_steps=3, seed=5)
HARDWARE = DenseHardware(physical_batch_size=2, workers=1)

# Before scripts that run in a process of their own.
COMMON = f"""
import sys, time
from pathlib import Path
import torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from dense_numbers import Numbers, groups_of, loss, make_model
from dpvision.eval.dense.settings import DenseTrainSettings
from dpvision.eval.dense.settings import DenseHardware
from dpvision.eval.dense.training_loop import fit
from dpvision.train.distributed import join, leave
torch.set_num_threads(1)
"""


def trained(
    settings: DenseTrainSettings = SETTINGS,
    hardware: DenseHardware = HARDWARE,
    dropout: float = 0.0,
    **more,
) -> dict[str, Tensor]:
    model = make_model(dropout)
    fit(model, Numbers(), loss, groups_of(model), settings, hardware, **more)
    assert not model.training
    return model.state_dict()


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_the_loop_is_adamw_by_hand_on_the_whole_batch() -> None:
    model, stream, step, steps = make_model(), [], 0, SETTINGS.steps(10)
    for epoch in range(7):
        stream += [
            (int(n), epoch)
            for n in np.random.Generator(np.random.PCG64([5, epoch])).permutation(10)
        ]
    optimizer = torch.optim.AdamW(groups_of(model), betas=SETTINGS.betas)
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, (1e-2, 3e-2), strict=True):
            group["lr"] = rate * (1 - step / steps) * min(1.0, 1e-6 + (1 - 1e-6) * step / 3)
        optimizer.zero_grad()
        loss(
            model, [Numbers().load(*place) for place in stream[4 * step : 4 * step + 4]]
        ).backward()
        optimizer.step()
    assert step == 14
    found = trained()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "hardware",
    [DenseHardware(1, workers=1), DenseHardware(3, workers=3), DenseHardware(64, workers=2)],
)
def test_physical_batch_and_workers_change_nothing_beyond_rounding(hardware: DenseHardware) -> None:
    one, other = trained(), trained(hardware=hardware)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


def test_passes_of_unequal_size_weigh_by_their_images() -> None:
    settings = replace(SETTINGS, batch_size=5)
    one, other = (
        trained(settings, DenseHardware(5, workers=1)),
        trained(settings, DenseHardware(2, workers=1)),
    )
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


def test_every_epoch_sees_every_image_once_and_each_is_loaded_for_its_epoch() -> None:
    seen: list[tuple[int, int]] = []

    class Told(Numbers):
        def load(self, number: int, epoch: int):
            seen.append((epoch, number))
            return super().load(number, epoch)

    model = make_model()
    fit(
        model,
        Told(),
        loss,
        groups_of(model),
        replace(SETTINGS, epochs=4, warmup_steps=0),
        DenseHardware(2, workers=1),
    )
    assert sorted(seen) == list(itertools.product(range(4), range(10)))


def test_the_seed_decides_the_order_and_the_dropout_and_the_global_generator_is_left_alone() -> (
    None
):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = trained(dropout=0.3)
    torch.manual_seed(2)
    assert equal(one, trained(dropout=0.3)) and not equal(
        one, trained(replace(SETTINGS, seed=6), dropout=0.3)
    )
    torch.manual_seed(1)
    trained(dropout=0.3)
    torch.manual_seed(1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_schedules_are_the_formulas() -> None:
    s = DenseTrainSettings(warmup_steps=10, warmup_start=0.0)
    assert [rate_factor(s, t, 100) for t in (0, 5, 10, 99)] == pytest.approx(
        [0, 0.5 * 0.95, 0.9, 0.01]
    )
    steps = replace(s, schedule="steps", step_at=(0.8, 0.9))
    assert [rate_factor(steps, t, 100) for t in (5, 79, 80, 89, 90, 99)] == pytest.approx(
        [0.5, 1, 0.1, 0.1, 0.01, 0.01]
    )
    assert rate_factor(replace(s, schedule="constant"), 99, 100) == 1
    paper = DenseTrainSettings()
    assert paper.steps(20_210) == 126_312, "ADE20K: 100 epochs, batch 16"
    every = [rate_factor(paper, t, 126_312) for t in range(126_312)]
    assert max(every) == every[1500] and every[0] == 1e-6 and every[-1] < 1e-5


def test_the_gradient_is_clipped_as_a_whole() -> None:
    model = make_model()
    still = {name: value.clone() for name, value in model.state_dict().items()}
    groups = [{"params": list(model.parameters()), "lr": 1e-2, "weight_decay": 0.0}]
    norms: list[float] = []

    kept = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
        return kept(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        fit(model, Numbers(), loss, groups, replace(SETTINGS, max_grad_norm=0.01), HARDWARE)
        assert norms and max(norms) <= 0.0101 and not equal(still, model.state_dict())
        fit(model, Numbers(), loss, groups, SETTINGS, HARDWARE)
    assert max(norms) > 0.1


class Stop(Exception):
    """A stop in the middle."""


def test_stop_and_go_is_straight_through_to_the_bit(tmp_path: Path) -> None:
    straight = trained(dropout=0.3)

    def stop_at(step: int):
        def say(text: str) -> None:
            if text.startswith(f"step {step} "):
                raise Stop

        return say

    every = replace(HARDWARE, checkpoint_every_s=0.0)
    for step in (4, 9):
        with pytest.raises(Stop):
            trained(hardware=every, dropout=0.3, work=tmp_path, progress=stop_at(step))
    lines: list[str] = []
    assert equal(
        straight,
        trained(
            hardware=replace(every, workers=2), dropout=0.3, work=tmp_path, progress=lines.append
        ),
    )
    assert lines[0].startswith("step 9 of 15"), "what was said of step 9 came before it was kept"
    assert (
        equal(straight, trained(hardware=every, dropout=0.3, work=tmp_path, progress=lines.append))
        and len(lines) == 7
    ), "a finished one"


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        COMMON
        + """
class Slow(Numbers):
    def load(self, number, epoch):
        time.sleep(0.01)
        return super().load(number, epoch)

model = make_model(0.3)
fit(model, Slow(), loss, groups_of(model),
    DenseTrainSettings(epochs=60, batch_size=4, warmup_steps=3, seed=5),
    DenseHardware(2, workers=1, checkpoint_every_s=0.0), work=Path(sys.argv[1]),
    progress=lambda text: print(text, flush=True))
"""
    )
    work = tmp_path / "work"
    process = subprocess.Popen(
        [sys.executable, str(script), str(work)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 25 "):
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    settings = replace(SETTINGS, epochs=60)
    lines: list[str] = []
    resumed = trained(settings, dropout=0.3, work=work, progress=lines.append)
    assert 24 <= int(lines[0].split()[1]) - 1 < 60
    assert equal(resumed, trained(settings, dropout=0.3))


def test_another_trainings_checkpoint_is_refused(tmp_path: Path) -> None:
    trained(work=tmp_path, about="pets")
    with pytest.raises(CheckpointError, match="this training's"):
        trained(work=tmp_path, about="cars")
    with pytest.raises(CheckpointError, match="epochs=6"):
        trained(replace(SETTINGS, epochs=7), work=tmp_path, about="pets")
    model = make_model()
    nn.init.zeros_(model[1].weight)
    with pytest.raises(CheckpointError, match="has start="):
        fit(
            model,
            Numbers(),
            loss,
            groups_of(model),
            SETTINGS,
            HARDWARE,
            work=tmp_path,
            about="pets",
        )
    (tmp_path / "training.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="Move it away"):
        trained(work=tmp_path, about="pets")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="expected a writable folder"):
        trained(work=tmp_path / "file" / "below")


@pytest.mark.slow
def test_two_processes_under_torchrun_are_one_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        COMMON
        + """
group = join("cpu")
assert group.world_size == 2
model = make_model()
fit(model, Numbers(), loss, groups_of(model),
    DenseTrainSettings(epochs=6, batch_size=4, warmup_steps=3, seed=5, max_grad_norm=0.5),
    DenseHardware(1, workers=1), work=Path(sys.argv[1]), group=group)
torch.save(model.state_dict(), f"{sys.argv[1]}/rank{group.rank}.pt")
leave()
"""
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(tmp_path),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert equal(first, second)
    one = trained(replace(SETTINGS, max_grad_norm=0.5))
    for name, value in one.items():
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)
    # And one process takes up what two have kept.
    lines: list[str] = []
    resumed = trained(replace(SETTINGS, max_grad_norm=0.5), work=tmp_path, progress=lines.append)
    assert lines == [] and equal(resumed, first)


def test_bfloat16_learns_the_same_up_to_its_precision() -> None:
    full, half = trained(), trained(hardware=replace(HARDWARE, precision="bfloat16"))
    assert all(value.dtype == torch.float32 for value in half.values()) and not equal(full, half)
    for name, value in full.items():
        torch.testing.assert_close(half[name], value, rtol=0.1, atol=0.05)
    with pytest.raises(ConfigError, match="float16"):
        trained(hardware=replace(HARDWARE, precision="float16"))


def test_a_parameter_outside_all_groups_or_a_loss_that_is_not_finite_does_not_pass() -> None:
    model = make_model()
    with pytest.raises(AssertionError):
        fit(model, Numbers(), loss, groups_of(model)[:1], SETTINGS, HARDWARE)

    def broken(model: nn.Module, examples: list) -> Tensor:
        return model(examples[0][0][None]).sum() * torch.nan

    with pytest.raises(ConfigError, match="loss=nan at step 1"):
        fit(model, Numbers(), broken, groups_of(model), SETTINGS, HARDWARE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epochs": 0.0}, "epochs=0.0"),
        ({"epochs": float("nan")}, "epochs=nan"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"schedule": "cosine"}, "schedule='cosine'"),
        ({"step_at": (1.5,)}, "step_at"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm=inf"),
        ({"power": 0.0}, "power"),
        ({"betas": (1.0, 0.9)}, "betas"),
    ],
)
def test_settings_out_of_range_are_named(change: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(SETTINGS, **change)


def test_runs_that_cannot_be_are_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match="warmup_steps=1500 of 62 steps"):
        checked_steps(DenseTrainSettings(), 10)
    with pytest.raises(ConfigError, match="batch_size=4 on 3 processes"):
        checked_steps(SETTINGS, 10, 3)
    with pytest.raises(ConfigError, match="no images"):
        checked_steps(SETTINGS, 0)
    with pytest.raises(ConfigError, match="workers=0"):
        DenseHardware(workers=0)


def test_a_step_is_timed_without_training() -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert 0 < seconds_a_step(model, Numbers(), loss, SETTINGS, HARDWARE) < 5
    assert equal(before, model.state_dict()) and all(p.grad is None for p in model.parameters())
