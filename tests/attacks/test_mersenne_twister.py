"""Attack: the state of a Mersenne Twister from noise that the attacker knows, then all of its
noise, then membership.

Noise was once drawn by torch's CPU generator. Where the sum is known to the attacker (a parameter
without a gradient), the released numbers are the noise itself; Box-Muller is inverted, the top bits
of the generator's words follow, and all its words are linear in its state over GF(2). ``OldNoise``
keeps that generator, so that the attack is seen to work; the same attack must get nothing from
``privatize``.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made import key, made_sum

from dpvision.checkpoint import load_checkpoint
from dpvision.config import (
    HardwareConfig,
    MAEConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
)
from dpvision.data.synthetic_store import write_scenes
from dpvision.dp import noise
from dpvision.dp.clip import ClippedSum
from dpvision.dp.noise import privatize
from dpvision.privacy.plan import make_plan
from dpvision.privacy.stream import Key
from dpvision.train import loop
from dpvision.train.start import new_session

WORDS = 624
BATCH, CLIP = 64.0, 1.0
PLAN = make_plan(
    PrivacyConfig(
        dataset_size=64, expected_batch_size=64, sampling="full_batch", steps=1, target_epsilon=0.1
    )
)


class OldNoise:
    """The generator of the release before, and ``privatize`` around it: one chunk of one
    parameter.
    """

    def __init__(self, seed: int) -> None:
        self._words = np.random.default_rng(seed).integers(0, 2**32, WORDS, dtype=np.uint32)

    def normals(self, count: int) -> np.ndarray:
        generator = torch.Generator()
        state = generator.get_state().numpy()
        state.view(np.uint64)[3 : 3 + WORDS] = self._words
        generator.set_state(torch.from_numpy(state))
        return torch.randn(count, dtype=torch.float64, generator=generator).numpy()

    def release(self, total: torch.Tensor) -> np.ndarray:
        noisy = total.double() + PLAN.noise_std * torch.from_numpy(self.normals(total.numel()))
        return (noisy / PLAN.expected_batch_size).to(total.dtype).double().numpy()


def new_release(total: torch.Tensor, seed: int) -> np.ndarray:
    return (
        privatize(
            made_sum({"a": total}, 1, CLIP),
            PLAN.another_run(),
            0,
            key(seed.to_bytes(32, "little")),
            dtype=total.dtype,
        )
        .grads["a"]
        .double()
        .numpy()
    )


def known_top_bits(normal: np.ndarray, error: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The generator's 53-bit numbers behind normals of relative ``error``: values, and how many low
    bits of each are unknown.
    """
    blocks = normal.reshape(-1, 2, 8)
    half_square = (blocks**2).sum(1) / 2
    uniform = np.stack(
        [-np.expm1(-half_square), np.arctan2(blocks[:, 1], blocks[:, 0]) / (2 * np.pi) % 1], 1
    )
    # Errors of the logarithm's inverse and of the angle, and one of the last place for each of
    # their roundings.
    width = (
        np.stack(
            [
                np.exp(-half_square) * 2 * half_square * 2 * error,
                np.full_like(half_square, error / np.pi),
            ],
            1,
        )
        + 2.0**-51
    )
    low, high = (
        (np.clip(uniform + sign * width, 0, 1 - 2.0**-53) * 2.0**53).astype(np.uint64).ravel()
        for sign in (-1, 1)
    )
    return high, np.where(low == high, 0, np.frexp((low ^ high).astype(np.float64))[1])


