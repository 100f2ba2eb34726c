# ruff: noqa: RET504 -- the names and the steps are those of the code that is imitated
"""Whole models with an encoder beside the decoder, or with biases of positions."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.patching.corpus.entry import Entry


class T5LayerNorm(nn.Module):
    """Root mean square; no bias and no subtraction of mean."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)

        # convert into half-precision if necessary
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)

        return self.weight * hidden_states


class NewGELUActivation(nn.Module):
    def forward(self, input):
        return 0.5 * input * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0))))


class T5DenseGatedActDense(nn.Module):
    """Gated GELU: not SwiGLU."""

    def __init__(self, d_model, d_ff, dropout_rate):
        super().__init__()
        self.wi_0 = nn.Linear(d_model, d_ff, bias=False)
        self.wi_1 = nn.Linear(d_model, d_ff, bias=False)
        self.wo = nn.Linear(d_ff, d_model, bias=False)
        self.dropout = nn.Dropout(dropout_rate)
        self.act = NewGELUActivation()

    def forward(self, hidden_states):
        hidden_gelu = self.act(self.wi_0(hidden_states))
        hidden_linear = self.wi_1(hidden_states)
        hidden_states = hidden_gelu * hidden_linear
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.wo(hidden_states)
        return hidden_states


class T5Attention(nn.Module):
    """No scale; in the first layer of a stack a bias of relative positions that learns."""

    def __init__(self, d_model, num_heads, dropout_rate, is_decoder, has_relative_attention_bias=False):
        super().__init__()
        self.is_decoder = is_decoder
        self.has_relative_attention_bias = has_relative_attention_bias
        self.relative_attention_num_buckets = 8
        self.relative_attention_max_distance = 16
        self.n_heads = num_heads
        self.key_value_proj_dim = d_model // num_heads
        self.inner_dim = d_model
        self.dropout = dropout_rate
        self.q = nn.Linear(d_model, self.inner_dim, bias=False)
        self.k = nn.Linear(d_model, self.inner_dim, bias=False)
        self.v = nn.Linear(d_model, self.inner_dim, bias=False)
        self.o = nn.Linear(self.inner_dim, d_model, bias=False)
        if self.has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(self.relative_attention_num_buckets, self.n_heads)

    def _relative_position_bucket(self, relative_position, bidirectional):
        relative_buckets = torch.zeros_like(relative_position)
        num_buckets = self.relative_attention_num_buckets
        if bidirectional:
            num_buckets //= 2
            relative_buckets += (relative_position > 0).to(torch.long) * num_buckets
            relative_position = torch.abs(relative_position)
        else:
            relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
        max_exact = num_buckets // 2
        is_small = relative_position < max_exact
        scale = (num_buckets - max_exact) / math.log(self.relative_attention_max_distance / max_exact)
        large = max_exact + (torch.log(relative_position.float().clamp(min=1) / max_exact) * scale).to(torch.long)
        large = torch.min(large, torch.full_like(large, num_buckets - 1))
        return relative_buckets + torch.where(is_small, relative_position, large)

    def compute_bias(self, query_length, key_length):
        """Compute binned relative position bias"""
        device = self.relative_attention_bias.weight.device
        context_position = torch.arange(query_length, dtype=torch.long, device=device)[:, None]
        memory_position = torch.arange(key_length, dtype=torch.long, device=device)[None, :]
        relative_position = memory_position - context_position  # shape (query_length, key_length)
        buckets = self._relative_position_bucket(relative_position, bidirectional=not self.is_decoder)
        values = self.relative_attention_bias(buckets)  # shape (query_length, key_length, num_heads)
        values = values.permute([2, 0, 1]).unsqueeze(0)  # shape (1, num_heads, query_length, key_length)
        return values

    def forward(self, hidden_states, mask=None, key_value_states=None, position_bias=None):
        batch_size, seq_length = hidden_states.shape[:2]
        current_states = hidden_states if key_value_states is None else key_value_states
        key_length = current_states.shape[1]

        query_states = self.q(hidden_states)
        query_states = query_states.view(batch_size, -1, self.n_heads, self.key_value_proj_dim).transpose(1, 2)
        key_states = self.k(current_states)
        value_states = self.v(current_states)
        key_states = key_states.view(batch_size, -1, self.n_heads, self.key_value_proj_dim).transpose(1, 2)
        value_states = value_states.view(batch_size, -1, self.n_heads, self.key_value_proj_dim).transpose(1, 2)

        # compute scores, equivalent of torch.einsum("bnqd,bnkd->bnqk", query_states, key_states)
        scores = torch.matmul(query_states, key_states.transpose(3, 2))

        if position_bias is None:
            if not self.has_relative_attention_bias:
                position_bias = torch.zeros(
                    (1, self.n_heads, seq_length, key_length), device=scores.device, dtype=scores.dtype
                )
            else:
                position_bias = self.compute_bias(seq_length, key_length)
            if mask is not None:
                position_bias = position_bias + mask  # (batch_size, n_heads, seq_length, key_length)

        scores += position_bias

        # (batch_size, n_heads, seq_length, key_length)
        attn_weights = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)
        attn_weights = nn.functional.dropout(attn_weights, p=self.dropout, training=self.training)

        attn_output = torch.matmul(attn_weights, value_states)

        attn_output = attn_output.transpose(1, 2).contiguous()
        attn_output = attn_output.view(batch_size, -1, self.inner_dim)
        attn_output = self.o(attn_output)
        return attn_output, position_bias


