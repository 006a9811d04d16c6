"""RT-DETR from transformers' own classes (founding case 1): GridSample attention, TopK query selection, boxes."""

from __future__ import annotations

import torch
from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

from models.common import Built, calibrate_batch_norms, export_classic, image_samples, pick, unit_gain

SEED = 3700  # number of the issue that reported the case, NVIDIA/TensorRT#3700


def config_for(full: bool) -> tuple[RTDetrConfig, int]:
    """The configuration and the input's side: the published R101 at 640, or the same structure tiny at 128."""
    if full:
        backbone = RTDetrResNetConfig(depths=[3, 4, 23, 3], out_features=["stage2", "stage3", "stage4"])
        return RTDetrConfig(
            backbone_config=backbone,
            freeze_backbone_batch_norms=False,
            num_labels=80,
            encoder_hidden_dim=384,
            encoder_ffn_dim=2048,
            anchor_image_size=[640, 640],
            decoder_in_channels=[384, 384, 384],
        ), 640
    backbone = RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[16, 24, 32, 48],
        depths=[1, 1, 2, 1],
        out_features=["stage2", "stage3", "stage4"],
    )
    return RTDetrConfig(
        backbone_config=backbone,
        freeze_backbone_batch_norms=False,
        num_labels=8,
        d_model=32,
        encoder_hidden_dim=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_in_channels=[24, 32, 48],
        decoder_in_channels=[32, 32, 32],
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        decoder_layers=2,
        num_queries=20,
        anchor_image_size=[128, 128],
    ), 128


def scale_weights(net: RTDetrForObjectDetection, width: int) -> None:
    """Unit gain, except in the heads: spread class scores, boxes near their anchors, offsets near their grid."""
    unit_gain(net, skip="sampling_offsets")  # its bias is the published star-shaped grid of sampling points
    for name, layer in net.named_modules():
        if name.endswith("sampling_offsets"):
            torch.nn.init.normal_(layer.weight, std=0.5 * width**-0.5)
    for score in [net.model.enc_score_head, *net.model.decoder.class_embed]:
        torch.nn.init.normal_(score.weight, std=2 * width**-0.5)
        torch.nn.init.constant_(score.bias, -2.0)
    for box in [net.model.enc_bbox_head, *net.model.decoder.bbox_embed]:
        torch.nn.init.normal_(box.layers[-1].weight, std=0.3 * width**-0.5)
        torch.nn.init.zeros_(box.layers[-1].bias)


def rtdetr(full: bool) -> Built:
    """RT-DETR: image [1, 3, S, S] in 0..1 to logits [1, queries, classes] and boxes [1, queries, 4] (centre, size, in 0..1).

    Classic exporter, opset 16, the first with GridSample (opset 20's form is wrong in some TensorRT releases).
    """
    torch.manual_seed(SEED)
    config, side = config_for(full)
    config._attn_implementation = "eager"
    net = RTDetrForObjectDetection(config)
    scale_weights(net, config.d_model)
    sample = image_samples("rtdetr", "image", side, normalised=False)
    calibrate_batch_norms(net, sample, count=2 if full else 8, damped=(".layer.2.normalization",))
    return Built(
        export_classic(pick(net, "logits", "pred_boxes"), sample(0), ["logits", "boxes"], opset=16), sample
    )
