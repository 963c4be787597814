"""Logits, loss and gradients by `transformers`: the independent implementation.

    python hf_reference.py CHECKPOINT OUTPUT.safetensors

Needs torch and transformers, and nothing of octablox. The checkpoint's folder also has
`tokens.safetensors` with `tokens` int64 [B, S]. Written are `logits` [B, S, V], as `grad.NAME` the
gradients of the mean loss of tokens 1..S-1, experts one by one, and, where there is such a layer,
the multi-token prediction's `mtp_logits` [B, S-1, V], all float32.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel


def main(folder, output):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    model.eval()
    tokens = load_file(Path(folder) / "tokens.safetensors")["tokens"]
    logits = model(tokens, use_cache=False).logits
    vocabulary = logits.shape[-1]
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, vocabulary), tokens[:, 1:].reshape(-1)
    )
    loss.backward()
    results = {"logits": logits.detach().contiguous(), "loss": loss.detach().reshape(1)}
    for name, parameter in model.named_parameters():
        for part, gradient in _as_stored(name, parameter.grad):
            results[f"grad.{part}"] = gradient.contiguous()
    if getattr(model.config, "num_mtp_layers", 0):
        results["mtp_logits"] = mtp_logits(model, tokens)
    save_file(results, output)


@torch.no_grad()
def mtp_logits(model, tokens):
    """From the hidden state of token i and token i+1, what token i+2 is."""
    number = model.config.num_hidden_layers
    # The class has DeepSeek-V3's own number of layers here, 61.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}.*"]
    mtp = MtpModel.from_pretrained(model).eval()
    hidden = model.model(tokens, use_cache=False).last_hidden_state
    position_ids = torch.arange(1, tokens.shape[1])[None]
    after = mtp.forward_layer(0, hidden[:, :-1], position_ids, None, input_ids=tokens[:, 1:])
    return model.lm_head(after).contiguous()


def _as_stored(name, gradient):
    """A parameter's gradient by the names of the checkpoint's tensors."""
    if name.endswith("experts.gate_up_proj"):
        for e, both in enumerate(gradient):
            gate, up = both.chunk(2)
            prefix = name.removesuffix("gate_up_proj")
            yield f"{prefix}{e}.gate_proj.weight", gate
            yield f"{prefix}{e}.up_proj.weight", up
    elif name.endswith("experts.down_proj"):
        for e, one in enumerate(gradient):
            yield f"{name.removesuffix('down_proj')}{e}.down_proj.weight", one
    else:
        yield name, gradient


if __name__ == "__main__":
    main(*sys.argv[1:])
