"""A loaded classifier: its scores against its parts, what can be recorded of it, and what loading
imports.
"""

import copy
import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor, nn

from dpvision.checkpoint import load_checkpoint, save_checkpoint, state_tensors
from dpvision.config import (
    ClassifierConfig,
    DataConfig,
    MAEConfig,
    PrivacyConfig,
    ResNetConfig,
    RunConfig,
    TimmConfig,
    ViTConfig,
    to_dict,
)
from dpvision.encoders.classifier import ImageClassifier, OnePooling, load_classifier
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.fixed import FIXED, FixedNetwork, fixed_encoder
from dpvision.encoders.open import open_encoder
from dpvision.errors import ConfigError
from dpvision.models import make_model
from dpvision.models.classifier import Classifier

from ..adapt.runs_of_heads import head_config, run_head, write_digits
from ..hub_folders import write_folder

VIT = ViTConfig(image_size=8, patch_size=2, depth=2, width=32, num_heads=2)
RESNET = ResNetConfig(image_size=8, depths=(1, 1), widths=(16, 32))
NETWORKS = {
    "vit": ClassifierConfig(encoder=VIT, num_classes=3),
    "vit, class token": ClassifierConfig(encoder=VIT, num_classes=3, pooling="cls"),
    "vit, lora": ClassifierConfig(encoder=VIT, num_classes=3, tuned="lora", lora_rank=2),
    "resnet": ClassifierConfig(encoder=RESNET, num_classes=3),
    "timm": ClassifierConfig(
        encoder=TimmConfig(
            name="vit_tiny_patch16_224",
            image_size=32,
            options=("depth=1", "embed_dim=32", "num_heads=2"),
        ),
        num_classes=3,
        pooling="own",
    ),
}


def write_run(root: Path, model: ClassifierConfig | MAEConfig, **manifest: object) -> Path:
    """A run with initial weights and a random head."""
    network = make_model(model, seed=3)
    if isinstance(network, Classifier):
        nn.init.normal_(network.head.weight, generator=torch.Generator().manual_seed(1))
    config = RunConfig(
        recipe="supervised.micro",
        privacy=PrivacyConfig(dataset_size=10, expected_batch_size=5, steps=1, guarantee="none"),
        model=model,
        data=DataConfig(mean=(0.1, 0.2, 0.3), std=(0.9, 0.8, 0.7), resize=10, crop="centre"),
    )
    about = {
        "run_id": "1f",
        "ledger_steps": 1,
        "updates": 1,
        "config": to_dict(config),
        "plan": {},
        "ledger_digest": "",
        "lineage": [],
    }
    save_checkpoint(root / "checkpoints" / "step-1", about | manifest, state_tensors(network))
    return root


@pytest.mark.parametrize("name", [*NETWORKS])
def test_a_trained_network_is_opened_as_it_was_saved(name: str, tmp_path: Path) -> None:
    model = NETWORKS[name]
    run = write_run(tmp_path / "run", model, class_names=["a", "b", "c"])
    (run / "statement.json").write_text("{}")
    made = load_classifier(run)
    assert made.class_names == ("a", "b", "c") and made.loss == "softmax" and made.temperature == 1
    assert made.run == {
        "run_id": "1f",
        "recipe": "supervised.micro",
        "statement": hashlib.sha256(b"{}").hexdigest(),
    }
    assert not made.training and not any(p.requires_grad for p in made.parameters())
    side = model.encoder.image_size
    assert made.data == replace(
        DataConfig(), mean=made.mean, std=made.std, resize=10, crop="centre"
    )
    x_BCHW = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    whole = make_model(model, seed=3)
    whole.load_state_dict(load_checkpoint(run).model)
    with torch.no_grad():
        score_BK = whole.eval()(x_BCHW)
        assert torch.equal(made(x_BCHW), score_BK)
        assert torch.equal(made.head(made.features(x_BCHW)), score_BK)
        probability_BK = made.probabilities(x_BCHW)
    expected = special.softmax(score_BK.double().numpy(), axis=1)
    np.testing.assert_allclose(probability_BK, expected, atol=1e-6)
    image = np.arange(20 * 30 * 3, dtype=np.uint8).reshape(20, 30, 3)
    assert made.preprocess(image).shape == (3, side, side)


