"""Tiny runs of every shape of recipe that record which settings are read."""

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dpvision.adapt.session import adapt, new_head_session
from dpvision.config import (
    CaptionerConfig,
    ClassifierConfig,
    CrossDecoderConfig,
    CrossMAEConfig,
    DataConfig,
    FrozenEncoderConfig,
    HardwareConfig,
    HeadConfig,
    MAEConfig,
    OptimConfig,
    PrivacyConfig,
    ResNetConfig,
    RunConfig,
    TimmConfig,
    ViTConfig,
    to_dict,
)
from dpvision.config.heads import HEADS, AnyHead, ChoiceConfig, FeatureConfig
from dpvision.config.resolve import resolve
from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_samples
from dpvision.data.sources import Sample
from dpvision.encoders.starting_weights import open_parent
from dpvision.recipes import RECIPES
from dpvision.train.loop import fit
from dpvision.train.start import new_session

from ..captioners import image, make_tokenizer, png

_NUM = 24
_CONFIGS = (
    RunConfig,
    PrivacyConfig,
    DataConfig,
    OptimConfig,
    HardwareConfig,
    MAEConfig,
    CrossMAEConfig,
    CaptionerConfig,
    ClassifierConfig,
    HeadConfig,
    FrozenEncoderConfig,
    FeatureConfig,
    ChoiceConfig,
    AnyHead,
    *HEADS.values(),
    ViTConfig,
    ResNetConfig,
    TimmConfig,
    CrossDecoderConfig,
)
_CHECKS = {
    "__post_init__",
    "check_choices",
    "asdict",
    "_asdict_inner",
    "replace",
    "_replace",
    "__eq__",
    "__hash__",
    "__repr__",
    "to_dict",
    "unread",
    "_unread_by_head",
    "require_read",
    "settings_of",
    "_plain",
    "_defaults",
    "applied",
    "resolve",
    "public_settings",
}
"""Functions that read settings only to check, copy or write them."""


