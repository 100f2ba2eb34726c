"""What the tests of benchmarks/field.py share: its modules, and repositories of toy programs made for a test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import _field_compare as compare
    import _field_run as running
    import _field_sources as sources
    import _field_table as table
    import field
    from field_programs import PROGRAMS, Program
finally:
    sys.path.remove(str(BENCHMARKS))

__all__ = ["PROGRAMS", "Program", "compare", "field", "made_repository", "running", "sources", "table"]

HONEST = """\
import sys, time
import torch

torch.manual_seed(0)
data = torch.tensor([float(line) for line in open("data.txt")])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
start = time.time()
for step in range(int(sys.argv[1])):
    loss = (model(torch.randn(8, 4)) - data.mean()).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f} in {time.time() - start:.3f} s", flush=True)
torch.save(model.state_dict(), "model.pt")
"""


def made_repository(folder: Path, text: str = HONEST, name: str = "someone+toy") -> str:
    """A git repository below ``folder`` with one program, ``train.py``; its commit."""
    place = folder / "sources" / name
    place.mkdir(parents=True)
    (place / "train.py").write_text(text)
    (place / "data.txt").write_text("the repository's own data\n")
    author = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "a program"]):
        subprocess.run(["git", "-C", str(place), *command], check=True)
    head = subprocess.run(["git", "-C", str(place), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return head.stdout.strip()


def numbers(folder: Path) -> None:
    """Make the toy's data."""
    (folder / "data.txt").write_text("1.0\n2.0\n")
