"""A whole run, evaluation, captions and a head on the strict device: the CPU's results, nothing
refused; and planted faults that are.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from golden_losses import secrets, small
from PIL import Image
from torch import Tensor, nn

from dpvision.adapt.session import adapt, new_head_session
from dpvision.checkpoint import load_checkpoint
from dpvision.config import HeadConfig, RunConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.data.open import open_store
from dpvision.dp.clip import clipped_sum
from dpvision.encoders import feature_file
from dpvision.encoders.open import open_encoder
from dpvision.errors import PrivacyError
from dpvision.eval.captions import caption_images, choice
from dpvision.eval.captions.open_captioner import open_captioner
from dpvision.eval.captions.settings import Asking
from dpvision.eval.probes import cache
from dpvision.eval.probes.protocols import make_protocols
from dpvision.eval.probes.settings import FineTuneSettings, LarsSettings, ProtocolSettings
from dpvision.eval.probes.suite import evaluate
from dpvision.models import make_model
from dpvision.models.generate import GenerateSettings
from dpvision.privacy.stream import Key, Keystream
from dpvision.recipes import RECIPES
from dpvision.train import distributed, step
from dpvision.train.distributed import Group
from dpvision.train.loop import Session, fit
from dpvision.train.objectives import example_batch, loss_function
from dpvision.train.start import new_session

from ..captioners import image, train_captioner, write_run
from .strict_device import DEVICE, StrictDeviceError, StrictTensor, crossings, without_float64

pytestmark = pytest.mark.usefixtures("gates_once")  # on the CPU, whatever the device

KEY = StepKey(0, 0)
RECIPES_RUN = (
    "vip.nano",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("dpcap.base_cap_mae", "supervised.micro")
    ),
)
"""A masked autoencoder, a captioner with both losses, and labels."""


@pytest.fixture(autouse=True, scope="module")
def on_strict() -> Iterator[None]:
    """Runs join on the strict device, and the words of its noise come from the CPU's cipher."""

    def chacha_words(key_8: StrictTensor, block: int, num_blocks: int) -> Tensor:
        word_W = np.empty(8 * num_blocks, dtype="<i8")
        Keystream(Key.for_tests(key_8.held.numpy().astype("<u4").tobytes()), block).fill(word_W)
        return StrictTensor(torch.from_numpy(word_W))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            sys.modules, "dpvision.dp.chacha_triton", SimpleNamespace(chacha_words=chacha_words)
        )
        patch.setattr(
            distributed,
            "join",
            lambda device, _=None: Group(0, 1, DEVICE if device == "cuda" else torch.device("cpu")),
        )
        yield


def run(
    config: RunConfig, root: Path, device: str, watch: Callable[[Session], Any] = fit
) -> Session:
    with new_session(
        replace(config, hardware=replace(config.hardware, device=device)), root
    ) as session:  # type: ignore[arg-type]
        watch(session)
    return session


def train(session: Session) -> None:
    fit(session, secrets=secrets(), quiet=True)


def both(name: str, stores: tuple[Path, Path], root: Path) -> Session:
    """Runs of a recipe on both devices, in ``root / device``; returns the session on the strict
    one.
    """
    config = small(RECIPES[name](), *stores)
    run(config, root / "cpu", "cpu", train)
    return run(config, root / "cuda", "cuda", train)


@pytest.fixture(scope="module")
def nano(
    stores: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Session, Path]:
    """The session of a masked autoencoder on the strict device, and the folder of its run on both;
    tests only read them.
    """
    root = tmp_path_factory.mktemp("nano")
    return both("vip.nano", stores, root), root


@pytest.mark.parametrize("name", RECIPES_RUN)
def test_a_run_on_the_device_is_the_cpus_run(
    name: str, nano: tuple[Session, Path], stores: tuple[Path, Path], tmp_path: Path
) -> None:
    """Three private steps from stored files: same draws, same noise, and weights that differ by
    rounding at most.
    """
    ours, root = nano if name == "vip.nano" else (both(name, stores, tmp_path), tmp_path)
    config = ours.config
    assert ours.group.device == DEVICE and all(
        isinstance(p, StrictTensor) for p in ours.model.parameters()
    )
    saved = [load_checkpoint(root / device) for device in ("cuda", "cpu")]
    assert saved[0].optimizer is not None and saved[0].optimizer.keys() == saved[1].optimizer.keys()  # type: ignore[union-attr]
    for part in ("model", "optimizer", "ema"):
        one, other = (getattr(checkpoint, part) or {} for checkpoint in saved)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    moved = {
        n: p.detach().cpu() - make_model(config.model, config.seed).state_dict()[n]
        for n, p in ours.model.named_parameters()
    }
    assert max(float(m.abs().max()) for m in moved.values()) > 1e-4, "the run did not train"


