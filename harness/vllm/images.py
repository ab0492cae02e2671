"""A small Gemma 3 with a vision tower, written to a folder, and chats with images. Each image becomes 64 tokens."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from harness.vllm.models import BOS, EOS, save_model, small_gemma3, write_tokenizer

VISION_IMPORTS = str(Path(__file__).with_name("vision_imports"))
"""The `PYTHONPATH` by which vLLM imports its vision code in the environment of the tests, which has no torchvision."""
NUM_IMAGE_TOKENS, PIXELS = 64, 112
SPECIAL = {"<image_soft_token>": 258, "<start_of_image>": 259, "<end_of_image>": 260}
BREAKS = {"\n" * (number + 1): 261 + number for number in range(4)}
"""Tokens that vLLM looks up."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<start_of_image>{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)


def write_image_model(folder: Path) -> Path:
    """Write the model, its tokenizer and its processor to `folder`, the same weights each time."""
    torch.manual_seed(7)
    text = small_gemma3().to_dict()
    vision = transformers.SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=PIXELS,
        patch_size=14,
        vision_use_head=False,
    )
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    ids = {name.replace("token", "token_id"): SPECIAL[token] for name, token in names.items()}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision.to_dict(),
        mm_tokens_per_image=NUM_IMAGE_TOKENS,
        boi_token_index=ids["boi_token_id"],
        eoi_token_index=ids["eoi_token_id"],
        image_token_index=ids["image_token_id"],
        **ids,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        tie_word_embeddings=True,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():  # otherwise every image has much the same answer
        model.model.language_model.embed_tokens.weight.mul_(0.2)
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.6)
        for name, weight in model.named_parameters():
            if "vision" in name and weight.dim() > 1:
                weight.mul_(6)
    save_model(model, folder)
    _name_as_published(folder / "model.safetensors")
    added = [AddedToken(token, special=token in SPECIAL, normalized=False) for token in (*SPECIAL, *BREAKS)]
    tokenizer = write_tokenizer(folder, {**SPECIAL, **BREAKS}, added, template=TEMPLATE, **names)
    images = Gemma3ImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
    processor = transformers.Gemma3Processor(
        images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=NUM_IMAGE_TOKENS
    )
    processor.save_pretrained(folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (file := folder / name).exists():  # published files name the class that each server then chooses a variant of
            file.write_text(file.read_text().replace("ImageProcessorPil", "ImageProcessor"))
    return folder


def _name_as_published(weights: Path) -> None:
    """Published files have `vision_tower.vision_model`, which transformers 5 leaves out."""
    names = {name: name.replace("vision_tower.", "vision_tower.vision_model.", 1) for name in load_file(weights)}
    save_file({names[name]: value.clone() for name, value in load_file(weights).items()}, weights, metadata={"format": "pt"})


def image(seed: int) -> str:
    """Random pixels, as the URI of a PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (80, 100, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def message(*parts: str | int) -> dict[str, Any]:
    """A user's message of texts, and of images by their seeds."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": image(part)}}
            for part in parts
        ],
    }