class T5Block(nn.Module):
    """Self-attention, cross-attention in a decoder, feed-forward; each after its norm and before a dropout."""

    def __init__(self, d_model, num_heads, d_ff, dropout_rate, is_decoder, has_relative_attention_bias):
        super().__init__()
        self.is_decoder = is_decoder
        args = (d_model, num_heads, dropout_rate, is_decoder)
        self.SelfAttention = T5Attention(*args, has_relative_attention_bias)
        self.self_norm = T5LayerNorm(d_model)
        if is_decoder:
            self.EncDecAttention = T5Attention(*args)
            self.cross_norm = T5LayerNorm(d_model)
        self.DenseReluDense = T5DenseGatedActDense(d_model, d_ff, dropout_rate)
        self.ff_norm = T5LayerNorm(d_model)

    def forward(self, hidden_states, attention_mask, position_bias, encoder_hidden_states=None, cross_bias=None):
        attention_output, position_bias = self.SelfAttention(
            self.self_norm(hidden_states), mask=attention_mask, position_bias=position_bias
        )
        hidden_states = hidden_states + attention_output
        if self.is_decoder:
            cross_output, cross_bias = self.EncDecAttention(
                self.cross_norm(hidden_states), key_value_states=encoder_hidden_states, position_bias=cross_bias
            )
            hidden_states = hidden_states + cross_output
        hidden_states = hidden_states + self.DenseReluDense(self.ff_norm(hidden_states))
        return hidden_states, position_bias, cross_bias


class T5Stack(nn.Module):
    def __init__(self, embed_tokens, d_model, num_heads, d_ff, dropout_rate, is_decoder, num_layers=2):
        super().__init__()
        self.embed_tokens = embed_tokens
        self.is_decoder = is_decoder
        self.block = nn.ModuleList(
            [T5Block(d_model, num_heads, d_ff, dropout_rate, is_decoder, i == 0) for i in range(num_layers)]
        )
        self.final_layer_norm = T5LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout_rate)

    def forward(self, input_ids, encoder_hidden_states=None):
        hidden_states = self.dropout(self.embed_tokens(input_ids))
        mask = None
        if self.is_decoder:
            length = input_ids.shape[1]
            seq_ids = torch.arange(length, device=input_ids.device)
            causal = seq_ids[None, None, :].repeat(input_ids.shape[0], length, 1) <= seq_ids[None, :, None]
            mask = (1.0 - causal[:, None, :, :].to(hidden_states.dtype)) * torch.finfo(hidden_states.dtype).min
        position_bias, cross_bias = None, None
        for layer_module in self.block:
            hidden_states, position_bias, cross_bias = layer_module(
                hidden_states, mask, position_bias, encoder_hidden_states, cross_bias
            )
        hidden_states = self.final_layer_norm(hidden_states)
        return self.dropout(hidden_states)


