# ruff: noqa: N806, RET504 -- the names and the steps are those of the code that is imitated
"""Whole encoders: of image patches, of words under a padding mask, and of torch's own layers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from tests.patching.corpus.entry import Entry


class PatchEmbed(nn.Module):
    """2D Image to Patch Embedding"""

    def __init__(self, img_size=(16, 20), patch_size=4, in_chans=3, embed_dim=48):
        super().__init__()
        self.num_patches = (img_size[0] // patch_size) * (img_size[1] // patch_size)
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)
        self.norm = nn.Identity()

    def forward(self, x):
        x = self.proj(x)
        x = x.flatten(2).transpose(1, 2)  # BCHW -> BNC
        return self.norm(x)


class Attention(nn.Module):
    def __init__(self, dim, num_heads=3, qkv_bias=True, qk_norm=False, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        assert dim % num_heads == 0, "dim should be divisible by num_heads"
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)

        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = attn @ v

        x = x.transpose(1, 2).reshape(B, N, C)
        x = self.proj(x)
        x = self.proj_drop(x)
        return x


class Mlp(nn.Module):
    def __init__(self, in_features, hidden_features, act_layer=nn.GELU, drop=0.0):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = act_layer()
        self.drop1 = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden_features, in_features)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.fc2(x)
        x = self.drop2(x)
        return x


def drop_path(x, drop_prob: float = 0.0, training: bool = False):
    """Drop paths (Stochastic Depth) per sample (when applied in main path of residual blocks)."""
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)  # work with diff dim tensors, not just 2D ConvNets
    random_tensor = x.new_empty(shape).bernoulli_(keep_prob)
    random_tensor.div_(keep_prob)
    return x * random_tensor


class LayerScale(nn.Module):
    def __init__(self, dim, init_values=1e-1):
        super().__init__()
        self.gamma = nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x):
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, dim, num_heads, qk_norm, drop):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads=num_heads, qk_norm=qk_norm, attn_drop=drop, proj_drop=drop)
        self.ls1 = LayerScale(dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, dim * 4, drop=drop)
        self.ls2 = LayerScale(dim)
        self.drop_prob = 0.1

    def forward(self, x):
        x = x + drop_path(self.ls1(self.attn(self.norm1(x))), self.drop_prob, self.training)
        x = x + drop_path(self.ls2(self.mlp(self.norm2(x))), self.drop_prob, self.training)
        return x


class VisionTransformer(nn.Module):
    def __init__(self, embed_dim=48, depth=2, num_heads=3, num_classes=11, qk_norm=False, drop=0.0):
        super().__init__()
        self.patch_embed = PatchEmbed(embed_dim=embed_dim)
        num_patches = self.patch_embed.num_patches
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.randn(1, num_patches + 1, embed_dim) * 0.02)
        self.pos_drop = nn.Dropout(p=drop)
        self.blocks = nn.Sequential(*[Block(embed_dim, num_heads, qk_norm, drop) for _ in range(depth)])
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward_features(self, x):
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.pos_drop(x + self.pos_embed)
        x = self.blocks(x)
        return self.norm(x)

    def forward_head(self, x, pre_logits: bool = False):
        x = x[:, 0]
        return x if pre_logits else self.head(x)

    def forward(self, x):
        x = self.forward_features(x)
        x = self.forward_head(x)
        return x


def gelu(x):
    """Original Implementation of the gelu activation function in Google Bert repo when initially created.
    For information: OpenAI GPT's gelu is slightly different (and gives slightly different results)
    """
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class BertEmbeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(2, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids, token_type_ids=None):
        seq_length = input_ids.size(1)
        position_ids = torch.arange(seq_length, dtype=torch.long, device=input_ids.device)
        position_ids = position_ids.unsqueeze(0).expand_as(input_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)

        words_embeddings = self.word_embeddings(input_ids)
        position_embeddings = self.position_embeddings(position_ids)
        token_type_embeddings = self.token_type_embeddings(token_type_ids)

        embeddings = words_embeddings + position_embeddings + token_type_embeddings
        embeddings = self.LayerNorm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


class BertSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = int(config.hidden_size / config.num_attention_heads)
        self.all_head_size = self.num_attention_heads * self.attention_head_size

        self.query = nn.Linear(config.hidden_size, self.all_head_size)
        self.key = nn.Linear(config.hidden_size, self.all_head_size)
        self.value = nn.Linear(config.hidden_size, self.all_head_size)

        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def transpose_for_scores(self, x):
        new_x_shape = x.size()[:-1] + (self.num_attention_heads, self.attention_head_size)  # noqa: RUF005
        x = x.view(*new_x_shape)
        return x.permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        mixed_query_layer = self.query(hidden_states)
        mixed_key_layer = self.key(hidden_states)
        mixed_value_layer = self.value(hidden_states)

        query_layer = self.transpose_for_scores(mixed_query_layer)
        key_layer = self.transpose_for_scores(mixed_key_layer)
        value_layer = self.transpose_for_scores(mixed_value_layer)

        # Take the dot product between "query" and "key" to get the raw attention scores.
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        # Apply the attention mask is (precomputed for all layers in BertModel forward() function)
        attention_scores = attention_scores + attention_mask

        # Normalize the attention scores to probabilities.
        attention_probs = nn.Softmax(dim=-1)(attention_scores)

        # This is actually dropping out entire tokens to attend to, which might
        # seem a bit unusual, but is taken from the original Transformer paper.
        attention_probs = self.dropout(attention_probs)

        context_layer = torch.matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        new_context_layer_shape = context_layer.size()[:-2] + (self.all_head_size,)  # noqa: RUF005
        context_layer = context_layer.view(*new_context_layer_shape)
        return context_layer


class BertSelfOutput(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states + input_tensor)
        return hidden_states


class BertAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertSelfOutput(config)

    def forward(self, input_tensor, attention_mask):
        self_output = self.self(input_tensor, attention_mask)
        attention_output = self.output(self_output, input_tensor)
        return attention_output


class BertIntermediate(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = gelu

    def forward(self, hidden_states):
        hidden_states = self.dense(hidden_states)
        hidden_states = self.intermediate_act_fn(hidden_states)
        return hidden_states


class BertOutput(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.intermediate_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states + input_tensor)
        return hidden_states


class BertLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(self, hidden_states, attention_mask):
        attention_output = self.attention(hidden_states, attention_mask)
        intermediate_output = self.intermediate(attention_output)
        layer_output = self.output(intermediate_output, attention_output)
        return layer_output


class BertForMaskedLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.layer = nn.ModuleList([BertLayer(config) for _ in range(config.num_hidden_layers)])
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_norm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.decoder.weight = self.embeddings.word_embeddings.weight

    def get_extended_attention_mask(self, attention_mask, dtype):
        # (1.0 for positions we want to attend, finfo.min for masked positions) on [batch, 1, 1, to_seq_length]
        extended_attention_mask = attention_mask[:, None, None, :]
        extended_attention_mask = extended_attention_mask.to(dtype=dtype)  # fp16 compatibility
        return (1.0 - extended_attention_mask) * torch.finfo(dtype).min

    def forward(self, input_ids, attention_mask=None, labels=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        hidden_states = self.embeddings(input_ids)
        extended_attention_mask = self.get_extended_attention_mask(attention_mask, hidden_states.dtype)
        for layer_module in self.layer:
            hidden_states = layer_module(hidden_states, extended_attention_mask)

        hidden_states = self.transform_norm(gelu(self.transform(hidden_states)))
        prediction_scores = self.decoder(hidden_states)

        if labels is not None:
            loss_fct = nn.CrossEntropyLoss(ignore_index=-100)
            masked_lm_loss = loss_fct(prediction_scores.view(-1, self.config.vocab_size), labels.view(-1))
            return masked_lm_loss, prediction_scores
        return prediction_scores


class TransformerModel(nn.Module):
    """nn.TransformerEncoder between an embedding and a linear head; the loss over log-probabilities of torch."""

    def __init__(self, ntoken=83, ninp=48, nhead=3, nhid=112, nlayers=2, dropout=0.1):
        super().__init__()
        self.ninp = ninp
        self.src_mask = None
        encoder_layers = nn.TransformerEncoderLayer(ninp, nhead, nhid, dropout, batch_first=True)
        self.transformer_encoder = nn.TransformerEncoder(encoder_layers, nlayers, enable_nested_tensor=False)
        self.input_emb = nn.Embedding(ntoken, ninp)
        self.pos_emb = nn.Parameter(torch.randn(32, ninp) * 0.02)
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(ninp, ntoken)

    def _generate_square_subsequent_mask(self, sz):
        return torch.log(torch.tril(torch.ones(sz, sz)))

    def forward(self, src, targets):
        if self.src_mask is None or self.src_mask.size(0) != src.size(1):
            self.src_mask = self._generate_square_subsequent_mask(src.size(1)).to(src.device)

        src = self.input_emb(src) * math.sqrt(self.ninp)
        src = self.drop(src + self.pos_emb[: src.size(1)])
        output = self.transformer_encoder(src, mask=self.src_mask)
        output = self.decoder(output)
        return output, F.cross_entropy(output.view(-1, output.size(-1)), targets.view(-1))


class MultiheadUser(nn.Module):
    """nn.MultiheadAttention in a block that normalises afterwards."""

    def __init__(self, embed_dim=48, num_heads=3, dropout=0.1):
        super().__init__()
        self.attn = nn.MultiheadAttention(embed_dim, num_heads, dropout=dropout, batch_first=True)
        self.ln_1 = nn.LayerNorm(embed_dim)
        self.mlp = nn.Sequential(nn.Linear(embed_dim, 4 * embed_dim), nn.GELU(), nn.Linear(4 * embed_dim, embed_dim))
        self.ln_2 = nn.LayerNorm(embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        attn_output, _ = self.attn(x, x, x, need_weights=False)
        x = self.ln_1(x + self.dropout(attn_output))
        x = self.ln_2(x + self.dropout(self.mlp(x)))
        return x


class MultiheadPreNorm(nn.Module):
    """CLIP's residual block: norm first, a causal mask as a buffer, x * sigmoid(1.702 x) for GELU."""

    def __init__(self, d_model=48, n_head=3, context_length=32):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_head)
        self.ln_1 = nn.LayerNorm(d_model)
        self.c_fc = nn.Linear(d_model, d_model * 4)
        self.c_proj = nn.Linear(d_model * 4, d_model)
        self.ln_2 = nn.LayerNorm(d_model)
        self.register_buffer("attn_mask", torch.empty(context_length, context_length).fill_(-math.inf).triu_(1))

    def attention(self, x):
        mask = self.attn_mask[: x.shape[0], : x.shape[0]]
        return self.attn(x, x, x, need_weights=False, attn_mask=mask)[0]

    def forward(self, x):
        x = x.permute(1, 0, 2)  # NLD -> LND
        x = x + self.attention(self.ln_1(x))
        h = self.c_fc(self.ln_2(x))
        x = x + self.c_proj(h * torch.sigmoid(1.702 * h))
        return x.permute(1, 0, 2)  # LND -> NLD