def test_a_run_of_the_device_goes_on_where_it_stopped(nano: tuple[Session, Path]) -> None:
    """Optimizer and averages come back to the device, its fused step counts too."""
    session = nano[0]
    state = session.optimizer.tensors()
    assert all(value.device == DEVICE for value in state.values())
    again = type(session.optimizer)(session.config.optim, session.model)
    again.load({name: value.cpu() for name, value in state.items()})
    assert all(
        value.device == DEVICE and torch.equal(value.cpu(), state[name].cpu())
        for name, value in again.tensors().items()
    )


@pytest.fixture(scope="module")
def captioner_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(
        tmp_path_factory.mktemp("captioner") / "run", train_captioner(), visibility="public"
    )


def scores(run: Path, store: Path, device: Any) -> list[float]:
    return [score.value for score in evaluate(run, open_store(store), device=device)]


def captions(run: Path, device: Any, method: str) -> list[Any]:
    ready = open_captioner(run, device=device)
    pixels = np.stack([image(i)[0] for i in range(5)])
    made = caption_images.caption_pixels(ready, pixels, range(5), GenerateSettings(method))  # type: ignore[arg-type]
    return [[caption.text for caption in row] for row in made]


def test_evaluation_on_the_device_gives_the_cpus_scores(
    nano: tuple[Session, Path], stores: tuple[Path, Path]
) -> None:
    one, other = (scores(nano[1] / "cpu", stores[0], device) for device in (DEVICE, "cpu"))
    assert one == pytest.approx(other, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["linear_lars", "fine_tune", "few_shot_probe"])
def test_probes_on_the_device_give_the_cpus_scores(
    protocol: str, nano: tuple[Session, Path], stores: tuple[Path, Path]
) -> None:
    fine_tune = FineTuneSettings(
        draws=1, epochs=2, warmup_epochs=1, learning_rates=(0.01,), auto_augment=False
    )
    (asked,) = make_protocols(
        [protocol],
        ProtocolSettings(
            shots=(2,),
            fine_tune=fine_tune,
            lars=LarsSettings(blrs=(0.1,), epochs=2, warmup_epochs=1),
        ),
    )
    found = [
        [
            score.value
            for score in evaluate(
                nano[1] / "cpu",
                open_store(stores[0]),
                protocols=(asked,),
                against=(),
                device=device,
            )
        ]
        for device in (DEVICE, "cpu")
    ]
    assert found[0] == pytest.approx(found[1], abs=0.1) and found[0]


@pytest.mark.parametrize(
    "spec",
    [
        "patches+scattering",
        *(pytest.param(spec, marks=pytest.mark.slow) for spec in ("hog", "scattering")),
    ],
)
def test_fixed_features_on_the_device_are_the_cpus(spec: str) -> None:
    ours, theirs = (open_encoder(spec, device=device, image_size=32) for device in (DEVICE, "cpu"))
    x_BCHW = torch.randn(
        3, 3, ours.image_size, ours.image_size, generator=torch.Generator().manual_seed(0)
    )
    made = ours(x_BCHW.to(DEVICE))
    assert made.device == DEVICE
    torch.testing.assert_close(made.cpu(), theirs(x_BCHW), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "method",
    ["greedy", *(pytest.param(method, marks=pytest.mark.slow) for method in ("beam", "sample"))],
)
def test_captions_on_the_device_are_the_cpus(method: str, captioner_run: Path) -> None:
    assert captions(captioner_run, DEVICE, method) == captions(captioner_run, "cpu", method)


def test_a_head_on_features_of_the_device_is_the_cpus(
    stores: tuple[Path, Path], tmp_path: Path
) -> None:
    config = small(
        next(make() for make in RECIPES.values() if isinstance(make().model, HeadConfig)), *stores
    )
    for device in ("cuda", "cpu"):
        with new_head_session(
            replace(config, hardware=replace(config.hardware, device=device)), tmp_path / device
        ) as session:
            adapt(session, secrets=secrets())
    one, other = (load_checkpoint(tmp_path / device).model for device in ("cuda", "cpu"))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# Planted faults.


@pytest.fixture(scope="module")
def subject() -> tuple[Any, nn.Module, Batch]:
    """A loss, model and batch on the strict device, which are accepted."""
    config = RECIPES["vip.micro_random_start"]()
    config = replace(
        config, model=replace(config.model, encoder=replace(config.model.encoder, depth=1))
    )
    model = make_model(config.model, 0).to(DEVICE)
    loss_fn, batch = loss_function(config), step.to_device(example_batch(config, 3), DEVICE)
    total = clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=0.1)
    assert total.num_records == 3 and all(isinstance(g, StrictTensor) for g in total.grads.values())
    return loss_fn, model, batch


