"""A private classifier of handwritten digits on features that need no training: `dpvision adapt`, from Python."""

import io
from dataclasses import replace
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

from dpvision.adapt.session import adapt, new_head_session
from dpvision.config import FrozenEncoderConfig, HeadConfig
from dpvision.data.importer import import_samples
from dpvision.data.sources import Sample
from dpvision.eval.probes.own_head import score_own_head
from dpvision.recipes import RECIPES


def png(pixels):
    Image.fromarray((pixels * 15.9).astype("uint8")).convert("RGB").save(file := io.BytesIO(), "PNG")
    return file.getvalue()


HERE = Path(__file__).parent
digits = load_digits()
samples = [Sample(str(i), png(x), {"label": str(y)}) for i, (x, y) in enumerate(zip(digits.images, digits.target, strict=True))]
private = import_samples(samples[:1500], HERE / "stores/digits")
public = import_samples(samples[1500:], HERE / "stores/digits-test", public=True)

config = RECIPES["transfer.auto"]()
config = replace(
    config,
    privacy=replace(config.privacy, dataset_size=1500, expected_batch_size=1500, target_epsilon=3.0),
    model=HeadConfig(encoder=FrozenEncoderConfig(spec="hog", image_size=16), num_classes=10),
    data=replace(config.data, store=str(private.path)),
)
with new_head_session(config, HERE / "runs/digits") as session:
    adapt(session)
    epsilon = session.plan.spent(session.run.ledger.steps).epsilon
score = score_own_head(HERE / "runs/digits", public)[0]
print(f"accuracy {score.value:.1%} at epsilon {epsilon:.2f} by {session.prepared.model.head}: {session.prepared.model.reason}")