def _squares(output, batch):
    return output.square().mean()


def _uneven(output, batch):
    """The mean square after a layer norm is nearly a constant: its gradient would be nothing."""
    return (output * batch).mean()


def _images():
    return torch.randn(2, 3, 16, 20)


def _masked_words():
    input_ids = torch.randint(1, 83, (2, 24))
    attention_mask = torch.ones(2, 24, dtype=torch.long)
    attention_mask[1, -7:] = 0
    input_ids[1, -7:] = 0
    labels = torch.where(torch.rand(2, 24) < 0.3, input_ids, -100)
    labels[0, 0] = input_ids[0, 0]
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def _words():
    return torch.randint(0, 83, (2, 20)), torch.randint(0, 83, (2, 20))


_BERT = SimpleNamespace(
    vocab_size=83,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=112,
    max_position_embeddings=32,
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
)
_BERT_SITES = (
    *((f"layer.{i}.attention.self", "attention") for i in range(2)),
    *((f"layer.{i}.attention.output", "add_norm") for i in range(2)),
    *((f"layer.{i}.intermediate", "gelu") for i in range(2)),
    *((f"layer.{i}.output", "add_norm") for i in range(2)),
    ("", "gelu"),
    ("", "linear_cross_entropy"),
    ("embeddings", "embedding"),
)
_VIT_SITES = (("blocks.0.attn", "packed_attention"), ("blocks.1.attn", "packed_attention"))

ENTRIES = [
    Entry("vit", lambda: (VisionTransformer(), _images()), _VIT_SITES, _squares),
    Entry("vit, dropout", lambda: (VisionTransformer(drop=0.1), _images()), _VIT_SITES, _squares),
    Entry(
        "vit, normalised queries and keys",  # between the split and the scores: no packed site
        lambda: (VisionTransformer(qk_norm=True), _images()),
        (("blocks.0.attn", "attention"), ("blocks.1.attn", "attention")),
        _squares,
    ),
    Entry("bert", lambda: (BertForMaskedLM(_BERT), _masked_words()), _BERT_SITES),
    Entry(
        "nn.TransformerEncoder",  # what stands in torch's own forwards is left alone
        lambda: (TransformerModel(), _words()),
        (("", "linear_cross_entropy"),),
    ),
    Entry(
        "nn.MultiheadAttention, normalised afterwards",
        lambda: (MultiheadUser(), torch.randn(2, 20, 48)),
        (("", "add_norm"), ("", "add_norm")),  # one a statement
        _uneven,
    ),
    Entry("nn.MultiheadAttention, clip", lambda: (MultiheadPreNorm(), torch.randn(2, 20, 48)), (), _squares),
]
