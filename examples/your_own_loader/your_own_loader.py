"""For other people's loops: an unmodified timm transformer and torch's own DataLoader, trained with
dpvision's guarantee.
"""

from pathlib import Path
from uuid import uuid4

import timm
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from dpvision import PrivacyConfig, make_plan, privatize
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import ClippedSum, clipped_sum
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.sampling import derive_rng
from dpvision.privacy.stream import new_key

if not (
    store := Path(__file__).parent / "stores/digits"
).exists():  # a random id names the data set to the ledger
    store.mkdir(parents=True)
    (store / "store.json").write_text(f'{{"store_id": "{uuid4().hex}"}}')
x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
x, order = (
    x.float().view(-1, 1, 8, 8) / 8 - 1,
    torch.randperm(len(x), generator=torch.Generator().manual_seed(0)),
)  # B C H W
loader, test = (
    DataLoader(
        TensorDataset(x[order[:1500]], y[order[:1500]], order[:1500]), batch_sampler=(batches := [])
    ),
    order[1500:],
)
net = timm.models.VisionTransformer(
    8, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=2, num_heads=4
)
optimizer, ce, secret = (
    torch.optim.Adam(net.parameters(), lr=0.002),
    torch.nn.CrossEntropyLoss(reduction="none"),
    new_key(),
)
plan = make_plan(
    PrivacyConfig(
        dataset_size=1500, expected_batch_size=500, steps=80, target_epsilon=8.0, max_grad_norm=1.0
    )
)
with Ledger.open(
    store, uuid4().hex[:8], plan, resume=False
) as ledger:  # the secret key is new at every start and never stored
    while ledger.steps < plan.steps:
        key, total = (
            StepKey(0, ledger.append()),
            ClippedSum.zeros(net, C := plan.max_grad_norm),
        )  # charged before the deed
        batches[:] = filter(
            len, [plan.draw(key.step, len(loader.dataset), derive_rng(secret, key.step))]
        )  # split below, by hash
        for image, label, ids in loader:  # no turn for an empty draw: that step is noise alone
            batch = Batch(
                record_id_B=ids, valid_B=ids >= 0, image_BVCHW=image[:, None], label_B=label
            )
            total += clipped_sum(
                lambda m, b, _: ce(m(b.image_BVCHW[:, 0]), b.label_B),
                net,
                batch,
                key,
                max_grad_norm=C,
                rows=128,
            )
        for name, gradient in privatize(total, plan, key.step, secret).grads.items():
            net.get_parameter(name).grad = gradient
        optimizer.step()
print(
    f"accuracy {(net.eval()(x[test]).argmax(1) == y[test]).double().mean():.1%} at epsilon "
    f"{plan.spent(ledger.steps).epsilon:.2f}"
)
