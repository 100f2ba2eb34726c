"""Transformers and diffusion of one prolific author: einops, checkpoints, custom autograd functions, EMA."""

from __future__ import annotations

from field_programs.data import config_file, pictures, together
from field_programs.program import Program

# The README's example of the Trainer, with smaller numbers.
_DIFFUSION = """\
from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

model = Unet(dim=16, dim_mults=(1, 2), flash_attn=False)
diffusion = GaussianDiffusion(model, image_size=32, timesteps=20, sampling_timesteps=5)
trainer = Trainer(
    diffusion, "pictures", train_batch_size=8, train_lr=8e-5, train_num_steps=24, gradient_accumulate_every=2,
    ema_decay=0.995, amp=False, calculate_fid=False, save_and_sample_every=23, num_samples=4,
)
trainer.train()
print(float(trainer.model.model.init_conv.weight.sum()))
"""
# The README's example of Reformer, trained for a few steps: reversible layers are a custom autograd function.
_REFORMER = """\
import torch
from reformer_pytorch import ReformerLM
from reformer_pytorch.generative_tools import TrainingWrapper

torch.manual_seed(0)
model = TrainingWrapper(ReformerLM(num_tokens=64, dim=32, depth=2, max_seq_len=64, heads=2, bucket_size=8, n_hashes=2, causal=True))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(24):
    loss = model(torch.randint(0, 64, (4, 65)), return_loss=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
"""  # noqa: E501
# Vision transformer of the README with a distillation token, trained against a frozen teacher.
_DISTILL = """\
import torch
from vit_pytorch.distill import DistillableViT, DistillWrapper

torch.manual_seed(0)
teacher = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
student = DistillableViT(image_size=32, patch_size=8, num_classes=10, dim=32, depth=2, heads=2, mlp_dim=64, dropout=0.1)
distiller = DistillWrapper(student=student, teacher=teacher, temperature=3, alpha=0.5, hard=False)
optimizer = torch.optim.AdamW(distiller.parameters(), lr=1e-3)
for step in range(24):
    loss = distiller(torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS: tuple[Program, ...] = (
    Program(
        "x-transformers-copy",
        "lucidrains/x-transformers",
        "9252ed7838021ee61e6c5be0930b3a9a88efdf06",
        "train_copy.py",
        without=("data/*",),
        needs=("einops", "einx", "loguru"),
        seed=1,
        endless=True,
    ),
    Program(
        "x-transformers-path-star",
        "lucidrains/x-transformers",
        "9252ed7838021ee61e6c5be0930b3a9a88efdf06",
        "train_path_star.py",
        without=("data/*",),
        needs=("einops", "einx", "loguru", "fire", "wandb"),
        seed=1,
        endless=True,
    ),
    Program(
        "denoising-diffusion",
        "lucidrains/denoising-diffusion-pytorch",
        "faed4db28e724735323fa91c70aa9b28a6e1cbac",
        "ours_train.py",
        data=together(config_file("ours_train.py", _DIFFUSION), pictures("pictures", 100, 40)),
        needs=("torchvision", "einops", "accelerate", "ema_pytorch", "pytorch_fid"),
        seed=1,
        limit_s=600,
    ),
    Program(
        "reformer",
        "lucidrains/reformer-pytorch",
        "66a19b6caf481a880c97d331306aba55d2ae4b9c",
        "ours_train.py",
        without=("examples/*",),
        data=config_file("ours_train.py", _REFORMER),
        needs=("einops", "axial_positional_embedding", "local_attention", "product_key_memory"),
    ),
    Program(
        "vit-distill",
        "lucidrains/vit-pytorch",
        "69d24fe9e3024c0d4b02761123b8583a24ebed1e",
        "ours_train.py",
        data=config_file("ours_train.py", _DISTILL),
        needs=("einops",),
    ),
)
