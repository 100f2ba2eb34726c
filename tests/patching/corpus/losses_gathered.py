"""Losses of rows by hand, whose logits or log-probabilities are picked at the targets; and what only looks so."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.patching.corpus.entry import Entry
from tests.patching.corpus.losses import VOCAB, WIDTH, Body, pair

CE = (("", "cross_entropy"),)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, VOCAB)


class LogProbsOfTokens(Model):
    """As in preference losses: the sequence's log-probability, padding masked out."""

    def forward(self, x, labels):
        logits = self.head(self.body(x))
        per_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
        mask = (labels != 0).float()
        return -(per_token * mask).sum() / mask.sum()


class PickedByRange(Model):
    """Which rows the range holds may be another thing next time."""

    def forward(self, x, y):
        logits, y = self.head(self.body(x)).view(-1, VOCAB), y.reshape(-1)
        logprobs = F.log_softmax(logits, dim=1)
        return -logprobs[range(len(y)), y].mean()


class Kept(Model):
    """The picked numbers stay a column."""

    def forward(self, x, y):
        logits = self.head(self.body(x))
        return -logits.log_softmax(-1).gather(-1, y[..., None]).mean()


class LogSumExp(Model):
    def forward(self, x, y):
        logits = self.head(self.body(x))
        nll = torch.logsumexp(logits, dim=-1) - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return nll.mean()


class LogSumExpKept(Model):
    def forward(self, x, y):
        logits = self.head(self.body(x))
        nll = logits.logsumexp(-1, keepdim=True) - logits.gather(-1, y[:, :, None])
        return nll.mean() + 0.1 * nll.std()


class Focal(Model):
    """The loss of each row is weighted by how sure the model is."""

    def forward(self, x, y):
        logits = self.head(self.body(x)).flatten(0, 1)
        y = y.reshape(-1, 1)
        logpt = F.log_softmax(logits, dim=-1).gather(1, y).view(-1)
        return (-((1 - logpt.exp()) ** 2) * logpt).mean()


class NoName(Model):
    """The logits have no name that their rows could be asked by."""

    def forward(self, x, y):
        logp = F.log_softmax(self.head(self.body(x)), dim=-1)
        return -logp.gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()


class Entropy(Model):
    """The log-probabilities are read as a whole too."""

    def forward(self, x, y):
        logp = F.log_softmax(self.head(self.body(x)), dim=-1)
        picked = logp.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return -picked.mean() + 0.01 * (logp.exp() * logp).sum(-1).mean()


class SqueezedWhole(Model):
    """Of a batch of one the batch's dimension goes too: nothing is found but a column."""

    def forward(self, x, y):
        logits = self.head(self.body(x))
        picked = logits.log_softmax(-1).gather(-1, y[..., None]).squeeze()
        return -picked.mean(0).sum()


class OverRows(Model):
    def forward(self, x, y):
        logp = F.log_softmax(self.head(self.body(x)), dim=1)
        return -logp.gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()


class TwoEach(Model):
    def forward(self, x, y):
        logp = F.log_softmax(self.head(self.body(x)), dim=-1)
        return -logp.gather(-1, torch.stack([y, y.flip(1)], -1)).mean()


class OfTheFirstRows(Model):
    def forward(self, x, y):
        logp = F.log_softmax(self.head(self.body(x)), dim=-1)
        return -logp.gather(-1, y[:, :3].unsqueeze(-1)).mean()


class OtherLogits(Model):
    def forward(self, x, y):
        logits = self.head(self.body(x))
        return (torch.logsumexp(logits * 2, -1) - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)).mean()


class TurnedRound(Model):
    def forward(self, x, y):
        logits = self.head(self.body(x))
        return (logits.gather(-1, y.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)).square().mean()


class SumOverRows(Model):
    def forward(self, x, y):
        logits = self.head(self.body(x))[:, :, : y.shape[1]]
        logits = logits[:, : logits.shape[2]]
        return (torch.logsumexp(logits, 1) - logits.gather(-1, (y % logits.shape[2]).unsqueeze(-1)).squeeze(-1)).mean()


class OfTheFirstClass(Model):
    """The targets say which row is picked."""

    def forward(self, x, y):
        logits = self.head(self.body(x))
        logp = F.log_softmax(logits, dim=-1)
        return -logp.gather(1, (y % y.shape[1]).unsqueeze(-1)).squeeze(-1).mean()


class EachOfEach(Model):
    """Every row's log-sum-exp stands beside what was picked of every other."""

    def forward(self, x, y):
        logits, y = self.head(self.body(x)).flatten(0, 1), y.reshape(-1)
        picked = logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return (torch.logsumexp(logits, -1, keepdim=True) - picked).square().mean()


class InFloat(Model):
    """The dtype of the logarithmic softmax is another one."""

    def forward(self, x, y):
        logp = F.log_softmax(self.head(self.body(x)), dim=-1, dtype=torch.float64)
        return -logp.gather(-1, y.unsqueeze(-1)).squeeze(-1).mean().float()


def entry(name, build, sites=CE, **more):
    return Entry(name, lambda: (build(), pair()), sites, **more)


ENTRIES = [
    entry("ce_gather_of_tokens", LogProbsOfTokens),
    entry("ce_gather_kept", Kept),
    entry("ce_logsumexp", LogSumExp),
    entry("ce_logsumexp_kept", LogSumExpKept),
    entry("ce_focal", Focal),
    entry("ce_gather_squeezed_whole", SqueezedWhole),
    entry("like_gather_without_a_name", NoName, (), refused="no name"),
    entry("like_gather_entropy", Entropy, (), refused="log_softmax"),
    entry("like_gather_over_rows", OverRows, (), refused="different dimensions"),
    entry("like_gather_two_each", TwoEach, (), refused=" "),
    entry("like_gather_first_rows", OfTheFirstRows, (), refused=" "),
    entry("like_picked_by_range", PickedByRange, (), refused=" "),
    entry("like_logsumexp_of_others", OtherLogits, (), refused=" "),
    entry("like_logsumexp_turned_round", TurnedRound, (), refused=" "),
    entry("like_logsumexp_over_rows", SumOverRows, (), refused="different dimensions"),
    entry("like_gather_of_the_first_class", OfTheFirstClass, ()),
    entry("like_logsumexp_each_of_each", EachOfEach, ()),
    entry("like_gather_in_float64", InFloat, (), refused="dtype"),
]
