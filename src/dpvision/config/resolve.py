"""The settings of a run: a recipe, what was asked for, and rules. The command line, Python and
``dpvision tune`` all resolve them here.

    asked = {"data.store": "stores/mine", "privacy.dataset_size": 2000, "model.num_classes": 10,
    "epsilon": 2.0} config = resolve(RECIPES["transfer.many_steps"](), asked)

A private head's settings that are None (its number of steps, rate, loss, ...) follow from the
encoder and the plan: ``adapt.prepare`` sets them, wherever the config comes from. Settings that a
run would not read are refused.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dpvision.config.heads import HEADS, HeadConfig
from dpvision.config.models import CaptionerConfig, ClassifierConfig, ResNetConfig
from dpvision.config.optim import OptimConfig
from dpvision.config.plain import from_dict, setting, settings_of, to_dict, with_settings
from dpvision.config.privacy import PrivacyConfig
from dpvision.config.run import DataConfig, RunConfig
from dpvision.errors import ConfigError

_BUDGETS = ("noise_multiplier", "target_epsilon", "target_unit_epsilon")
BUDGETS = ("epsilon", *(f"privacy.{name}" for name in _BUDGETS))
"""Settings, as for ``resolve``, each of which fixes the noise."""


def resolve(recipe: RunConfig, asked: Mapping[str, Any]) -> RunConfig:
    """Return the config of a run of ``recipe`` with the settings asked for.

    Args:
        asked: values by dotted name ("privacy.steps", "seed"). "epsilon" is short for
            privacy.target_epsilon, or for privacy.target_unit_epsilon where people are declared.

    Raises:
        ConfigError: a name is unknown, a value is out of range, settings contradict each other, or
            one would not be read.
    """
    config = applied(recipe, asked)
    require_read(config, {name: x for name, x in asked.items() if setting(recipe, name) != x})
    # What the recipe set for another optimizer, say, goes back to its default.
    plain = _defaults(config)
    unset = {name: [setting(one, name) for one in plain] for name in unread(config)}
    return with_settings(
        config,
        {name: values[0] for name, values in unset.items() if setting(config, name) not in values},
    )


def applied(config: RunConfig, asked: Mapping[str, Any]) -> RunConfig:
    """Return the config with the settings asked for, whether or not it reads them; arguments and
    errors otherwise as for ``resolve``.
    """
    privacy = {
        name.removeprefix("privacy."): value
        for name, value in asked.items()
        if name.startswith("privacy.") or name == "epsilon"
    }
    others = {
        name: value
        for name, value in asked.items()
        if name != "epsilon" and not name.startswith("privacy.")
    }
    return with_settings(replace(config, privacy=resolve_privacy(config.privacy, privacy)), others)


def read_of(config: RunConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the settings that a run with all of them reads: the momentum of SGD, say, and
    none where another optimizer is set.
    """
    ignored = unread(applied(config, settings))
    return {name: value for name, value in settings.items() if name not in ignored}


def resolve_privacy(recipe: PrivacyConfig, asked: Mapping[str, Any]) -> PrivacyConfig:
    """Return a recipe's privacy settings with those asked for, by name.

    - A noise multiplier or a target replaces the recipe's. "epsilon" is a person's where people are
      declared, and so is then the recipe's.
    - Without a guarantee there is no noise, no target and no clipping, unless they are asked for; a
      simulation has no target.
    - Full batches hold all that is declared.
    - A delta that is asked for is not the recipe's.

    Raises:
        ConfigError: as ``resolve``.
    """
    changes = dict(asked)
    epsilon, guarantee = changes.pop("epsilon", None), changes.get("guarantee", recipe.guarantee)
    given = [name for name in _BUDGETS if changes.get(name) is not None]
    people = changes.get("num_units", recipe.num_units) is not None
    if epsilon is not None:
        if guarantee == "none":
            raise ConfigError(
                "settings: --epsilon with --non-private; expected one of the two. Drop --epsilon."
            )
        if given:
            option = given[0].replace("_", "-")
            raise ConfigError(
                f"settings: --epsilon with --privacy.{option}; expected only one, since it "
                "determines the other. Drop one."
            )
        changes["target_unit_epsilon" if people else "target_epsilon"] = epsilon
        given = ["epsilon"]
    dropped: tuple[str, ...] = ()
    if given:
        dropped = _BUDGETS
    elif guarantee == "none" != recipe.guarantee:
        dropped = (*_BUDGETS, "max_grad_norm")
    elif guarantee == "simulated":
        dropped = _BUDGETS[1:]
    elif changes.get("num_units") is not None and recipe.target_epsilon is not None:
        changes = {"target_epsilon": None, "target_unit_epsilon": recipe.target_epsilon} | changes
    if "delta" in changes:
        changes = {"delta_for": None} | changes
    values = to_dict(recipe) | dict.fromkeys(dropped) | changes
    if (
        "full_batch" in (recipe.sampling, values["sampling"])
        and "expected_batch_size" not in changes
    ):
        values["expected_batch_size"] = values[
            "num_units" if people and values["sampling_unit"] == "person" else "dataset_size"
        ]
    return from_dict(PrivacyConfig, values, "privacy")


