"""Models of many kinds whose repositories have no training script for a CPU, in a short loop as their pages show it."""

# ruff: noqa: E501
from __future__ import annotations

from field_programs.data import config_file
from field_programs.program import INSTALLED, Program

_VQVAE = """\
import torch
from vqvae import VQVAE
torch.manual_seed(0)
model = VQVAE(channel=32, n_res_channel=8, embed_dim=16, n_embed=32)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for i in range(24):
    model.zero_grad()
    img = torch.randn(4, 3, 64, 64)
    out, latent_loss = model(img)
    recon_loss = torch.nn.functional.mse_loss(out, img)
    latent_loss = latent_loss.mean()
    loss = recon_loss + 0.25 * latent_loss
    loss.backward()
    optimizer.step()
    print(i, recon_loss.item(), latent_loss.item())
"""
_MAMBA = """\
import torch
from model import Mamba, ModelArgs
torch.manual_seed(0)
model = Mamba(ModelArgs(d_model=32, n_layer=2, vocab_size=64))
opt = torch.optim.AdamW(model.parameters(), 1e-3)
for i in range(24):
    x = torch.randint(0, 64, (4, 25))
    loss = torch.nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    opt.zero_grad(); loss.backward(); opt.step()
    print(i, loss.item())
"""
_HOPFIELD = """\
import torch
from hflayers import Hopfield, HopfieldPooling
torch.manual_seed(0)
model = torch.nn.Sequential(Hopfield(input_size=16, hidden_size=8, num_heads=2, update_steps_max=3, scaling=0.25, dropout=0.1),
    HopfieldPooling(input_size=16, hidden_size=8, num_heads=2), torch.nn.Linear(16, 1), torch.nn.Flatten(0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(24):
    x = torch.randn(8, 32, 16); y = (x[:, 0, 0] > 0).float()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x), y)
    optimizer.zero_grad(); loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10)
    optimizer.step()
    print(step, loss.item())
"""
_SIREN = """\
import torch, modules, loss_functions
torch.manual_seed(0)
model = modules.SingleBVPNet(type="sine", in_features=3, hidden_features=32)
opt = torch.optim.Adam(model.parameters(), 1e-4)
for i in range(24):
    coords = torch.rand(1, 128, 3) * 2 - 1
    gt = {"sdf": torch.cat([torch.zeros(1, 64, 1), -torch.ones(1, 64, 1)], 1), "normals": torch.nn.functional.normalize(torch.randn(1, 128, 3), dim=-1)}
    out = model({"coords": coords}); losses = loss_functions.sdf(out, gt); loss = sum(v.mean() for v in losses.values())
    opt.zero_grad(); loss.backward(); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.); opt.step()
    print(i, loss.item())
"""
_PYRO = """\
import torch, pyro, pyro.distributions as dist
from torch import nn
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
pyro.set_rng_seed(0)
class Decoder(nn.Module):
    def __init__(self):
        super().__init__(); self.fc1 = nn.Linear(8, 64); self.fc21 = nn.Linear(64, 784); self.softplus = nn.Softplus()
    def forward(self, z):
        return torch.sigmoid(self.fc21(self.softplus(self.fc1(z))))
class Encoder(nn.Module):
    def __init__(self):
        super().__init__(); self.fc1 = nn.Linear(784, 64); self.fc21 = nn.Linear(64, 8); self.fc22 = nn.Linear(64, 8); self.softplus = nn.Softplus()
    def forward(self, x):
        h = self.softplus(self.fc1(x)); return self.fc21(h), torch.exp(self.fc22(h))
class VAE(nn.Module):
    def __init__(self):
        super().__init__(); self.encoder = Encoder(); self.decoder = Decoder()
    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", x.shape[0]):
            z = pyro.sample("latent", dist.Normal(torch.zeros(x.shape[0], 8), torch.ones(x.shape[0], 8)).to_event(1))
            pyro.sample("obs", dist.Bernoulli(self.decoder(z), validate_args=False).to_event(1), obs=x)
    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", x.shape[0]):
            loc, scale = self.encoder(x)
            pyro.sample("latent", dist.Normal(loc, scale).to_event(1))
vae = VAE()
svi = SVI(vae.model, vae.guide, Adam({"lr": 1e-3}), loss=Trace_ELBO())
for i in range(24):
    print(i, svi.step(torch.rand(32, 784).round()))
"""

PROGRAMS: tuple[Program, ...] = (
    Program(
        "vqvae2",
        "rosinality/vq-vae-2-pytorch",
        "ef5f67c46f93624163776caec9e0d95063910eca",
        "ours_train.py",
        data=config_file("ours_train.py", _VQVAE),
    ),
    Program(
        "mamba-minimal",
        "johnma2006/mamba-minimal",
        "03de542a36d873f6e6c4057ad687278cc6ae944d",
        "ours_train.py",
        data=config_file("ours_train.py", _MAMBA),
        needs=("einops",),
    ),
    Program(
        "hopfield",
        "ml-jku/hopfield-layers",
        "f56f929c95b77a070ae675ea4f56b6d54d36e730",
        "ours_train.py",
        data=config_file("ours_train.py", _HOPFIELD),
    ),
    Program(
        "siren-sdf",
        "vsitzmann/siren",
        "4df34baee3f0f9c8f351630992c1fe1f69114b5f",
        "ours_train.py",
        data=config_file("ours_train.py", _SIREN),
        needs=(
            "torchvision",
            "skimage",
            "scipy",
            "cmapy",
            "tensorboard",
            "matplotlib",
        ),
    ),
    Program(
        "pyro-vae",
        INSTALLED,
        "pyro-ppl",
        "train.py",
        data=config_file("train.py", _PYRO),
        needs=("pyro",),
        library=True,
    ),
)