def test_probabilities_are_divided_by_the_temperature_and_independent_with_the_sigmoid_loss() -> (
    None
):
    score_BK = torch.tensor([[2.0, -1.0, 0.5]])
    made = ImageClassifier(
        nn.Identity(),
        nn.Identity(),
        class_names=("a", "b", "c"),
        image_size=8,
        data=DataConfig(),
        loss="sigmoid",
        temperature=2.5,
    )
    expected = special.expit(score_BK.double().numpy() / 2.5)
    np.testing.assert_allclose(made.probabilities(score_BK), expected, atol=1e-7)
    made.loss = "softmax"
    expected = special.softmax(score_BK.double().numpy() / 2.5, axis=1)
    np.testing.assert_allclose(made.probabilities(score_BK), expected, atol=1e-7)


def test_what_is_no_classifier_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mae", MAEConfig(encoder=VIT))
    with pytest.raises(ConfigError, match=r"model kind 'mae'; expected .* dpvision.load\."):
        load_classifier(run)
    run = write_run(tmp_path / "vit", NETWORKS["vit"])
    with pytest.raises(ConfigError, match="which is not a head; expected none"):
        load_classifier(run, encoder="patches")


def _recorded(network: nn.Module, x_BCHW: Tensor, how: str) -> nn.Module:
    if how == "trace":
        return torch.jit.trace(network, x_BCHW, check_trace=False)
    dynamic = ({0: torch.export.Dim("B", min=1, max=1024)},)
    return torch.export.export(network, (x_BCHW,), dynamic_shapes=dynamic).module()


def _check_records(network: nn.Module, x_BCHW: Tensor) -> None:
    """A record of three images gives the network's output on other images and other numbers."""
    with torch.no_grad():
        expected = network(x_BCHW)
        for how in ("trace", "export"):
            made = _recorded(network, x_BCHW[:3].clone(), how)
            for rows in ([0], [1, 2, 3], [*range(len(x_BCHW))][::-1]):
                torch.testing.assert_close(made(x_BCHW[rows]), expected[rows], atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS])