def leaves(config: Any, part: str = "") -> Iterator[tuple[str, Any]]:
    """Every single setting of a config, by dotted name."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, part if "flat" in f.metadata else f"{part}{f.name}.")
        else:
            yield part + f.name, value


_OTHERS: dict[str, tuple[Any, ...]] = {
    "privacy.steps": (3,),
    "privacy.dataset_size": (402,),
    "privacy.expected_batch_size": (200.0,),
    "privacy.delta": (5e-4,),
    "privacy.guarantee": ("none", "simulated"),
    "privacy.sampling": ("poisson",),
    "privacy.clipping": ("automatic",),
    "privacy.sampling_unit": ("person",),
    "model.num_classes": (12,),
    "model.head": ("prototypes", "one_step"),
    "model.candidates": (("one_step", "prototypes"),),
    "model.reason": ("x",),
    "model.loss": ("softmax", "sigmoid"),
    "model.centre": ("none",),
    "model.init": ("lecun",),
    "model.iterate": ("average", "ema"),
    "model.encoder.spec": ("hog",),
    "model.encoder.pooling": ("2x2", "mean"),
    "model.encoder.image_size": (16,),
    "data.images": ("textures", "public"),
    "data.crop": ("centre", "random"),
    "data.crop_scale": ((0.5, 0.9),),
    "data.mean": ((0.1, 0.2, 0.3),),
    "data.std": ((0.1, 0.2, 0.3),),
    "data.own_sizes": ((8, 16),),
    "data.tokenizer": ("x.json",),
    "data.resize": (12,),
    "optim.name": ("adamw", "lamb", "sgd"),
    "optim.learning_rate": (0.37,),
    "optim.betas": ((0.3, 0.4),),
    "optim.decayed": ("matrices", "all"),
    "optim.momentum": (0.3,),
    "optim.schedule": ("cosine", "linear", "vip"),
    "optim.warmup_steps": (3,),
    "optim.global_clip": (1e-3,),
    "optim.ema_decay": (0.05,),
    "optim.decay_horizon": (3.0,),
    "hardware.precision": ("bfloat16",),
    "init_from": ("runs/x",),
    "model.lora_on": ("mlp", "both"),
    "model.init_scale": (2.0,),
    "model.feature_norm": (0.5,),
    "model.frequency_decay": (2.0,),
}


def other(name: str, value: Any) -> list[Any]:
    """Other values of a setting; some may be out of range."""
    found: tuple[Any, ...]
    if name in _OTHERS:
        found = _OTHERS[name]
    elif isinstance(value, bool):
        found = (not value,)
    elif isinstance(value, int | float):
        found = (value + 1, value / 2) if isinstance(value, float) else (value + 1,)
    elif value is None:
        found = (1, 1.5, "x")
    else:
        found = ("x",)
    return [one for one in found if one != value]


def shrunk(config: RunConfig) -> RunConfig:
    """The same kind of run on a few small images: every choice stays, every size shrinks."""
    model, optim, data, privacy = config.model, config.optim, config.data, config.privacy
    if isinstance(model, HeadConfig):
        model = replace(
            model, num_classes=4, encoder=replace(model.encoder, spec="pixels", image_size=8)
        )
    else:
        encoder: Any = model.encoder
        if isinstance(encoder, ViTConfig):
            encoder = replace(
                encoder, image_size=16, patch_size=8, depth=1, width=8, num_heads=2, mlp_ratio=4.0
            )
        elif isinstance(encoder, ResNetConfig):
            depths = (1,) * len(encoder.depths)
            encoder = replace(
                encoder,
                image_size=16 if encoder.stem == "3x3" else 64,
                depths=depths,
                widths=(16,) * len(depths),
                stem_width=16,
                groups=4,
            )
        else:
            encoder = replace(encoder, name="test_vit", image_size=32)
        small: dict[str, Any] = {"encoder": encoder}
        if isinstance(model, MAEConfig):
            small |= {
                "decoder_depth": 1,
                "decoder_width": 8,
                "decoder_num_heads": 2,
                "mask_ratio": 0.5,
            }
        elif isinstance(model, CrossMAEConfig):
            small |= {"decoder": CrossDecoderConfig(1, 8, 2), "mask_ratio": 0.5}
        elif isinstance(model, CaptionerConfig):
            small |= {
                "decoder": CrossDecoderConfig(1, 8, 2),
                "vocab_size": make_tokenizer().vocab_size,
                "num_tokens": 18,
                "mask_ratio": 0.5,
            }
            small |= {
                "parallel_rate": 0.5 * (model.parallel_rate > 0),
                "reconstruction_weight": 1.0 * (model.reconstruction_weight > 0),
            }
        else:
            small |= {
                "num_classes": 4,
                "lora_rank": 2 if model.tuned == "lora" else model.lora_rank,
                "last_blocks": 1,
            }
            small |= {"head_bias": 0.0, "head_scale": 1.0}
        model = replace(model, **small)
    full = privacy.sampling == "full_batch"
    budget: dict[str, Any] = {
        "noise_multiplier": None,
        "target_epsilon": None,
        "target_unit_epsilon": None,
    }
    if privacy.guarantee != "none":
        budget |= (
            {"target_epsilon": 8.0} if isinstance(model, HeadConfig) else {"noise_multiplier": 4.0}
        )
    privacy = replace(
        privacy,
        dataset_size=_NUM,
        expected_batch_size=_NUM if full else 8,
        steps=None if privacy.steps is None else 2,
        delta=None,
        delta_for=None,
        num_units=None,
        max_records_per_unit=1,
        max_batch_size=None,
        sampling="full_batch" if full else "poisson",
        max_grad_norm=None if privacy.max_grad_norm is None else 1.0,
        **budget,
    )
    plain = OptimConfig()
    same: dict[str, Any] = {
        "betas": plain.betas,
        "eps": plain.eps,
        "momentum": plain.momentum,
        "warmup_steps": 1,
    }
    if not isinstance(model, HeadConfig):
        same["learning_rate"] = 1e-3
    for name, value in (("weight_decay", 0.1), ("global_clip", 1.0), ("ema_decay", 0.9)):
        same[name] = value if getattr(optim, name) else getattr(optim, name)
    same["decay_horizon"] = 2.0 if optim.schedule in ("cosine", "linear") else 1.0
    same["pretrained_multiplier"] = 1.0 if optim.pretrained_multiplier == 1 else 0.1
    optim = replace(optim, **same)
    data = replace(
        data,
        store=None,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        views=min(data.views, 2),
        tokenizer=None,
        resize=None if data.resize is None else 20,
        crop_scale=data.crop_scale
        if isinstance(model, HeadConfig) or data.crop == "centre"
        else (0.5, 1.0),
    )
    if isinstance(model, HeadConfig):
        data, optim = replace(data, mean=DataConfig.mean, std=DataConfig.std), config.optim
    hardware = HardwareConfig(
        device="cpu", physical_batch_size=8, workers=1, compile=config.hardware.compile
    )
    start = None if config.init_from is None else "parent"
    return RunConfig("x", privacy, model, data, optim, hardware, init_from=start)


@cache
def shape_of(config: RunConfig) -> str:
    """All that decides which settings a run reads."""
    return str(to_dict(replace(shrunk(config), hardware=HardwareConfig())))


def _shapes() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, recipe in RECIPES.items():
        found.setdefault(shape_of(recipe()), []).append(name)
    return {
        min(names, key=lambda name: ("micro" not in name, len(name))): names
        for names in found.values()
    }


SHAPES = _shapes()
"""One recipe of each shape -> all of its shape."""


def _store(folder: Path, name: str, *, public: bool) -> str:
    path = folder / name
    if not path.exists():
        first = 0 if public else 1000
        samples = (
            Sample(
                f"{i}", png(first + i), {"label": "abcd"[i % 4], "captions": [image(first + i)[1]]}
            )
            for i in range(_NUM)
        )
        import_samples(samples, path, public=public, labels=LabelRule(classes=("a", "b", "c", "d")))
    return str(path)


def read_by_a_run(
    recipe: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunConfig, set[str]]:
    """Run the shrunk recipe, and return its config and the settings that were read."""
    config = shrunk(recipe)
    tokenizer = None
    if isinstance(config.model, CaptionerConfig):
        make_tokenizer().save(folder / "words.json")
        tokenizer = str(folder / "words.json")
    config = replace(
        config,
        data=replace(
            config.data,
            store=_store(folder, "mine", public=config.data.images == "public"),
            tokenizer=tokenizer,
        ),
    )
    if config.init_from is not None:
        public = replace(config.data, store=_store(folder, "public", public=True))
        parent = resolve(
            replace(config, data=public, init_from=None), {"privacy.guarantee": "none"}
        )
        with new_session(parent, folder / "parent") as session:
            fit(session, quiet=True)
        config = replace(config, init_from=str(folder / "parent"))
    ran = config = resolve(config, {})
    read: set[tuple[type, str]] = set()
    with monkeypatch.context() as patch:
        for cls in _CONFIGS:
            patch.setattr(cls, "__getattribute__", _recording(cls, read), raising=False)
        if isinstance(config.model, HeadConfig):
            with new_head_session(config, folder / "run") as head:
                adapt(head)
                ran = head.config  # 'auto' has become a head, with settings of its own
        else:
            with new_session(config, folder / "run", open_parent) as session:
                fit(session, quiet=True)
    owners = {name: _owner(ran, name) for name, _ in leaves(ran)}
    return config, {name for name, cls in owners.items() if (cls, name.rpartition(".")[2]) in read}


def _owner(config: Any, name: str) -> type:
    *above, last = name.split(".")
    for part in above:
        config = getattr(config, part)
    flat = [getattr(config, f.name) for f in dataclasses.fields(config) if "flat" in f.metadata]
    return next(type(owner) for owner in (config, *flat) if hasattr(owner, last))


def _recording(cls: type, read: set[tuple[type, str]]) -> Any:
    names = {f.name for f in dataclasses.fields(cls)}

    def get(self: Any, name: str) -> Any:
        if name in names and (cls, name) not in read:
            frame: Any = sys._getframe(1)
            called = []
            for _ in range(12):
                if frame is None:
                    break
                called.append(frame.f_code.co_name)
                frame = frame.f_back
            if not _CHECKS & set(called):
                read.add((cls, name))
        return object.__getattribute__(self, name)

    return get