class T5ForConditionalGeneration(nn.Module):
    def __init__(self, vocab_size=83, d_model=48, num_heads=3, d_ff=112, dropout_rate=0.1):
        super().__init__()
        self.model_dim = d_model
        self.shared = nn.Embedding(vocab_size, d_model)
        sizes = (d_model, num_heads, d_ff, dropout_rate)
        self.encoder = T5Stack(self.shared, *sizes, is_decoder=False)
        self.decoder = T5Stack(self.shared, *sizes, is_decoder=True)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self.lm_head.weight = self.shared.weight

    def _shift_right(self, labels):
        shifted = labels.new_zeros(labels.shape)
        shifted[..., 1:] = labels[..., :-1].clone()
        return shifted.masked_fill_(shifted == -100, 0)

    def forward(self, input_ids, labels):
        hidden_states = self.encoder(input_ids)
        sequence_output = self.decoder(self._shift_right(labels), encoder_hidden_states=hidden_states)
        # Rescale output before projecting on vocab
        sequence_output = sequence_output * (self.model_dim**-0.5)
        lm_logits = self.lm_head(sequence_output)
        loss_fct = nn.CrossEntropyLoss(ignore_index=-100)
        loss = loss_fct(lm_logits.view(-1, lm_logits.size(-1)), labels.view(-1))
        return loss, lm_logits


class BartAttention(nn.Module):
    """Heads folded into the batch, the query scaled at its projection, and the mask added to a view."""

    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _shape(self, tensor, seq_len, bsz):
        return tensor.view(bsz, seq_len, self.num_heads, self.head_dim).transpose(1, 2).contiguous()

    def forward(self, hidden_states, key_value_states=None, attention_mask=None):
        is_cross_attention = key_value_states is not None
        bsz, tgt_len, _ = hidden_states.size()

        # get query proj
        query_states = self.q_proj(hidden_states) * self.scaling
        # get key, value proj
        if is_cross_attention:
            key_states = self._shape(self.k_proj(key_value_states), -1, bsz)
            value_states = self._shape(self.v_proj(key_value_states), -1, bsz)
        else:
            key_states = self._shape(self.k_proj(hidden_states), -1, bsz)
            value_states = self._shape(self.v_proj(hidden_states), -1, bsz)

        proj_shape = (bsz * self.num_heads, -1, self.head_dim)
        query_states = self._shape(query_states, tgt_len, bsz).view(*proj_shape)
        key_states = key_states.reshape(*proj_shape)
        value_states = value_states.reshape(*proj_shape)

        src_len = key_states.size(1)
        attn_weights = torch.bmm(query_states, key_states.transpose(1, 2))

        if attention_mask is not None:
            attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, src_len) + attention_mask
            attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, src_len)

        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        attn_probs = nn.functional.dropout(attn_weights, p=self.dropout, training=self.training)
        attn_output = torch.bmm(attn_probs, value_states)

        attn_output = attn_output.view(bsz, self.num_heads, tgt_len, self.head_dim)
        attn_output = attn_output.transpose(1, 2)
        attn_output = attn_output.reshape(bsz, tgt_len, self.embed_dim)
        return self.out_proj(attn_output)


