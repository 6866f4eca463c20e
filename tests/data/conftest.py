import pytest

from dpvision.data.import_labels import LabelRule
from dpvision.data.importer import import_samples
from dpvision.data.person_names import PersonRule
from dpvision.data.sources import Sample
from dpvision.data.store import Store

from .image_files import encode, noise, png


@pytest.fixture
def store(tmp_path) -> Store:
    """40 records of several sizes and kinds, 4 classes, 2 captions each, persons of 1 to 6 records
    and 5 records without a person.
    """
    samples = []
    for i in range(40):
        image = (
            png(i, 20 + i % 7, 24 + i % 5) if i % 2 else encode(noise(i, 33, 20 + i % 9), "JPEG")
        )
        person = {"person": f"p{int((i * 0.8) ** 0.7)}"} if i >= 5 else {}
        samples.append(
            Sample(
                f"k{i}",
                image,
                {"label": f"class {i % 4}", "captions": [f"one {i}", f"two {i}"], **person},
            )
        )
    classes = LabelRule(classes=tuple(f"class {k}" for k in range(4)))
    return import_samples(
        samples,
        tmp_path / "store",
        people=PersonRule("person", unmatched="own-person"),
        labels=classes,
    )
