"""Foreign loaders, offline, give the outputs of the run: the table of docs/export.md, cell by cell.

Set EXPORT_TABLE to a file to write the table as measured.
"""

import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

from dpvision.checkpoint import load_checkpoint
from dpvision.config import CaptionerConfig, ClassifierConfig
from dpvision.encoders.classifier import is_head, load_classifier
from dpvision.encoders.identity import fingerprint
from dpvision.encoders.open import open_encoder
from dpvision.encoders.trained import load_model
from dpvision.errors import ConfigError
from dpvision.export.write import FORMATS, Format, export
from dpvision.models.captioner import Captioner
from dpvision.models.classifier import Classifier
from dpvision.models.timm_encoder import TimmEncoder
from dpvision.models.tuned import LoRA
from dpvision.runs.folder import read_run
from dpvision.runs.lineage import undeclared_weights

from . import models_to_export
from .models_to_export import HEADS, MODELS, NEEDS, Copies, Made, make_exportable, make_head

DOCS = Path(__file__).parents[2] / "docs" / "export.md"
TOLERANCE = 1e-5


def images(side: int, num: int = 5, own_sizes: tuple[int, ...] = ()) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    if not own_sizes:
        return torch.randn(num, 3, side, side, generator=generator)
    # Patches take pixels from 0 to 1; the square root of their sums magnifies rounding elsewhere.
    x_BCHW = torch.rand(num, 3, side, side, generator=generator)
    for x_CHW, own in zip(x_BCHW, own_sizes, strict=False):
        x_CHW[:, own:] = x_CHW[:, :, own:] = torch.nan
    return x_BCHW


@torch.inference_mode()
def ours(run: Path, to: str, x_BCHW: Tensor) -> Tensor:
    """What the run gives: logits; features; for a captioner's own formats the logits of words."""
    if is_head(load_checkpoint(run)):
        return load_classifier(run)(x_BCHW)
    model, _ = load_model(load_checkpoint(run))
    model.eval()
    if isinstance(model, Classifier):
        return model(x_BCHW)
    if isinstance(model, Captioner) and to in ("onnx", "safetensors"):
        return model.logits(model.decode(words(model.cfg), model.encode(x_BCHW)))
    return model.encoder(x_BCHW)[:, 1:].mean(1)


def words(cfg: CaptionerConfig) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    token_BL = torch.randint(3, cfg.vocab_size, (5, cfg.num_tokens), generator=generator)
    token_BL[:, 0] = 1
    return token_BL


@torch.inference_mode()
def theirs(run: Path, to: str, folder: Path, x_BCHW: Tensor) -> Tensor:
    """What the format's own library gives, as its users would call it."""
    config = read_run(run)[1]
    if to == "timm":
        return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(x_BCHW)
    if to == "safetensors":
        loaded = modelling(folder).load(folder)
        if isinstance(config.model, CaptionerConfig):
            return loaded.decode(words(config.model), loaded.encode(x_BCHW))
        return loaded(x_BCHW)
    if to == "onnx":
        return by_onnx(config.model, folder, x_BCHW)
    if to == "peft":
        import peft

        model, _ = load_model(load_checkpoint(run))
        assert isinstance(model, Classifier) and isinstance(model.encoder, TimmEncoder)
        base = timm.create_model(
            model.encoder.cfg.name, img_size=model.encoder.cfg.image_size, num_classes=3, depth=2
        )
        frozen = {
            name.replace(".frozen.", "."): value
            for name, value in model.encoder.model.state_dict().items()
            if not name.endswith((".up", ".down"))
        }
        assert any(isinstance(part, LoRA) for part in model.modules())
        missing = base.load_state_dict(frozen, strict=False)
        assert missing.missing_keys == ["head.weight", "head.bias"]
        return peft.PeftModel.from_pretrained(base, str(folder)).eval()(x_BCHW)
    import transformers

    found = transformers.AutoConfig.from_pretrained(folder)
    name = found.architectures[0]
    more = {"add_pooling_layer": False} if name == "ViTModel" else {}
    loaded = getattr(transformers, name).from_pretrained(folder, **more).eval()
    if name == "ViTForImageClassification":
        return loaded(x_BCHW).logits
    if name == "ViTMAEForPreTraining":
        loaded.config.mask_ratio = 0.0
        loaded = loaded.vit
    return loaded(x_BCHW).last_hidden_state[:, 1:].mean(1)


def by_onnx(cfg: Any, folder: Path, x_BCHW: Tensor) -> Tensor:
    import onnxruntime

    def session(name: str) -> Any:
        return onnxruntime.InferenceSession(folder / name)

    if not isinstance(cfg, CaptionerConfig):
        (first, *_) = session("model.onnx").run(None, {"images": x_BCHW.numpy()})
        return torch.from_numpy(first)
    (memory,) = session("encoder.onnx").run(None, {"images": x_BCHW.numpy()})
    decoder, past, logits = session("decoder.onnx"), memory[..., :0, :], []
    for token_B in words(cfg).unbind(1):
        given = {"token": token_B.numpy(), "memory": memory, "past": past}
        logit_BV, past = decoder.run(None, given)
        logits.append(torch.from_numpy(logit_BV))
    return torch.stack(logits, dim=1)