class BartDecoderLayer(nn.Module):
    """Dropout, residual and norm three times in one forward."""

    def __init__(self, d_model=48, heads=3, ffn_dim=112, dropout=0.1):
        super().__init__()
        self.self_attn = BartAttention(d_model, heads, dropout)
        self.dropout = dropout
        self.activation_fn = F.gelu
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.encoder_attn = BartAttention(d_model, heads, dropout)
        self.encoder_attn_layer_norm = nn.LayerNorm(d_model)
        self.fc1 = nn.Linear(d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)

    def forward(self, hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask):
        residual = hidden_states

        # Self Attention
        hidden_states = self.self_attn(hidden_states=hidden_states, attention_mask=attention_mask)
        hidden_states = nn.functional.dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = residual + hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)

        # Cross-Attention Block
        residual = hidden_states
        hidden_states = self.encoder_attn(
            hidden_states=hidden_states,
            key_value_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
        )
        hidden_states = nn.functional.dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = residual + hidden_states
        hidden_states = self.encoder_attn_layer_norm(hidden_states)

        # Fully Connected
        residual = hidden_states
        hidden_states = self.activation_fn(self.fc1(hidden_states))
        hidden_states = self.fc2(hidden_states)
        hidden_states = nn.functional.dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = residual + hidden_states
        hidden_states = self.final_layer_norm(hidden_states)
        return hidden_states


class BartDecoder(nn.Module):
    """Over the hidden states of an encoder that is elsewhere; tied weight, a bias that is a buffer."""

    def __init__(self, vocab_size=83, d_model=48, layers=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, d_model)
        self.embed_positions = nn.Embedding(32, d_model)
        self.layers = nn.ModuleList([BartDecoderLayer(d_model) for _ in range(layers)])
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids, encoder_hidden_states, encoder_padding_mask, labels):
        length = input_ids.shape[1]
        hidden_states = self.embed_tokens(input_ids) + self.embed_positions.weight[:length]
        mask = torch.full((length, length), float("-inf"), device=input_ids.device).triu(1)
        encoder_mask = torch.zeros(encoder_padding_mask.shape, dtype=hidden_states.dtype, device=input_ids.device)
        encoder_mask = encoder_mask.masked_fill(encoder_padding_mask, torch.finfo(hidden_states.dtype).min)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, encoder_hidden_states, encoder_mask[:, None, None, :])
        lm_logits = self.lm_head(hidden_states)
        return lm_logits, F.cross_entropy(lm_logits.view(-1, lm_logits.size(-1)), labels.view(-1))


def clones(module, n):
    "Produce N identical layers."
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


class LayerNorm(nn.Module):
    "Divides by the standard deviation of n - 1, eps outside of the root: not torch's layer norm."

    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class SublayerConnection(nn.Module):
    """
    A residual connection followed by a layer norm.
    Note for code simplicity the norm is first as opposed to last.
    """

    def __init__(self, size, dropout):
        super().__init__()
        self.norm = LayerNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer):
        "Apply residual connection to any sublayer with the same size."
        return x + self.dropout(sublayer(self.norm(x)))


def attention(query, key, value, mask=None, dropout=None):
    "Compute 'Scaled Dot Product Attention'"
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = F.softmax(scores, dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        assert d_model % h == 0
        self.d_k = d_model // h
        self.h = h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            # Same mask applied to all h heads.
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        x, attn = attention(query, key, value, mask=mask, dropout=self.dropout)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        del query, key, value, attn
        return self.linears[-1](x)


class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_model, d_ff, dropout=0.1):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.w_2(self.dropout(self.w_1(x).relu()))