def require_read(
    config: RunConfig,
    asked: Mapping[str, Any] | None = None,
    *,
    before: RunConfig | None = None,
    textures: bool = False,
) -> None:
    """Refuse settings that a run would not read.

    Args:
        asked: those to refuse; if None, those that have another value than by default.
        before: has these values, if ``config`` was made of it by choosing a head.
        textures: whether the store makes textures.

    Raises:
        ConfigError: names the first one, and why it is not read.
    """
    plain = _defaults(config) if asked is None else []
    for name, why in unread(config, textures=textures).items():
        if asked is None:
            value = setting(before or config, name)
            refused = value not in [setting(one, name) for one in plain]
        else:
            value, refused = asked.get(name), name in asked
        if refused:
            raise ConfigError(
                f"settings: {name}={value!r} is not read: {why}; expected only settings with an "
                "effect. Leave it out."
            )


def unread(config: RunConfig, *, textures: bool = False) -> dict[str, str]:
    """Return the settings that a run with this config does not read, by dotted name, and why;
    ``textures`` as for ``require_read``.
    """
    found: dict[str, str] = {}

    def add(why: str, part: str, *names: str) -> None:
        found.update({f"{part}{name}": why for name in names})

    model, optim, data, guarantee = (
        config.model,
        config.optim,
        config.data,
        config.privacy.guarantee,
    )
    if guarantee != "dp":
        add(f"guarantee={guarantee!r}", "privacy.", "allow_weak_guarantee")
    if config.privacy.max_grad_norm is None:
        add("nothing is clipped", "privacy.", "clipping")
    add(
        f"name={optim.name!r}",
        "optim.",
        *(("betas", "eps") if optim.name == "sgd" else ("momentum",)),
    )
    if optim.schedule in ("vip", "constant"):
        add(f"schedule={optim.schedule!r}", "optim.", "decay_horizon")
    if not optim.weight_decay:
        add("weight_decay=0", "optim.", "decayed")
    if isinstance(model, HeadConfig):
        return found | _unread_by_head(config, model)
    add("frozen encoders set it", "data.", "own_sizes")
    if data.crop == "centre":
        add("crop='centre'", "data.", "crop_scale")
    if textures or (data.store is None and data.images == "textures"):
        add("textures replace crops", "data.", "crop_scale", "horizontal_flip", "resize", "crop")
    if not isinstance(model, CaptionerConfig):
        add(f"a {model.kind} has no text", "data.", "tokenizer")
    elif not model.reconstruction_weight:
        add("reconstruction_weight=0", "model.", "mask_ratio")
    if config.init_from is None:
        add("init_from=None", "", "public_weights")
    if isinstance(model, ClassifierConfig):
        add(
            f"tuned={model.tuned!r}",
            "model.",
            *(("last_blocks",) if model.tuned != "last_blocks" else ()),
        )
        add(
            f"tuned={model.tuned!r}",
            "model.",
            *(("lora_rank", "lora_scale", "lora_on") if model.tuned != "lora" else ()),
        )
        if model.tuned == "head":
            add("tuned='head'", "optim.", "pretrained_multiplier")
        if model.head_init == "zero":
            add("head_init='zero'", "model.", "head_scale")
        if isinstance(model.encoder, ResNetConfig) and model.encoder.norm != "group":
            add(f"norm={model.encoder.norm!r}", "model.encoder.", "groups")
    return found


_WITHOUT = {
    "loss": "takes no gradient steps",
    "bias": "takes no gradient steps",
    "init": "starts from zeros",
    "init_scale": "starts from zeros",
    "feature_norm": "clips gradients",
    "iterate": "has one iterate",
}
"""What is true of a head without a setting that others have."""


