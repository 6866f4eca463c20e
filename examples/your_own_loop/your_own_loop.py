"""Your own model, data set, loss and optimizer with dpvision's guarantee, on handwritten digits."""

from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from dpvision import PrivacyConfig, private_loop

x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[:1500], order[1500:]
digits = TensorDataset(x[train].float() / 16, y[train])
net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=0.02)


def loss(model, batch):
    image, label = batch
    return F.cross_entropy(model(image), label, reduction="none")  # one loss per record


config = PrivacyConfig(dataset_size=1500, expected_batch_size=500, steps=150, target_epsilon=3.0)
folder = Path(__file__).parent / "stores/digits"  # names the data set: its runs add up here
with private_loop(net, digits, loss, config, folder, physical_batch_size=300) as loop:
    for step in loop:  # charged before anything is computed
        step.backward()  # draws, clips, adds noise, and sets .grad
        optimizer.step()
accuracy = (net(x[test].float() / 16).argmax(1) == y[test]).double().mean()
print(f"accuracy {accuracy:.1%} at epsilon {loop.spent().epsilon:.2f}")
