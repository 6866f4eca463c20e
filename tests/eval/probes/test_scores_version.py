"""A change of a protocol's scores must raise ``SCORES_VERSION``: scores that were kept before are
known by it alone.
"""

import secrets

import numpy as np
import pytest

from dpvision.data.store import Store
from dpvision.encoders.feature_file import collect_features
from dpvision.eval.metric import Scoring
from dpvision.eval.probes.cache import SCORES_VERSION
from dpvision.eval.probes.protocol import Subject, Task
from dpvision.eval.probes.protocols import make_protocols
from dpvision.eval.probes.records import LabelledFeatures
from dpvision.eval.probes.settings import (
    FewShotProbeSettings,
    FineTuneSettings,
    LarsSettings,
    ProtocolSettings,
)

from ..labelled import vit_encoder, write_digits

SETTINGS = ProtocolSettings(
    (4,),
    LarsSettings(blrs=(2.0,), trust=0.02, batch_size=64, epochs=20, warmup_epochs=2, augment=False),
    FineTuneSettings(
        draws=1,
        epochs=50,
        warmup_epochs=2,
        learning_rates=(3e-3,),
        crop_scale=(0.9, 1.0),
        auto_augment=False,
    ),
    FewShotProbeSettings(draws=4),
)
GOLDEN: dict[int, dict[str, tuple[float, float, float, float]]] = {
    1: {
        "knn": (0.2267, 0.1829, 0.2773, 0.1067),
        "linear": (0.4867, 0.4306, 0.5430, 0.1067),
        "ridge": (0.6000, 0.5436, 0.6538, 0.1067),
        "few_shot_probe": (0.2742, 0.2366, 0.3118, 0.1067),
        "few_shot_dpcap": (0.2383, 0.2070, 0.2697, 0.1067),
        "linear_lars": (0.3867, 0.3333, 0.4429, 0.1067),
        "fine_tune": (0.2467, 0.2013, 0.2984, 0.1067),
    }
}
"""Version -> protocol -> value, low, high and chance. Add an entry, and do not change one: files of
old versions are still in stores.
"""


def features(store: Store) -> LabelledFeatures:
    encoder = vit_encoder()
    x, label_N, row_N = collect_features({"encoder": encoder.poolings}, store, encoder.data, 8)
    return LabelledFeatures(x, label_N, np.arange(len(label_N)), row_N.numpy())


@pytest.fixture(scope="module")
def subject_and_task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Subject, Task]:
    folder = tmp_path_factory.mktemp("version")
    with pytest.MonkeyPatch.context() as patch:  # crops and flips follow from records' keyed ids
        patch.setattr(secrets, "token_bytes", bytes)
        train = write_digits(folder / "train", 0, 200)
        test = write_digits(folder / "test", 1000, 1300)
    subject = Subject(vit_encoder(), "vit", features=(features(train), features(test)))
    rows = [(store, np.arange(store.num_records)) for store in (train, test)]
    return subject, Task(*rows, Scoring(visibility="public"), workers=1)


@pytest.mark.parametrize(
    "name",
    sorted(GOLDEN[SCORES_VERSION]),
)
def test_protocols_have_the_scores_of_this_version(
    name: str, subject_and_task: tuple[Subject, Task]
) -> None:
    [protocol] = make_protocols([name], SETTINGS)
    score = protocol.run(*subject_and_task)[0]
    figures = (score.value, score.low, score.high, score.chance)
    close = 0.04 if protocol.needs == "images" else 0.012  # a network's last bits differ by machine
    assert figures == pytest.approx(GOLDEN[SCORES_VERSION][name], abs=close), (
        "scores changed: raise SCORES_VERSION, and add the new figures to GOLDEN"
    )
