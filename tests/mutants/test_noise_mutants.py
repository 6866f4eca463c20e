"""Mistakes with the noise and its divisor: planted, and caught. The ids are those of
docs/pitfalls.md, section "Noise and divisor".
"""

import contextlib
import itertools
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from made import RAW, changed, key, made_sum, released, secrets
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from zoo import GradientIsImage, image_losses

from dpvision import private_loop
from dpvision.adapt import release
from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.gradient import sum_at_zero
from dpvision.adapt.release import Releases, full_batch_plan
from dpvision.checkpoint import state_tensors
from dpvision.config import PrivacyConfig, RunConfig
from dpvision.data.store import Store
from dpvision.dp import noise as noise_module
from dpvision.dp import normals
from dpvision.dp.clip import clipped_sum
from dpvision.dp.clipped import ClippedSum
from dpvision.dp.noise import DPGradient, privatize
from dpvision.privacy import batches
from dpvision.privacy.mechanism import IndependentGaussian
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.privacy.sampling import derive_rng
from dpvision.privacy.stream import Key, Keystream, new_key, subkey
from dpvision.runs.run import Secrets
from dpvision.train import loop, own_loop, step
from dpvision.train.distributed import Group
from dpvision.train.loop import fit

from .conftest import NewRun
from .planting import assert_refused, caught, planted
from .ranks import Ranks

pytestmark = pytest.mark.usefixtures("gates_once")

ALONE = Group(0, 1, torch.device("cpu"))


def as_sum(values: torch.Tensor, num_records: int = 40, clip: float = 0.5) -> ClippedSum:
    """A sum clipped to the norm of the plan of this folder."""
    return made_sum({"a": values}, num_records, clip)


def test_divide_by_realised_batch(plan: DPPlan) -> None:
    def check(privatize) -> None:
        values = torch.linspace(-3, 3, 1000)
        noise = (
            privatize(as_sum(torch.zeros(1000)), plan.another_run(), 0, key()).grads["a"]
            * plan.expected_batch_size
        )
        for num_records in (1, 20, 39, 40):
            released = privatize(as_sum(values, num_records), plan.another_run(), 0, key()).grads[
                "a"
            ]
            torch.testing.assert_close(
                released * plan.expected_batch_size - noise,
                values,
                msg="the divisor follows the realised batch",
            )

    def by_realised(total, plan, step, key):
        real = privatize(total, plan, step, key)
        return released(
            {
                name: value * plan.expected_batch_size / total.num_records
                for name, value in real.grads.items()
            }
        )

    check(privatize)
    with caught("divisor follows the realised batch"):
        check(by_realised)


def test_divisor_of_the_store() -> None:
    """A release is a multiple of grid / divisor: whoever divides by the store's own number of
    records publishes it exactly.
    """
    declared = full_batch_plan(100, 1.0)
    feature_ND = np.random.default_rng(0).normal(size=(100, 12)).astype(np.float32)

    def values_of(count: int) -> np.ndarray:
        stream = FeatureStream(feature_ND[:count], np.arange(count) % 4, 4, unit=True)
        releases = Releases(
            declared.another_run(), itertools.count().__next__, key(), key(bytes(reversed(RAW)))
        )
        _, noisy = releases.release(
            stream,
            lambda blocks: sum_at_zero(blocks, stream.width, torch.zeros(4), "softmax", declared),
        )
        return noisy.grads["weight"].numpy().ravel()

    def divisors(values: np.ndarray) -> list[int]:
        """Numbers of records for which all values are multiples of grid / number, to the rounding
        of the division.
        """
        grids = values / noise_module.grid_of(declared.noise_std)
        return [n for n in range(90, 110) if np.abs(grids * n - np.rint(grids * n)).max() < 1e-6]

    def check() -> None:
        for count in (100, 99, 97):
            assert divisors(values_of(count)) == [100], (
                "a release shows how many records the store holds"
            )

    def by_store(total: ClippedSum, plan: DPPlan, *args: object, **settings: object) -> DPGradient:
        real = privatize(total, plan, *args, **settings)
        return released(
            {
                name: value * (plan.expected_batch_size / total.num_records)
                for name, value in real.grads.items()
            }
        )

    check()
    with planted(release, "privatize", by_store, "shows how many records"):
        check()


