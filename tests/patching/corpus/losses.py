"""Heads with their losses, as people write them: linear + cross-entropy, cross-entropy alone, tied embeddings."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn import CrossEntropyLoss

from tests.patching.corpus.entry import Entry

VOCAB, WIDTH, TOKENS, BATCH = 61, 40, 20, 2
ROOT = (("", "linear_cross_entropy"),)


class Body(nn.Module):
    """What comes before the head: token and position embedding, one layer, a norm."""

    def __init__(self, vocab_size=VOCAB, n_embd=WIDTH, block_size=TOKENS):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.fc = nn.Linear(n_embd, n_embd)
        self.ln_f = nn.LayerNorm(n_embd)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        return self.ln_f(F.relu(self.fc(x)))


def ids():
    return torch.randint(VOCAB, (BATCH, TOKENS))


def pair():
    tokens = torch.randint(VOCAB, (BATCH, TOKENS + 1))
    return tokens[:, :-1], tokens[:, 1:]


# --------------------------------------------------------------------------------------------------------------------
# Linear + cross-entropy
# --------------------------------------------------------------------------------------------------------------------


class NanoHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = Body()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, idx, targets=None):
        x = self.transformer(idx)

        if targets is not None:
            # if we are given some desired targets also calculate the loss
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            # inference: only the last position is wanted
            logits = self.lm_head(x[:, [-1], :])  # list [-1] keeps the time dimension
            loss = None

        return logits, loss


def ignored_pair():
    x, y = pair()
    y = y.clone()
    y[0, :7] = -1
    return x, y.contiguous()


class OnlyLogits(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Body()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        return self.head(self.backbone(tokens))


def next_token_loss(output, batch):
    """The training script's own loss: every position predicts the token after it."""
    return F.cross_entropy(output[:, :-1].reshape(-1, output.size(-1)), batch[:, 1:].reshape(-1))


class SmoothedReshape(nn.Module):
    def __init__(self, label_smoothing=0.1):
        super().__init__()
        self.encoder = Body()
        self.generator = nn.Linear(WIDTH, VOCAB)
        self.label_smoothing = label_smoothing

    def forward(self, src, tgt):
        return F.cross_entropy(
            self.generator(self.encoder(src)).reshape(-1, VOCAB),
            tgt.reshape(-1),
            label_smoothing=self.label_smoothing,
        )


class Flattened(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x, y):
        h = self.body(x)
        # (batch, time, vocab) -> (batch * time, vocab)
        return F.cross_entropy(self.out(h).flatten(0, 1), y.flatten())


class ClassesSecond(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.proj = nn.Linear(WIDTH, VOCAB)

    def forward(self, x, y):
        pred = self.proj(self.body(x)).transpose(1, 2)  # cross_entropy wants (B, C, T)
        loss = F.cross_entropy(pred, y)
        return loss  # noqa: RET504


class ForCausalLM(nn.Module):
    """Labels are the inputs; the shift is made inside."""

    def __init__(self):
        super().__init__()
        self.model = Body()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids=None, labels=None, return_dict=True):
        hidden_states = self.model(input_ids)
        logits = self.lm_head(hidden_states)

        loss = None
        if labels is not None:
            # move labels to correct device to enable model parallelism
            labels = labels.to(logits.device)
            # Shift so that tokens < n predict n
            shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = labels[..., 1:].contiguous()
            # Flatten the tokens
            loss_fct = CrossEntropyLoss()
            loss = loss_fct(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))

        if not return_dict:
            return (loss, logits) if loss is not None else logits
        return {"loss": loss, "logits": logits}


def padded_labels():
    input_ids = ids()
    labels = input_ids.clone()
    labels[1, -6:] = -100
    return {"input_ids": input_ids, "labels": labels}


class CriterionModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Body()
        self.decoder = nn.Linear(WIDTH, VOCAB, bias=True)
        self.criterion = nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, input, target):
        output = self.decoder(self.trunk(input))
        return self.criterion(output.view(-1, VOCAB), target.contiguous().view(-1))


class FloatFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Body()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, targets):
        logits = self.lm_head(self.model(tokens))
        logits = logits.float()  # the loss is taken in full precision
        loss = F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))
        return logits, loss


