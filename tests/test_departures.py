"""docs/departures.md holds every departure of a recipe from its paper: settings are compared with
the papers' (oracles/papers.toml).
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dpvision.config import DataConfig, HeadConfig, OptimConfig, PrivacyConfig, RunConfig, to_dict
from dpvision.config.heads import HEADS, GradientSteps
from dpvision.config.resolve import unread
from dpvision.eval.captions.settings import Asking
from dpvision.eval.captions.zero_shot import ZeroShotSettings
from dpvision.eval.dense import detector
from dpvision.eval.dense.settings import DenseHardware, DetectionSettings, SegmentationSettings
from dpvision.eval.probes.settings import FineTuneSettings, LarsSettings
from dpvision.models import count_parameters
from dpvision.recipes import RECIPES

DOCS = Path(__file__).parents[1] / "docs"
PAPERS: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "oracles" / "papers.toml").read_text()
)
NOT_STATED = "?"
PROTOCOLS: dict[str, dict[str, Any]] = {
    "linear_lars": asdict(LarsSettings()),
    "fine_tune": asdict(FineTuneSettings()),
    "zero_shot": asdict(ZeroShotSettings()) | {"fit": Asking().fit},
    "detection": asdict(DetectionSettings())
    | {"sampling_ratio": detector.SAMPLING_RATIO, "precision": DenseHardware().precision},
    "segmentation": asdict(SegmentationSettings()) | {"precision": DenseHardware().precision},
}
COMMANDS = {"few_shot_dpcap", "order", "captions"}
"""Names in the table's first column that have no settings here."""
COUNTED = {"epochs", "warmup_epochs", "warmup_share", "parameters"}
Found = dict[tuple[str, str], tuple[Any, Any]]
"""(recipe, setting) -> (the paper's value, ours)."""


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield (
                path + key,
                "none" if value is None else list(value) if isinstance(value, tuple) else value,
            )


def printed(name: str) -> dict[str, Any]:
    """A recipe's settings by its paper: those of all sections with its name, later ones first."""
    found: dict[str, Any] = {}
    for section in PAPERS["of"]:
        if any(fnmatchcase(name, pattern) for pattern in section["recipes"]):
            found = {} if section.get("partial") else found
            found |= {path: value for path, value in leaves(section) if path != "recipes"}
    return found


def is_own(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in PAPERS["own"])


def ours(config: RunConfig) -> dict[str, Any]:
    """A recipe's settings, and what papers print in their place."""
    made = dict(
        leaves({part: to_dict(config)[part] for part in ("privacy", "model", "data", "optim")})
    )
    del made["privacy.delta_for"]  # says whose delta it is
    if isinstance(config.model, HeadConfig) and config.model.head in HEADS:
        kind = HEADS[config.model.head]
        own: dict[str, Any] = {"model.constant": kind.constant, "privacy.steps": kind.steps}
        if issubclass(kind, GradientSteps):
            own |= {"model.loss": kind.own_loss, "model.bias": kind.own_bias}
        made |= {path: value for path, value in own.items() if made[path] in ("auto", "none")}
    if made["privacy.delta"] == 1 / config.privacy.dataset_size:
        made["privacy.delta"] = "1/N"
    elif config.privacy.guarantee != "none" and config.privacy.delta is None:
        made["privacy.delta"] = "1/(2N)"
    return made


def defaults_of(config: RunConfig) -> dict[str, Any]:
    model = (
        config.model
        if isinstance(config.model, HeadConfig)
        else type(config.model)(encoder=type(config.model.encoder)())
    )
    parts = {
        "privacy": PrivacyConfig(1, 1, 1, guarantee="none"),
        "model": model,
        "data": DataConfig(),
        "optim": OptimConfig(),
    }
    return dict(leaves({name: to_dict(part) for name, part in parts.items()})) | {
        "privacy.guarantee": "dp"
    }


size_of = cache(count_parameters)


