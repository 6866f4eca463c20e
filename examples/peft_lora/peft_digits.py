"""A timm transformer with PEFT's LoRA: adapters and head are trained privately, the rest stays."""

import sys
from pathlib import Path

import peft
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from dpvision import PrivacyConfig, private_loop

x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
x = x.float().view(-1, 1, 8, 8) / 8 - 1
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[:1500], order[1500:]
vit = timm.models.VisionTransformer(
    8, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=2, num_heads=4
)
if sys.argv[1:]:  # a state dict of public weights; without one, the random weights stay
    vit.load_state_dict(torch.load(sys.argv[1], weights_only=True))
lora = peft.LoraConfig(
    r=8,
    lora_alpha=16,
    lora_dropout=0.0,  # dropout is refused
    target_modules=["attn.qkv", "attn.proj"],
    modules_to_save=["head"],
)
net = peft.get_peft_model(vit, lora)
net.print_trainable_parameters()
optimizer = torch.optim.Adam((p for p in net.parameters() if p.requires_grad), lr=0.02)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")  # one loss per record


config = PrivacyConfig(dataset_size=1500, expected_batch_size=500, steps=80, target_epsilon=8.0)
here, digits = Path(__file__).parent / "stores", TensorDataset(x[train], y[train])
with private_loop(net, digits, loss, config, here / "digits", physical_batch_size=256) as loop:
    for step in loop:
        step.backward()
        optimizer.step()
net.save_pretrained(here / "adapter")  # adapters and head only
accuracy = (net.eval()(x[test]).argmax(1) == y[test]).double().mean()
print(f"accuracy {accuracy:.1%} at epsilon {loop.spent().epsilon:.2f}")
