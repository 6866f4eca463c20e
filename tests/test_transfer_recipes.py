"""DP transfer's recipes against the paper, whose numbers stand here once more; and, where its text
is at hand, against that.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dpvision.config import ClassifierConfig, TimmConfig
from dpvision.models import count_parameters
from dpvision.privacy.plan import make_plan
from dpvision.recipes import RECIPES, TABLE_ROWS, transfer, transfer_micro, transfer_tables

PAPER = Path(__file__).resolve().parents[2] / "shared" / "papers" / "dp-transfer.txt"
DOC = Path(__file__).resolve().parents[1] / "docs" / "transfer.md"
RECORDS = 1_281_167
# model -> (timm's name, parameters without a head, from BiT's and ViT's dimensions)
MODELS = {
    "vit_b16": "vit_base_patch16_224",
    "vit_l16": "vit_large_patch16_224",
    "vit_h14": "vit_huge_patch14_224",
    "vit_h14_4b": "vit_huge_patch14_224",
    "r50x4": "resnetv2_50x4_bit",
    "r152x4": "resnetv2_152x4_bit",
}
# Table 1 has no whole ResNet-50x4; Table 3 has batch 2^20 alone.
MOMENTUM = ("vit_b16", "vit_b16_last", "r50x4_last")
LAMB = ("vit_b16", "vit_b16_last", "r50x4", "r50x4_last")
LARGE = ("r152x4", "vit_l16", "vit_h14", "vit_h14_4b")
STEPS = {15: 391, 16: 195, 17: 98, 18: 49, 19: 24, 20: 12}
WARMUP = {15: 10, 16: 5, 17: 2, 18: 1, 19: 1, 20: 0}


def rows() -> dict[str, tuple[str, bool, bool, bool, int]]:
    """Name -> (model, last layer, momentum, private, exponent of the batch) of every number of
    Tables 1, 2, 3 and 9 but "Best".
    """
    found = {}

    def add(model: str, momentum: bool, private: bool, exponent: int) -> None:
        name = (
            f"transfer.{model}"
            + ("_momentum" if momentum else "")
            + (f"_b{exponent}" if exponent < 20 else "")
        )
        base = model.removesuffix("_last")
        found[name + ("" if private else "_non_private")] = (
            base,
            base != model,
            momentum,
            private,
            exponent,
        )

    for models, momentum in ((MOMENTUM, True), (LAMB, False)):
        for model in models:
            for private in (True, False):
                for exponent in (17, 18, 19, 20):
                    add(model, momentum, private, exponent)
    for model in LARGE:
        for last in ("", "_last"):
            for private in (True, False):
                add(model + last, False, private, 20)
    for exponent in (15, 16):
        add("vit_b16", True, True, exponent)
    return found


ROWS = rows()


def test_there_is_a_recipe_for_every_number_of_the_tables() -> None:
    best = {f"transfer.{model}{last}_best" for model in MODELS for last in ("", "_last")}
    changes = {
        f"transfer.vit_h14_4b_last_{c}"
        for c in (
            "adam",
            "momentum",
            "lecun",
            "centre",
            "1_epoch",
            "clip10",
            "clip01",
            "512px",
            "256px",
        )
    }
    pretraining = {f"transfer.pretrain_{model}" for model in MODELS}
    assert len(ROWS) == 24 + 32 + 16 + 2 and len(best) == 12
    made = {*transfer.RECIPES, *transfer_tables.VARIATIONS, *transfer_tables.PRETRAINING}
    assert made == {*ROWS, *best, *changes, *pretraining} and made <= set(RECIPES)
    assert set(TABLE_ROWS) == made - set(transfer.RECIPES) - pretraining, "what lists leave out"


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_the_papers_settings(name: str) -> None:
    """At most 10 epochs, a quarter of one for warm-up, clip norm 1, epsilon 10 at delta 1e-6, 384
    px of 448; Tables 6 and 7.
    """
    model, last, momentum, private, exponent = ROWS[name]
    config = RECIPES[name]()
    p, o, m = config.privacy, config.optim, config.model
    assert (p.dataset_size, p.expected_batch_size, p.steps, p.delta, p.sampling) == (
        RECORDS,
        2**exponent,
        STEPS[exponent],
        1e-6,
        "poisson",
    )
    assert (
        abs(p.steps - 10 * RECORDS / 2**exponent) <= 0.5
        and abs(WARMUP[exponent] - 0.25 * RECORDS / 2**exponent) <= 0.5
    )
    if private:
        assert (p.guarantee, p.target_epsilon, p.max_grad_norm, o.global_clip) == (
            "dp",
            10.0,
            1.0,
            None,
        )
    else:
        assert (p.guarantee, p.target_epsilon, p.max_grad_norm, o.global_clip) == (
            "none",
            None,
            None,
            1.0,
        )
    assert o.warmup_steps == WARMUP[exponent] and o.weight_decay == 0 and o.decay_horizon == 1
    if momentum:
        assert (o.name, o.schedule, o.momentum, o.pretrained_multiplier) == (
            "sgd",
            "cosine",
            0.9,
            1.0,
        )
        assert o.learning_rate in (0.03, 0.06, 0.1, 0.4, 1.6, 6.4, 25.6, 102.4)
    else:
        assert (o.name, o.schedule) == ("lamb", "linear") and o.learning_rate in (
            1e-4,
            5e-4,
            1e-3,
            5e-3,
            0.01,
            0.05,
            0.1,
            0.5,
            1.0,
        )
        assert o.pretrained_multiplier in (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    assert isinstance(m, ClassifierConfig) and m.encoder == TimmConfig(
        name=MODELS[model], image_size=384
    )
    assert (m.tuned, m.num_classes, m.loss, m.pooling) == (
        "head" if last else "whole",
        1000,
        "sigmoid",
        "own",
    )
    assert (m.head_init, m.head_bias, m.train_head_bias) == ("zero", -10.0, False)
    assert (
        config.data.resize,
        config.data.crop,
        config.data.horizontal_flip,
        config.data.views,
    ) == (448, "random", True, 1)
    assert config.init_from == f"runs/transfer.pretrain_{model}"


@pytest.mark.parametrize("model", MODELS)
def test_the_best_column_is_momentum_at_batch_512_without_privacy(model: str) -> None:
    for last in ("", "_last"):
        config, base = (
            RECIPES[f"transfer.{model}{last}_best"](),
            RECIPES[f"transfer.{model}{last}"](),
        )
        assert (
            config.privacy.expected_batch_size,
            config.privacy.guarantee,
            config.optim.name,
        ) == (512, "none", "sgd")
        assert (config.privacy.steps, config.optim.warmup_steps, config.optim.schedule) == (
            20_000,
            500,
            "cosine",
        )
        assert config.model == base.model and config.data == base.data


def test_table_4_changes_one_thing_at_a_time() -> None:
    base = RECIPES["transfer.vit_h14_4b_last"]()

    def of(change: str):
        return RECIPES[f"transfer.vit_h14_4b_last_{change}"]()

    assert (
        of("adam").optim.name == "adamw"
        and of("momentum").optim.name == "sgd"
        and of("lecun").model.head_init == "lecun"
    )
    assert (
        of("centre").data.crop == "centre"
        and of("1_epoch").privacy.steps == round(RECORDS / 2**20) == 1
    )
    assert of("clip10").privacy.max_grad_norm == 10 and of("clip01").privacy.max_grad_norm == 0.1
    assert (
        of("512px").model.encoder.image_size,
        of("256px").model.encoder.image_size,
        of("256px").data.resize,
    ) == (512, 256, 384)
    same = ("privacy", "model", "data", "optim")
    for row in transfer_tables.TABLE_4.values():
        assert row.of() == base and sum(bool(getattr(row, part)) for part in same) == (
            2 if "encoder" in row.model else 1
        )


@pytest.mark.parametrize(
    ("model", "epochs", "rate", "records", "classes"),
    [
        ("vit_b16", 7, 8e-4, 303e6, 18_000),
        ("vit_l16", 14, 4e-4, 303e6, 18_000),
        ("vit_h14", 14, 3e-4, 303e6, 18_000),
        ("vit_h14_4b", 1, 3e-4, 4e9, 29_500),
        ("r50x4", 7, 1e-3, 303e6, 18_000),
        ("r152x4", 7, 6e-4, 303e6, 18_000),
    ],
)
def test_pre_training_is_table_5(
    model: str, epochs: int, rate: float, records: float, classes: int
) -> None:
    config = RECIPES[f"transfer.pretrain_{model}"]()
    p, o = config.privacy, config.optim
    assert (p.guarantee, p.expected_batch_size, p.dataset_size, p.max_grad_norm) == (
        "none",
        4096,
        records,
        None,
    )
    assert p.steps == round(epochs * records / 4096)
    assert (o.name, o.learning_rate, o.betas, o.weight_decay, o.schedule) == (
        "adamw",
        rate,
        (0.9, 0.999),
        0.1,
        "linear",
    )
    assert (o.warmup_steps, o.global_clip, config.init_from) == (10_000, 1.0, None)
    assert config.model.encoder == TimmConfig(name=MODELS[model], image_size=224)
    assert (config.model.num_classes, config.model.loss, config.model.tuned) == (
        classes,
        "sigmoid",
        "whole",
    )


def test_scores_in_the_docstrings_are_those_of_the_papers_text() -> None:
    """Its tables have every number three times over, as in 81.781.781.7, and "Best" once."""
    if not PAPER.exists():
        pytest.skip("the paper's text is not here")
    text = PAPER.read_text()
    table_1 = text[text.index("4.1 DP-SGD with Large") : text.index("4.2 Optimization")]
    table_2 = text[text.index("4.2 Optimization") : text.index("4.3 Scaling Analysis")]
    table_3 = text[text.index("4.3 Scaling Analysis") : text.index("5 Influence of other")]
    table_9 = text[text.index("E.4 Smaller batch sizes") :]

    def numbers(table: str) -> list[tuple[str | None, list[str]]]:
        found = []
        for line in table.splitlines():
            if re.match(r"(ViT-|ResNet\d+x4|Last layer )", line) and re.search(
                r"(\d+\.\d+)\1\1", line
            ):
                best = re.search(r"(?:Full|Last layer) (\d+\.\d) ", line)
                found.append(
                    (best and best.group(1), [n for n in re.findall(r"(\d+\.\d+?)\1\1", line)])
                )
        return found

    def score(name: str) -> str:
        match = re.search(r"([\d.]+)%", RECIPES[name].__doc__ or "")
        assert match, name
        return match.group(1)

    for table, models, momentum in ((table_1, MOMENTUM, "_momentum"), (table_2, LAMB, "")):
        lines = numbers(table)
        assert len(lines) == len(models)
        for model, (best, scores) in zip(models, lines, strict=True):
            names = [
                f"transfer.{model}{momentum}" + b + n
                for n in ("_non_private", "")
                for b in ("_b17", "_b18", "_b19", "")
            ]
            assert [score(name) for name in names] == scores, model
            if best:
                assert score(f"transfer.{model}_best") == best
    lines = numbers(table_3)
    names = [f"transfer.{model}{last}" for model in LARGE for last in ("", "_last")]
    assert [[score(f"{name}_non_private"), score(name)] for name in names] == [
        scores for _, scores in lines
    ]
    assert [score(f"{name}_best") for name in names] == [best for best, _ in lines]
    assert [score(f"transfer.vit_b16_momentum_b{e}") for e in (15, 16)] == numbers(table_9)[-1][1]


@pytest.mark.parametrize(
    "exponent",
    [20, pytest.param(17, marks=pytest.mark.slow), pytest.param(15, marks=pytest.mark.slow)],
)
def test_the_noise_gives_epsilon_10_and_the_papers_accountant_would_say_more(exponent: int) -> None:
    name = "transfer.vit_b16" if exponent == 20 else f"transfer.vit_b16_momentum_b{exponent}"
    plan = make_plan(replace(RECIPES[name]().privacy, delta_for=None))
    assert plan.delta == 1e-6 and plan.epsilon is not None and 9.98 < plan.epsilon <= 10
    assert plan.epsilon_rdp is not None and 10 < plan.epsilon_rdp < 12


def test_every_micro_way_has_one_epsilon_and_one_number_of_sample_gradients() -> None:
    names = ["transfer.micro", *transfer_micro.VARIATIONS]
    assert len({RECIPES[name]().privacy for name in names}) == 1
    counts = {name: count_parameters(RECIPES[name]().model) for name in names}
    head = 128 * 10 + 10
    assert counts["transfer.micro_head"] == head
    assert counts["transfer.micro_lora"] == head + 4 * 4 * (4 + 2) * 128
    assert counts["transfer.micro_film"] == head + 2 * 128 * (2 * 4 + 1)
    assert counts["transfer.micro_biases"] == head + 4 * 11 * 128 + 2 * 128
    assert counts["transfer.micro_last_block"] == head + 12 * 128**2 + 13 * 128 + 2 * 128


def page_scores() -> dict[str, str]:
    """Recipe -> score as the page's tables have it: a row's name, a column's suffix, and
    "with/without privacy" in a cell.
    """
    found: dict[str, str] = {}
    suffixes: list[str] = []
    for line in DOC.read_text().splitlines():
        first, *cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if first == "recipe":
            suffixes = cells if all(re.fullmatch(r"(_\w+)?", cell) for cell in cells) else []
        elif first.startswith("transfer.") and suffixes:
            for suffix, cell in zip(suffixes, cells, strict=True):
                scores = [score for score in cell.split("/") if score]
                found |= dict(
                    zip((first + suffix, first + suffix + "_non_private"), scores, strict=False)
                )
    return found


def test_the_page_has_every_figure_under_its_recipe() -> None:
    found = page_scores()
    assert {*found} == {*transfer.RECIPES, *TABLE_ROWS} - set(transfer_tables.PRETRAINING)
    for name, score in found.items():
        said = re.search(r"(?:([\d.]+)%|chance)", RECIPES[name].__doc__ or "")
        assert said and (said.group(1) or said.group(0)) == score, name


def test_the_page_names_the_other_recipes() -> None:
    text = DOC.read_text()
    assert [
        name
        for name in (*transfer_tables.PRETRAINING, *transfer_micro.VARIATIONS)
        if f"`{name}`" not in text
    ] == []