def counted(config: RunConfig, paper: dict[str, Any]) -> dict[str, Any]:
    """What papers print in place of steps, and the size. Whatever gives the recipe's steps when
    rounded is the recipe's.
    """
    per_epoch, steps, warm = (
        config.privacy.dataset_size / config.privacy.expected_batch_size,
        config.privacy.steps,
        config.optim.warmup_steps,
    )

    def agreed(name: str, steps: int, unit: float, at_least: int = 0) -> Any:
        value = paper[name]
        return (
            value
            if value != NOT_STATED and max(at_least, round(value * unit)) == steps
            else round(steps / unit, 1)
        )

    made = {
        "epochs": lambda: agreed("epochs", steps, per_epoch, 1),
        "warmup_epochs": lambda: agreed("warmup_epochs", warm, per_epoch),
        "warmup_share": lambda: agreed("warmup_share", warm, steps),
        "parameters": lambda: round(
            size_of(config.model) / 1e6, len(str(paper["parameters"]).partition(".")[2])
        ),
    }
    return {name: make() for name, make in made.items() if paper.get(name, "none") != "none"}


REPLACES = {
    "epochs": "privacy.steps",
    "warmup_epochs": "optim.warmup_steps",
    "warmup_share": "optim.warmup_steps",
}


def differences(recipes: Mapping[str, RunConfig]) -> tuple[Found, list[str]]:
    """Departures of recipes and protocols, and settings of recipes of which papers.toml says
    nothing.
    """
    found: Found = {}
    unknown = []
    for name, config in recipes.items():
        paper = printed(name)
        partial = paper.pop("partial", False)
        if is_own(name) and not partial:
            continue
        extra, base, ignored = counted(config, paper), defaults_of(config), unread(config)
        own = {path: value for path, value in ours(config).items() if path not in ignored}
        replaced = {REPLACES[key] for key in extra if key in REPLACES}
        paper = {
            path: value
            for path, value in paper.items()
            if path not in replaced and (path in extra or path not in COUNTED)
        }
        found |= {(name, path): both for path, both in compare(paper, own | extra).items()}
        if not partial:
            new = [
                p
                for p, value in own.items()
                if p not in paper
                and p not in replaced
                and (p in PAPERS["always"] or value != base[p])
            ]
            unknown += [f"{name}: {path} = {own[path]!r}" for path in new]
    for name, own in PROTOCOLS.items():
        found |= {
            (name, path): both for path, both in compare(printed(name), dict(leaves(own))).items()
        }
    return found, unknown


