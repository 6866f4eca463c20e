"""Class numbers that follow from private label names: one more image with a class of its own moved
every contribution.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from dpvision.cli import main
from dpvision.config import ClassifierConfig, DataConfig, ViTConfig
from dpvision.data.batch import Batch
from dpvision.data.import_labels import LabelRule, read_classes
from dpvision.data.importer import import_source
from dpvision.data.keys import StepKey
from dpvision.data.loader import image_batches, physical_batches
from dpvision.data.open import open_store
from dpvision.data.split import split_store
from dpvision.data.store import Store
from dpvision.dp.clip import clipped_sum
from dpvision.errors import DataError
from dpvision.models import make_model
from dpvision.runs.store_checks import check_labels
from dpvision.train.objectives import classification_losses

C, NUM, CLASSES = 0.1, 105, ("beech", "birch", "oak")
DECLARED = LabelRule(classes=CLASSES)


def write_images(folder: Path, extra: str | None = None) -> Path:
    """``NUM`` images in class folders; one more in a folder of its own."""
    rng = np.random.default_rng(0)
    for i in range(NUM + (extra is not None)):
        name = extra if i == NUM else CLASSES[1 + (i > 0)]
        (folder / str(name)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(200, 256, (8, 8, 3), dtype=np.uint8)).save(
            folder / str(name) / f"{i}.png"
        )
    return folder


def losses(model: nn.Module, batch: Batch, key: StepKey) -> torch.Tensor:
    return F.cross_entropy(model(batch.image_BVCHW.flatten(1)), batch.label_B, reduction="none")


def sum_of(store: Store) -> torch.Tensor:
    """Clipped sum of a linear classifier over all labelled records, in the order of the store."""
    (x_BCHW, _, label_B) = next(
        image_batches(store, None, 8, DataConfig(), batch_size=1000, workers=1)
    )
    known_B = label_B >= 0
    model = nn.Linear(192, 4)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    num = int(
        known_B.sum()
    )  # ids that both stores give the same record, so that both sums are formed in one order
    batch = Batch(
        torch.arange(num),
        torch.ones(num, dtype=torch.bool),
        x_BCHW[known_B][:, None],
        None,
        label_B[known_B],
    )
    total = clipped_sum(losses, model, batch, StepKey(0, 0), max_grad_norm=C)
    return torch.cat([value.double().flatten() for _, value in sorted(total.grads.items())])


def moved(folder: Path, extra: str, **options: object) -> float:
    """By how many C one more image of class ``extra`` moves the sum."""
    one = import_source(write_images(folder / "a"), folder / "one", **options)  # type: ignore[arg-type]
    two = import_source(write_images(folder / "b", extra), folder / "two", **options)  # type: ignore[arg-type]
    return float((sum_of(two) - sum_of(one)).norm()) / C


def test_one_more_image_moves_the_sum_by_its_own_contribution_only(tmp_path: Path) -> None:
    assert moved(tmp_path / "known", "beech", labels=DECLARED) <= 1.0001
    unlabelled = LabelRule(classes=CLASSES, unknown_classes="unlabelled")
    assert moved(tmp_path / "unknown", "ash", labels=unlabelled) == 0.0, (
        "an image of an unknown class contributes nothing"
    )


def test_names_in_a_private_store_are_refused_without_a_list(tmp_path: Path) -> None:
    """Numbered by the alphabet, an image of a class "ash" moved the sum by 167 C."""
    with pytest.raises(
        DataError, match=r"class names \('birch', 'oak'\) in a private store; .* --classes FILE"
    ):
        moved(tmp_path, "ash")
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("extra", [None, "ash"])
def test_declared_numbers_are_those_of_the_list_whatever_else_there_is(
    tmp_path: Path, extra: str | None
) -> None:
    folder = write_images(tmp_path / "a", extra)
    if extra is not None:
        with pytest.raises(
            DataError,
            match=r"1 records of classes that are not declared \('ash'\); "
            r"expected the 3 declared ones",
        ):
            import_source(folder, tmp_path / "refused", labels=DECLARED)
    store = import_source(
        folder, tmp_path / "s", labels=LabelRule(classes=CLASSES, unknown_classes="unlabelled")
    )
    named = {
        store.record(i).key.split("/")[0]: store.record(i).labels for i in range(store.num_records)
    }
    assert named == {"birch": (1,), "oak": (2,)} | ({"ash": ()} if extra else {})
    assert store.label_names == list(CLASSES) and store.import_summary()[
        "classes_not_declared"
    ] == (extra is not None)
    half, _ = split_store(store.path, tmp_path / "half", tmp_path / "rest", 0.9)
    assert half.label_names == list(CLASSES) and half.meta["may_be_unlabelled"]


def test_all_kinds_of_sources_and_lists_keep_to_the_declared_classes(tmp_path: Path) -> None:
    """Parquet, a JSON field, several labels, and numbers that a source's own list names."""
    png = [p.read_bytes() for p in sorted(write_images(tmp_path / "a").rglob("*.png"))[:4]]
    source_names = {
        b"huggingface": json.dumps(
            {"info": {"features": {"label": {"names": ["oak", "ash", "birch"]}}}}
        ).encode()
    }
    tables = {
        "text": pa.table({"image": png, "label": ["oak", "birch", "ash", None]}),
        "numbers": pa.table(
            {"image": png, "label": [2, 0, 3, -1]}
        ),  # with a 0, so that numbers count from 0
        "named": pa.table({"image": png, "label": [0, 2, 1, -1]}).replace_schema_metadata(
            source_names
        ),
        "lists": pa.table({"image": png, "label": [["oak", "birch"], [], ["oak", "ash"], None]}),
    }
    for name, table in tables.items():
        pq.write_table(table, tmp_path / f"{name}.parquet")
        with pytest.raises(DataError, match="1 records of classes that are not declared"):
            import_source(tmp_path / f"{name}.parquet", tmp_path / "refused", labels=DECLARED)
        store = import_source(
            tmp_path / f"{name}.parquet",
            tmp_path / name,
            labels=LabelRule(classes=CLASSES, unknown_classes="unlabelled"),
        )
        labels = [store.record(i).labels for i in range(4)]
        second = (0,) if name == "numbers" else (1,)
        assert labels == ([(1, 2), (), (), ()] if name == "lists" else [(2,), second, (), ()]), name
        assert store.labelled.tolist() == [True, True, False, False]


