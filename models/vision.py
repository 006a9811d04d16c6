"""Image models from transformers' own classes, with seeded random weights: ViT, Swin, ConvNeXt, MobileNetV2, ResNet, SegFormer.

Every model takes `pixel_values`, float32 [1, 3, S, S], normalised as for ImageNet. Classifiers give `logits`
[1, classes], SegFormer [1, classes, S / 4, S / 4].
"""

from __future__ import annotations

import torch
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from models.common import Built, calibrate_batch_norms, export_classic, image_samples, pick, unit_gain

# Classes of ImageNet-1k; the small models have fewer, so that their last MatMul does not dominate their size.
CLASSES = {True: 1000, False: 20}

# Two channels of the residual stream, one up and one down, as trained ViTs show them (Sun et al. 2024,
# "Massive Activations in Large Language Models", arXiv 2402.17762, section on vision transformers).
MASSIVE_CHANNELS = (3, 17)
MASSIVE = 1.2e4


def classifier(name: str, net, size: int, opset: int) -> Built:
    """Export a classifier with the classic exporter."""
    sample = image_samples(name, "pixel_values", size)
    return Built(export_classic(pick(net, "logits"), sample(0), ["logits"], opset), sample)


def vit_net(full: bool, hidden: int, heads: int):
    """A 12-layer pre-norm ViT (25 LayerNorms) with eager attention: MatMul, Mul, Softmax, MatMul."""
    config = ViTConfig(
        hidden_size=hidden if full else 32,
        num_attention_heads=heads if full else 2,
        intermediate_size=4 * hidden if full else 64,
        image_size=224 if full else 32,
        patch_size=16 if full else 8,
        num_hidden_layers=12,
        num_labels=CLASSES[full],
    )
    config._attn_implementation = "eager"
    net = ViTForImageClassification(config)
    unit_gain(net)
    return net, config


def vit(full: bool) -> Built:
    """ViT-S (88 MB) at opset 13: every LayerNorm decomposed over the last axis, values small enough for FP16."""
    torch.manual_seed(13)
    net, config = vit_net(full, hidden=384, heads=6)
    return classifier("vit", net, config.image_size, opset=13)


def vit_massive(full: bool) -> Built:
    """ViT-B whose residual stream carries two massive channels from the third block on, at opset 13.

    The square in each later LayerNorm is 1.4e8. As in trained models, the norms' scales compensate the variance of the
    massive channels, so that the output still depends on the other channels.
    """
    torch.manual_seed(14)
    net, config = vit_net(full, hidden=768, heads=12)
    up, down = MASSIVE_CHANNELS
    deviation = MASSIVE * (2 / config.hidden_size) ** 0.5  # of a token whose other channels are small
    with torch.no_grad():
        layers, embeddings = net.vit.layers, net.vit.embeddings
        for start in (embeddings.cls_token, embeddings.position_embeddings):
            start[..., [up, down]] = 0
        embeddings.patch_embeddings.projection.weight[[up, down]] = 0
        embeddings.patch_embeddings.projection.bias[[up, down]] = 0
        for writer in [w for layer in layers for w in (layer.attention.o_proj, layer.mlp.fc2)]:
            writer.weight[[up, down]] = (
                0  # nothing else writes there: FP16 holds +-12000 exactly, and only that
            )
            writer.bias[[up, down]] = 0
        for writer in [w for layer in layers[2:] for w in (layer.attention.o_proj, layer.mlp.fc2)]:
            writer.weight *= (
                0.25  # these norms no longer see the small channels grow, so keep them from growing
            )
        bias = layers[1].mlp.fc2.bias
        bias[up], bias[down] = MASSIVE, -MASSIVE
        norms = [norm for layer in layers[2:] for norm in (layer.layernorm_before, layer.layernorm_after)]
        for norm in [*norms, net.vit.layernorm]:
            norm.weight *= deviation
            norm.weight[[up, down]] = 0.05
    return classifier("vit_massive", net, config.image_size, opset=13)


def swin(full: bool) -> Built:
    """Swin-T at opset 13: window partitioning in int64 shape arithmetic, and many casts that do nothing."""
    torch.manual_seed(15)
    config = SwinConfig(
        image_size=224 if full else 64,
        patch_size=4,
        embed_dim=96 if full else 16,
        depths=[2, 2, 6, 2] if full else [2, 2],
        num_heads=[3, 6, 12, 24] if full else [2, 4],
        window_size=7 if full else 4,
        num_labels=CLASSES[full],
    )
    config._attn_implementation = "eager"
    net = SwinForImageClassification(config)
    unit_gain(net)
    return classifier("swin", net, config.image_size, opset=13)


def convnext(full: bool) -> Built:
    """ConvNeXt-T at opset 16: LayerNorms between transposes, layer scales."""
    torch.manual_seed(16)
    config = ConvNextConfig(
        image_size=224 if full else 64,
        num_labels=CLASSES[full],
        hidden_sizes=[96, 192, 384, 768] if full else [8, 16, 32, 64],
        depths=[3, 3, 9, 3] if full else [1, 1, 2, 1],
        layer_scale_init_value=0.5,
    )
    net = ConvNextForImageClassification(config)
    unit_gain(net)
    return classifier("convnext", net, config.image_size, opset=16)


def mobilenet_v2(full: bool) -> Built:
    """MobileNetV2 at opset 13: 35 Conv+Clip pairs, each Clip with its own two bound Constants."""
    torch.manual_seed(17)
    config = MobileNetV2Config(
        image_size=224 if full else 64,
        depth_multiplier=1.0 if full else 0.25,
        num_labels=CLASSES[full],
        tf_padding=False,
    )
    net = MobileNetV2ForImageClassification(config)
    return batch_normed("mobilenet_v2", net, config.image_size)


def resnet(full: bool) -> Built:
    """ResNet-50 at opset 13, the control: it needs no repair."""
    torch.manual_seed(18)
    config = (
        ResNetConfig(num_labels=CLASSES[full])
        if full
        else ResNetConfig(
            embedding_size=16, hidden_sizes=[32, 48, 64, 96], depths=[1, 1, 1, 1], num_labels=CLASSES[full]
        )
    )
    return batch_normed("resnet", ResNetForImageClassification(config), 224 if full else 64)


def batch_normed(name: str, net, size: int) -> Built:
    """Exports with unit gain and BatchNorm statistics of eight images; the exporter folds each BatchNorm into its Conv."""
    unit_gain(net)
    calibrate_batch_norms(net, image_samples(name, "pixel_values", size), count=8)
    return classifier(name, net, size, opset=13)


def segformer(full: bool) -> Built:
    """SegFormer-B2 for the 150 classes of ADE20K at opset 16: attention over shortened keys, LayerNorms, Resize."""
    torch.manual_seed(19)
    config = (
        SegformerConfig(
            hidden_sizes=[64, 128, 320, 512], depths=[3, 4, 6, 3], decoder_hidden_size=768, num_labels=150
        )
        if full
        else SegformerConfig(
            hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], decoder_hidden_size=16, num_labels=8
        )
    )
    config._attn_implementation = "eager"
    net = SegformerForSemanticSegmentation(config)
    unit_gain(net)
    side = 512 if full else 64
    calibrate_batch_norms(net, image_samples("segformer", "pixel_values", side), count=4)
    return classifier("segformer", net, side, opset=16)