def compare(paper: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings of both that differ, or that the paper does not state, with both values."""
    return {
        path: (value, own[path])
        for path, value in paper.items()
        if path in own and (value == NOT_STATED or value != own[path])
    }


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    names: tuple[str, ...]
    settings: tuple[str, ...]
    paper: tuple[Any, ...]
    here: tuple[Any, ...]
    line: str

    def fit(self, name: str, setting: str) -> int:
        """How well the row fits a departure: the length of its longest pattern that does, or 0."""
        return (
            max((len(p) for p in self.names if fnmatchcase(name, p)), default=0)
            if setting in self.settings
            else 0
        )


def table(text: str) -> list[Row]:
    rows = []
    for line in text.splitlines():
        cells = re.split(r"\s*\|\s*", line.strip())[1:-1]
        if len(cells) != 5 or cells[0] in ("recipes", "---"):
            continue
        names, settings, paper, here, _ = (tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells)
        said = (NOT_STATED,) if cells[2] == "not stated" else tuple(map(value_of, paper))
        rows.append(Row(names, settings, said, tuple(map(value_of, here)), line))
    return rows


def value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def complaints(found: Found, rows: list[Row]) -> list[str]:
    """What is wrong with the table: departures without a row, rows without a departure, other
    values.
    """
    wrong, covered = [], {row.line: list[tuple[str, str]]() for row in rows}
    for (name, setting), values in found.items():
        row = max(rows, key=lambda row: row.fit(name, setting))
        if row.fit(name, setting):
            covered[row.line].append((name, setting))
        else:
            wrong.append(f"no row: {name}, {setting}: {values[0]} by the paper, {values[1]} here")
    for row in rows:
        if not row.settings:
            continue
        both = [found[key] for key in covered[row.line]]
        for column, said, true in (
            ("paper", row.paper, [p for p, _ in both]),
            ("here", row.here, [h for _, h in both]),
        ):
            if sorted(map(repr, said)) != sorted({repr(value) for value in true}):
                wrong.append(
                    f"{column}: {sorted({repr(value) for value in true})} in truth, of {row.line}"
                )
        unused = [
            p for p in row.names if not any(fnmatchcase(name, p) for name, _ in covered[row.line])
        ]
        wrong += [f"no departure of {pattern}: {row.line}" for pattern in unused]
    return wrong


@pytest.fixture(scope="module")
def recipes() -> dict[str, RunConfig]:
    return {name: make() for name, make in RECIPES.items()}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return table((DOCS / "departures.md").read_text())


def test_every_departure_of_a_recipe_stands_in_the_table_with_both_values(
    recipes: dict[str, RunConfig], rows: list[Row]
) -> None:
    assert complaints(differences(recipes)[0], rows) == []


def test_the_papers_have_a_word_on_every_setting_that_a_recipe_changes(
    recipes: dict[str, RunConfig],
) -> None:
    assert differences(recipes)[1] == []


def test_a_changed_recipe_a_changed_paper_and_a_changed_table_are_found(
    recipes: dict[str, RunConfig], rows: list[Row]
) -> None:
    base = recipes["vip.base"]
    rate = replace(base, optim=replace(base.optim, learning_rate=3.2e-4))
    heads = replace(
        base, model=replace(base.model, encoder=replace(base.model.encoder, num_heads=8))
    )
    fewer = replace(base, privacy=replace(base.privacy, dataset_size=233_000_000))
    for config, setting in (
        (rate, "optim.learning_rate"),
        (heads, "model.encoder.num_heads"),
        (fewer, "privacy.dataset_size"),
    ):
        wrong = complaints(differences({**recipes, "vip.base": config})[0], rows)
        assert len(wrong) == 1 and wrong[0].startswith(f"no row: vip.base, {setting}: ")
    eps = recipes["transfer.vit_b16"]
    other = replace(eps, optim=replace(eps.optim, eps=1e-6))
    assert any(
        "`optim.eps`" in line
        for line in complaints(differences({**recipes, "transfer.vit_b16": other})[0], rows)
    )
    unheard = replace(base, optim=replace(base.optim, global_clip=1.0))
    assert differences({"vip.base": unheard})[1] == ["vip.base: optim.global_clip = 1.0"]
    found = differences(recipes)[0]
    for row in [row for row in rows if row.settings][::7]:
        less = [other for other in rows if other is not row]
        assert complaints(found, less), f"a deleted row is missed: {row.line}"
        assert complaints(found, [*less, replace(row, here=("else",))]) and complaints(
            found, [*less, replace(row, paper=("else",))]
        )


def test_rows_and_papers_name_what_exists(recipes: dict[str, RunConfig], rows: list[Row]) -> None:
    names = {*recipes, *PROTOCOLS, *COMMANDS}
    assert len(rows) > 60
    for row in rows:
        assert all(any(fnmatchcase(name, pattern) for name in names) for pattern in row.names), (
            row.line
        )
    known = {path for config in recipes.values() for path in ours(config)} | {
        path for own in PROTOCOLS.values() for path in own
    }
    for section in PAPERS["of"]:
        paths = {path for path, _ in leaves(section)} - {"recipes", "partial", *COUNTED}
        assert paths <= known, paths - known
        assert all(
            any(fnmatchcase(name, pattern) for name in names) for pattern in section["recipes"]
        ), section["recipes"]


def test_there_is_one_list_of_departures() -> None:
    sources = [*(DOCS.parent / "src").rglob("*.py"), *DOCS.glob("*.md")]
    listed = [
        path
        for path in sources
        if re.search(r"\bDepartures?:|^#+ Departures", path.read_text(), re.MULTILINE)
    ]
    assert [path.name for path in listed] == ["departures.md"]