def unknown_bits(value: np.ndarray, num_unknown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By output word and bit: its value, and whether it is known. Of two words that make a 53-bit
    number, the first gives 21 bits.
    """
    shift = np.arange(64, dtype=np.uint64)
    bits = ((value[:, None] >> shift) & np.uint64(1)).astype(bool)
    known = (shift[None] >= num_unknown[:, None]) & (shift < 53)
    order = np.r_[32:64, 0:32]
    return bits[:, order].reshape(-1, 32), known[:, order].reshape(-1, 32)


def right(x: np.ndarray, by: int) -> np.ndarray:
    """Words as axes (word, bit, terms), shifted."""
    return np.concatenate([x[:, by:], np.zeros_like(x[:, :by])], 1)


def left(x: np.ndarray, by: int, mask: int) -> np.ndarray:
    shifted = np.concatenate([np.zeros_like(x[:, :by]), x[:, :-by]], 1)
    shifted[:, [not mask >> bit & 1 for bit in range(32)]] = 0
    return shifted


def temper(x: np.ndarray) -> np.ndarray:
    x = x ^ right(x, 11)
    x = x ^ left(x, 7, 0x9D2C5680)
    x = x ^ left(x, 15, 0xEFC60000)
    return x ^ right(x, 18)


def untemper(y: np.ndarray) -> np.ndarray:
    y = y ^ right(y, 18)
    y = y ^ left(y, 15, 0xEFC60000)
    whole = y
    for _ in range(4):
        y = whole ^ left(y, 7, 0x9D2C5680)
    whole = y
    for _ in range(2):
        y = whole ^ right(y, 11)
    return y


def next_words(x: np.ndarray) -> np.ndarray:
    """The 624 words that follow ``x``."""
    made = list(x)
    for k in range(WORDS):
        mixed = np.concatenate([made[k + 1][:31], made[k][31:]])
        word = made[k + 397].copy()
        word[:31] ^= mixed[1:]
        word[[bool(0x9908B0DF >> bit & 1) for bit in range(32)]] ^= mixed[0]
        made.append(word)
    return np.stack(made[WORDS:])


def recover_state(normal: np.ndarray, error: float | np.ndarray) -> np.ndarray | None:
    """The state from whose first words ``normal`` was made; None where there is no such state."""
    bits, known = unknown_bits(*known_top_bits(normal, error))
    first_bits, first_known = bits[:WORDS], known[:WORDS]
    # The unknown bits of the first 624 words are the variables; term 0 is the constant one.
    num = int((~first_known).sum()) + 1
    terms = np.zeros((WORDS, 32, -(-num // 64)), np.uint64)
    terms[..., 0] = first_bits & first_known
    word, bit = np.nonzero(~first_known)
    number = np.arange(1, num)
    terms[word, bit, number // 64] = np.uint64(1) << (number % 64).astype(np.uint64)
    state = latest = untemper(terms)
    equations: list[np.ndarray] = []
    for start in range(WORDS, len(bits), WORDS):
        latest = next_words(latest)
        here = known[start : start + WORDS]
        rows = temper(latest)[: len(here)][here]
        rows[:, 0] ^= bits[start : start + WORDS][here].astype(np.uint64)
        equations.append(rows)
    rows = np.concatenate(equations)
    solution = solve(rows[np.linspace(0, len(rows) - 1, min(len(rows), 3 * num)).astype(int)], num)
    if solution is None:
        return None
    values = np.bitwise_xor.reduce(terms_parity(state & solution), axis=-1)
    return (values.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)


def terms_parity(x: np.ndarray) -> np.ndarray:
    return np.bitwise_count(x) & 1


def solve(rows: np.ndarray, num: int) -> np.ndarray | None:
    """Values of all terms such that each row of them adds up to zero over GF(2), by Gauss and
    Jordan; None if there are none.
    """
    pivots: list[int] = []
    for term in range(1, num):
        place, mask = term // 64, np.uint64(1) << np.uint64(term % 64)
        column = (rows[:, place] & mask) != 0
        below = np.flatnonzero(column[len(pivots) :])
        if not len(below):
            continue
        at, top = below[0] + len(pivots), len(pivots)
        rows[[at, top]] = rows[[top, at]]
        column[at] = column[top]
        column[top] = False
        rows[column] ^= rows[top]
        pivots.append(term)
    if (rows[len(pivots) :, 0] & np.uint64(1)).any():
        return None
    values = np.zeros(rows.shape[1] * 64, np.uint64)
    values[0] = 1
    values[pivots] = rows[: len(pivots), 0] & np.uint64(1)
    return (values.reshape(-1, 64) << np.arange(64, dtype=np.uint64)).sum(1, dtype=np.uint64)


def all_noise(state: np.ndarray, count: int) -> np.ndarray:
    """Normals of a twister whose current 624 words, all unused, are ``state``."""
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": state, "pos": 0}}
    raw = twister.random_raw(2 * count).reshape(-1, 2)
    uniform = (((raw[:, 0] << np.uint64(32)) | raw[:, 1]) & np.uint64(2**53 - 1)).astype(
        np.float64
    ) * 2.0**-53
    blocks = uniform.reshape(-1, 2, 8)
    radius, angle = np.sqrt(-2 * np.log1p(-blocks[:, 0])), 2 * np.pi * blocks[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).ravel()


def decide(released: np.ndarray, known: int, contribution: np.ndarray, error: float) -> bool | None:
    """Is the record whose clipped gradient is ``contribution`` in the sum? None: the attack got
    nowhere.
    """
    noisy = released * PLAN.expected_batch_size
    state = recover_state(noisy[:known] / PLAN.noise_std, error)
    if state is None:
        return None
    private_sum = noisy - PLAN.noise_std * all_noise(state, len(noisy))
    return bool(private_sum @ contribution > 0.5 * contribution @ contribution)


def membership(
    known: int, dtype: torch.dtype, error: float, seeds: range
) -> list[tuple[bool | None, bool | None, bool]]:
    """Decisions on the old and on the new release, and the truth. The first ``known`` coordinates
    have no gradient.
    """
    outcomes = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        contribution = np.concatenate([np.zeros(known), rng.standard_normal(4096)])
        contribution *= CLIP / np.linalg.norm(contribution)
        member = bool(rng.integers(2))
        total = torch.from_numpy(contribution * member).to(dtype)
        outcomes.append(
            (
                decide(OldNoise(seed).release(total), known, contribution, error),
                decide(new_release(total, seed), known, contribution, error),
                member,
            )
        )
    return outcomes


def test_the_old_generator_gives_its_state_and_the_new_one_does_not() -> None:
    """Releases in float64, as heads are: 1,152 known coordinates decide membership at epsilon 0.1,
    where 0.525 is allowed.

    1,024 leave a bit of the state open for one seed in six.
    """
    outcomes = membership(1152, torch.float64, 2.0**-51, range(2))
    assert len({member for *_, member in outcomes}) == 2
    for old, new, member in outcomes:
        assert old is member and new is None


@pytest.mark.slow
def test_the_old_generator_gives_its_state_from_float32_releases_too() -> None:
    """As a checkpoint's optimizer moments hold them: 3,840 known coordinates."""
    for old, new, member in membership(3840, torch.float32, 2.0**-23, range(1)):
        assert old is member and new is None


class Mersenne:
    """The old generator in the place of ``dp.normals.Normals``."""

    def blocks(
        self, key: Key, first: int, stop: int, std: float
    ) -> Iterator[tuple[int, np.ndarray]]:
        yield (
            first,
            std * OldNoise(int.from_bytes(key.secret()[:4], "little")).normals(stop)[first:],
        )


def noise_in_a_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """What someone who knows every record finds in the checkpoint of one step: the noise of the
    largest parameter, over its scale.

    The optimizer's first moment is (1 - beta1) times the release, and the adversary of the
    guarantee may know the sum of the gradients.
    """
    base = RunConfig(
        recipe="vip.micro",
        privacy=PrivacyConfig(
            dataset_size=24,
            expected_batch_size=24,
            sampling="full_batch",
            steps=1,
            max_grad_norm=0.5,
            noise_multiplier=20.0,
        ),
        model=MAEConfig(
            encoder=ViTConfig(image_size=16, patch_size=4, depth=1, width=32, num_heads=2),
            decoder_depth=1,
            decoder_width=16,
            decoder_num_heads=2,
        ),
        optim=OptimConfig(warmup_steps=0),
        hardware=HardwareConfig(device="cpu", physical_batch_size=8, workers=1),
    )
    known: dict[str, torch.Tensor] = {}

    def watched(total: ClippedSum, *args: object, **kwargs: object) -> object:
        known.update({name: value.clone() for name, value in total.grads.items()})
        return release(total, *args, **kwargs)  # type: ignore[arg-type]

    release = loop.privatize
    monkeypatch.setattr(loop, "privatize", watched)
    write_scenes(folder / "scenes", 24, 16, public=False)
    with new_session(
        replace(base, data=replace(base.data, store=str(folder / "scenes"))), folder / "run"
    ) as session:
        loop.fit(session, quiet=True)
        scale, divisor = session.plan.noise_std, session.plan.expected_batch_size
    (checkpoint,) = (folder / "run" / "checkpoints").iterdir()
    moments = load_checkpoint(checkpoint).optimizer
    assert moments is not None
    name = max(known, key=lambda name: known[name].numel())
    (moment,) = (
        value
        for key, value in moments.items()
        if name in key and "exp_avg" in key and "sq" not in key
    )
    released = moment.double() / (1 - base.optim.betas[0])
    return ((released * divisor - known[name].double()) / scale).view(-1).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("twister", [True, False])
def test_a_checkpoint_of_a_run_gives_the_state_of_a_twister_and_nothing_now(
    twister: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End to end, from the files of a run: with the old generator put in, the attack has all of the
    noise; with the code's own, nothing.
    """
    if twister:
        monkeypatch.setattr(noise, "Normals", Mersenne)
    normal = noise_in_a_checkpoint(tmp_path, monkeypatch)
    assert len(normal) == 4096 and 0.9 < normal.std() < 1.1
    radius = np.sqrt((normal.reshape(-1, 2, 8) ** 2).sum(1))
    state = recover_state(
        normal, 2.0**-20.5 / radius + 2.0**-22
    )  # the grid, and two roundings to float32
    if twister:
        assert state is not None and np.allclose(all_noise(state, len(normal)), normal, atol=1e-5)
    else:
        assert state is None