class EncoderLayer(nn.Module):
    def __init__(self, size, self_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = nn.ModuleList([SublayerConnection(size, dropout) for _ in range(2)])

    def forward(self, x, mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    def __init__(self, size, self_attn, src_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn = self_attn
        self.src_attn = src_attn
        self.feed_forward = feed_forward
        self.sublayer = nn.ModuleList([SublayerConnection(size, dropout) for _ in range(3)])

    def forward(self, x, memory, src_mask, tgt_mask):
        m = memory
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, m, m, src_mask))
        return self.sublayer[2](x, self.feed_forward)


def subsequent_mask(size):
    "Mask out subsequent positions."
    attn_shape = (1, size, size)
    return torch.triu(torch.ones(attn_shape), diagonal=1).type(torch.uint8) == 0


class EncoderDecoder(nn.Module):
    """A standard Encoder-Decoder architecture; log-probabilities come out."""

    def __init__(self, src_vocab=83, tgt_vocab=71, d_model=48, h=3, d_ff=112, dropout=0.1):
        super().__init__()
        attn = lambda: MultiHeadedAttention(h, d_model, dropout)  # noqa: E731
        ff = lambda: PositionwiseFeedForward(d_model, d_ff, dropout)  # noqa: E731
        self.encoder = EncoderLayer(d_model, attn(), ff(), dropout)
        self.encoder_norm = LayerNorm(d_model)
        self.decoder = DecoderLayer(d_model, attn(), attn(), ff(), dropout)
        self.decoder_norm = LayerNorm(d_model)
        self.src_embed = nn.Embedding(src_vocab, d_model)
        self.tgt_embed = nn.Embedding(tgt_vocab, d_model)
        self.generator = nn.Linear(d_model, tgt_vocab)

    def encode(self, src, src_mask):
        return self.encoder_norm(self.encoder(self.src_embed(src) * math.sqrt(48), src_mask))

    def decode(self, memory, src_mask, tgt, tgt_mask):
        x = self.tgt_embed(tgt) * math.sqrt(48)
        return self.decoder_norm(self.decoder(x, memory, src_mask, tgt_mask))

    def forward(self, src, tgt):
        "Take in and process masked src and target sequences."
        src_mask = (src != 0).unsqueeze(-2)
        tgt_mask = (tgt != 0).unsqueeze(-2)
        tgt_mask = tgt_mask & subsequent_mask(tgt.size(-1)).type_as(tgt_mask.data)
        out = self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)
        return F.log_softmax(self.generator(out), dim=-1)


def dropout_add(x, residual, prob, training):
    """Dropout add function"""
    out = F.dropout(x, p=prob, training=training)
    out = residual + out
    return out


def bloom_gelu_forward(x):
    """Custom bias GELU function. Adapted from Megatron-DeepSpeed code."""
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def build_alibi_tensor(attention_mask, num_heads, dtype):
    """[batch * heads, 1, tokens]: a slope a head times the position of the key."""
    batch_size, seq_length = attention_mask.shape
    closest_power_of_2 = 2 ** math.floor(math.log2(num_heads))
    base = 2 ** (-(2 ** -(math.log2(closest_power_of_2) - 3)))
    slopes = torch.pow(torch.tensor(base), torch.arange(1, 1 + closest_power_of_2, dtype=torch.int32))
    if closest_power_of_2 != num_heads:
        extra_base = torch.tensor(2 ** (-(2 ** -(math.log2(2 * closest_power_of_2) - 3))))
        num_remaining_heads = min(closest_power_of_2, num_heads - closest_power_of_2)
        extra_powers = torch.arange(1, 1 + 2 * num_remaining_heads, 2, dtype=torch.int32)
        slopes = torch.cat([slopes, torch.pow(extra_base, extra_powers)], dim=0)
    arange_tensor = ((attention_mask.cumsum(dim=-1) - 1) * attention_mask)[:, None, :]
    alibi = slopes[..., None] * arange_tensor
    return alibi.reshape(batch_size * num_heads, 1, seq_length).to(dtype)


