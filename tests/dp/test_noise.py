"""The law of the noise, the independence of its streams, the grid, the divisor; that a share drawn
alone is that of the whole.
"""

import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from made import changed, key, made_sum
from mpmath import mp

from dpvision.config import PrivacyConfig
from dpvision.dp import noise as noise_module
from dpvision.dp import normals as normals_module
from dpvision.dp.clipped import ClippedSum
from dpvision.dp.noise import DPGradient, grid_of, privatize
from dpvision.dp.normals import box_muller, normals
from dpvision.errors import PrivacyError
from dpvision.privacy.plan import make_plan
from dpvision.privacy.stream import Keystream, subkey

KEY = bytes(range(32))
STD, BATCH, CLIP = 0.75, 40.0, 0.5


def plan(guarantee="simulated", batch=BATCH):
    noise = {} if guarantee == "none" else {"noise_multiplier": STD / CLIP, "max_grad_norm": CLIP}
    return make_plan(
        PrivacyConfig(
            dataset_size=1000,
            expected_batch_size=batch,
            steps=10,
            guarantee=guarantee,
            **{"max_grad_norm": None, **noise},
        )
    )


def zeros(num_records=3, **sizes) -> ClippedSum:
    return made_sum({name: torch.zeros(size) for name, size in sizes.items()}, num_records, CLIP)


def noise(step=0, raw=KEY, **sizes) -> dict[str, np.ndarray]:
    """Noise in units of its standard deviation."""
    gradient = privatize(zeros(**sizes), plan(), step, key(raw), dtype=torch.float64)
    return {name: value.numpy() * BATCH / STD for name, value in gradient.grads.items()}


def test_noise_is_normal_with_the_plans_scale():
    """``test_normals`` has the law itself; here that nothing between it and the gradient changes
    it.
    """
    drawn = noise(matrix=(1000, 900), bias=100_000)
    x = np.concatenate([drawn["matrix"].ravel(), drawn["bias"]])
    assert len(x) == 10**6
    assert (
        abs(x.mean()) < 5e-3
        and abs(x.var() - 1) < 7e-3
        and scipy.stats.kstest(x, "norm").pvalue > 1e-6
    )


def test_streams_do_not_correlate():
    size = 2**18
    first = noise(step=5, a=2 * size, b=size)
    later, restarted = noise(step=6, a=size), noise(step=5, raw=bytes(32), a=size)
    streams = [first["a"][:size], first["a"][size:], first["b"], later["a"], restarted["a"]]
    for moved in (streams, [np.square(x) for x in streams]):
        off_diagonal = np.corrcoef(moved)[~np.eye(len(streams), dtype=bool)]
        assert np.abs(off_diagonal).max() < 5 / math.sqrt(size)


def test_noise_is_a_function_of_key_step_and_name():
    reference = noise(step=2, a=50, b=50)
    assert np.array_equal(noise(step=2, b=50)["b"], reference["b"]), "other parameters changed it"
    for other in (
        noise(step=3, a=50)["a"],
        noise(step=2, raw=bytes(32), a=50)["a"],
        reference["b"],
    ):
        assert not np.isin(other, reference["a"]).any()


def test_a_release_is_the_rounded_sum_of_the_streams_normals():
    """Every number of it, against exact arithmetic: sum + std x normal, to the nearest multiple of
    the grid, divided and rounded once.
    """
    value = torch.linspace(-30, 30, 999)
    total = changed(zeros(), grads={"a.weight": value.view(27, 37)})
    got = (
        privatize(total, plan(), 4, key(), dtype=torch.float64).grads["a.weight"].flatten().tolist()
    )
    normal, ties = normals(subkey(key(), "noise", step=4, parameter="a.weight"), 0, 999), 0
    with mp.workprec(150):
        for summed, drawn, released in zip(value.tolist(), normal.tolist(), got, strict=True):
            exact = (mp.mpf(summed) + STD * mp.mpf(drawn)) / grid_of(STD)
            whole = mp.nint(exact)
            # Where sum plus noise is within float64's rounding of a border, either multiple is
            # right.
            ties += released != float(whole * grid_of(STD) / BATCH)
            assert abs(mp.mpf(released) * BATCH / grid_of(STD) - exact) < 0.5 + 1e-6
    assert ties == 0


