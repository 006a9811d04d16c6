"""The networks of population.py: a seeded draw from timm and transformers, and six that are always there.

    python benchmarks/population_networks.py NAME FOLDER      # writes FOLDER/model.onnx, inputs/*.npz, held/*.npz

Weights are random at trained scale: products by their fan-in, norms and running statistics spread. Inputs are
photographs, token ids by Zipf's law, synthetic speech and series. Of five samples three are for the tools, two judge.
"""

import copy
import hashlib
import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.population_deployed import build, deployed, sizes_of

TIMM, TABLE = 40, 14
"""How many are drawn from timm, one of a module, and from `TRANSFORMERS`."""

MOST_PARAMETERS, MOST_PIXELS = 100e6, 384
MOST_DEPLOYED, ROWS = 300e6, 2
"""Of the deployed stratum; rows of a batch by which its weights are scaled."""

SAMPLES, FOR_TOOLS = 5, 3
Feeds = list[dict[str, np.ndarray]]
Names = tuple[str, ...]
Fields = dict[str, Any]
HIDDEN = ("last_hidden_state",)


def digest(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


# -- inputs ------------------------------------------------------------------------------------


def photos(size: int, mean: float = 0.45, deviation: float = 0.226) -> Feeds:
    """scikit-image's photographs, normalised."""
    from skimage import data, transform

    sources = [data.astronaut(), data.coffee(), data.chelsea(), data.rocket()[:, :, :3]]
    sources.append(sources[0][:, ::-1])
    scaled = [transform.resize(one, (size, size), anti_aliasing=True) for one in sources]
    return [{"x": ((one - mean) / deviation).transpose(2, 0, 1)[None].astype(np.float32)} for one in scaled]


def tokens(length: int, vocabulary: int = 16000, mask: bool = True) -> Feeds:
    """Token ids by Zipf's law; later samples end in padding, if there is a mask."""
    draw, found = np.random.default_rng(0), []
    for number in range(SAMPLES):
        feeds = {"ids": np.minimum(draw.zipf(1.3, (1, length)), vocabulary - 1).astype(np.int64)}
        if mask:
            feeds["mask"] = (np.arange(length) < length - 5 * number)[None].astype(np.int64)
        found.append(feeds)
    return found


def speech(seconds: float = 1.0, rate: int = 16000) -> list[np.ndarray]:
    """Voiced syllables with three formants, noise between them."""
    draw, found, time = np.random.default_rng(0), [], np.arange(int(seconds * rate)) / rate
    for number in range(SAMPLES):
        pitch = (110 + 30 * number) * (1 + 0.08 * np.sin(2 * np.pi * 2.5 * time))
        phase, wave = 2 * np.pi * np.cumsum(pitch) / rate, np.zeros_like(time)
        for harmonic in range(1, 25):
            gain = sum(1 / (1 + ((harmonic * pitch - f) / 120) ** 2) for f in (500 + 60 * number, 1500, 2500))
            wave += gain * np.sin(harmonic * phase)
        syllables = np.clip(np.sin(2 * np.pi * (3 + 0.4 * number) * time) + 0.3, 0, 1)
        found.append((0.2 * wave * syllables + 0.01 * draw.standard_normal(time.shape)).astype(np.float32))
    return found


def waves() -> Feeds:
    return [{"x": wave[None]} for wave in speech()]


def mels(bins: int, frames: int, channels_first: bool) -> Feeds:
    """Normalised log-mel spectrograms of the speech."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    bank = mel_filter_bank(257, bins, 0.0, 8000.0, 16000, norm="slaney")
    found = []
    for wave in speech(frames * 160 / 16000):
        hann = window_function(400, "hann")
        power = spectrogram(wave, hann, 400, 160, fft_length=512, mel_filters=bank, power=2.0)
        logs = np.log10(np.maximum(power, 1e-8))[:, :frames]
        logs = ((logs - logs.mean()) / logs.std()).astype(np.float32)
        found.append({"x": np.ascontiguousarray(logs if channels_first else logs.T)[None]})
    return found


def series(length: int, channels: int) -> Feeds:
    """Trend, season and noise."""
    draw, time = np.random.default_rng(0), np.arange(length)[:, None]
    seasons = [np.sin(2 * np.pi * time / draw.uniform(8, 60, channels)) for _ in range(SAMPLES)]
    walks = [np.cumsum(draw.normal(0, 0.1, (length, channels)), 0) for _ in range(SAMPLES)]
    return [{"x": (5 + s * 2 + w)[None].astype(np.float32)} for s, w in zip(seasons, walks, strict=True)]


def forecasts() -> Feeds:
    """What TimesFM's decoder takes: a series of 512 steps, which of them are padding, and the frequency's class."""
    rest = {"padding": np.zeros((1, 512), np.int64), "frequency": np.zeros((1, 1), np.int64)}
    return [{"x": one["x"][:, :, 0], **rest} for one in series(512, 1)]


def noise(**shapes: tuple[int, ...]) -> Feeds:
    draw = np.random.default_rng(0)
    normal = draw.standard_normal
    return [{n: normal(s).astype(np.float32) for n, s in shapes.items()} for _ in range(SAMPLES)]


# -- networks that are always there --------------------------------------------------------------


class Residual(nn.Module):
    """A block of diffusion models: GroupNorm, SiLU, Conv, twice; shifted by the time where there is one."""

    def __init__(self, width: int, out: int, time: int = 0) -> None:
        super().__init__()
        self.n1, self.n2 = nn.GroupNorm(32, width, eps=1e-6), nn.GroupNorm(32, out, eps=1e-6)
        self.c1, self.c2 = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(width, out, 1) if width != out else nn.Identity()
        self.shift = nn.Linear(time, out) if time else None

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        y = self.c1(nn.functional.silu(self.n1(x)))
        if self.shift is not None and time is not None:
            y = y + self.shift(nn.functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.c2(nn.functional.silu(self.n2(y)))


class Attention(nn.Module):
    """Attention over the places of an image, or from them to a text, with what diffusion models put round it."""

    def __init__(self, width: int, context: int = 0, heads: int = 1) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(32, width, eps=1e-6)
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(context or width, width), nn.Linear(context or width, width)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        b, c, h, w = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        given = y if context is None else context
        q, k, v = self.split(self.q(y)), self.split(self.k(given)), self.split(self.v(given))
        mixed = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).softmax(-1) @ v
        return x + self.o(mixed.transpose(1, 2).reshape(b, h * w, c)).transpose(1, 2).reshape(b, c, h, w)


class Gated(nn.Module):
    """The gated layers of a diffusion model's transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, gate = self.up(self.norm(x.flatten(2).transpose(1, 2))).chunk(2, -1)
        return x + self.down(y * nn.functional.gelu(gate)).transpose(1, 2).reshape(x.shape)


class Unet(nn.Module):
    """A small conditional UNet of a latent diffusion model."""

    def __init__(self, w: int = 160, context: int = 384) -> None:
        super().__init__()
        time = 4 * w
        self.width, self.time = w, nn.Sequential(nn.Linear(w, time), nn.SiLU(), nn.Linear(time, time))
        self.first, self.last = nn.Conv2d(4, w, 3, padding=1), nn.Conv2d(w, 4, 3, padding=1)
        self.down = nn.ModuleList([Residual(w, w, time), Residual(w, 2 * w, time)])
        self.middle = nn.ModuleList([Residual(2 * w, 2 * w, time), Residual(2 * w, 2 * w, time)])
        self.up = nn.ModuleList([Residual(4 * w, 2 * w, time), Residual(3 * w, w, time)])
        self.own = nn.ModuleList([Attention(c, 0, 8) for c in (w, 2 * w, 2 * w, 2 * w, w)])
        self.text = nn.ModuleList([Attention(c, context, 8) for c in (w, 2 * w, 2 * w, 2 * w, w)])
        self.gated = nn.ModuleList([Gated(c) for c in (w, 2 * w, 2 * w, 2 * w, w)])
        self.smaller, self.larger = nn.Conv2d(w, w, 3, 2, 1), nn.Conv2d(2 * w, 2 * w, 3, padding=1)
        self.norm = nn.GroupNorm(32, w)

    def block(self, number: int, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return self.gated[number](self.text[number](self.own[number](x), context))

    def forward(self, x: torch.Tensor, step: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(torch.arange(self.width // 2) * (-math.log(10000.0) / (self.width // 2)))
        angles = 500 * step.abs() * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        a = self.block(0, self.down[0](self.first(x), time), context)
        b = self.block(1, self.down[1](self.smaller(a), time), context)
        y = self.middle[1](self.block(2, self.middle[0](b, time), context), time)
        y = self.block(3, self.up[0](torch.cat([y, b], 1), time), context)
        y = self.larger(nn.functional.interpolate(y, scale_factor=2.0, mode="nearest"))
        y = self.block(4, self.up[1](torch.cat([y, a], 1), time), context)
        return self.last(nn.functional.silu(self.norm(y)))


class Decoder(nn.Module):
    """The decoder of a latent diffusion model, whose stream grows beyond FP16 as SDXL's does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 256, 3, padding=1), nn.Conv2d(64, 3, 3, padding=1)
        self.middle = nn.Sequential(Residual(256, 256), Attention(256), Residual(256, 256))
        self.up = nn.ModuleList([Residual(256, 256), Residual(256, 128), Residual(128, 64)])
        self.norm = nn.GroupNorm(32, 64, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x))
        for block in self.up:
            x = nn.functional.interpolate(block(x), scale_factor=2.0, mode="nearest")
        return self.last(nn.functional.silu(self.norm(x)))

    def heat(self) -> None:
        for hot in (self.middle[0], self.middle[2], self.up[0]):
            hot.c2.weight.data.mul_(2.5e4)


class Speaker(nn.Module):
    """Resemblyzer's speaker encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedding = torch.relu(self.linear(self.lstm(x)[1][0][-1]))
        return embedding / torch.norm(embedding, dim=1, keepdim=True)


class WhisperStep(nn.Module):
    """One step of Whisper's decoder with 32 tokens in its cache."""

    layers, heads, width, past = 4, 6, 384, 32

    def __init__(self) -> None:
        super().__init__()
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        sizes: dict[str, Any] = {f"{part}_layers": self.layers for part in ("encoder", "decoder")}
        sizes |= {f"{part}_attention_heads": self.heads for part in ("encoder", "decoder")}
        sizes |= {f"{part}_ffn_dim": 4 * self.width for part in ("encoder", "decoder")}
        sizes |= {"d_model": self.width, "vocab_size": 16000, "pad_token_id": 0}
        whole = WhisperForConditionalGeneration(WhisperConfig(**sizes, attn_implementation="eager"))
        self.decoder, self.head = whole.model.decoder, whole.proj_out

    def forward(
        self, ids: torch.Tensor, heard: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> Any:
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        own = DynamicCache()
        for layer in range(self.layers):
            own.update(keys[layer], values[layer], layer)
        cache = EncoderDecoderCache(own, DynamicCache())
        place = torch.tensor([[self.past]])
        given = {"input_ids": ids, "encoder_hidden_states": heard, "past_key_values": cache}
        found = self.decoder(**given, position_ids=place, use_cache=True)
        new = [layer.keys[:, :, -1:] for layer in own.layers]
        return self.head(found[0]), torch.stack(new)


def whisper_step() -> Feeds:
    step = WhisperStep
    cached = (step.layers, 1, step.heads, step.past, step.width // step.heads)
    found = noise(heard=(1, 300, step.width), keys=cached, values=cached)
    ids = tokens(1, mask=False)
    return [{**one, **rest} for one, rest in zip(ids, found, strict=True)]


# -- the table of transformers -------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A small configuration of transformers: its class, the class of its configuration, fields, samples, outputs."""

    model: str
    config: str
    feeds: Callable[[], Feeds]
    fields: Fields = field(default_factory=dict)
    outputs: Names = HIDDEN
    inputs: Names = ()


ENCODER = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}
TEXT = ENCODER | {"vocab_size": 16000}
CAUSAL = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1408,
    "vocab_size": 16000,
    "use_cache": False,
    "pad_token_id": 0,
}
HEADED = CAUSAL | {"head_dim": 64}
MASKED = ("input_ids", "attention_mask")
IDS = ("input_ids",)
LOGITS, BOXES = ("logits",), ("logits", "pred_boxes")
FRONT = {"conv_dim": (256,) * 7, "num_feat_extract_layers": 7}


def _text(model: str, config: str, **fields: Any) -> Entry:
    return Entry(model, config, lambda: tokens(96), TEXT | fields, inputs=MASKED)


def _causal(
    model: str, config: str, fields: Fields = CAUSAL, outputs: Names = HIDDEN, length: int = 96, **more: Any
) -> Entry:
    return Entry(model, config, lambda: tokens(length, mask=False), fields | more, outputs, IDS)


def _image(model: str, config: str, size: int = 224, outputs: Names = HIDDEN, **f: Any) -> Entry:
    return Entry(model, config, lambda: photos(size), f, outputs)


def _speech(model: str, config: str, **fields: Any) -> Entry:
    return Entry(model, config, waves, ENCODER | FRONT | fields)


T5 = {"d_model": 384, "d_ff": 1024, "num_layers": 6, "num_heads": 6, "vocab_size": 16000, "use_cache": False}
GPT2 = {"n_embd": 512, "n_layer": 6, "n_head": 8, "vocab_size": 16000, "use_cache": False}
SMALL_CONVS = {"depths": [2, 2, 4, 2], "hidden_sizes": [48, 96, 192, 384]}

TRANSFORMERS = {
    "bert": _text("BertModel", "BertConfig"),
    "albert": _text("AlbertModel", "AlbertConfig", embedding_size=128),
    "mpnet": _text("MPNetModel", "MPNetConfig"),
    "roformer": _text("RoFormerModel", "RoFormerConfig", embedding_size=384),
    "electra": _text("ElectraModel", "ElectraConfig", embedding_size=128),
    "squeezebert": _text("SqueezeBertModel", "SqueezeBertConfig", embedding_size=384, q_groups=2, k_groups=2),
    "nystromformer": _text("NystromformerModel", "NystromformerConfig", num_landmarks=16, segment_means_seq_len=96),
    "convbert": _text("ConvBertModel", "ConvBertConfig", embedding_size=128),
    "esm": _text("EsmModel", "EsmConfig", position_embedding_type="rotary", pad_token_id=1, mask_token_id=2),
    "eurobert": _text("EuroBertModel", "EuroBertConfig", pad_token_id=0),
    "mobilebert": _text("MobileBertModel", "MobileBertConfig", hidden_size=256, num_attention_heads=4, intermediate_size=512),
    "t5_encoder": Entry("T5EncoderModel", "T5Config", lambda: tokens(96), T5, inputs=MASKED),
    "gpt2": _causal("GPT2Model", "GPT2Config", GPT2),
    "gpt_neox": _causal("GPTNeoXModel", "GPTNeoXConfig"),
    "llama": _causal("LlamaModel", "LlamaConfig"),
    "qwen3": _causal("Qwen3Model", "Qwen3Config", HEADED),
    "gemma2": _causal("Gemma2Model", "Gemma2Config", HEADED),
    "phi": _causal("PhiModel", "PhiConfig", num_key_value_heads=8),
    "olmo2": _causal("Olmo2Model", "Olmo2Config"),
    "cohere": _causal("CohereModel", "CohereConfig"),
    "granite": _causal("GraniteModel", "GraniteConfig"),
    "stablelm": _causal("StableLmModel", "StableLmConfig"),
    "opt": _causal("OPTModel", "OPTConfig", word_embed_proj_dim=512, ffn_dim=2048),
    "bloom": _causal("BloomModel", "BloomConfig", {"hidden_size": 512, "n_layer": 6, "n_head": 8, "vocab_size": 16000, "use_cache": False}),
    "vit": _image("ViTModel", "ViTConfig", 224, HIDDEN, **ENCODER),
    "dinov2_registers": _image("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", 224, HIDDEN, **ENCODER, image_size=224),
    "dinov3_vit": _image("DINOv3ViTModel", "DINOv3ViTConfig", 224, HIDDEN, **ENCODER),
    "clip_vision": _image("CLIPVisionModel", "CLIPVisionConfig", 224, HIDDEN, **ENCODER),
    "swinv2": _image("Swinv2Model", "Swinv2Config", 256, image_size=256, embed_dim=64, depths=[2, 2, 4, 2], num_heads=[2, 4, 8, 16], window_size=8),
    "segformer": _image("SegformerForSemanticSegmentation", "SegformerConfig", 256, LOGITS),
    "dpt": _image("DPTForDepthEstimation", "DPTConfig", 224, ("predicted_depth",), **ENCODER, image_size=224, backbone_out_indices=[1, 2, 4, 5], neck_hidden_sizes=[48, 96, 192, 384], fusion_hidden_size=96),
    "glpn": _image("GLPNForDepthEstimation", "GLPNConfig", 256, ("predicted_depth",)),
    "yolos": _image("YolosForObjectDetection", "YolosConfig", 256, BOXES, **ENCODER, image_size=[256, 256], num_detection_tokens=50),
    "rt_detr": _image("RTDetrForObjectDetection", "RTDetrConfig", 320, BOXES, num_queries=100, decoder_layers=3),
    "upernet": _image("UperNetForSemanticSegmentation", "UperNetConfig", 256, LOGITS, hidden_size=128, use_auxiliary_head=False),
    "vitpose": Entry("VitPoseForPoseEstimation", "VitPoseConfig", lambda: [{"x": one["x"][..., 32:224]} for one in photos(256)], {}, ("heatmaps",)),
    "wav2vec2": _speech("Wav2Vec2Model", "Wav2Vec2Config"),
    "wavlm": _speech("WavLMModel", "WavLMConfig"),
    "wav2vec2_conformer": _speech("Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", position_embeddings_type="rotary"),
    "sew": Entry("SEWModel", "SEWConfig", waves, ENCODER | {"squeeze_factor": 2}),
    "whisper_encoder": Entry("WhisperEncoder", "WhisperConfig", lambda: mels(80, 1000, True), {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536, "max_source_positions": 500}),
    "audio_spectrogram": Entry("ASTModel", "ASTConfig", lambda: mels(128, 400, False), ENCODER | {"max_length": 400}),
    "hifigan": Entry("SpeechT5HifiGan", "SpeechT5HifiGanConfig", lambda: mels(80, 60, False), {"upsample_initial_channel": 256}, ()),
    "patchtst": Entry("PatchTSTForPrediction", "PatchTSTConfig", lambda: series(512, 7), {"num_input_channels": 7, "context_length": 512, "prediction_length": 96, "patch_length": 16, "patch_stride": 8, "d_model": 128, "num_attention_heads": 8, "num_hidden_layers": 3, "ffn_dim": 256}, ("prediction_outputs",)),
    "patchtsmixer": Entry("PatchTSMixerForPrediction", "PatchTSMixerConfig", lambda: series(512, 7), {"num_input_channels": 7, "context_length": 512, "prediction_length": 96, "patch_length": 16, "patch_stride": 8, "d_model": 64, "num_layers": 6}, ("prediction_outputs",)),
}  # fmt: skip

EXTRAS: dict[str, Entry | tuple[Callable[[], nn.Module], Callable[[], Feeds]]] = {
    "swin2sr": Entry("Swin2SRForImageSuperResolution", "Swin2SRConfig", lambda: photos(64, 0.0, 1.0), {"embed_dim": 60, "depths": [6] * 4, "num_heads": [6] * 4, "upscale": 2, "image_size": 64}, ("reconstruction",)),
    "d_fine": _image("DFineForObjectDetection", "DFineConfig", 320, BOXES, num_queries=100, decoder_layers=3),
    "diffusion_unet": (Unet, lambda: noise(x=(1, 4, 32, 32), step=(1, 1), context=(1, 77, 384))),
    "diffusion_decoder": (Decoder, lambda: noise(x=(1, 4, 32, 32))),
    "whisper_decoder_step": (WhisperStep, whisper_step),
    "speaker_lstm": (Speaker, lambda: mels(40, 160, False)),
}  # fmt: skip

SCORED = {
    "bark": _causal("BarkSemanticModel", "BarkSemanticConfig", {"hidden_size": 512, "num_layers": 6, "num_heads": 8, "input_vocab_size": 16000, "output_vocab_size": 4096, "block_size": 256, "use_cache": False}, outputs=LOGITS),
    "chronos": Entry("T5EncoderModel", "T5Config", lambda: noise(x=(1, 33, 256)), {"d_model": 256, "d_ff": 1024, "num_layers": 4, "num_heads": 4, "vocab_size": 2}, inputs=("inputs_embeds",)),
    "deepseek_ocr2_text": _causal("DeepseekOcr2TextModel", "DeepseekOcr2TextConfig", CAUSAL | {"num_key_value_heads": 8}, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=352, mlp_layer_types=["dense"] + ["sparse"] * 5, experts_implementation="batched_mm"),
    "mamba": _causal("MambaModel", "MambaConfig", {"hidden_size": 384, "num_hidden_layers": 4, "vocab_size": 16000, "use_cache": False}, length=32),
    "mixtral": _causal("MixtralModel", "MixtralConfig", CAUSAL | {"hidden_size": 288, "num_attention_heads": 6, "num_hidden_layers": 4, "intermediate_size": 768}, num_local_experts=4, experts_implementation="batched_mm"),
    "modernbert": _text("ModernBertModel", "ModernBertConfig", pad_token_id=0),
    "moshi": Entry("MoshiModel", "MoshiConfig", lambda: tokens(96), CAUSAL | {"num_key_value_heads": 8, "ffn_dim": 2816}, inputs=MASKED),
    "nemotron_h": _causal("NemotronHModel", "NemotronHConfig", HEADED | {"layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "linear_attention", "mlp"]}, mamba_num_heads=16, n_groups=4, ssm_state_size=64, chunk_size=32, length=32),
    "qwen2_5_vl_text": _causal("Qwen2_5_VLTextModel", "Qwen2_5_VLTextConfig", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}),
    "qwen3_vl_text": _causal("Qwen3VLTextModel", "Qwen3VLTextConfig", HEADED, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]}),
    "rwkv": _causal("RwkvModel", "RwkvConfig", {"hidden_size": 384, "num_hidden_layers": 3, "vocab_size": 16000, "context_length": 128, "use_cache": False}, length=16),
    "sam3_vit": _image("Sam3ViTModel", "Sam3ViTConfig", 224, **ENCODER, image_size=224, pretrain_image_size=224, patch_size=16, window_size=7, global_attn_indexes=[2, 5]),
    "stablelm_head": _causal("StableLmForCausalLM", "StableLmConfig", outputs=LOGITS),
    "t5_gated": Entry("T5EncoderModel", "T5Config", lambda: tokens(96), T5 | {"feed_forward_proj": "gated-gelu"}, inputs=MASKED),
    "timesfm": Entry("TimesFmModel", "TimesFmConfig", forecasts, {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "head_dim": 64, "intermediate_size": 384}, inputs=("past_values", "past_values_padding", "freq")),
    "umt5": Entry("UMT5EncoderModel", "UMT5Config", lambda: tokens(96), T5 | {"feed_forward_proj": "gated-gelu"}, inputs=MASKED),
}  # fmt: skip
"""Classes of the checkpoints that NVIDIA's TensorRT-Model-Connect runs in FP32, or with layers in FP32; never drawn."""


class Outputs(nn.Module):
    """A model that returns the tensors of these names alone."""

    def __init__(self, model: nn.Module, entry: Entry) -> None:
        super().__init__()
        self.model, self.entry = model, entry

    def forward(self, *given: torch.Tensor) -> Any:
        named = dict(zip(self.entry.inputs, given, strict=True)) if self.entry.inputs else {}
        found = self.model(**named) if named else self.model(*given)
        return tuple(found[name] for name in self.entry.outputs) if self.entry.outputs else found


def of_transformers(name: str, entry: Entry, larger: Mapping[str, Any] | None = None) -> nn.Module:
    """The network of a table; `larger` has other sizes for the fields that its configuration has."""
    import transformers

    attention = "eager" if digest(name) >> 2 & 1 else "sdpa"
    for wanted in (attention, "eager"):
        config = getattr(transformers, entry.config)(**entry.fields)
        sizes = {
            n: v for n, v in (larger or {}).items() if n in entry.fields or n == "max_position_embeddings"
        }
        config = getattr(transformers, entry.config)(**entry.fields | sizes) if sizes else config
        config._attn_implementation = wanted
        try:
            return Outputs(_class(transformers, entry)(config), entry)
        except ValueError:  # this one has no sdpa
            continue
    raise ValueError(f"{name}: neither attention")


def _class(library: Any, entry: Entry) -> Any:
    if hasattr(library, entry.model):
        return getattr(library, entry.model)
    place = getattr(library, entry.config).__module__.replace("configuration_", "modeling_")
    return getattr(importlib.import_module(place), entry.model)


def network(name: str) -> tuple[nn.Module, Feeds]:
    """The network of a name with the weights of its initialisation, and its samples."""
    torch.manual_seed(digest(name) % 2**31)
    if sizes_of(name)[1]:
        return build(name)
    entry = EXTRAS.get(name) or TRANSFORMERS.get(name) or SCORED.get(name)
    if isinstance(entry, Entry):
        return of_transformers(name, entry), entry.feeds()
    if entry is not None:
        return entry[0](), entry[1]()
    import timm

    model = timm.create_model(name, pretrained=False)
    return model, photos(model.pretrained_cfg["input_size"][-1])


# -- the draw ------------------------------------------------------------------------------------


def draw(seed: int) -> list[str]:
    """60 names: one of each of 40 modules of timm, 14 of the table, and the six; then those of deployed sizes."""
    import timm

    random = np.random.default_rng(seed)
    modules = sorted(timm.list_modules())
    found: list[str] = []
    for module in random.permutation(modules):
        names = sorted(n for n in timm.list_models(module=str(module)) if not n.startswith("test_"))
        fitting = (str(n) for n in random.permutation(names) if len(found) < TIMM and _fits(str(n)))
        found += [name for name in [next(fitting, None)] if name]
    table = random.permutation(sorted(TRANSFORMERS))[:TABLE]
    small = [*(str(name) for name in random.permutation([*found, *table])), *EXTRAS]
    modules = [str(module) for module in random.permutation(modules)][:TIMM]
    every = (sorted(timm.list_models(module=module)) for module in modules)
    firsts = (next((n for n in names if _fits(n, MOST_DEPLOYED)), None) for names in every)
    texts = [
        name
        for name, entry in TRANSFORMERS.items()
        if entry.inputs == MASKED and "hidden_size" in entry.fields
    ]
    return [*small, *deployed(seed, [name for name in firsts if name], texts)]


def _fits(name: str, most: float = MOST_PARAMETERS) -> bool:
    """Whether a network of timm takes images of one size that is not large, and has fewer parameters than `most`."""
    import timm

    try:
        with torch.device("meta"):  # the largest have billions of parameters
            model = timm.create_model(name, pretrained=False)
    except Exception:  # needs a package that is not here
        return False
    channels, height, width = model.pretrained_cfg["input_size"]
    parameters = sum(p.numel() for p in model.parameters())
    return bool(channels == 3 and height == width <= MOST_PIXELS and parameters < most)


# -- weights of trained scale ----------------------------------------------------------------------

GAINS = (1.3, 1.0, 0.7, 2.0, 0.4)
SHIFTS = (0.0, 0.5, 1.0, 2.0)
"""Of the biases of norms: the larger, the fewer activations are cut off, and the less a network amplifies rounding."""

LARGEST_INSIDE, LARGEST, SMALLEST = 5e3, 1e3, 1e-3
"""What activations and outputs may reach, and the least deviation of the outputs."""

LARGEST_TF32 = 2.5e-3
"""Relative L2 error of the outputs with products of TF32. Of the trained networks in trained.json three quarters
have less; with random weights a deep network may amplify rounding a hundred times, and no FP16 plan can pass."""


def settled(model: nn.Module, feeds: Feeds, seed: int) -> nn.Module:
    """The model with weights at trained scale: activations of reasonable size, and rounding is not amplified."""
    said, best, least = "", None, math.inf
    for shift in SHIFTS:
        for gain in GAINS:
            candidate = scaled(copy.deepcopy(model).eval(), seed, gain, shift)
            calibrated(candidate, feeds[:FOR_TOOLS], seed)
            if not (said := complaint(candidate, feeds[-1])):
                break
        if not said and (error := tf32_error(candidate, feeds[-1])) < least:
            best, least = candidate, error
        if least <= LARGEST_TF32:
            break
    if best is None:
        raise ValueError(f"no gain gives activations of reasonable size: {said}")
    return best


def scaled(model: nn.Module, seed: int, gain: float, shift: float) -> nn.Module:
    random = torch.Generator().manual_seed(seed)

    def normal(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=random)

    seen: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or id(weight) in seen:
            continue
        seen.add(id(weight))
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            weight.data = normal(weight) * (gain / weight[0].numel()) ** 0.5
        elif "Norm" in type(module).__name__ and weight.ndim == 1:
            weight.data = weight.data + 0.3 * normal(weight)
            if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
                bias.data = shift + 0.1 * normal(bias)
    for parameter in model.parameters():
        if id(parameter) not in seen and parameter.numel() > 1 and float(parameter.detach().std()) < 1e-8:
            _spread(parameter, normal(parameter))
    return model


def _spread(parameter: nn.Parameter, random: torch.Tensor) -> None:
    """Gives what starts as a constant the spread of training: positions, scales of layers."""
    if abs(float(parameter.detach().flatten()[0])) < 0.02:
        parameter.data = 0.05 * random if parameter.ndim > 1 else 0.1 + 0.1 * random.abs()
    else:
        parameter.data = parameter.data * (1 + 0.2 * random)


def calibrated(model: nn.Module, feeds: Feeds, seed: int) -> None:
    """Sets the running statistics of BatchNorms from samples, and spreads them."""
    random = torch.Generator().manual_seed(seed)
    batch = nn.modules.batchnorm._BatchNorm
    norms = [m for m in model.modules() if isinstance(m, batch) and m.track_running_stats]
    if not norms:
        return
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    try:
        with torch.no_grad():
            model(*(torch.from_numpy(np.concatenate([f[name] for f in feeds])) for name in feeds[0]))
    finally:
        model.eval()
    for norm in norms:
        assert norm.running_var is not None and norm.running_mean is not None
        spread, shift = (torch.randn(norm.running_var.shape, generator=random) for _ in range(2))
        norm.running_var.mul_(torch.exp(0.3 * spread)).add_(1e-4)
        norm.running_mean.add_(0.2 * shift * norm.running_var.sqrt())


def complaint(model: nn.Module, feeds: dict[str, np.ndarray]) -> str:
    """Why the activations on a sample are not those of a trained network; "" if they are."""
    inside = [0.0]

    def look(_module: nn.Module, _given: Any, out: Any) -> None:
        inside.extend(float(t.abs().max()) for t in _floats(out))

    hooks = [module.register_forward_hook(look) for module in model.modules()]
    with torch.no_grad():
        outputs = list(_floats(model(*map(torch.from_numpy, feeds.values()))))
    for hook in hooks:
        hook.remove()
    largest = max(float(one.abs().max()) for one in outputs)
    if not all(map(math.isfinite, inside)) or max(inside) > LARGEST_INSIDE or not largest < LARGEST:
        return f"up to {max(inside):.3g} inside, {largest:.3g} at the end"
    least = min(float(one.std()) for one in outputs if one.numel() > 1)
    return f"outputs deviate by {least:.3g}" if least < SMALLEST else ""


def tf32_error(model: nn.Module, feeds: dict[str, np.ndarray]) -> float:
    """Relative L2 error of the worst output when operands of linear layers and convolutions are rounded to TF32."""
    given = [torch.from_numpy(value) for value in feeds.values()]
    linear = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    exact_weights = [module.weight.data for module in linear]
    with torch.no_grad():
        exact = list(_floats(model(*given)))
        hooks = [m.register_forward_pre_hook(lambda _, args: tuple(map(_tf32, args))) for m in linear]
        for module in linear:
            module.weight.data = _tf32(module.weight.data)
        rounded = list(_floats(model(*given)))
    for hook in hooks:
        hook.remove()
    for module, weight in zip(linear, exact_weights, strict=True):
        module.weight.data = weight
    pairs = zip(exact, rounded, strict=True)
    return max(float((one - other).norm() / (one.norm() + 1e-30)) for one, other in pairs)


def _tf32(value: Any) -> Any:
    """A float tensor rounded to the 10 bits of TF32's significand, ties away from zero."""
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        return value
    return ((value.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _floats(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _floats(one)


# -- outliers --------------------------------------------------------------------------------------

OUTLIERS = "+outliers"
"""End of the name of a network with outliers."""

SYSTEMATIC, MASSIVE, BEYOND = 60.0, (3e3, -1e3), 1e5
"""Six channels of all tokens (Dettmers et al. 2022, "LLM.int8()"); two of the first or class token (Sun et al. 2024,
"Massive Activations in Large Language Models"); a feed-forward layer of T5 at that token, where FP16 ends at 65504."""

FIRST_TOKEN = ("cls_token", "embed_positions.weight", "position_embeddings")
EMBEDDING_NORMS = ("word_embeddings_layernorm", "embeddings.norm", "pre_ln")


def outliers(model: nn.Module, feeds: Feeds) -> dict[str, float]:
    """Puts the outliers of trained networks into the residual stream, by weights alone; returns what they measure.

    Systematic ones come from a bias of the first block, massive ones from what embeds the first token. Then weights
    become what training makes of them: norms give ordinary channels the scale that they had, a linear layer reads the
    outliers a third as strongly as all others together, and the last norm takes the outliers out again.
    """
    for name, module in model.named_modules():
        if name.endswith("SelfAttention.q"):
            module.weight.data /= 8  # T5's attention scales nothing: trained weights do
    norms = {
        module: name
        for name, module in model.named_modules()
        if "Norm" in type(module).__name__ and getattr(getattr(module, "weight", None), "ndim", 0) == 1
    }
    width = Counter(len(module.weight) for module in norms).most_common(1)[0][0]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(0))
    hot, six = order[:2], order[2 : 2 + min(6, width // 40)]
    scales: dict[nn.Module, float] = {}
    _before(model, norms, feeds, lambda norm, x: scales.update({norm: _scale(x)}))
    readers = [m for m in model.modules() if _columns(m) is not None and len(_columns(m)) == width]
    blocks = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    _systematic(blocks[0], six, width)
    _massive(model, feeds, hot, [m for m, name in norms.items() if name.endswith(EMBEDDING_NORMS)], width)
    beyond = _beyond(blocks, hot, width) if "T5" in type(blocks[0]).__name__ else None
    last = list(scales)[-1]

    def trained(module: nn.Module, x: torch.Tensor) -> None:
        middle = x[1:].abs().median()
        levels = [(six, x[1:, six].abs().mean(0)), (hot, x[0, hot].abs())] if x.shape[-1] == width else []
        there = [(channels, level) for channels, level in levels if level.min() > 10 * middle]
        if module is beyond:
            module.weight.data[hot[0], 0] = BEYOND / float(x[0, 0])
        elif module not in norms:
            for channels, level in there:
                _columns(module)[channels] *= (middle * (width / len(channels)) ** 0.5 / (3 * level))[:, None]
        elif there and there[0][0] is six:
            module.weight.data *= _scale(x) / scales[module]
            if module is last:
                module.weight.data[order[: 2 + len(six)]] /= SYSTEMATIC

    _before(model, [*norms, *readers, *([beyond] if beyond else [])], feeds, trained)
    stream = [0.0]
    _before(model, norms, feeds, lambda _, x: stream.append(float(x.abs().max())))
    return {"largest": max(stream), "tf32_error": tf32_error(model, feeds[-1])}


def _before(model: nn.Module, modules: Any, feeds: Feeds, look: Callable[..., Any]) -> None:
    """Runs the first sample, and looks at the input of each of these modules, tokens by channels, just before it."""

    def hook_of(own: nn.Module, given: Any) -> None:
        look(own, given[0].reshape(-1, given[0].shape[-1]))

    hooks = [module.register_forward_pre_hook(hook_of) for module in modules]
    with torch.no_grad():
        model(*map(torch.from_numpy, feeds[0].values()))
    for hook in hooks:
        hook.remove()


def _scale(x: torch.Tensor) -> float:
    """Of the tokens but the first."""
    return float(x[1:].square().mean().sqrt())


def _columns(module: nn.Module) -> Any:
    """The weight of a linear layer, input channels first; a view."""
    if isinstance(module, nn.Linear):
        return module.weight.data.T
    return module.weight.data if type(module).__name__ == "Conv1D" else None


def _systematic(block: nn.Module, six: torch.Tensor, width: int) -> None:
    """A bias of the last linear layer that writes into the stream."""
    layers = [m for m in block.modules() if _columns(m) is not None and _columns(m).shape[1] == width]
    bias = torch.zeros(width) if layers[-1].bias is None else layers[-1].bias.data
    bias[six] = SYSTEMATIC * torch.linspace(1, 1.5, len(six)) * (-1) ** torch.arange(len(six))
    layers[-1].bias = nn.Parameter(bias)


def _massive(model: nn.Module, feeds: Feeds, hot: torch.Tensor, norms: Any, width: int) -> None:
    """Two channels of the first token, which is 0 in texts, and of no other embedding."""
    rows = [parameter.data for name, parameter in model.named_parameters() if name.endswith(FIRST_TOKEN)]
    if "ids" in feeds[0]:
        embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding))
        rows = [max(embeddings, key=lambda m: m.num_embeddings).weight.data]
        rows[0][1:, hot] = 0
    for one in feeds:
        if "ids" in one:
            one["ids"][:, 0] = 0
        elif one["x"].shape[2:] == (width,):  # embeddings as an input
            one["x"][0, :, hot] = 0
            one["x"][0, 0, hot] = MASSIVE
    for row in rows:
        row.reshape(-1, row.shape[-1])[0, hot] = torch.tensor(MASSIVE)
    for norm in norms:
        norm.weight.data[hot] *= abs(MASSIVE[0]) / len(norm.weight) ** 0.5


def _beyond(blocks: nn.ModuleList, hot: torch.Tensor, width: int) -> nn.Module:
    """Gives a feed-forward layer of T5 a channel that the massive activation alone opens; returns the layer after it."""
    for module in (module for block in blocks[:3] for module in block.modules()):
        if isinstance(module, nn.Linear) and module.out_features == width:
            module.weight.data[hot] = 0
    layer = blocks[2].layer[-1].DenseReluDense
    for name, module in layer.named_children():
        if name.startswith("wi"):
            module.weight.data[0] = 0
            module.weight.data[0, hot[0]] = 1
    layer.wo.weight.data[:, 0] = 0
    wo: nn.Module = layer.wo
    return wo


# -- export ----------------------------------------------------------------------------------------


def export(name: str, folder: Path) -> dict[str, Any]:
    """Writes the network and its samples; returns which exporter wrote it, and sizes."""
    name, with_outliers = name.removesuffix(OUTLIERS), name.endswith(OUTLIERS)
    model, feeds = network(name)
    batched = sizes_of(name)[1].get("batch", 0) > ROWS
    few = [{n: value[:ROWS] for n, value in one.items()} for one in feeds] if batched else feeds
    model = settled(model, few, digest(name) % 2**31)
    measures = outliers(model, feeds) if with_outliers else {}
    if isinstance(model, Decoder):
        model.heat()
    for number, sample in enumerate(feeds):
        target = folder / ("inputs" if number < FOR_TOOLS else "held")
        target.mkdir(parents=True, exist_ok=True)
        np.savez(target / f"{number:02d}.npz", **sample)  # type: ignore[arg-type]
    exporters = ["torchscript", "dynamo"][:: 1 if digest(name) >> 1 & 1 else -1]
    said: list[str] = []
    for exporter in exporters:
        try:
            _exported(model, feeds[0], folder / "model.onnx", exporter)
        except Exception as error:
            said.append(f"{exporter}: {type(error).__name__}: {str(error)[:150]}")
            continue
        parameters = sum(p.numel() for p in model.parameters())
        return {"exporter": exporter, "parameters": parameters, "failed": said, **measures}
    raise ValueError("; ".join(said))


def _exported(model: nn.Module, sample: dict[str, np.ndarray], path: Path, exporter: str) -> None:
    import onnxruntime

    given = tuple(map(torch.from_numpy, sample.values()))
    more: dict[str, Any] = {"dynamo": False, "opset_version": 17}
    if exporter == "dynamo":
        more = {"dynamo": True, "opset_version": 18, "external_data": False, "verbose": False}
    with torch.no_grad():
        torch.onnx.export(model, given, str(path), input_names=list(sample), **more)
        exact = list(_floats(model(*given)))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    found = session.run(None, {k: v for k, v in sample.items() if k in wanted})
    error = float((torch.from_numpy(found[0]) - exact[0]).norm() / (exact[0].norm() + 1e-30))
    if not error < 1e-2:
        raise ValueError(f"the exported file errs by {error:.2g}")


if __name__ == "__main__":
    (wanted, place) = sys.argv[1:]
    torch.set_num_threads(2)
    made = export(wanted, Path(place))
    (Path(place) / "exported.json").write_text(json.dumps(made, indent=1) + "\n")