class BloomAttention(nn.Module):
    def __init__(self, hidden_size, n_head, attention_dropout, hidden_dropout):
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads = n_head
        self.head_dim = hidden_size // n_head
        self.hidden_dropout = hidden_dropout
        # Layer-wise attention scaling
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.beta = 1.0
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=True)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_dropout = nn.Dropout(attention_dropout)

    def _split_heads(self, fused_qkv):
        """Heads come before the three parts; results share the storage of fused_qkv"""
        batch_size, seq_length, three_times_hidden_size = fused_qkv.shape  # noqa: RUF059
        fused_qkv = fused_qkv.view(batch_size, seq_length, self.num_heads, 3, self.head_dim)
        return fused_qkv[..., 0, :], fused_qkv[..., 1, :], fused_qkv[..., 2, :]

    def _merge_heads(self, x):
        batch_size_and_num_heads, seq_length, _ = x.shape
        batch_size = batch_size_and_num_heads // self.num_heads
        x = x.view(batch_size, self.num_heads, seq_length, self.head_dim)
        x = x.permute(0, 2, 1, 3)
        return x.reshape(batch_size, seq_length, self.num_heads * self.head_dim)

    def forward(self, hidden_states, residual, alibi, attention_mask):
        fused_qkv = self.query_key_value(hidden_states)  # [batch_size, seq_length, 3 x hidden_size]

        # 3 x [batch_size, seq_length, num_heads, head_dim]
        (query_layer, key_layer, value_layer) = self._split_heads(fused_qkv)

        batch_size, q_length, _, _ = query_layer.shape

        query_layer = query_layer.transpose(1, 2).reshape(batch_size * self.num_heads, q_length, self.head_dim)
        key_layer = key_layer.permute(0, 2, 3, 1).reshape(batch_size * self.num_heads, self.head_dim, q_length)
        value_layer = value_layer.transpose(1, 2).reshape(batch_size * self.num_heads, q_length, self.head_dim)

        # [batch_size * num_heads, q_length, kv_length]
        matmul_result = alibi.baddbmm(
            batch1=query_layer,
            batch2=key_layer,
            beta=self.beta,
            alpha=self.inv_norm_factor,
        )

        # change view to [batch_size, num_heads, q_length, kv_length]
        attention_scores = matmul_result.view(batch_size, self.num_heads, q_length, -1)

        # cast attention scores to fp32, compute scaled softmax and cast back to initial dtype
        input_dtype = attention_scores.dtype
        attn_weights = torch.masked_fill(attention_scores, attention_mask, torch.finfo(attention_scores.dtype).min)
        attention_probs = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(input_dtype)

        # [batch_size, num_heads, q_length, kv_length]
        attention_probs = self.attention_dropout(attention_probs)

        # change view [batch_size x num_heads, q_length, kv_length]
        attention_probs_reshaped = attention_probs.view(batch_size * self.num_heads, q_length, -1)

        # matmul: [batch_size * num_heads, q_length, head_dim]
        context_layer = torch.bmm(attention_probs_reshaped, value_layer)
        context_layer = self._merge_heads(context_layer)

        output_tensor = self.dense(context_layer)
        output_tensor = dropout_add(output_tensor, residual, self.hidden_dropout, self.training)
        return output_tensor


class BloomMLP(nn.Module):
    def __init__(self, hidden_size, hidden_dropout):
        super().__init__()
        self.hidden_dropout = hidden_dropout
        self.dense_h_to_4h = nn.Linear(hidden_size, 4 * hidden_size)
        self.dense_4h_to_h = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, hidden_states, residual):
        hidden_states = bloom_gelu_forward(self.dense_h_to_4h(hidden_states))
        intermediate_output = self.dense_4h_to_h(hidden_states)
        return dropout_add(intermediate_output, residual, self.hidden_dropout, self.training)


class BloomBlock(nn.Module):
    def __init__(self, hidden_size, n_head, dropout):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.self_attention = BloomAttention(hidden_size, n_head, dropout, dropout)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.mlp = BloomMLP(hidden_size, dropout)

    def forward(self, hidden_states, alibi, attention_mask):
        layernorm_output = self.input_layernorm(hidden_states)
        attention_output = self.self_attention(layernorm_output, hidden_states, alibi, attention_mask)
        layernorm_output = self.post_attention_layernorm(attention_output)
        return self.mlp(layernorm_output, attention_output)


