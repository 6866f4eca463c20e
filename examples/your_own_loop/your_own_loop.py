"""Your own model and loop with dpvision's guarantee: scikit-learn's handwritten digits, on a CPU,
in under a minute.
"""

import json
from pathlib import Path
from uuid import uuid4

import torch
from sklearn.datasets import load_digits

from dpvision import PrivacyConfig, clipped_sum, make_plan, privatize
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.sampling import derive_rng
from dpvision.privacy.stream import new_key

store = (
    Path(__file__).parent / "stores/digits"
)  # its random id names the data set to the ledger; `dpvision data import` gives one, too
if not store.exists():
    store.mkdir(parents=True)
    (store / "store.json").write_text(json.dumps({"store_id": uuid4().hex}))
x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
x, order = (
    x.float().view(-1, 1, 1, 8, 8) / 16,
    torch.randperm(len(x), generator=torch.Generator().manual_seed(0)),
)  # B V C H W
train, test = order[:1500], order[1500:]
net = torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
)
optimizer, ce = (
    torch.optim.Adam(net.parameters(), lr=0.02),
    torch.nn.CrossEntropyLoss(reduction="none"),
)
plan = make_plan(
    PrivacyConfig(
        dataset_size=1500, expected_batch_size=500, steps=150, target_epsilon=3.0, max_grad_norm=1.0
    )
)
secret = new_key()  # new at every start and never stored
with Ledger.open(store, uuid4().hex[:8], plan, resume=False) as ledger:
    while ledger.steps < plan.steps:
        step = ledger.append()  # charged before the deed
        i = train[plan.draw(step, len(train), derive_rng(secret, step))]
        batch, key = (
            Batch(record_id_B=i, valid_B=i >= 0, image_BVCHW=x[i], label_B=y[i]),
            StepKey(0, step),
        )
        total = clipped_sum(
            lambda m, b, _: ce(m(b.image_BVCHW), b.label_B),
            net,
            batch,
            key,
            max_grad_norm=plan.max_grad_norm,
            rows=300,
        )
        for name, gradient in privatize(total, plan, step, secret).grads.items():
            net.get_parameter(name).grad = gradient
        optimizer.step()
    print(
        f"accuracy {(net(x[test]).argmax(1) == y[test]).double().mean():.1%} at epsilon "
        f"{plan.spent(ledger.steps).epsilon:.2f}"
    )
