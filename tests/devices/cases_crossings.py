"""What crosses between host and device in a step, by name and number: the list of decision 0033,
which cannot grow unseen.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from golden_losses import secrets, small

from dpvision.config import TimmConfig
from dpvision.dp.noise import privatize
from dpvision.optim.ema import update_average
from dpvision.recipes import RECIPES
from dpvision.train import distributed, step
from dpvision.train.distributed import Group
from dpvision.train.start import new_session

from .cases_strict_device import on_strict
from .strict_device import DEVICE, crossings

pytestmark = pytest.mark.usefixtures("gates_once")

WAIT, COPY = "waits: copy to the host", "copy to the device"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "decisions" / "0033-host-and-device.md"

__all__ = ["on_strict"]  # used by name


def step_crossings(
    name: str, stores: tuple[Path, Path], root: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Counter, int, int]:
    """(crossings, passes, tensors of a batch) of one whole step after the first, which finds the
    route of the model's parameters.
    """
    monkeypatch.setattr(distributed, "join", lambda *_: Group(0, 1, DEVICE))
    config = small(RECIPES[name](), *stores)
    if isinstance(config.model.encoder, TimmConfig):  # whose bits of 7 rows go by their place
        config = replace(config, hardware=replace(config.hardware, physical_batch_size=16))
    passes, tensors = 0, set()
    feed = step.on_device

    def counted(*args):
        nonlocal passes
        for batch, rows in feed(*args):
            passes += 1
            tensors.add(sum(value is not None for value in batch))
            yield batch, rows

    with new_session(config, root) as s:
        step.step_sum(0, s, secrets().draw)
        monkeypatch.setattr(step, "on_device", counted)
        with crossings() as found:
            total, _ = step.step_sum(1, s, secrets().draw)
            s.optimizer.step(privatize(total, s.plan, 1, secrets().noise), 1e-3)
            if s.ema is not None:
                update_average(s.ema, s.model, config.optim, 1)
    (width,) = tensors
    return found, passes, width


OTHERS = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("dpcap.base_cap_mae", "supervised.micro", "transfer.vit_b16_last")
]


@pytest.mark.parametrize("name", ["vip.nano", *OTHERS])
def test_a_step_waits_once_a_pass_and_once_at_its_end(
    name: str, stores: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, passes, width = step_crossings(name, stores, tmp_path / "run", monkeypatch)
    assert passes > 1
    assert found == {
        (WAIT, "dp/one_pass.py weigh"): passes,
        (WAIT, "train/step.py _metrics"): 1,
        (COPY, "train/step.py _copied"): width * passes,
        (COPY, "data/transform.py normalise_tensor"): 2 * passes,
        (COPY, "dp/clip.py _sum_of_pass"): 3 * passes,
        (COPY, "dp/noise.py _Release._away"): 2,
        (WAIT, "dp/noise.py _Release._away"): 1,
    }


def test_without_a_guarantee_a_pass_does_not_wait(
    stores: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, passes, _ = step_crossings(
        "vip.micro_non_private", stores, tmp_path / "run", monkeypatch
    )
    assert passes > 1 and [
        (what, count) for what, count in found.items() if what[0].startswith("waits")
    ] == [((WAIT, "train/step.py _metrics"), 1)]


def test_a_new_wait_is_seen(
    stores: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted where batches arrive: a number, rows by a mask, and an operation whose shape depends
    on the data.
    """
    own = step.on_device

    def waiting(*args):
        for batch, rows in own(*args):
            x = batch.image_BVCHW
            float(x.mean()), x[x > 0], x.unique()
            yield batch, rows

    monkeypatch.setattr(step, "on_device", waiting)
    found, passes, _ = step_crossings("vip.nano", stores, tmp_path / "run", monkeypatch)
    planted = {
        what: count for (what, where), count in found.items() if where == "train/step.py _batches"
    }
    assert planted == {
        "waits: _local_scalar_dense": passes,
        "waits: index by a mask": passes,
        "waits: _unique2": passes,
    }


def test_the_documents_list_names_every_wait() -> None:
    text = DOCS.read_text()
    assert "`dp/one_pass.py` `weigh`" in text and "`train/step.py` `_metrics`" in text


def test_rows_known_to_the_host_change_nothing(stores: tuple[Path, Path]) -> None:
    """With and without ``host``, padding and undecodable records anywhere: the same sum, norms and
    losses, bit for bit.
    """
    from dpvision.data.batch import HostRows
    from dpvision.data.keys import StepKey
    from dpvision.dp.clip import METHODS, clipped_sum
    from dpvision.models import make_model
    from dpvision.train.objectives import example_batch, loss_function

    config = small(RECIPES["vip.nano"](), *stores)
    model, loss_fn = make_model(config.model, 0), loss_function(config)
    batch = example_batch(config, 9)
    batch = batch._replace(valid_B=torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 0]).bool())
    for method in METHODS:
        ours, theirs = (
            clipped_sum(
                loss_fn, model, batch, StepKey(0, 1), max_grad_norm=0.1, method=method, host=host
            )
            for host in (HostRows(batch.record_id_B.clone(), batch.valid_B.clone()), None)
        )
        kept = batch._replace(
            **{n: v[batch.valid_B] for n, v in batch._asdict().items() if v is not None}
        )
        alone = clipped_sum(loss_fn, model, kept, StepKey(0, 1), max_grad_norm=0.1, method="vmap")
        assert ours.num_records == theirs.num_records == 6 and torch.equal(
            ours.norms_B, theirs.norms_B
        )
        assert torch.equal(ours.losses_B, theirs.losses_B) and all(
            torch.equal(v, theirs.grads[n]) for n, v in ours.grads.items()
        )
        torch.testing.assert_close(
            ours.norms_B, alone.norms_B, rtol=1e-4, atol=0
        )  # in the order of the batch's rows