def test_numbers_need_no_list_as_text_either(tmp_path: Path) -> None:
    """Folders 1 and 7 are classes 1 and 7; numbered by the alphabet they were 0 and 1, until an
    image of class 3 came.
    """
    folder = tmp_path / "a"
    for name in ("1", "7"):
        (folder / name).mkdir(parents=True)
        Image.fromarray(np.full((8, 8, 3), int(name), dtype=np.uint8)).save(folder / name / "x.png")
    store = import_source(folder, tmp_path / "s")
    assert store.labels.tolist() == [1, 7] and store.label_names is None


def test_a_record_without_a_class_adds_exactly_nothing_to_a_step(tmp_path: Path) -> None:
    store = import_source(
        write_images(tmp_path / "a", "ash"),
        tmp_path / "s",
        labels=LabelRule(classes=CLASSES, unknown_classes="unlabelled"),
    )
    unknown = np.flatnonzero(~store.labelled)
    assert len(unknown) == 1
    model = make_model(
        ClassifierConfig(
            encoder=ViTConfig(image_size=8, patch_size=4, depth=1, width=8, num_heads=2),
            num_classes=3,
        ),
        0,
    )
    nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))

    def grads(rows: np.ndarray) -> dict[str, torch.Tensor]:
        (batch,) = physical_batches(
            store, rows, StepKey(0, 0), DataConfig(), 8, physical_batch_size=8, workers=1
        )
        return clipped_sum(
            classification_losses, model, batch, StepKey(0, 0), max_grad_norm=C
        ).grads

    alone = grads(unknown)
    assert alone and all(not value.any() for value in alone.values())
    with_others, others = grads(np.concatenate([unknown, [3, 4, 5]])), grads(np.array([3, 4, 5]))
    assert any(value.any() for value in others.values())
    for name, value in others.items():
        torch.testing.assert_close(with_others[name], value, rtol=1e-5, atol=1e-7)


def test_records_without_a_class_train_only_with_the_operators_word(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "a", "ash")
    store = import_source(
        folder, tmp_path / "s", labels=LabelRule(classes=CLASSES, unknown_classes="unlabelled")
    )
    check_labels(store, np.arange(store.num_records), 3)
    store.meta["may_be_unlabelled"] = False
    with pytest.raises(DataError, match="1 of 106 records have no label"):
        check_labels(store, np.arange(store.num_records), 3)
    nothing = import_source(folder, tmp_path / "n", labels=LabelRule(unknown_classes="unlabelled"))
    with pytest.raises(DataError, match="106 of 106 records have no label"):
        check_labels(nothing, np.arange(nothing.num_records), 3)


def test_the_list_is_a_file_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, names = write_images(tmp_path / "a"), tmp_path / "classes.txt"
    assert main(["data", "import", str(folder), str(tmp_path / "s")]) == 2
    assert "--classes FILE" in capsys.readouterr().err
    names.write_text("\n".join(CLASSES) + "\n\n")
    assert main(["data", "import", str(folder), str(tmp_path / "s"), "--classes", str(names)]) == 0
    assert open_store(tmp_path / "s").label_names == list(CLASSES)
    (tmp_path / "classes.json").write_text(json.dumps(CLASSES))
    assert read_classes(tmp_path / "classes.json") == CLASSES
    for bad in ("", "[1, 2]", "oak\noak", "[\n"):
        names.write_text(bad)
        with pytest.raises(DataError, match="classes: "):
            read_classes(names)


def test_public_names_may_still_be_numbered_by_the_alphabet(tmp_path: Path) -> None:
    assert import_source(write_images(tmp_path / "a"), tmp_path / "s", public=True).label_names == [
        "birch",
        "oak",
    ]
