"""Dropout, residual and norm as people write them."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.patching.corpus.entry import Entry

WIDTH, HIDDEN, TOKENS, BATCH = 40, 56, 20, 2


def tokens():
    return torch.randn(BATCH, TOKENS, WIDTH)


def uneven(output, batch):
    """The mean after a layer norm is a constant: its gradient would be nothing."""
    return (output * batch).mean()


class Mixer(nn.Module):
    """Stands for attention: mixes tokens by their cumulative mean."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        count = torch.arange(1, x.size(1) + 1, device=x.device, dtype=x.dtype)
        return self.proj(x.cumsum(1) / count[:, None])


def feed_forward():
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))


class PostNormOutput(nn.Module):
    """As BERT's output layers."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.dense = nn.Linear(HIDDEN, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states + input_tensor)
        return hidden_states  # noqa: RET504


class PostNormLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.intermediate = nn.Linear(WIDTH, HIDDEN)
        self.output = PostNormOutput()

    def forward(self, x):
        return self.output(torch.tanh(self.intermediate(x)), x)


class EncoderLayer(nn.Module):
    """Post-norm, both halves in one forward."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.self_attn = Mixer()
        self.linear1, self.linear2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, src):
        src2 = self.self_attn(src)
        src = self.norm1(src + self.dropout1(src2))
        src2 = self.linear2(F.relu(self.linear1(src)))
        src = src + self.dropout2(src2)
        src = self.norm2(src)
        return src  # noqa: RET504


class PreNormBlock(nn.Module):
    """The sum goes into the second norm and on to the second residual."""

    def __init__(self, p=0.1):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = Mixer()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = feed_forward()
        self.drop = nn.Dropout(p)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x)))
        x = x + self.drop(self.mlp(self.ln_2(x)))
        return x  # noqa: RET504


class FunctionalPreNorm(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.dropout = dropout
        self.mix = Mixer()
        self.ffn = feed_forward()
        self.norm_weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.norm_bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        residual = x
        x = self.mix(x)
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = residual + x

        residual = x
        x = F.layer_norm(x, (WIDTH,), self.norm_weight, self.norm_bias, 1e-5)
        return residual + self.ffn(x)


class RMSBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Mixer()
        self.ffn_norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.feed_forward = feed_forward()
        self.resid_dropout = nn.Dropout(0.1)

    def forward(self, x):
        h = x + self.resid_dropout(self.attention(x))
        out = h + self.feed_forward(self.ffn_norm(h))
        return out  # noqa: RET504


class FinalNorm(nn.Module):
    """The loop adds, the norm stands after it: the last addition and the norm are of one forward."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.layers = nn.ModuleList(feed_forward() for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        sublayer = self.layers[0]
        x = x + torch.tanh(sublayer(x))
        return self.norm(x + self.dropout(self.layers[1](x)))


class SublayerConnection(nn.Module):
    """Norm first, then x + dropout(sublayer(.)): the norm of the sum stands in the next layer's forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class PreNormEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.feed_forward = Mixer(), feed_forward()
        self.sublayer = nn.ModuleList(SublayerConnection() for _ in range(2))

    def forward(self, x):
        x = self.sublayer[0](x, lambda x: self.mixer(x))
        return self.sublayer[1](x, self.feed_forward)


def two_blocks():
    return nn.Sequential(PreNormBlock(), PreNormBlock())


ADD = (("", "add_norm"),)
ENTRIES = [
    Entry("add_norm_bert_output", lambda: (PostNormLayer(), tokens()), (("output", "add_norm"),), loss=uneven),
    Entry(
        "add_norm_encoder_layer", lambda: (EncoderLayer(), tokens()), (("", "add_norm"), ("", "add_norm")), loss=uneven
    ),
    Entry("add_norm_pre_norm_blocks", lambda: (two_blocks(), tokens()), (("0", "add_norm"), ("1", "add_norm"))),
    Entry("add_norm_functional", lambda: (FunctionalPreNorm(), tokens()), ADD),
    Entry("add_norm_rms", lambda: (RMSBlock(), tokens()), ADD),
    Entry("add_norm_last_of_two_sums", lambda: (FinalNorm(), tokens()), ADD, loss=uneven),
    Entry(
        "add_norm_eval",
        lambda: (EncoderLayer(), tokens()),
        (("", "add_norm"), ("", "add_norm")),
        loss=uneven,
        train=False,
    ),
    # The sum and its norm are of two calls of one forward: no site of add_norm as it stands.
    Entry("dropout_residual_norm_elsewhere", lambda: (PreNormEncoder(), tokens()), refused="norm"),
]
