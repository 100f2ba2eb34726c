"""Differential equations, Hamiltonians, splines: second derivatives, solvers inside backward, LBFGS, no optimizer."""

from __future__ import annotations

from field_programs.data import config_file, mnist
from field_programs.program import Program

_ODE = ("rtqichen/torchdiffeq", "657943acefa826ef04c025ebeb1ff5e9d60dc268")
_BASICS = ("jcjohnson/pytorch-examples", "0003fcdc606a79951e53bf8f46f8574fa4739f23")
_HERE = {"PYTHONPATH": "."}

# The README's hello-world: the repository's own LBFGS fits a spline network.
_KAN = """\
import torch
from kan import KAN, create_dataset

model = KAN(width=[2, 3, 1], grid=3, k=3, seed=42, auto_save=False)
dataset = create_dataset(lambda x: torch.exp(torch.sin(torch.pi * x[:, [0]]) + x[:, [1]] ** 2), n_var=2, train_num=200)
results = model.fit(dataset, opt="LBFGS", steps=22, lamb=0.001)
print([float(loss) for loss in results["train_loss"]])
"""
# The README's way of use with a closure: two forward and backward passes a step.
_SAM = """\
import torch
from sam import SAM

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
for step in range(24):
    x, y = torch.randn(16, 20), torch.randint(0, 5, (16,))

    def closure():
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step(closure)
    optimizer.zero_grad()
    print(step, loss.item())
"""

# What the repository's example.py does in one step, for some.
_MOE = """\
import torch
from moe import MoE

torch.manual_seed(0)
model = MoE(100, 20, 10, 64, k=4, noisy_gating=True)
optimizer = torch.optim.Adam(model.parameters())
for step in range(24):
    output, balance = model(torch.rand(16, 100))
    loss = torch.nn.functional.nll_loss(output, torch.randint(20, (16,))) + balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS: tuple[Program, ...] = (
    Program(
        "ode-demo",
        *_ODE,
        "examples/ode_demo.py --niters 24 --test_freq 4 --data_size 60 --batch_size 5",
        needs=("scipy",),
        environment=_HERE,
        seed=1,
    ),
    Program(
        "ode-adjoint",
        *_ODE,
        "examples/ode_demo.py --adjoint --niters 24 --test_freq 4 --data_size 60 --batch_size 5",
        needs=("scipy",),
        environment=_HERE,
        seed=1,
    ),
    Program(
        "cnf",
        *_ODE,
        "examples/cnf.py --niters 22 --num_samples 16 --width 8 --hidden_dim 8",
        needs=("scipy", "sklearn", "matplotlib"),
        environment=_HERE,
        seed=1,
        limit_s=600,
    ),
    Program(
        "hamiltonian-spring",
        "greydanus/hamiltonian-nn",
        "bcc362235dc623ffe48f22ccc22417e02e9803b4",
        "experiment-spring/train.py --verbose --total_steps 24 --print_every 2",
        needs=("autograd", "scipy", "imageio"),
    ),
    Program("basics-autograd", *_BASICS, "autograd/two_layer_net_autograd.py", seed=1),
    Program("basics-custom-function", *_BASICS, "autograd/two_layer_net_custom_function.py", seed=1),
    Program("basics-dynamic-net", *_BASICS, "nn/dynamic_net.py", seed=1),
    Program("basics-manual-update", *_BASICS, "nn/two_layer_net_nn.py", seed=1),
    Program("basics-optim", *_BASICS, "nn/two_layer_net_optim.py", seed=1),
    Program(
        "efficient-kan",
        "Blealtan/efficient-kan",
        "7b6ce1c87f18c8bc90c208f6b494042344216b11",
        "examples/mnist.py",
        data=mnist("data", 192, 64),
        needs=("torchvision",),
        environment={"PYTHONPATH": "src"},
        seed=1,
    ),
    Program(
        "pykan-lbfgs",
        "KindXiaoming/pykan",
        "ecde4ec3274d3bef1ad737479cf126aed38ab530",
        "ours_train.py",
        data=config_file("ours_train.py", _KAN),
        needs=("sklearn", "matplotlib", "sympy", "pandas", "yaml"),
        limit_s=600,
    ),
    Program(
        "sam-closure",
        "davda54/sam",
        "3c3afdbd71cff2462ec91c734b3d1170bd0f3707",
        "ours_train.py",
        data=config_file("ours_train.py", _SAM),
    ),
    Program(
        "mixture-of-experts",
        "davidmrau/mixture-of-experts",
        "f662999727109357c42074997e9a6cd72806f668",
        "ours_train.py",
        data=config_file("ours_train.py", _MOE),
    ),
)