class Bigram(nn.Module):
    """Lecture style: logits come back flat when there are targets."""

    def __init__(self):
        super().__init__()
        self.blocks = Body()
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def forward(self, idx, targets=None):
        B, T = idx.shape  # noqa: N806
        x = self.blocks(idx)  # (B,T,C)
        logits = self.lm_head(x)  # (B,T,vocab_size)

        if targets is None:
            loss = None
        else:
            B, T, C = logits.shape  # noqa: N806
            logits = logits.view(B * T, C)
            targets = targets.reshape(B * T)
            loss = F.cross_entropy(logits, targets)

        return logits, loss


class LogSoftmaxNll(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = Body()
        self.decoder = nn.Linear(WIDTH, VOCAB)

    def forward(self, input, target):
        decoded = self.decoder(self.rnn(input)).view(-1, VOCAB)
        log_probs = F.log_softmax(decoded, dim=1)
        return F.nll_loss(log_probs, target.reshape(-1))


class NllModules(nn.Module):
    """The head returns log-probabilities, the loss outside is NLLLoss."""

    def __init__(self):
        super().__init__()
        self.features = Body()
        self.classifier = nn.Sequential(nn.Linear(WIDTH, VOCAB), nn.LogSoftmax(dim=-1))
        self.nll = nn.NLLLoss(ignore_index=-100)

    def forward(self, x, y):
        return self.nll(self.classifier(self.features(x)).flatten(0, 1), y.flatten())


class SummedOverTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x, y):
        n_tokens = (y != -1).sum()
        logits = self.head(self.body(x)).view(-1, VOCAB)
        total = F.cross_entropy(logits, y.view(-1), reduction="sum", ignore_index=-1)
        return total / n_tokens


class MaskedMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, labels, loss_mask):
        b, t = tokens.shape
        logits = self.head(self.body(tokens))
        losses = F.cross_entropy(logits.reshape(b * t, -1), labels.reshape(b * t), reduction="none").view(b, t)
        return (losses * loss_mask).sum() / loss_mask.sum()


class MatmulHead(nn.Module):
    """No nn.Linear: the unembedding is a parameter (d_model, d_vocab)."""

    def __init__(self):
        super().__init__()
        self.embed = Body()
        self.W_U = nn.Parameter(torch.randn(WIDTH, VOCAB) / WIDTH**0.5)
        self.b_U = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, x, y):
        residual = self.embed(x)
        logits = residual @ self.W_U + self.b_U
        return F.cross_entropy(logits.reshape(-1, VOCAB), y.reshape(-1))


class EinsumHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Body()
        self.unembed = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.02)

    def forward(self, x, y):
        logits = torch.einsum("btd,vd->btv", self.embed(x), self.unembed)
        return F.cross_entropy(logits.permute(0, 2, 1), y)


class LossInMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def compute_loss(self, logits, targets):
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-1)

    def forward(self, idx, targets=None):
        logits = self.lm_head(self.body(idx))
        loss = self.compute_loss(logits, targets) if targets is not None else None
        return logits, loss


class WeightedClasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("class_weight", torch.linspace(0.5, 1.5, VOCAB))

    def forward(self, x, y):
        def loss_of(logits):
            return F.cross_entropy(logits.reshape(-1, VOCAB), y.reshape(-1), weight=self.class_weight)

        return loss_of(self.head(self.body(x)))


def with_loss_mask():
    x, y = pair()
    return x, y, (torch.rand(BATCH, TOKENS) > 0.3).float()


# --------------------------------------------------------------------------------------------------------------------
# Cross-entropy alone
# --------------------------------------------------------------------------------------------------------------------


