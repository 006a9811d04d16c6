"""Text encoders and a decoder block from transformers' own classes: BERT, the encoder of T5, two Llama layers."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, T5Config, T5EncoderModel

from models.common import Built, Sample, export_classic, export_dynamo, rng_for, unit_gain

# Standard deviation of T5's residual stream here. In trained models it grows so much that transformers
# clamps it in FP16.
STREAM = 2000.0

# Masks add the lowest float32 to forbidden scores. In FP16 that is -inf, and 0 * -inf is NaN.
LOWEST = torch.finfo(torch.float32).min


def token_samples(case: str, vocabulary: int, length: int):
    """A sampler of `input_ids` and `attention_mask`, int64 [1, length]; the last fifth or so is padding (id 0)."""

    def sample(index: int) -> Sample:
        rng = rng_for(case, index)
        used = length - int(rng.integers(1, max(2, length // 5)))
        mask = (np.arange(length) < used).astype(np.int64)[None]
        return {"input_ids": rng.integers(1, vocabulary, (1, length)) * mask, "attention_mask": mask}

    return sample


class MaskedEncoder(nn.Module):
    """Calls an encoder with the additive mask (1 - mask) * lowest, as in every export of transformers 2 to 4."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, attention_mask):
        mask = (1.0 - attention_mask[:, None, None, :].to(torch.float32)) * LOWEST
        return self.inner(input_ids=input_ids, attention_mask=mask).last_hidden_state


class PlainMask(nn.Module):
    """Calls an encoder with the 0/1 mask; transformers turns it into a Where, which is harmless in FP16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, attention_mask):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def bert(full: bool) -> Built:
    """BERT-base at opset 13: decomposed LayerNorms, and a mask that is NaN everywhere in FP16."""
    torch.manual_seed(21)
    config = (
        BertConfig()
        if full
        else BertConfig(
            vocab_size=200,
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    )
    config._attn_implementation = "eager"
    net = BertModel(config, add_pooling_layer=False)
    unit_gain(net, norms=False)  # one case must have scales and biases shared through Identity nodes
    sample = token_samples("bert", config.vocab_size, 128 if full else 16)
    return Built(export_classic(MaskedEncoder(net), sample(0), ["hidden"], opset=13), sample)


def t5_encoder(full: bool) -> Built:
    """T5-base's encoder at opset 16: RMSNorms over a residual stream in the thousands, whose squares FP16 cannot hold."""
    torch.manual_seed(22)
    config = (
        T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
        if full
        else T5Config(vocab_size=200, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    )
    config._attn_implementation = "eager"
    net = T5EncoderModel(config)
    unit_gain(net)
    with torch.no_grad():
        net.shared.weight.normal_(std=STREAM)
        for name, layer in net.named_modules():
            if name.endswith((".o", ".wo")):  # the two layers that write into the residual stream
                layer.weight *= 0.5 * STREAM
            if name.endswith(
                ".q"
            ):  # T5 does not divide scores by sqrt(d_kv): its weights are trained to be that small
                layer.weight *= config.d_kv**-0.5
    sample = token_samples("t5_encoder", config.vocab_size, 128 if full else 16)
    return Built(export_classic(PlainMask(net), sample(0), ["hidden"], opset=16), sample)


class LlamaBlock(nn.Module):
    """Runs Llama's layers on embeddings, with the causal mask of transformers."""

    def __init__(self, inner: LlamaModel) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, embeddings):
        return self.inner(inputs_embeds=embeddings, use_cache=False).last_hidden_state


def llama_block(full: bool) -> Built:
    """Two Llama layers and the last norm, dynamo exporter, opset 18: RMSNorm, RoPE, grouped keys, SwiGLU.

    embeddings, float32 [1, length, hidden], to hidden states of the same shape. The causal mask is a Where, harmless in
    FP16, so a tool that guards every lowest-float constant over-reports here. Full: the widths of TinyLlama 1.1B.
    """
    torch.manual_seed(23)
    config = (
        LlamaConfig(
            hidden_size=2048,
            intermediate_size=5632,
            num_attention_heads=32,
            num_key_value_heads=4,
            num_hidden_layers=2,
            vocab_size=8,
        )
        if full
        else LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
            vocab_size=8,
        )
    )
    net = LlamaModel(config)
    unit_gain(net)

    def sample(index: int) -> Sample:
        shape = (1, 128 if full else 16, config.hidden_size)
        return {"embeddings": rng_for("llama_block", index).standard_normal(shape).astype(np.float32)}

    return Built(export_dynamo(LlamaBlock(net), sample(0), ["hidden"], opset=18), sample)