def planted(loss_fn: Any, fault: Callable[[Tensor], Tensor]) -> Any:
    return lambda model, batch, key: loss_fn(
        model, batch._replace(image_BVCHW=fault(batch.image_BVCHW)), key
    )


FAULTS = {
    "a mask on the CPU": (
        lambda x: torch.where(torch.ones(x.shape[-1]) > 0, x, 0.0),
        "same device",
    ),
    "an index on the CPU": (lambda x: x[..., torch.arange(x.shape[-1])], "same device"),
    "a constant on the CPU": (
        lambda x: x - torch.tensor([0.5, 0.4, 0.3])[:, None, None],
        "same device",
    ),
    "a generator of the CPU": (
        lambda x: x + torch.randn(3, 1, 1, generator=torch.Generator(), device=x.device),
        "generator",
    ),
    "an array of the host": (lambda x: x * float(x.detach().numpy().max()), "numpy"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_loss_is_refused(fault: str, subject: tuple[Any, nn.Module, Batch]) -> None:
    loss_fn, model, batch = subject
    plant, words = FAULTS[fault]
    with pytest.raises((StrictDeviceError, TypeError, PrivacyError), match=words):
        clipped_sum(
            planted(loss_fn, plant), model, batch, KEY, max_grad_norm=0.1, check_separability=False
        )


def test_a_float64_tensor_is_refused_on_a_device_without_them(
    subject: tuple[Any, nn.Module, Batch],
) -> None:
    """The forward pass is float32; norms and totals of a clipped sum are float64, so such a device
    could train without privacy only.
    """
    loss_fn, model, batch = subject
    with without_float64():
        assert loss_fn(model, batch, KEY).dtype == torch.float32
        with pytest.raises(StrictDeviceError, match="float64"):
            planted(loss_fn, lambda x: (x.double() * 0.5).float())(model, batch, KEY)


def edited(module: ModuleType, name: str, cut: str) -> Any:
    """A function of a module without a fragment of its source."""
    source = inspect.getsource(getattr(module, name))
    assert source.count(cut) == 1, f"{cut!r} in {name}"
    made: dict[str, Any] = {}
    exec(
        compile(
            "from __future__ import annotations\n" + source.replace(cut, ""),
            module.__file__ or "",
            "exec",
        ),
        vars(module) | made,
        made,
    )
    return made[name]


def test_evaluation_that_forgets_the_device_is_refused(
    nano: tuple[Session, Path], stores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cache, "collect_features", edited(feature_file, "collect_features", ".to(device)")
    )
    with pytest.raises(StrictDeviceError, match="same device"):
        scores(nano[1] / "cpu", stores[0], DEVICE)


@pytest.mark.parametrize("forgets", ["caption", "choices"])
def test_captions_that_forget_the_device_are_refused(
    forgets: str, captioner_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forgets == "caption":
        monkeypatch.setattr(
            caption_images,
            "caption_pixels",
            edited(caption_images, "caption_pixels", ".to(captioner.device)"),
        )
        with pytest.raises(StrictDeviceError, match="same device"):
            captions(captioner_run, DEVICE, "greedy")
        return
    ready = open_captioner(captioner_run, device=DEVICE)
    images = type(
        "Images",
        (),
        {"__len__": lambda self: 2, "read": lambda self, p: Image.fromarray(image(p)[0])},
    )()
    how = Asking(batch_size=2, workers=1)
    assert all(memory.device == DEVICE for memory, _ in choice.encoded_images(ready, images, how))  # type: ignore[arg-type]
    with pytest.raises(StrictDeviceError, match="same device"):
        list(edited(choice, "encoded_images", ".to(ready.device)")(ready, images, how))


def test_the_device_keeps_identity_and_values() -> None:
    """What clipping relies on: views share memory, ``data_ptr`` tells inputs apart, results are the
    CPU kernels'.
    """
    base = torch.arange(12.0).view(3, 4)
    x = base.to(DEVICE)
    row = x[1]
    assert (
        row._base is x
        and row.data_ptr() == x.data_ptr() + 16
        and x.clone().data_ptr() != x.data_ptr()
    )
    row += 1
    assert torch.equal(x.cpu()[1], base[1] + 1)
    weight = nn.Parameter(torch.ones(4, 2, device=DEVICE))
    (x @ weight).square().sum().backward()
    assert isinstance(weight.grad, StrictTensor) and torch.equal(
        (x @ weight).cpu(), x.cpu() @ weight.cpu()
    )
    with crossings() as found:
        (
            x[x > 3],
            float(x[0, 0]),
            torch.tensor([1.0, 2.0], device=DEVICE),
            base.to(DEVICE, non_blocking=True),
        )
    assert {what for what, _ in found} == {
        "waits: index by a mask",
        "waits: _local_scalar_dense",
        "copy to the device, blocking",
        "copy to the device",
    }