class WithAccuracy(nn.Module):
    """The logits are looked at for the accuracy as well."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 48), nn.ReLU())
        self.fc = nn.Linear(48, 10)

    def forward(self, x, label):
        logits = self.fc(self.net(x))
        acc = (logits.argmax(dim=-1) == label).float().mean()
        loss = F.cross_entropy(logits, label)
        return {"loss": loss, "acc": acc}


class Contrastive(nn.Module):
    """Two towers: the logits are similarities, in both directions."""

    def __init__(self):
        super().__init__()
        self.image = nn.Linear(WIDTH, 24)
        self.text = nn.Linear(32, 24)
        self.logit_scale = nn.Parameter(torch.tensor(2.6593))

    def forward(self, image, text):
        image_features = F.normalize(self.image(image), dim=-1)
        text_features = F.normalize(self.text(text), dim=-1)
        # cosine similarity as logits
        logits_per_image = self.logit_scale.exp() * image_features @ text_features.t()
        logits_per_text = logits_per_image.t()
        labels = torch.arange(image.shape[0], device=image.device)
        return (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_text, labels)) / 2


class Segmentation(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 7, kernel_size=1)
        self.criterion = nn.CrossEntropyLoss(ignore_index=255)

    def forward(self, image, mask):
        out = self.conv2(F.relu(self.conv1(image)))  # N, classes, H, W
        return self.criterion(out, mask)


class MixtureOfHeads(nn.Module):
    """The logits are a mean of two heads: no single product comes before the loss."""

    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head_a = nn.Linear(WIDTH, VOCAB)
        self.head_b = nn.Linear(WIDTH, VOCAB)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x, y):
        h = self.body(x)
        g = torch.sigmoid(self.gate(h))
        logits = g * torch.relu(self.head_a(h)) + (1 - g) * torch.tanh(self.head_b(h))
        return F.cross_entropy(logits.view(-1, VOCAB), y.reshape(-1))


def segmentation_batch():
    mask = torch.randint(7, (BATCH, 12, 18))
    mask[0, 0] = 255
    return torch.randn(BATCH, 3, 12, 18), mask


# --------------------------------------------------------------------------------------------------------------------
# Tied embedding
# --------------------------------------------------------------------------------------------------------------------


class TiedByAssignment(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight  # weight tying

    def forward(self, idx, targets):
        x = torch.tanh(self.fc(self.wte(idx)))
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss


class TiedByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens, labels):
        h = torch.relu(self.layer(self.tok_embeddings(tokens) * WIDTH**0.5))
        # the output shares the weight of the input
        logits = F.linear(h, self.tok_embeddings.weight)
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))


TIED = (("", "linear_cross_entropy"), ("", "embedding"))
ENTRIES = [
    Entry("lce_nano_logits_and_loss", lambda: (NanoHead(), ignored_pair()), ROOT),
    Entry("lce_loss_outside", lambda: (OnlyLogits(), ids()), ROOT, loss=next_token_loss),
    Entry("lce_reshape_label_smoothing", lambda: (SmoothedReshape(), pair()), ROOT),
    Entry("lce_flatten", lambda: (Flattened(), pair()), ROOT),
    Entry("lce_transpose", lambda: (ClassesSecond(), pair()), ROOT),
    Entry("lce_shifted_labels", lambda: (ForCausalLM(), padded_labels()), ROOT),
    Entry("lce_criterion_module_bias", lambda: (CriterionModule(), pair()), ROOT),
    Entry("lce_float_first", lambda: (FloatFirst(), pair()), ROOT),
    Entry("lce_flat_logits_returned", lambda: (Bigram(), pair()), ROOT),
    Entry("lce_log_softmax_nll", lambda: (LogSoftmaxNll(), pair()), ROOT),
    Entry("lce_nll_modules", lambda: (NllModules(), pair()), ROOT),
    Entry("lce_sum_reduction", lambda: (SummedOverTokens(), ignored_pair()), ROOT),
    Entry("lce_masked_mean", lambda: (MaskedMean(), with_loss_mask()), ROOT),
    Entry("lce_matmul_parameter", lambda: (MatmulHead(), pair()), ROOT),
    Entry("lce_einsum_permute", lambda: (EinsumHead(), pair()), ROOT),
    Entry("lce_loss_in_method", lambda: (LossInMethod(), pair()), ROOT),
    Entry("lce_class_weights_nested_function", lambda: (WeightedClasses(), pair()), ROOT),
    Entry("lce_eval", lambda: (NanoHead(), ignored_pair()), ROOT, train=False),
    Entry(
        "ce_with_accuracy",
        lambda: (WithAccuracy(), (torch.randn(16, WIDTH), torch.randint(10, (16,)))),
        (("", "cross_entropy"),),
    ),
    Entry(
        "ce_contrastive_both_ways",
        lambda: (Contrastive(), (torch.randn(18, WIDTH), torch.randn(18, 32))),
        (("", "cross_entropy"), ("", "cross_entropy")),
    ),
    Entry("ce_segmentation", lambda: (Segmentation(), segmentation_batch()), (("", "cross_entropy"),)),
    Entry("ce_mixture_of_heads", lambda: (MixtureOfHeads(), pair()), (("", "cross_entropy"),)),
    Entry("tied_by_assignment", lambda: (TiedByAssignment(), pair()), TIED),
    Entry("tied_by_function", lambda: (TiedByFunction(), pair()), TIED),
]
