"""More ways to spell a head and its loss, and some that must not be taken for one."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.functional import cross_entropy as ce

from tests.patching.corpus.entry import Entry
from tests.patching.corpus.losses import VOCAB, WIDTH, Body, ids, pair, segmentation_batch

LCE = (("", "linear_cross_entropy"),)
CE = (("", "cross_entropy"),)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, VOCAB)


class TiedByMatmul(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)

    def forward(self, idx, targets):
        x = torch.tanh(self.wte(idx))
        logits = x @ self.wte.weight.T
        return F.cross_entropy(logits.view(-1, VOCAB), targets.flatten())


class TiedByMethod(TiedByMatmul):
    def forward(self, idx, targets):
        x = torch.tanh(self.wte(idx))
        logits = x.reshape(-1, WIDTH).mm(self.wte.weight.transpose(0, 1))
        return logits, F.cross_entropy(logits, targets.flatten())


class Conv1DStyle(nn.Module):
    """torch.addmm with a weight (features, classes)."""

    def __init__(self):
        super().__init__()
        self.body = Body()
        self.weight = nn.Parameter(torch.randn(WIDTH, VOCAB) * 0.02)
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, x, y):
        h = self.body(x)
        logits = torch.addmm(self.bias, h.view(-1, h.size(-1)), self.weight)
        return ce(logits, y.reshape(-1))


class PredictionHead(nn.Module):
    """A head with a transform, and a bias of its own."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCAB, bias=False)
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, hidden_states):
        hidden_states = F.gelu(self.dense(hidden_states))
        return self.decoder(hidden_states) + self.bias


class MaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.predictions = PredictionHead()

    def forward(self, input_ids, labels=None):
        prediction_scores = self.predictions(self.body(input_ids))
        outputs = (prediction_scores,)
        if labels is not None:
            loss_fct = nn.CrossEntropyLoss()  # -100 index = padding token
            outputs = (loss_fct(prediction_scores.view(-1, VOCAB), labels.reshape(-1)), *outputs)
        return outputs


class SeveralHeads(nn.Module):
    """One head for each of the next tokens, in a loop."""

    def __init__(self):
        super().__init__()
        self.body = Body()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, VOCAB, bias=False) for _ in range(3))

    def forward(self, tokens):
        h = self.body(tokens)
        loss = 0.0
        for i, head in enumerate(self.heads, start=1):
            logits = head(h[:, :-i])
            loss = loss + F.cross_entropy(logits.flatten(0, 1), tokens[:, i:].flatten())
        return loss / len(self.heads)


class InPieces(Model):
    """A few rows at a time, to spare memory."""

    def forward(self, x, y):
        total = 0.0
        for rows, targets in zip(self.body(x).split(1), y.split(1), strict=True):
            total = total + F.cross_entropy(self.head(rows)[0], targets[0], reduction="sum")
        return total / y.numel()


class DeepHead(nn.Module):
    """The head is the end of a Sequential."""

    def __init__(self):
        super().__init__()
        self.body = Body()
        self.classifier = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(32, VOCAB), nn.LogSoftmax(dim=-1)
        )

    def forward(self, x, y):
        log_probs = self.classifier(
            self.body(x)  # (batch, tokens, features)
        )
        return log_probs, F.nll_loss(log_probs.transpose(1, 2), y, ignore_index=-1)


class ByKeyword(Model):
    def forward(self, x, y):
        return F.cross_entropy(input=self.head(input=self.body(x)).permute(0, 2, 1), target=y, label_smoothing=0.05)


class UnderAutocast(Model):
    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.head(self.body(x))
            loss = F.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1))
        return logits, loss


class PlainMatmulUnderAutocast(Conv1DStyle):
    """The bias is added in float32 to a product in bfloat16."""

    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.body(x) @ self.weight + self.bias
            return F.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1))


def loss_of_pairs(output, batch):
    logits, hidden = output
    return F.nll_loss(F.log_softmax(logits.float(), -1)[:, :-1].flatten(0, 1), batch[:, 1:].flatten()) + hidden.mean()


class LogitsAndHidden(Model):
    def forward(self, tokens):
        hidden = self.body(tokens)
        return self.head(hidden), hidden


class HeadChosen(Model):
    """A head that is called through a method of its own."""

    def forward(self, x, y):
        return F.cross_entropy(self.head.forward(self.body(x)).flatten(0, 1), y.flatten())