def test_trained_classifiers_can_be_traced_and_exported(name: str, tmp_path: Path) -> None:
    made = load_classifier(write_run(tmp_path / "run", NETWORKS[name]))
    side = made.image_size
    _check_records(made, torch.randn(5, 3, side, side, generator=torch.Generator().manual_seed(0)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("spec", "side", "pooling"),
    [
        ("hog", 16, "hog"),
        pytest.param("pixels", 24, "pixels", marks=pytest.mark.slow),
        pytest.param("scattering", 36, "4x4", marks=pytest.mark.slow),
        pytest.param("patches", 64, "3x3", marks=pytest.mark.slow),
        pytest.param("patches+scattering", 64, "3x3", marks=pytest.mark.slow),
        pytest.param("patches+scattering+zooms", 64, "3x3", marks=pytest.mark.slow),
        pytest.param("timm:vit_tiny_patch16_224", None, "2x2", marks=pytest.mark.slow),
        pytest.param("timm:convnext_atto", None, "2x2", marks=pytest.mark.slow),
        pytest.param("timm:efficientnet_lite0", None, "mean", marks=pytest.mark.slow),
        pytest.param("torchvision:resnet18", None, "mean", marks=pytest.mark.slow),
        ("timm:test_resnet", 32, "stages"),
        pytest.param("timm:tf_efficientnet_lite0", 64, "stages", marks=pytest.mark.slow),
        pytest.param("timm:test_vit", None, "stages", marks=pytest.mark.slow),
        pytest.param("torchvision:resnet18", 64, "stages", marks=pytest.mark.slow),
        pytest.param("hf:vit", None, "mean", marks=pytest.mark.slow),
        pytest.param("hf:convnext", None, "mean", marks=pytest.mark.slow),
        pytest.param("hf:swin", None, "mean", marks=pytest.mark.slow),
    ],
)
def test_frozen_encoders_can_be_traced_and_exported(
    spec: str, side: int | None, pooling: str, tmp_path: Path
) -> None:
    """Patches see images of two resolutions: which one an image has must not be recorded."""
    if spec.startswith("hf:"):
        pytest.importorskip("transformers", reason="transformers is of an extra")
        spec = f"hf:{write_folder(tmp_path / 'hub', spec.removeprefix('hf:'))}"
    encoder = open_encoder(spec, image_size=side)
    side = encoder.image_size
    x_BCHW = torch.rand(5, 3, side, side, generator=torch.Generator().manual_seed(0))
    for i, own in enumerate(encoder.own_sizes[:-1]):
        x_BCHW[2 * i, :, own:], x_BCHW[2 * i, :, :, own:] = torch.nan, torch.nan
    _check_records(OnePooling(encoder, pooling).eval(), x_BCHW)


def test_an_encoder_that_torch_does_not_compute_is_not_recorded() -> None:
    """A record would hold one image's features as a constant."""

    def poolings(x_BCHW: Tensor) -> dict[str, Tensor]:
        return {"mean": torch.from_numpy(x_BCHW.numpy().mean(axis=(2, 3)))}

    encoder = Encoder("onnx:made", 8, (0.0,) * 3, (1.0,) * 3, poolings, "convnet")
    network = OnePooling(encoder, "mean")
    x_BCHW = torch.rand(2, 3, 8, 8)
    assert torch.equal(network(x_BCHW), poolings(x_BCHW)["mean"])
    with pytest.raises(ConfigError, match=r"onnx:made is not computed by torch; expected"):
        torch.jit.trace(network, x_BCHW)


@pytest.mark.parametrize("name", FIXED)
def test_the_constants_of_fixed_features_are_buffers_that_move_with_the_module(name: str) -> None:
    encoder = fixed_encoder(name, 32)
    assert isinstance(encoder.network, FixedNetwork)
    x_BCHW = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    copied = copy.deepcopy(encoder.network).double()
    assert bool(list(copied.buffers())) == (name not in ("pixels", "hog"))
    assert all(buffer.dtype == torch.float64 for buffer in copied.buffers())
    with torch.no_grad():
        if name != "hog":  # it computes in float32
            torch.testing.assert_close(
                copied(x_BCHW.double()).float(), encoder(x_BCHW), atol=1e-5, rtol=1e-5
            )
        assert torch.equal(encoder.network(x_BCHW), encoder(x_BCHW)), "the original is unchanged"


SLOW_LIBRARIES = "timm torchvision sklearn matplotlib pyarrow pandas huggingface_hub transformers"


def test_loading_imports_no_library_that_the_classifier_does_not_use(tmp_path: Path) -> None:
    """Such a library takes one to four seconds to import."""
    store = write_digits(tmp_path / "store", 0, 200)
    head = run_head(head_config(store, "prototypes", spec="hog"), tmp_path / "head")
    vit = write_run(tmp_path / "vit", NETWORKS["vit"])
    (tmp_path / "image.png").write_bytes(store.read(0))
    code = (
        "import sys, torch, dpvision\n"
        "made = dpvision.load_classifier(sys.argv[1])\n"
        "made.probabilities(torch.from_numpy(made.preprocess(sys.argv[2]))[None])\n"
        f"print([name for name in {SLOW_LIBRARIES!r}.split() if name in sys.modules])"
    )
    for run in (head, vit):
        done = subprocess.run(
            [sys.executable, "-c", code, run, tmp_path / "image.png"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr
