"""Healthy models of many families, tiny and untrained, for tolerances and tests: none of them may give a finding.

The families of ``transformers`` come with labels, so that backward runs; the hand-written ones are deep, or have a kink
at every layer, which is where errors grow most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T
from torch import Tensor, nn

__all__ = ["FAMILIES", "HAND_WRITTEN", "batch_for", "mean_square"]

WORDS = 120
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
}
GROUPED = {**SMALL, "num_key_value_heads": 1}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": WORDS,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 5,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**GROUPED)),
    "mistral": lambda: T.MistralForCausalLM(T.MistralConfig(**GROUPED)),
    "mixtral": lambda: T.MixtralForCausalLM(T.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": lambda: T.Qwen2ForCausalLM(T.Qwen2Config(**GROUPED)),
    "gemma2": lambda: T.Gemma2ForCausalLM(T.Gemma2Config(**GROUPED, head_dim=16)),
    "phi": lambda: T.PhiForCausalLM(T.PhiConfig(**SMALL)),
    "gpt_neox": lambda: T.GPTNeoXForCausalLM(T.GPTNeoXConfig(**SMALL)),
    "gpt2": lambda: T.GPT2LMHeadModel(
        T.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=WORDS, n_positions=32, bos_token_id=1, eos_token_id=2)
    ),
    "opt": lambda: T.OPTForCausalLM(
        T.OPTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=64,
            vocab_size=WORDS,
            max_position_embeddings=32,
            word_embed_proj_dim=32,
        )
    ),
    "bloom": lambda: T.BloomForCausalLM(T.BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=WORDS)),
    "falcon": lambda: T.FalconForCausalLM(
        T.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=WORDS)
    ),
    "mamba": lambda: T.MambaForCausalLM(
        T.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=WORDS, state_size=4)
    ),
    "bert": lambda: T.BertForMaskedLM(T.BertConfig(**SMALL)),
    "roberta": lambda: T.RobertaForMaskedLM(T.RobertaConfig(**SMALL, pad_token_id=1)),
    "distilbert": lambda: T.DistilBertForMaskedLM(
        T.DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=64, vocab_size=WORDS, max_position_embeddings=32)
    ),
    "albert": lambda: T.AlbertForMaskedLM(T.AlbertConfig(**SMALL, embedding_size=16)),
    "deberta_v2": lambda: T.DebertaV2ForMaskedLM(
        T.DebertaV2Config(**SMALL, relative_attention=True, pos_att_type=["c2p", "p2c"])
    ),
    "t5": lambda: T.T5ForConditionalGeneration(
        T.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=WORDS, decoder_start_token_id=0)
    ),
    "bart": lambda: T.BartForConditionalGeneration(T.BartConfig(**SEQ2SEQ, max_position_embeddings=32)),
    "whisper": lambda: T.WhisperForConditionalGeneration(
        T.WhisperConfig(
            **SEQ2SEQ,
            max_source_positions=20,
            max_target_positions=32,
            num_mel_bins=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    ),
    "wav2vec2": lambda: T.Wav2Vec2ForCTC(
        T.Wav2Vec2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            vocab_size=16,
            conv_dim=(16, 16),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            mask_time_prob=0.0,
        )
    ),
    "vit": lambda: T.ViTForImageClassification(T.ViTConfig(**VISION)),
    "convnext": lambda: T.ConvNextForImageClassification(
        T.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5, image_size=16)
    ),
    "resnet": lambda: T.ResNetForImageClassification(
        T.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5, layer_type="basic")
    ),
    "swin": lambda: T.SwinForImageClassification(
        T.SwinConfig(
            embed_dim=8, depths=[1, 1], num_heads=[1, 2], image_size=16, patch_size=2, window_size=4, num_labels=5
        )
    ),
    "clip": lambda: T.CLIPModel(
        T.CLIPConfig(
            text_config={**SMALL, "eos_token_id": 2},
            vision_config={key: value for key, value in VISION.items() if key != "num_labels"},
            projection_dim=16,
        )
    ),
}


def batch_for(name: str) -> dict[str, Any]:
    """Return two or four samples with labels, some of them padded."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, WORDS, (3, 12), generator=draw)
    pixels = torch.randn(3, 3, 16, 16, generator=draw)
    if name in ("vit", "convnext", "resnet", "swin"):
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (3,), generator=draw)}
    if name == "clip":
        return {"input_ids": ids, "pixel_values": pixels, "return_loss": True}
    if name == "wav2vec2":
        return {
            "input_values": torch.randn(2, 800, generator=draw),
            "labels": torch.randint(1, 16, (2, 6), generator=draw),
        }
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=draw), "labels": ids[:2]}
    keep = torch.ones_like(ids)
    keep[0, :3] = 0
    keep[2, 9:] = 0
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": keep}
    return {key: value for key, value in batch.items() if not (name == "mamba" and key == "attention_mask")}


class _Block(nn.Module):
    """A pre-norm transformer block around PyTorch's own attention kernel."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.n1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.ff(self.n2(x))


def _plain(depth: int, activation: type[nn.Module], width: int = 64) -> nn.Sequential:
    """A stack without residuals: the hardest case, because nothing carries the signal past a rounding."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.kaiming_normal_(linear.weight)
        layers += [linear, activation()]
    return nn.Sequential(*layers, nn.Linear(width, 8))


class _Recurrent(nn.Module):
    """A GRU over a sequence, read at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(16, 32, 2, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x)
        return self.head(states[:, -1])


def _unet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(32, 16, 4, stride=4),
        nn.LeakyReLU(),
        nn.Conv2d(16, 3, 1),
    )


HAND_WRITTEN: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "transformer, 64 blocks": lambda: (nn.Sequential(*(_Block() for _ in range(64))), torch.randn(2, 8, 32)),
    "plain ReLU, 40 layers": lambda: (_plain(40, nn.ReLU), torch.randn(16, 64)),
    "plain GELU, 40 layers": lambda: (_plain(40, nn.GELU), torch.randn(16, 64)),
    "recurrent, 64 steps": lambda: (_Recurrent(), torch.randn(4, 64, 16)),
    "convolutions": lambda: (_unet(), torch.randn(4, 3, 16, 16)),
}
"""Name to a function that makes a model and its batch; the loss is the mean square of the output."""


def mean_square(output: Any, batch: Any) -> Tensor:
    """Return the mean square of an output tensor."""
    del batch
    assert isinstance(output, Tensor)
    return output.float().square().mean()