def modelling(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("exported_modelling", folder / "modelling.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HEADING = "| model | timm | transformers | onnx | safetensors | peft |"


def table() -> dict[str, dict[str, str]]:
    """The rows of docs/export.md: model -> format -> cell."""
    rows = DOCS.read_text().split(HEADING)[1].split("\n\n")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows.splitlines()]
    return {row[0]: dict(zip(FORMATS, row[1:], strict=True)) for row in found[2:]}


QUICK = {"captioner (`dpcap.*`)", "classifier on our ViT, class token"}
"""Models whose ONNX files are made in the fast tests too: each takes seconds."""
QUICK_HEADS = {name for name in HEADS if "masked autoencoder" in name or "convnet" in name}
"""Heads that are made in seconds."""


def is_slow(name: str, to: str) -> bool:
    return (to == "onnx" and name not in QUICK) or (name in HEADS and name not in QUICK_HEADS)


def cells() -> list[Any]:
    return [
        pytest.param(name, to, marks=[pytest.mark.slow] if is_slow(name, to) else [])
        for name in (*MODELS, *HEADS)
        for to in FORMATS
    ]


def test_the_table_has_every_model_once() -> None:
    assert list(table()) == [*MODELS, *HEADS]


@pytest.mark.parametrize(("name", "to"), cells())
def test_a_cell_of_the_table_is_what_a_foreign_loader_measures(
    name: str, to: Format, made: Made, copied: Copies, tmp_path: Path
) -> None:
    if to in NEEDS:
        pytest.importorskip(NEEDS[to], reason=f"{NEEDS[to]} is of an extra")
    folder, cell = tmp_path / "out", table()[name][to]
    if cell == "no":
        with pytest.raises(ConfigError, match=f"export: --to {to}: .*; expected .* Use "):
            export(made(name), to, folder)
        assert not folder.exists()
        return
    exported = copied(name, to, folder)
    sizes: tuple[int, ...] = ()
    if name in HEADS:
        data = load_classifier(made(name)).data
        sizes = data.own_sizes
        if to == "onnx":  # as an encoder it takes the run's pixels
            opened = open_encoder(f"onnx:logits@{folder / 'model.onnx'}")
            assert opened.data == data and fingerprint(opened)
    x_BCHW = images(read_run(made(name))[1].model.encoder.image_size, own_sizes=sizes)
    mine, other = ours(made(name), to, x_BCHW), theirs(made(name), to, folder, x_BCHW)
    difference = (mine - other).abs().max().item()
    assert mine.std() > 1e-3 and difference <= TOLERANCE, difference
    assert exported.difference <= TOLERANCE
    assert re.fullmatch(r"0|\de-\d( \(encoder\))?", cell), cell
    if where := os.environ.get("EXPORT_TABLE"):
        with open(where, "a") as file:
            file.write(f"{name}\t{to}\t{difference:.0e}\n")


@pytest.mark.slow
def test_the_default_of_adapt_leaves_with_all_its_resolutions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is of an extra")
    monkeypatch.setattr(models_to_export, "PATCHES_PX", {})
    run = make_head(tmp_path / "run", "head on patches and scattering", tmp_path)
    export(run, "onnx", tmp_path / "out")
    sizes = load_classifier(run).data.own_sizes
    x_BCHW = images(sizes[-1], own_sizes=sizes)
    mine, other = ours(run, "onnx", x_BCHW), theirs(run, "onnx", tmp_path / "out", x_BCHW)
    assert sizes == (32, 64, 128) and mine.std() > 1e-3
    # Features of length 1, as exact as 1e-6, times rows of a noisy head that are 46 long.
    longest = load_classifier(run).head.get_parameter("weight").norm(dim=1).max().item()
    torch.testing.assert_close(other, mine, atol=1e-6 * longest, rtol=0)
    assert 10 < longest < 100


def test_the_printed_code_of_peft_gives_the_runs_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where timm's own pooling is replaced, and the run started from a file: the printed code
    loaded ``fc_norm`` in place of ``norm``, and other weights.
    """
    pytest.importorskip("peft", reason="peft is of an extra")
    cfg = MODELS["LoRA on a timm model"]
    assert isinstance(cfg, ClassifierConfig)
    monkeypatch.setitem(MODELS, "mean", replace(cfg, pooling="mean"))
    base = undeclared_weights("timm:vit_tiny_patch16_224@base.safetensors")
    run = make_exportable(tmp_path / "run", "mean", parents=(base | {"visibility": "public"},))
    exported = export(run, "peft", tmp_path / "out")
    model, _ = load_model(load_checkpoint(run))
    assert isinstance(model, Classifier) and isinstance(model.encoder, TimmEncoder)
    frozen = {
        name.replace(".frozen.", "."): value.contiguous()
        for name, value in model.encoder.model.state_dict().items()
        if not name.endswith((".up", ".down"))
    }
    head = {"head.weight": torch.zeros(1000, 192), "head.bias": torch.zeros(1000)}
    save_file(frozen | head, tmp_path / "out" / "base.safetensors")
    monkeypatch.chdir(tmp_path / "out")
    x_BCHW = images(32)
    scope = {"x_BCHW": x_BCHW}
    with torch.inference_mode():
        exec(exported.how_to_load, scope)
        difference = (scope["logit_BK"] - model.eval()(x_BCHW)).abs().max().item()
    assert difference <= TOLERANCE, difference