class BloomForCausalLM(nn.Module):
    def __init__(self, vocab_size=83, hidden_size=48, n_head=3, n_layer=2, dropout=0.1):
        super().__init__()
        self.num_heads = n_head
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.word_embeddings_layernorm = nn.LayerNorm(hidden_size)
        self.h = nn.ModuleList([BloomBlock(hidden_size, n_head, dropout) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.lm_head.weight = self.word_embeddings.weight

    def forward(self, input_ids, attention_mask=None, labels=None):
        batch_size, seq_length = input_ids.shape
        hidden_states = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        if attention_mask is None:
            attention_mask = torch.ones((batch_size, seq_length), device=hidden_states.device)
        alibi = build_alibi_tensor(attention_mask, self.num_heads, dtype=hidden_states.dtype)
        causal = torch.ones(seq_length, seq_length, dtype=torch.bool, device=input_ids.device).triu(1)
        causal_mask = causal[None, None] | ~attention_mask[:, None, None, :].to(torch.bool)

        for block in self.h:
            hidden_states = block(hidden_states, alibi=alibi, attention_mask=causal_mask)
        lm_logits = self.lm_head(self.ln_f(hidden_states))

        loss = None
        if labels is not None:
            # Shift so that tokens < n predict n
            shift_logits = lm_logits[..., :-1, :].contiguous()
            shift_labels = labels[..., 1:].contiguous()
            batch_size, seq_length, vocab_size = shift_logits.shape
            # Flatten the tokens
            loss_fct = nn.CrossEntropyLoss()
            loss = loss_fct(
                shift_logits.view(batch_size * seq_length, vocab_size), shift_labels.view(batch_size * seq_length)
            )
        return loss, lm_logits


def _pairs():
    labels = torch.randint(1, 83, (2, 20))
    labels[1, -3:] = -100
    return {"input_ids": torch.randint(1, 83, (2, 27)), "labels": labels}


def _decoder_batch():
    padding = torch.zeros(2, 27, dtype=torch.bool)
    padding[1, -6:] = True
    return {
        "input_ids": torch.randint(0, 83, (2, 20)),
        "encoder_hidden_states": torch.randn(2, 27, 48),
        "encoder_padding_mask": padding,
        "labels": torch.randint(0, 83, (2, 20)),
    }


def _translation():
    src, tgt = torch.randint(1, 83, (2, 27)), torch.randint(1, 71, (2, 20))
    src[1, -6:] = 0
    tgt[1, -4:] = 0
    return src, tgt


def _negative_log_likelihood(output, batch):
    return F.nll_loss(output[:, :-1].flatten(0, 1), batch[1][:, 1:].flatten(), ignore_index=0)


def _story():
    ids = torch.randint(0, 83, (2, 20))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, -5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


_T5 = (
    *((f"{side}.block.{i}.SelfAttention", "attention") for side in ("encoder", "decoder") for i in range(2)),
    *((f"decoder.block.{i}.EncDecAttention", "attention") for i in range(2)),
    *(
        (f"{s}.block.{i}.{n}", "rms_norm")
        for s in ("encoder", "decoder")
        for i in range(2)
        for n in ("self_norm", "ff_norm")
    ),
    *((f"decoder.block.{i}.cross_norm", "rms_norm") for i in range(2)),
    *((f"{side}.final_layer_norm", "rms_norm") for side in ("encoder", "decoder")),
    *((f"{s}.block.{i}.DenseReluDense.act", "gelu") for s in ("encoder", "decoder") for i in range(2)),
    *((side, "embedding") for side in ("encoder", "decoder")),
    ("", "linear_cross_entropy"),
)
_BART = (
    *((f"layers.{i}.{name}", "attention") for i in range(2) for name in ("self_attn", "encoder_attn")),
    *((f"layers.{i}", "add_norm") for i in range(2) for _ in range(3)),  # one a statement
    ("", "linear_cross_entropy"),
    ("", "embedding"),
)
_BLOOM = (
    *((f"h.{i}.self_attention", "attention") for i in range(2)),
    *((f"h.{i}.mlp", "gelu") for i in range(2)),
    ("", "linear_cross_entropy"),
    ("", "embedding"),
)

ENTRIES = [
    Entry("t5", lambda: (T5ForConditionalGeneration(), _pairs()), _T5),
    Entry("bart's decoder over an encoder", lambda: (BartDecoder(), _decoder_batch()), _BART),
    Entry(
        "annotated encoder and decoder",
        lambda: (EncoderDecoder(), _translation()),
        (
            ("", "linear_cross_entropy"),
            ("encoder.self_attn", "attention"),
            ("decoder.self_attn", "attention"),
            ("decoder.src_attn", "attention"),
        ),
        _negative_log_likelihood,
    ),
    Entry("bloom", lambda: (BloomForCausalLM(), _story()), _BLOOM),
]