def test_noise_per_physical_batch(new_run: NewRun) -> None:
    def check() -> None:
        sums = []
        with new_run() as session:
            for size in (5, 16, 40):
                settings = replace(
                    session.config,
                    hardware=replace(session.config.hardware, physical_batch_size=size),
                )
                total, _ = step.step_sum(0, replace(session, config=settings), key())
                sums.append(torch.cat([value.flatten() for value in total.grads.values()]))
        for one, other in itertools.pairwise(sums):
            torch.testing.assert_close(
                one, other, rtol=1e-4, atol=1e-5, msg="the sum depends on the physical batches"
            )

    def noisy(loss_fn, model, batch, key, *, max_grad_norm, **settings):
        total = clipped_sum(loss_fn, model, batch, key, max_grad_norm=max_grad_norm, **settings)
        grads = {
            name: value + 4.0 * max_grad_norm * torch.randn_like(value)
            for name, value in total.grads.items()
        }
        return changed(total, grads=grads)

    check()
    with planted(step, "clipped_sum", noisy, "depends on the physical batches"):
        check()
    # Nor does a released gradient fit where a sum is expected.
    with pytest.raises(AttributeError):
        as_sum(torch.zeros(3)) + released({"a": torch.zeros(3)})


def test_noise_per_rank(new_run: NewRun) -> None:
    """Two ranks must end with the weights that one process has, noise included; only rank 0 knows
    its keys.
    """
    with new_run() as session:
        fit(session, secrets=secrets(), quiet=True)
        expected = state_tensors(session.model)

    def check() -> None:
        with new_run() as first, new_run() as second:
            second.folder = second.ledger = None
            keys = secrets(), secrets(b"?" * 32, b"!" * 32)

            def work(group: Group):
                session = (first, second)[group.rank]
                session.group = group
                fit(session, secrets=keys[group.rank], quiet=True)
                return state_tensors(session.model)

            for weights in Ranks(2).run(work):
                for name, value in expected.items():
                    torch.testing.assert_close(
                        weights[name],
                        value,
                        rtol=1e-3,
                        atol=2e-5,
                        msg="two ranks add other noise than one",
                    )

    def own_noise_key(secrets, group):
        own = secrets.noise.secret()
        return replace(share(secrets, group), noise=key(own))

    def noise_then_sum(total, plan, step, key, owners):
        gradient = privatize(total, plan, step, new_key())
        for value in gradient.grads.values():
            dist.all_reduce(value)
        return released(gradient.grads)

    share = loop.shared_secrets
    check()
    with planted(loop, "shared_secrets", own_noise_key, "other noise than one"):
        check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "all_reduce_sum", lambda total, group: total)
        with planted(loop, "privatize", noise_then_sum, "other noise than one"):
            check()


def test_noise_wrong_norm(config: RunConfig, scenes: Store) -> None:
    """Noise in units of the longest contribution that the clip lets through, measured: the plan's
    noise multiplier.
    """
    num = 100_000

    def huge_losses(model, batch, key):
        return 1e6 * image_losses(model, batch, key)

    def check() -> None:
        for clip in (0.1, 2.0):
            plan = make_plan(replace(config.privacy, max_grad_norm=clip))
            model = GradientIsImage(3, 16, 16)
            one, _ = step.step_sum(
                0,
                step.Training(config, plan, scenes, np.array([3]), None, model, huge_losses, ALONE),
                key(),
            )
            noise = (
                privatize(as_sum(torch.zeros(num), clip=clip), plan, 0, key()).grads["a"].double()
                * plan.expected_batch_size
            )
            ratio = noise.std() / one.grads["weight"].double().norm()
            assert abs(ratio / config.privacy.noise_multiplier - 1) < 5 / (2 * num) ** 0.5, (
                "noise has another norm than the clip's"
            )

    def clip_at_one(loss_fn, model, batch, key, *, max_grad_norm, **settings):
        return changed(
            clipped_sum(loss_fn, model, batch, key, max_grad_norm=1.0, **settings),
            max_grad_norm=max_grad_norm,
        )

    check()
    with planted(
        IndependentGaussian,
        "std",
        lambda noise, step: noise.multiplier * noise.max_grad_norm**2,
        "another norm than the clip's",
    ):
        check()
    with planted(step, "clipped_sum", clip_at_one, "another norm than the clip's"):
        check()


def test_sum_of_another_clip_norm(config: RunConfig, plan: DPPlan, scenes: Store) -> None:
    """A sum says what it was clipped to: it is refused where it would join the step's sum, and
    before the noise.
    """

    def check(privatize=privatize) -> None:
        for clip in (0.4999, 5.0, None):
            assert_refused(
                lambda clip=clip: privatize(as_sum(torch.zeros(3), clip=clip), plan, 0, key()),
                "a sum of another clip norm",
            )

    def trusting(total, plan, step, key):
        return privatize(changed(total, max_grad_norm=plan.max_grad_norm), plan, step, key)

    def clip_at_one(loss_fn, model, batch, key, *, max_grad_norm, **settings):
        return clipped_sum(loss_fn, model, batch, key, max_grad_norm=1.0, **settings)

    def one_step() -> None:
        step.step_sum(
            0,
            step.Training(
                config,
                plan,
                scenes,
                np.array([3]),
                None,
                GradientIsImage(3, 16, 16),
                image_losses,
                ALONE,
            ),
            key(),
        )

    check()
    with caught("a sum of another clip norm was accepted"):
        check(trusting)
    one_step()
    with planted(step, "clipped_sum", clip_at_one, "expected the same"):
        one_step()


def test_replayed_noise(new_run: NewRun) -> None:
    """Two starts with one config and seed, two steps each: no noise resembles another."""

    def check() -> None:
        noises = []

        def watch(total, plan, step, key, **owners):
            gradient = release(total, plan, step, key, **owners)
            noises.append(
                torch.cat(
                    [
                        (gradient.grads[n] * plan.expected_batch_size - v).flatten()
                        for n, v in total.grads.items()
                    ]
                )
            )
            return gradient

        release = loop.privatize
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "privatize", watch)
            for _ in range(2):
                with new_run() as session:
                    fit(session, quiet=True)
        assert len(noises) == 4
        correlation = np.corrcoef(torch.stack(noises).numpy())[~np.eye(4, dtype=bool)]
        assert np.abs(correlation).max() < 5 / len(noises[0]) ** 0.5, (
            "noise of one step comes again in another"
        )

    check()
    with planted(
        loop, "Secrets", lambda *keys: Secrets(*keys) if keys else secrets(), "comes again"
    ):
        check()
    at_zero = lambda total, plan, step, key, owners: privatize(  # noqa: E731
        changed(total, step=0), plan.another_run(), 0, key, owners=owners
    )
    with planted(loop, "privatize", at_zero, "not drawn under this key before"):
        check()


def test_predictable_generator(plan: DPPlan) -> None:
    """Noise against ChaCha20 called directly, and a formula of one line."""
    # With sum 0 the release is the noise on the grid; the grid is far below the tolerance.
    secret = subkey(key(), "noise", step=0, parameter="a").secret()
    stream = (
        Cipher(algorithms.ChaCha20(secret, bytes(16)), None).encryptor().update(bytes(8 * 1000))
    )
    word_H2 = np.frombuffer(stream, dtype="<u8").reshape(-1, 2).astype(float) * 2.0**-64
    expected = np.sqrt(-2 * np.log(word_H2[:, 0])) * np.exp(2j * np.pi * word_H2[:, 1])

    def check() -> None:
        noise = (
            privatize(as_sum(torch.zeros(1000)), plan.another_run(), 0, key()).grads["a"].double()
            * plan.expected_batch_size
            / plan.noise_std
        )
        assert np.allclose(noise.numpy().view(complex), expected, atol=1e-5), (
            "noise is not that of the cryptographic stream"
        )

    class Mersenne(Keystream):
        def fill(self, out_W):
            out_W[:] = np.random.RandomState(0).randint(-(2**63), 2**63, len(out_W), dtype=np.int64)

    check()
    with planted(normals, "Keystream", Mersenne, "not that of the cryptographic stream"):
        check()


def test_low_bits(plan: DPPlan) -> None:
    """Every number is a multiple of the public grid, whatever the sum was (``tests/attacks`` has
    what it was good for).
    """

    def check() -> None:
        released = (
            privatize(
                as_sum(torch.zeros(20_000)), plan.another_run(), 0, key(), dtype=torch.float64
            )
            .grads["a"]
            .numpy()
        )
        steps = (
            released
            * plan.expected_batch_size
            / 2.0 ** (math.floor(math.log2(plan.noise_std)) - 20)
        )
        assert np.abs(steps - np.rint(steps)).max() < 1e-6, "low bits tell of the sum"

    check()
    with planted(noise_module, "grid_of", lambda noise_std: 2.0**-60, "low bits tell"):
        check()


def test_noise_of_a_step_twice(plan: DPPlan) -> None:
    """One key, one step, two models of one size: the difference of the releases is that of the
    sums.
    """

    def check() -> None:
        once = key()
        first = privatize(as_sum(torch.zeros(9)), plan.another_run(), 0, once).grads["a"]
        assert_refused(
            lambda: (
                privatize(as_sum(torch.ones(9)), plan.another_run(), 0, once).grads["a"] - first
            ),
            "noise drawn before",
        )

    check()
    with planted(Key, "spend", lambda self, step: None, "noise drawn before was accepted"):
        check()


def test_step_released_again(plan: DPPlan) -> None:
    """Under another key the noise is another one: two releases of a step, at the epsilon of one."""
    total = as_sum(torch.zeros(9))

    def check() -> None:
        run = plan.another_run()
        run.release(0, total.num_records, total.record_id_B)
        assert_refused(lambda: privatize(total, run, 0, key()), "a step released before")

    check()
    with planted(DPPlan, "release", lambda *args: None, "a step released before was accepted"):
        check()


def test_record_in_every_sum() -> None:
    """One record is summed in each step, whatever was drawn."""
    plan = make_plan(
        PrivacyConfig(
            dataset_size=1000,
            expected_batch_size=100,
            steps=30,
            noise_multiplier=9.0,
            max_grad_norm=0.5,
        )
    )
    find = batches._find

    def all_steps() -> None:
        # In 1 of 80 runs two of 30 draws share none: refused then, whatever is counted.
        run, draws = plan.another_run(), Key.for_tests(bytes(32))
        for number in range(30):
            run.draw(number, 1000, derive_rng(draws, number))
            run.release(number, 1, np.zeros(1, dtype=np.int64))

    def check() -> None:
        assert_refused(all_steps, "one record in every sum")

    check()
    with planted(
        batches,
        "_find",
        lambda *args: (find(*args)[0], np.zeros(len(args[1]))),
        "one record in every sum was accepted",
    ):
        check()


def test_stale_batch_released() -> None:
    """The sum, or the records, of a step in a later one."""
    plan = make_plan(
        PrivacyConfig(
            dataset_size=1000,
            expected_batch_size=500,
            steps=4,
            noise_multiplier=9.0,
            max_grad_norm=0.5,
        )
    )
    ids = np.arange(400)

    def check(same_sum: bool) -> None:
        run, noise, draws = plan.another_run(), new_key(), new_key()
        total = changed(as_sum(torch.zeros(9), 400), record_id_B=ids, step=0)
        for number in range(2):
            run.draw(number, 1000, derive_rng(draws, number))
        privatize(total, run, 0, noise)
        stale = total if same_sum else changed(total, step=1)
        assert_refused(lambda: privatize(stale, run, 1, noise), "a stale batch")

    check(True)
    check(False)
    with planted(batches.Batches, "fit", lambda *args: True, "a stale batch was accepted"):
        check(False)


def test_key_across_a_fork(plan: DPPlan) -> None:
    """A child that was forked with the parent's key would add the parent's noise."""
    total = as_sum(torch.zeros(9))

    def check() -> None:
        secret, (read, write) = key(), os.pipe()
        if (child := os.fork()) == 0:
            try:
                privatize(total, plan.another_run(), 0, secret)
                os.write(write, b"released")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        assert os.read(read, 100) == b"", "a forked child adds its parent's noise"
        os.close(read)

    check()
    with planted(
        Key, "secret", lambda self: self._secret, "a forked child adds its parent's noise"
    ):
        check()


def test_backward_beside_the_loop(tmp_path: Path) -> None:
    """As a trainer does that is given a private loop for its batches, and goes on by habit."""
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    config = PrivacyConfig(
        dataset_size=20, expected_batch_size=8, steps=2, noise_multiplier=2.0, max_grad_norm=1.0
    )
    numbers = itertools.count()

    def losses(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def check() -> None:
        model, folder = nn.Linear(4, 2), tmp_path / f"{next(numbers)}" / "data"
        with private_loop(model, TensorDataset(x, y), losses, config, folder) as steps:
            next(iter(steps)).backward()
            assert_refused(lambda: losses(model, (x, y)).mean().backward(), "a raw gradient")

    check()
    with planted(
        own_loop, "_no_other_gradients", lambda _: contextlib.nullcontext(), "gradient was accepted"
    ):
        check()
