"""transformers' GPT-2 with our shape and weights: the oracle of model and loop."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2demo.config import GPTConfig
from gpt2demo.model import GPT


def reference_model(config: GPTConfig, implementation: str, device: str = "cpu") -> GPT2LMHeadModel:
    """A GPT2LMHeadModel of this shape without dropout; `implementation` is eager or sdpa."""
    with torch.device(device):
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=config.vocab_size,
                n_positions=config.block_size,
                n_embd=config.n_embd,
                n_layer=config.n_layer,
                n_head=config.n_head,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                attn_implementation=implementation,
            )
        )


def is_conv1d(name: str) -> bool:
    """Whether transformers stores this weight transposed, as OpenAI's checkpoint does."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def copy_weights(ours: GPT, theirs: GPT2LMHeadModel) -> None:
    """Copy our weights into transformers' model, whose Conv1D stores them transposed."""
    weights = ours.state_dict()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(weights[name].t() if is_conv1d(name) else weights[name])
