"""What looks like linear + cross-entropy, and is not, or has logits that somebody else needs.

As in lookalikes_attention: with sites and a reason, either is right, some of the sites will do, and no other is.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.patching.corpus.entry import Entry
from tests.patching.corpus.losses import TOKENS, VOCAB, WIDTH, Body, OnlyLogits, ids, pair


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)


class AuxiliaryLoss(Model):
    """The entropy of the predictions is rewarded."""

    def forward(self, x, y):
        logits = self.head(self.body(x))
        loss = F.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1))
        p = logits.softmax(-1)
        entropy = -(p * logits.log_softmax(-1)).sum(-1).mean()
        return loss - 0.01 * entropy


class ZLoss(Model):
    def forward(self, x, y):
        logits = self.head(self.body(x)).view(-1, VOCAB)
        loss = F.cross_entropy(logits, y.reshape(-1))
        z = torch.logsumexp(logits, dim=-1)
        return loss + 1e-4 * (z**2).mean()


class ArgmaxKept(Model):
    def forward(self, x, y):
        logits = self.head(self.body(x))
        self.last_prediction = logits.argmax(dim=-1)
        return F.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1))


class LogitsStored(Model):
    def forward(self, x, y):
        self.logits = self.head(self.body(x))
        return F.cross_entropy(self.logits.view(-1, VOCAB), y.reshape(-1))


class LogitsChanged(Model):
    """Forbidden tokens are set after the head, in place."""

    def forward(self, x, y):
        logits = self.head(self.body(x))
        logits[..., 5] = -30.0
        return F.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1))


class SoftCapped(Model):
    def forward(self, x, y):
        logits = self.head(self.body(x))
        logits = 30.0 * torch.tanh(logits / 30.0)
        return F.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1))


class LearntTemperature(Model):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def forward(self, x, y):
        logits = self.head(self.body(x)) / self.temperature
        return F.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1))


class FocalLoss(Model):
    def forward(self, x, y, gamma=2.0):
        logits = self.head(self.body(x)).view(-1, VOCAB)
        log_pt = F.log_softmax(logits, dim=-1).gather(1, y.reshape(-1, 1)).squeeze(1)
        return -((1 - log_pt.exp()) ** gamma * log_pt).mean()


class FocalByCrossEntropy(Model):
    """The weight of each loss is a function of the loss itself."""

    def forward(self, x, y):
        ce = F.cross_entropy(self.head(self.body(x)).view(-1, VOCAB), y.reshape(-1), reduction="none")
        pt = torch.exp(-ce)
        return ((1 - pt) ** 2 * ce).mean()


def margin_loss(output, batch):
    """A margin on the logits, not a cross-entropy."""
    logits, y = output[:, :-1].reshape(-1, VOCAB), batch[:, 1:].reshape(-1, 1)
    return F.relu(1.0 + logits - logits.gather(1, y)).mean()


def smoothed_by_hand(output, batch):
    """Label smoothing by hand over the log-probabilities."""
    log_probs = output[:, :-1].log_softmax(-1)
    nll = -log_probs.gather(-1, batch[:, 1:, None]).squeeze(-1)
    return (0.9 * nll - 0.1 * log_probs.mean(-1)).mean()


class LastClassByMinusOne(Model):
    """Indexing, in which -1 is the last class and nothing is ignored."""

    def forward(self, x, y):
        log_probs = F.log_softmax(self.head(self.body(x)).view(-1, VOCAB), dim=-1)
        y = y.reshape(-1)
        return -log_probs[torch.arange(len(y)), y].mean()


def minus_one_is_a_class():
    x, y = pair()
    return x, torch.where(y == VOCAB - 1, -1, y).where(torch.rand(y.shape) > 0.2, torch.tensor(-1))


class ShiftedLabels(Model):
    """-1 is a class: labels run from -1 and are moved up by one before the loss."""

    def forward(self, x, y):
        logits = self.head(self.body(x))
        return F.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1) + 1)


def labels_from_minus_one():
    x, _ = pair()
    return x, torch.randint(-1, VOCAB - 1, x.shape)


class OverPositions(Model):
    """The classes are the positions: dimension 1 of (batch, tokens, vocabulary)."""

    def forward(self, x, where):
        return F.cross_entropy(self.head(self.body(x)), where)


class WithEpsilon(Model):
    def forward(self, x, y):
        probs = torch.softmax(self.head(self.body(x)), dim=-1)
        log_probs = torch.log(probs + 1e-3)
        return F.nll_loss(log_probs.view(-1, VOCAB), y.reshape(-1))


class SoftmaxTwice(Model):
    """A common mistake, and theirs to keep: probabilities given to cross_entropy."""

    def forward(self, x, y):
        probs = F.softmax(self.head(self.body(x)), dim=-1)
        return F.cross_entropy(probs.view(-1, VOCAB), y.reshape(-1))


class OverWrongDimension(Model):
    """log_softmax over the tokens, then nll over the classes."""

    def forward(self, x, y):
        log_probs = F.log_softmax(self.head(self.body(x)), dim=1)
        return F.nll_loss(log_probs.reshape(-1, VOCAB), y.reshape(-1))


class SoftLabels(Model):
    """Targets are probabilities."""

    def forward(self, x, teacher):
        logits = self.head(self.body(x))
        return F.cross_entropy(logits.view(-1, VOCAB), teacher.softmax(-1).view(-1, VOCAB))


class LearntTargets(Model):
    """Probabilities as targets, with a gradient of their own."""

    def __init__(self):
        super().__init__()
        self.confusion = nn.Parameter(torch.zeros(VOCAB, VOCAB))

    def forward(self, x, y):
        logits = self.head(self.body(x))
        target = self.confusion[y].softmax(-1)
        return F.cross_entropy(logits.view(-1, VOCAB), target.view(-1, VOCAB))


class DropoutOnLogits(Model):
    def forward(self, x, y):
        logits = F.dropout(self.head(self.body(x)), 0.1, self.training)
        return F.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1))


class BranchOnLoss(Model):
    def forward(self, x, y):
        losses = F.cross_entropy(self.head(self.body(x)).view(-1, VOCAB), y.reshape(-1), reduction="none")
        hardest = losses.topk(7).values
        return hardest.mean() if losses.max() > 1.0 else losses.mean()


class ForcePenalty(Model):
    """The loss's derivative by the hidden state is part of the loss."""

    def forward(self, x, y):
        h = self.body(x)
        loss = F.cross_entropy(self.head(h).view(-1, VOCAB), y.reshape(-1))
        (g,) = torch.autograd.grad(loss, h, create_graph=True)
        return loss + g.pow(2).sum()


