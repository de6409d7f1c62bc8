#!/usr/bin/env python3
"""Dumps post-RoPE queries and keys, and values, of a Hugging Face model into a file for turboquant_eval.

    pip install torch transformers safetensors
    python dump_qkv.py Qwen/Qwen2.5-0.5B text.txt qkv.safetensors [tokens]
"""
import sys

import torch
from safetensors.torch import save_file
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

tensors = {}


def recording_attention(module, query, key, value, *args, **kwargs):
    # Attention functions get [batch, heads, tokens, head_dim], after RoPE and before key heads are repeated.
    for kind, tensor in (("q", query), ("k", key), ("v", value)):
        tensors[f"layers.{module.layer_idx}.{kind}"] = tensor[0].detach().cpu().contiguous()
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


def main(model_name, text_file, out_file, tokens="2048"):
    AttentionInterface.register("recording", recording_attention)
    AttentionMaskInterface.register("recording", sdpa_mask)  # without it sliding windows would be ignored
    model = AutoModelForCausalLM.from_pretrained(model_name, attn_implementation="recording").eval()
    text = open(text_file, encoding="utf-8").read()
    ids = AutoTokenizer.from_pretrained(model_name)(text, return_tensors="pt").input_ids[:, : int(tokens)]
    with torch.no_grad():
        model(ids, use_cache=False)
    save_file(tensors, out_file, metadata={"model": model_name})
    print(f"{out_file}: {len(tensors)} tensors of {ids.shape[1]} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
