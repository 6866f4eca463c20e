"""A LightningModule trained privately: Lightning turns the loop, which stops at the budget."""

from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from dpvision import PrivacyConfig, private_loop

x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[:1500], order[1500:]
digits = TensorDataset(x[train].float() / 16, y[train])


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False  # else Lightning calls backward on a loss of its own
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        )

    def training_step(self, step):  # a step of the loop, in the place of a batch
        step.backward()  # draws, clips, adds noise, and sets .grad
        self.optimizers().step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=0.02)


def loss(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1], reduction="none")  # one loss per record


module = Classifier()
config = PrivacyConfig(dataset_size=1500, expected_batch_size=500, steps=150, target_epsilon=3.0)
here = Path(__file__).parent / "stores"
with private_loop(
    module.net, digits, loss, config, here / "digits", physical_batch_size=300
) as loop:
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, default_root_dir=here
    )
    trainer.fit(module, loop)
accuracy = (module.net(x[test].float() / 16).argmax(1) == y[test]).double().mean()
print(f"accuracy {accuracy:.1%} at epsilon {loop.spent().epsilon:.2f}")