class InputChanged(nn.Module):
    """The hidden states are scaled in place after the head, whose weight is not trained, has read them."""

    def __init__(self):
        super().__init__()
        self.body = Body()
        self.register_buffer("weight", torch.randn(VOCAB, WIDTH))

    def forward(self, x, y):
        h = self.body(x)
        logits = F.linear(h, self.weight)
        h.mul_(0.5)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + h.mean()


class HeadWithForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0.5


class OwnHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = HeadWithForward(WIDTH, VOCAB)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.body(x)).flatten(0, 1), y.flatten())


class OnlyMasked(Model):
    def forward(self, x, y):
        keep = y != 3
        return F.cross_entropy(self.head(self.body(x))[keep], y[keep])


class PartOfTheClasses(Model):
    def forward(self, x, y):
        logits = self.head(self.body(x))[..., : VOCAB - 3]
        return F.cross_entropy(logits.flatten(0, 1), y.flatten().clamp(max=VOCAB - 4))


class InBatchNegatives(nn.Module):
    """Scores of queries and passages: no weight comes in."""

    def __init__(self):
        super().__init__()
        self.query, self.passage = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)

    def forward(self, query, passage):
        scores = self.query(query) @ self.passage(passage).t() / 0.05
        return F.cross_entropy(scores, torch.arange(len(query)))


class CriterionAlone(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, padding=1)
        self.criterion = nn.CrossEntropyLoss(**settings)

    def forward(self, image, mask):
        return self.criterion(self.conv(image), mask)


class LogProbabilities(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, padding=1)

    def forward(self, image, mask):
        log_p = F.log_softmax(self.conv(image), dim=1)
        return F.nll_loss(log_p, mask, ignore_index=255, reduction="sum") / 100


class NllModule(LogProbabilities):
    def __init__(self):
        super().__init__()
        self.nll = nn.NLLLoss(ignore_index=255)

    def forward(self, image, mask):
        return self.nll(F.log_softmax(self.conv(image), dim=1), mask)


class LogProbabilitiesRead(LogProbabilities):
    def forward(self, image, mask):
        log_p = F.log_softmax(self.conv(image), dim=1)
        return F.nll_loss(log_p, mask, ignore_index=255) - 0.01 * log_p.mean()


def images():
    return torch.randn(16, WIDTH), torch.randn(16, WIDTH)


def entry(name, build, sites, batch=pair, **more):
    return Entry(name, lambda: (build(), batch()), sites, **more)


ENTRIES = [
    entry("lce_weight_transposed", TiedByMatmul, (*LCE, ("", "embedding"))),
    entry("lce_mm_of_rows", TiedByMethod, (*LCE, ("", "embedding"))),
    entry("lce_addmm", Conv1DStyle, LCE),
    entry("lce_bias_added_in_head", MaskedLM, (("predictions", "linear_cross_entropy"),)),
    entry("lce_heads_in_a_loop", SeveralHeads, LCE, ids),
    entry("lce_rows_in_pieces", InPieces, LCE),
    entry("lce_end_of_sequential", DeepHead, LCE),
    entry("lce_by_keyword", ByKeyword, LCE),
    entry("lce_autocast", UnderAutocast, LCE),
    entry("lce_float_log_softmax_outside", LogitsAndHidden, LCE, ids, loss=loss_of_pairs),
    entry("ce_log_softmax_nll", LogProbabilities, CE, segmentation_batch),
    entry("ce_nll_module", NllModule, CE, segmentation_batch),
    entry("ce_in_batch_negatives", InBatchNegatives, CE, images),
    entry(
        "ce_criterion_settings",
        lambda: CriterionAlone(ignore_index=255, label_smoothing=0.1, weight=torch.linspace(0.5, 1.5, 7)),
        CE,
        segmentation_batch,
    ),
    entry("like_head_by_forward", HeadChosen, (), refused="which module"),
    entry("like_input_changed_later", InputChanged, CE, refused="in place"),
    entry("like_head_with_its_own_forward", OwnHead, CE, refused="mul"),
    entry("like_rows_by_mask", OnlyMasked, CE, refused="getitem"),
    entry("like_part_of_the_classes", PartOfTheClasses, CE, refused="getitem"),
    entry("like_bias_added_in_float32", PlainMatmulUnderAutocast, CE, refused="add"),
    entry("like_log_probabilities_read", LogProbabilitiesRead, (), segmentation_batch, refused="log_softmax"),
]
