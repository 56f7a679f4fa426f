"""Diffusion transformers and U-nets at toy size; latents are not square, timesteps differ by row."""

from __future__ import annotations

from typing import Any

import diffusers as df
import torch

from zoo.case import CONV, TABLE, ZooCase, first, from_kwargs, normal

TUPLE: dict[str, Any] = {"return_dict": False}


def timesteps() -> torch.Tensor:
    """One step per row, as in training or in a batch of requests."""
    return torch.tensor([750, 120])


def flux_inputs() -> dict[str, Any]:
    """A 4 x 6 grid of latents and five text tokens; the guidance of the distilled model."""
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij")
    grid = torch.stack([torch.zeros(24), rows.flatten(), columns.flatten()], dim=-1)
    return TUPLE | {
        "hidden_states": normal(2, 24, 16),
        "encoder_hidden_states": normal(2, 5, 32, seed=1),
        "pooled_projections": normal(2, 24, seed=2),
        "timestep": torch.tensor([0.75, 0.12]),
        "img_ids": grid,
        "txt_ids": torch.zeros(5, 3),
        "guidance": torch.tensor([3.5, 2.0]),
    }


def sd3_inputs() -> dict[str, Any]:
    return TUPLE | {
        "hidden_states": normal(2, 4, 8, 12),
        "encoder_hidden_states": normal(2, 5, 32, seed=1),
        "pooled_projections": normal(2, 24, seed=2),
        "timestep": timesteps(),
    }


def pixart_inputs() -> dict[str, Any]:
    """Resolution and aspect ratio as conditions (nested), and a padded caption."""
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    return TUPLE | {
        "hidden_states": normal(2, 4, 8, 8),
        "encoder_hidden_states": normal(2, 5, 32, seed=1),
        "encoder_attention_mask": mask,
        "timestep": timesteps(),
        "added_cond_kwargs": {
            "resolution": torch.tensor([[64.0, 64.0], [64.0, 96.0]]),
            "aspect_ratio": torch.tensor([[1.0], [1.5]]),
        },
    }


def wan_inputs() -> dict[str, Any]:
    return TUPLE | {
        "hidden_states": normal(2, 4, 2, 8, 12),
        "encoder_hidden_states": normal(2, 5, 32, seed=1),
        "timestep": timesteps(),
    }


def hunyuan_video_inputs() -> dict[str, Any]:
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, 3:] = 0
    return TUPLE | {
        "hidden_states": normal(2, 4, 2, 8, 12),
        "encoder_hidden_states": normal(2, 5, 32, seed=1),
        "encoder_attention_mask": mask,
        "pooled_projections": normal(2, 24, seed=2),
        "timestep": timesteps(),
        "guidance": torch.tensor([6000.0, 2000.0]),
    }


def unet_inputs() -> dict[str, Any]:
    return TUPLE | {
        "sample": normal(2, 4, 8, 12),
        "timestep": timesteps(),
        "encoder_hidden_states": normal(2, 5, 32, seed=1),
    }


def unet_sdxl_inputs() -> dict[str, Any]:
    """The pooled text and six size conditions, nested as the pipeline passes them."""
    sizes = torch.tensor([[64.0, 96.0, 0.0, 0.0, 64.0, 96.0], [64.0, 64.0, 0.0, 8.0, 64.0, 96.0]])
    return unet_inputs() | {"added_cond_kwargs": {"text_embeds": normal(2, 16, seed=2), "time_ids": sizes}}


flux = from_kwargs(
    df.FluxTransformer2DModel,
    in_channels=16,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=32,
    pooled_projection_dim=24,
    guidance_embeds=True,
    axes_dims_rope=(4, 6, 6),
)
# The 3.5 medium form: qk norm, and a second self-attention in the first block.
sd3 = from_kwargs(
    df.SD3Transformer2DModel,
    sample_size=16,
    in_channels=4,
    out_channels=4,
    num_layers=2,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=32,
    caption_projection_dim=64,
    pooled_projection_dim=24,
    pos_embed_max_size=16,
    dual_attention_layers=(0,),
    qk_norm="rms_norm",
)
pixart = from_kwargs(
    df.PixArtTransformer2DModel,
    num_attention_heads=4,
    attention_head_dim=24,
    in_channels=4,
    out_channels=8,
    num_layers=2,
    cross_attention_dim=96,
    sample_size=8,
    use_additional_conditions=True,
    caption_channels=32,
)
wan = from_kwargs(
    df.WanTransformer3DModel,
    num_attention_heads=4,
    attention_head_dim=16,
    in_channels=4,
    out_channels=4,
    text_dim=32,
    freq_dim=32,
    ffn_dim=128,
    num_layers=2,
    rope_max_seq_len=32,
)
hunyuan_video = from_kwargs(
    df.HunyuanVideoTransformer3DModel,
    in_channels=4,
    out_channels=4,
    num_attention_heads=4,
    attention_head_dim=16,
    num_layers=1,
    num_single_layers=1,
    num_refiner_layers=1,
    text_embed_dim=32,
    pooled_projection_dim=24,
    rope_axes_dim=(4, 6, 6),
)
UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
}
# Stable Diffusion 1.5: 1x1 convolutions around each transformer block.
unet = from_kwargs(df.UNet2DConditionModel, **UNET, attention_head_dim=4)
# SDXL: linears around it, two blocks deep, and a second conditioning path.
unet_sdxl = from_kwargs(
    df.UNet2DConditionModel,
    **UNET,
    attention_head_dim=(2, 4),
    use_linear_projection=True,
    transformer_layers_per_block=(1, 2),
    addition_embed_type="text_time",
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=16 + 6 * 8,
)

UNET_FLOATS = {
    "conv_in.weight": CONV,
    "conv_out.weight": CONV,
    "*.conv.weight": CONV,
    "*.resnets.*.conv?.weight": CONV,
    "*.conv_shortcut.weight": CONV,
}


def _case(name: str, build: Any, inputs: Any, linears: int, floats: dict[str, str]) -> ZooCase:
    return ZooCase(name=name, build=build, inputs=inputs, linears=linears, floats=floats, output=first)


DIFFUSION: tuple[ZooCase, ...] = (
    _case("flux", flux, flux_inputs, 50, {}),
    _case("sd3", sd3, sd3_inputs, 36, {"pos_embed.proj.weight": CONV}),
    _case("pixart", pixart, pixart_inputs, 30, {"pos_embed.proj.weight": CONV, "*scale_shift_table": TABLE}),
    _case("wan", wan, wan_inputs, 26, {"patch_embedding.weight": CONV, "*scale_shift_table": TABLE}),
    _case("hunyuan_video", hunyuan_video, hunyuan_video_inputs, 40, {"x_embedder.proj.weight": CONV}),
    _case(
        "unet",
        unet,
        unet_inputs,
        50,
        UNET_FLOATS | {"*.attentions.*.proj_in.weight": CONV, "*.attentions.*.proj_out.weight": CONV},
    ),
    _case("unet_sdxl", unet_sdxl, unet_sdxl_inputs, 70, UNET_FLOATS),
)