class TwoLosses(Model):
    """One head, two cross-entropies on the same logits."""

    def forward(self, x, y):
        logits = self.head(self.body(x))
        now = F.cross_entropy(logits.transpose(1, 2), x)
        following = F.cross_entropy(logits.transpose(1, 2), y)
        return following + 0.1 * now


class HookedHead(Model):
    def forward(self, x, y):
        return F.cross_entropy(self.head(self.body(x)).view(-1, VOCAB), y.reshape(-1))


def hooked_head():
    model = HookedHead()
    model.head.register_forward_hook(lambda module, args, output: output.clamp(-0.1, 0.1))
    return model, pair()


def weight_hook():
    """A hook on the head's weight: its gradient goes through it."""
    model = HookedHead()
    model.head.weight.register_hook(lambda grad: grad * 0.5)
    return model, pair()


class WeightChanged(Model):
    """The head's weight is normalised before the product, with a gradient through it."""

    def forward(self, x, y):
        logits = F.linear(F.normalize(self.body(x), dim=-1), F.normalize(self.head.weight, dim=-1)) * 16.0
        return F.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1))


CE = (("", "cross_entropy"),)
LCE = (("", "linear_cross_entropy"),)
BOTH = CE + LCE  # logits may be made anew for who reads them, or be left and the loss alone be taken


def entry(name, model, reason, sites=(), batch=pair, **more):
    return Entry(name, lambda: (model(), batch()), sites, refused=reason, **more)


ENTRIES = [
    entry("like_auxiliary_loss", AuxiliaryLoss, "logits", BOTH),
    entry("like_z_loss", ZLoss, "logits", BOTH),
    entry("like_argmax_kept", ArgmaxKept, "logits", BOTH),
    entry("like_logits_stored", LogitsStored, "logits", BOTH),
    entry("like_logits_changed_in_place", LogitsChanged, "in place", CE),
    entry("like_logits_softcapped", SoftCapped, "logits", BOTH),
    entry("like_learnt_temperature", LearntTemperature, "scale", BOTH),
    entry("like_focal_loss", FocalLoss, "loss"),
    entry("like_focal_by_cross_entropy", FocalByCrossEntropy, "reduction", LCE),
    entry("like_margin_outside", OnlyLogits, "loss", batch=ids, loss=margin_loss),
    entry("like_smoothing_by_hand_outside", OnlyLogits, "loss", batch=ids, loss=smoothed_by_hand),
    entry("like_minus_one_indexes_last_class", LastClassByMinusOne, "index", batch=minus_one_is_a_class),
    entry("like_minus_one_moved_up", ShiftedLabels, "labels", LCE, batch=labels_from_minus_one),
    entry(
        "like_classes_not_last", OverPositions, "dimension", CE,
        batch=lambda: (ids(), torch.randint(TOKENS, (2, VOCAB))),
    ),
    entry("like_log_with_epsilon", WithEpsilon, "softmax"),
    entry("like_softmax_twice", SoftmaxTwice, "softmax", CE),
    entry("like_log_softmax_over_tokens", OverWrongDimension, "dimension"),
    entry("like_soft_labels", SoftLabels, "probabilities", batch=lambda: (ids(), torch.randn(2, TOKENS, VOCAB))),
    entry("like_learnt_targets", LearntTargets, "probabilities"),
    entry("like_dropout_on_logits", DropoutOnLogits, "logits", CE),
    entry("like_branch_on_loss", BranchOnLoss, "branch", LCE),
    entry("like_force_penalty", ForcePenalty, "second derivative"),
    entry("like_two_losses_on_logits", TwoLosses, "logits", BOTH),
    Entry("like_hooked_head", hooked_head, CE, refused="hook"),
    Entry("like_hooked_head_weight", weight_hook, LCE, refused="hook"),
    entry("like_normalised_head", WeightChanged, "scale", BOTH),
]  # fmt: skip