@pytest.mark.parametrize("std", [1e-12, 0.3, 0.5, 0.999, 1.0, 1.5, 2.0, 3e11])
def test_the_grid_is_a_power_of_two_a_millionth_of_the_noise(std):
    assert grid_of(std) == 2.0 ** (math.floor(math.log2(std)) - 20)
    assert std / 2**21 < grid_of(std) <= std / 2**20


def test_every_released_number_is_on_the_grid():
    total = changed(zeros(), grads={"a": torch.randn(10_000, dtype=torch.float64)})
    steps = (
        privatize(total, plan(batch=64.0), 0, key(), dtype=torch.float64).grads["a"].numpy()
        * 64
        / grid_of(STD)
    )
    assert np.array_equal(steps, np.rint(steps)) and (steps % 2 == 1).mean() == pytest.approx(
        0.5, abs=0.03
    )
    narrow = privatize(total, plan(batch=64.0), 0, key()).grads["a"]
    assert narrow.dtype == torch.float32 and np.array_equal(
        narrow.numpy(), (steps * grid_of(STD) / 64).astype(np.float32)
    )


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads, monkeypatch):
    """Also where a task is a small part of a parameter, and ends within a block of the cipher."""
    total = changed(
        zeros(), grads={"a": torch.randn(70_001), "b": torch.randn(3, 5), "c": torch.tensor(2.0)}
    )
    expected = privatize(total, plan(), 1, key()).grads
    monkeypatch.setattr(noise_module, "_CPU_TASK", 1003)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.testing.assert_close(privatize(total, plan(), 1, key()).grads, expected, rtol=0, atol=0)


class Rank:
    """One of several threads that stand for processes: adds up at a barrier."""

    def __init__(self, rank, world_size, slots, barrier):
        self.rank, self.world_size, self._slots, self._barrier = rank, world_size, slots, barrier

    def add_up(self, values):
        self._slots[self.rank] = values.clone()
        self._barrier.wait()
        values.copy_(torch.stack(self._slots).sum(0))
        assert (torch.stack(self._slots) != 0).sum(0).max() <= 1, "a coordinate has two owners"
        self._barrier.wait()


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_shares_of_several_owners_are_the_whole_bit_for_bit(world_size):
    total = changed(
        zeros(), grads={"a": torch.randn(123, 457), "b": torch.randn(5), "c": torch.tensor(2.0)}
    )
    expected, results = privatize(total, plan(), 1, key()).grads, [None] * world_size
    slots, barrier = [None] * world_size, threading.Barrier(world_size, timeout=900)

    def work(rank):
        results[rank] = privatize(
            total, plan(), 1, key(), owners=Rank(rank, world_size, slots, barrier)
        ).grads

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_what_a_gpu_computes_is_the_release_of_a_cpu(monkeypatch):
    """The GPU's way with words from the CPU: numbers on the grid, all but a few in a million the
    same ones.
    """
    made = {}

    def chacha_words(key_8, block, num_blocks):
        word_W = np.empty(8 * num_blocks, dtype="<i8")
        Keystream(key(key_8.numpy().astype("<u4").tobytes()), block).fill(word_W)
        return torch.from_numpy(word_W)

    monkeypatch.setitem(
        __import__("sys").modules,
        "dpvision.dp.chacha_triton",
        SimpleNamespace(chacha_words=chacha_words),
    )
    monkeypatch.setattr(noise_module, "_GPU_PIECE", 9_999)
    monkeypatch.setattr(normals_module, "_RARE", 2.0**-8)  # twenty second words in a piece
    total = torch.randn(100_003)
    for way in ("_on_cpu", "_away"):
        made[way] = torch.empty(100_003, dtype=torch.float64)
        terms = ((subkey(key(), "noise"), STD),)
        share = noise_module._Share(total, made[way], terms, 3, 100_003)
        release = noise_module._Release(STD, 64.0)
        if way == "_on_cpu":
            release._on_cpu(noise_module.deque(share.pieces(9_999)))
        else:
            release._away([share])
    cpu, gpu = (value[3:].numpy() * 64 / grid_of(STD) for value in made.values())
    assert (
        np.array_equal(gpu, np.rint(gpu))
        and np.abs(cpu - gpu).max() <= 1
        and (cpu != gpu).mean() < 1e-4
    )
    assert box_muller.__module__ == "dpvision.dp.normals"