def _unread_by_head(config: RunConfig, model: HeadConfig) -> dict[str, str]:
    found = {
        f"data.{name}": "a frozen encoder prepares images in its own way"
        for name in DataConfig.__dataclass_fields__
        if name != "store"
    }
    found |= dict.fromkeys(
        (
            "hardware.compile",
            "hardware.finish_step_s",
            "hardware.rank_timeout_s",
            "init_from",
        ),
        "no network is trained",
    )
    found |= {
        "hardware.precision": "no network is trained, and features have model.encoder.precision",
        "model.reason": "it is a result",
        "model.encoder.width": "it follows from the encoder",
    }
    found |= dict.fromkeys(
        ("optim.decayed", "optim.average", "optim.pretrained_multiplier"), "a head has one matrix"
    )
    own, by_name = set(to_dict(model)), model.choice.by_name
    if by_name or "loss" not in own:
        why = "each candidate has its own" if by_name else f"{model.head} takes no gradient steps"
        found |= {f"optim.{name}": why for name in OptimConfig.__dataclass_fields__}
    elif "iterate" not in own:
        found["optim.ema_decay"] = "one step has no average"
    for name in settings_of(model):
        if name not in own:
            found[f"model.{name}"] = f"{model.head} {_WITHOUT.get(name, 'has no such setting')}"
    if setting(model, "init") == "zero" and not model.choice.candidates:
        found.setdefault("model.init_scale", "init='zero'")
    if not model.choice.candidates:
        found |= dict.fromkeys(
            ("model.selection_runs", "model.selection_shape"), "nothing is selected"
        )
    return found


def _defaults(config: RunConfig) -> list[RunConfig]:
    """Configs with default values: a setting with one of these is not refused, even if the run does
    not read it.
    """
    model: Any = type(config.model)()
    if isinstance(config.model, ClassifierConfig):
        model = replace(model, encoder=type(config.model.encoder)())
    plain = [RunConfig(config.recipe, config.privacy, model)]
    if isinstance(config.model, HeadConfig):
        still = DataConfig(crop_scale=(1.0, 1.0), horizontal_flip=False)
        plain += [
            RunConfig(config.recipe, config.privacy, model, still, head.optim)
            for head in HEADS.values()
        ]
    return plain


def with_head(config: RunConfig, head: str) -> RunConfig:
    """Return a head run's config with another head, its optimizer, and its own number of steps."""
    assert isinstance(config.model, HeadConfig)
    return replace(
        config,
        model=with_settings(config.model, {"head": head}),
        optim=HEADS[head].optim,
        privacy=replace(config.privacy, steps=None),
    )


def with_steps(config: RunConfig) -> RunConfig:
    """Return the config with its head's own number of steps if it has none; candidates get the
    largest of theirs.
    """
    model = config.model
    if config.privacy.steps is not None or not isinstance(model, HeadConfig):
        return config
    kinds = [HEADS[name] for name in model.choice.candidates if model.choice.by_name]
    steps = max(kind.steps for kind in kinds or [type(model.settings)])
    return replace(config, privacy=replace(config.privacy, steps=steps))


_OF_A_CANDIDATE = {
    f"model.{name}" for name in ("loss", "bias", "constant", "feature_norm", "init", "init_scale")
}


def candidate_name(settings: Mapping[str, Any]) -> str:
    """Return settings of one head as an entry of ``ChoiceConfig.candidates``.

    Raises:
        ConfigError: a setting is not one in which candidates may differ.
    """
    for name in settings:
        if not name.startswith("optim.") and name not in _OF_A_CANDIDATE:
            raise ConfigError(
                f"select: {name}; expected optim.* or one of "
                f"{', '.join(sorted(_OF_A_CANDIDATE))}, because candidates share features, "
                "releases, clipping and noise. Fix it for all of them."
            )
    return " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())


def with_candidate(config: RunConfig, name: str) -> RunConfig:
    """Make the config of one candidate: its head, optimizer, loss and bias, or its settings, with
    the common number of releases.

    Raises:
        ConfigError: a setting is unknown, out of range, or not one in which candidates may differ.
    """
    if "=" not in name:
        return replace(with_head(config, name), privacy=config.privacy)
    pairs = (part.partition("=") for part in name.split(" "))
    try:
        settings = {part: json.loads(value) for part, _, value in pairs}
    except ValueError:
        raise ConfigError(
            f"select: {name!r}; expected part.name=value, values in JSON, separated by spaces. "
            "E.g. optim.learning_rate=3"
        ) from None
    candidate_name(settings)
    return with_settings(config, settings)
