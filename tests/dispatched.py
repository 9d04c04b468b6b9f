"""What a step does, as torch's dispatcher sees it: operations, and bytes read and written."""

from collections import defaultdict

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# Products have a rate of their own, so what they read and write is not traffic.
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
)
PRODUCTS = {"mm", "addmm", "bmm", *_ATTENTION, *(f"{name}_backward" for name in _ATTENTION)}
SCORES = {"mul", "masked_fill", "eq", "_softmax", "_softmax_backward_data", "clone"}


class Dispatched(TorchDispatchMode):
    """Counts what torch's dispatcher runs: operations a phase, and the bytes of each kind."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.phase = ""
        self.operations = defaultdict(int)
        self.moved = defaultdict(int)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace != "aten":
            return out
        self.operations[self.phase] += 1
        name = func._schema.name.split("::")[1]
        if func.is_view or name in ("_unsafe_view", "detach") or name in PRODUCTS:
            return out
        read = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        written = [t for t in tree_iter(out) if isinstance(t, torch.Tensor)]
        # one tensor given twice is read once
        once = {(t.untyped_storage()._cdata, t.storage_offset(), t.shape): t for t in read}
        size = sum(t.nbytes for t in once.values()) + sum(t.nbytes for t in written)
        if name == "embedding":  # a few rows of the table
            size = 2 * written[0].nbytes
        elif name == "embedding_dense_backward":
            size = read[0].nbytes + written[0].nbytes
        elif name == "nll_loss_forward":  # a logit a token
            size = 0
        elif name == "nll_loss_backward":  # of the logits it takes the shape
            size = written[0].nbytes
        elif name.startswith("_foreach") and name.endswith("_"):  # returns nothing
            size += sum(t.nbytes for t in args[0])
        elif name == "_fused_adamw_":  # writes three of the four lists that it reads
            size += sum(t.nbytes for i in (0, 2, 3) for t in args[i])
        self.moved[self.part(name, written)] += size
        return out

    def part(self, name, written):
        gpt = self.config.gpt
        table = (gpt.vocab_size, gpt.n_embd)
        if self.phase == "optimizer":
            return "optimizer"
        if name == "_to_copy":
            return "casts"
        if "log_softmax" in name or "nll_loss" in name:
            return "loss"
        if name == "embedding_dense_backward" or (name == "add" and written[0].shape == table):
            return "gradients"
        return "scores" if name in SCORES else "activations"
