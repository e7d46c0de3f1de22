"""Tiny random models of many families from ``transformers``: forward and backward in both modes, nothing found.

The models are untrained, so every finding would be a false one. Discrete choices may differ: experts that tie.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nanprobe

T = pytest.importorskip("transformers")

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

MODELS: dict[str, Callable[[], Any]] = {
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


@pytest.mark.parametrize("mode", ["autocast", "cast"])
@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_architecture_gives_no_finding(name: str, mode: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MODELS[name]()
        report = nanprobe.compare_precisions(model, batch_for(name), mode=mode, train=mode == "cast")
    assert report.verdict == "clean", report.render()
    assert report.exit_code == 0
    assert {f.rule for f in report.findings} <= {"routing-flip"}, report.render()
    assert report.record.conditions["backward"] is True
    assert all(result.completed and result.loss is not None for result in report.precisions.values())
    assert all(result.first_bad is None for result in report.precisions.values())
    assert not report.record.coverage.outputs_not_inspected


def test_a_planted_fault_is_found_in_every_second_layer_that_could_have_it() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MODELS["t5"]()
        with torch.no_grad():
            model.decoder.block[1].layer[2].DenseReluDense.wo.weight.mul_(1e6)
        # T5 keeps this layer in FP32 when it is loaded in half; a plain cast does not.
        report = nanprobe.compare_precisions(model, batch_for("t5"), mode="autocast")
    first = report.precisions["fp16"].first_bad
    assert first is not None
    assert first.module == "decoder.block.1.layer.2.DenseReluDense.wo"
    assert report.precisions["bf16"].verdict == "clean"
