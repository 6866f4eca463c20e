"""A private classifier of handwritten digits on features that need no training: `dpvision adapt`,
from Python.
"""

import io
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

from dpvision.adapt.session import adapt, new_head_session
from dpvision.config.resolve import resolve
from dpvision.data.importer import import_samples
from dpvision.data.sources import Sample
from dpvision.eval.probes.own_head import score_own_head
from dpvision.recipes import RECIPES


def png(pixels):
    Image.fromarray((pixels * 15.9).astype("uint8")).convert("RGB").save(
        file := io.BytesIO(), "PNG"
    )
    return file.getvalue()


HERE = Path(__file__).parent
digits = load_digits()
samples = [
    Sample(str(i), png(x), {"label": str(y)})
    for i, (x, y) in enumerate(zip(digits.images, digits.target, strict=True))
]
private = import_samples(samples[:1500], HERE / "stores/digits")
public = import_samples(samples[1500:], HERE / "stores/digits-test", public=True)

asked = {
    "data.store": str(private.path),
    "privacy.dataset_size": 1500,
    "epsilon": 3.0,
    "model.num_classes": 10,
}
asked |= {"model.encoder.spec": "hog", "model.encoder.image_size": 16}
config = resolve(RECIPES["transfer.auto"](), asked)
with new_head_session(config, HERE / "runs/digits") as session:
    adapt(session)
    epsilon = session.plan.spent(session.run.ledger.steps).epsilon
score = score_own_head(HERE / "runs/digits", public)[0]
print(
    f"accuracy {score.value:.1%} at epsilon {epsilon:.2f} by {session.prepared.model.head}: "
    f"{session.prepared.model.choice.reason}"
)
