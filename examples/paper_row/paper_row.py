"""One row of a paper in small: DP transfer's one full-batch step from a head of zeros against many
(Mehta et al. 2022, figure 1b).
"""

import io
from dataclasses import replace
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

from dpvision.adapt.session import adapt, new_head_session
from dpvision.config import FrozenEncoderConfig
from dpvision.data.importer import import_samples
from dpvision.data.sources import Sample
from dpvision.eval.probes.own_head import score_own_head
from dpvision.recipes import RECIPES

HERE = Path(__file__).parent


def png(pixels):
    Image.fromarray((pixels * 15.9).astype("uint8")).convert("RGB").save(
        file := io.BytesIO(), "PNG"
    )
    return file.getvalue()


digits = load_digits()
samples = [
    Sample(str(i), png(x), {"label": str(y)})
    for i, (x, y) in enumerate(zip(digits.images, digits.target, strict=True))
]
private = import_samples(samples[:1500], HERE / "stores/digits")
public = import_samples(samples[1500:], HERE / "stores/digits-test", public=True)
for head in ("one_step", "many_steps"):
    for epsilon in (0.5, 1.0, 2.0, 8.0):
        config, root = RECIPES[f"transfer.{head}"](), HERE / f"runs/{head}-{epsilon:g}"
        privacy = replace(
            config.privacy, dataset_size=1500, expected_batch_size=1500, target_epsilon=epsilon
        )
        model = replace(
            config.model, encoder=FrozenEncoderConfig(spec="hog", image_size=16), num_classes=10
        )
        with new_head_session(
            replace(
                config,
                privacy=privacy,
                model=model,
                data=replace(config.data, store=str(private.path)),
            ),
            root,
        ) as s:
            adapt(s)
            spent = s.plan.spent(s.run.ledger.steps).epsilon
        score = score_own_head(root, public)[0]
        print(
            f"{head}: accuracy {score.value:.1%} ({score.low:.1%} to {score.high:.1%}) at "
            f"epsilon {spent:.2f}"
        )
