"""An unmodified timm transformer, dicts, a random transform, and a run that can be resumed."""

from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from dpvision import PrivacyConfig, private_loop

x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
x = x.float().view(-1, 1, 8, 8) / 8 - 1
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).tolist()
net = timm.models.VisionTransformer(
    8, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=2, num_heads=4
)
optimizer = torch.optim.Adam(net.parameters(), lr=0.002)


class Digits(torch.utils.data.Dataset):
    def __len__(self):
        return 1500

    def __getitem__(self, i):  # torch's global random numbers, which the loop keys by record
        return {"image": x[order[i]] + 0.1 * torch.randn(1, 8, 8), "label": y[order[i]]}


def loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["label"], reduction="none")


config = PrivacyConfig(dataset_size=1500, expected_batch_size=500, steps=80, target_epsilon=8.0)
stores = Path(__file__).parent / "stores"
saved = stores / "saved.pt"
if resume := saved.exists():
    state = torch.load(saved, weights_only=True)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
with private_loop(net, Digits(), loss, config, stores / "digits", run="vit", resume=resume) as loop:
    for step in loop:
        step.backward()
        optimizer.step()
        if step.number % 20 == 19:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, saved)
accuracy = (net.eval()(x[order[1500:]]).argmax(1) == y[order[1500:]]).double().mean()
print(f"accuracy {accuracy:.1%} at epsilon {loop.spent().epsilon:.2f}")