@pytest.mark.gpu
def test_a_gpu_releases_what_a_cpu_releases():
    total = changed(zeros(), grads={"a": torch.randn(1000, 1001), "b": torch.randn(7)})
    moved = changed(total, grads={name: value.cuda() for name, value in total.grads.items()})
    cpu, gpu = (privatize(of, plan(), 1, key(), dtype=torch.float64).grads for of in (total, moved))
    for name, value in cpu.items():
        steps = (gpu[name].cpu() - value) * BATCH / grid_of(STD)
        assert (
            gpu[name].is_cuda
            and steps.abs().max() < 1.01
            and (steps.abs() > 0.5).double().mean() < 1e-4
        )


@pytest.mark.parametrize("num_records", [0, 1, 40, 63])
def test_divisor_is_the_expected_batch_size_whatever_was_realised(num_records):
    total = made_sum({"a": torch.full((1000,), 8.0)}, num_records, CLIP)
    gradient = privatize(total, plan(), 0, key())
    torch.testing.assert_close(
        gradient.grads["a"], (8.0 + STD * torch.from_numpy(noise(a=1000)["a"])).float() / BATCH
    )
    assert isinstance(gradient, DPGradient) and gradient.grads["a"].dtype == torch.float32


def test_noise_is_added_once_whatever_the_number_of_physical_batches():
    parts = zeros(a=1000) + zeros(a=1000) + zeros(a=1000)
    assert torch.equal(
        privatize(parts, plan(), 4, key()).grads["a"],
        privatize(zeros(a=1000), plan(), 4, key()).grads["a"],
    )


def test_without_guarantee_only_the_division_happens():
    """Nothing is rounded to a grid either."""
    total = made_sum({"a": torch.tensor([8.0, 1 / 3]), "b": torch.tensor(3.0)}, 5, None)
    gradient = privatize(total, plan(guarantee="none"), 0, key(), dtype=torch.float64)
    third = float(torch.tensor(1 / 3))
    assert gradient.grads["a"].tolist() == [0.2, third / 40] and gradient.grads["b"] == 0.075


def test_secret_sum_is_not_written_to():
    total = zeros(a=10)
    privatize(total, plan(), 0, key())
    assert not total.grads["a"].any()


@pytest.mark.parametrize("wrong", [b"", b"short", bytes(32), bytes(64), None])
def test_anything_but_a_key_is_refused(wrong):
    with pytest.raises(PrivacyError, match="new_key"):
        privatize(zeros(a=3), plan(), 0, wrong)


@pytest.mark.parametrize("std", [0.0, float("nan")])
def test_guarantee_without_noise_is_refused(std):
    noise = SimpleNamespace(std=lambda step: std)
    broken = SimpleNamespace(guarantee="dp", noise=noise, expected_batch_size=BATCH, steps=1)
    with pytest.raises(PrivacyError, match="noise_std"):
        privatize(zeros(a=3), broken, 0, key())


@pytest.mark.parametrize("step", [-1, 10, 1.0, None])
def test_only_steps_of_the_plan_are_released(step):
    """A loop of full batches without a ledger makes no other check."""
    privatize(zeros(a=3), plan(), 9, key())
    with pytest.raises(PrivacyError, match=r"step=.*; expected an integer from 0 to 9"):
        privatize(zeros(a=3), plan(), step, key())


@pytest.mark.parametrize("max_grad_norm", [0.4999, 0.5001, 5.0, None])
def test_a_sum_of_another_clip_norm_than_the_plans_is_refused(max_grad_norm):
    other = changed(zeros(a=3), max_grad_norm=max_grad_norm)
    with pytest.raises(PrivacyError, match=r"max_grad_norm=plan\.max_grad_norm"):
        privatize(other, plan(), 0, key())
    assert privatize(zeros(a=3), plan(), 0, key()).grads["a"].any()
    with pytest.raises(PrivacyError, match="plan with max_grad_norm=None"):
        privatize(zeros(a=3), plan(guarantee="none"), 0, key())


def test_a_sum_without_rows_is_released_without_a_guarantee_only():
    for guarantee in ("dp", "none"):
        total = changed(zeros(a=3), rows=None, max_grad_norm=CLIP if guarantee == "dp" else None)
        if guarantee == "none":
            assert privatize(total, plan(guarantee), 0, key()).grads["a"].shape == (3,)
            continue
        with pytest.raises(PrivacyError, match="without rows="):
            privatize(total, plan(guarantee), 0, key())
