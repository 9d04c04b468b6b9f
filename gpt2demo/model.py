"""GPT-2 as the lesson writes it. Names are those of OpenAI's checkpoint: wte, c_attn, mlp.c_fc."""

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from gpt2demo.config import GPTConfig


class Linear(nn.Linear):
    """nn.Linear, filled by GPT._init_weights only: filling GPT-2 twice takes a second."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class Embedding(nn.Embedding):
    """nn.Embedding, filled by GPT._init_weights only."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which no token sees a later one; (B, T, C) to (B, T, C)."""

    bias: torch.Tensor

    def __init__(self, config: GPTConfig, *, attention: str = "manual") -> None:
        super().__init__()
        assert config.n_embd % config.n_head == 0
        # key, query and value projections of all heads in one matmul
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.attention = attention
        if attention == "manual":
            # called bias in OpenAI's checkpoint, though it is the causal mask
            mask = torch.tril(torch.ones(config.block_size, config.block_size))
            self.register_buffer(
                "bias",
                mask.view(1, 1, config.block_size, config.block_size),
                persistent=False,
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend: x (B, T, C) -> (B, T, C)."""
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        if self.attention == "sdpa":
            # one kernel: the (T, T) matrix is never written to memory
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))  # (B, nh, T, T)
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            y = att @ v  # (B, nh, T, T) @ (B, nh, T, hs) -> (B, nh, T, hs)
        y = y.transpose(1, 2).contiguous().view(B, T, C)  # heads side by side again
        return self.c_proj(y)


class MLP(nn.Module):
    """The feed-forward half of a block, four times as wide inside; (B, T, C) to (B, T, C)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU(approximate="tanh")  # GPT-2 was trained with the approximation
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform every token by itself: x (B, T, C) -> (B, T, C)."""
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    """Attention, then MLP, each on a normalised copy and added to the residual stream."""

    def __init__(self, config: GPTConfig, *, attention: str = "manual") -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config, attention=attention)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer: x (B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """GPT-2 with a tied head and GPT-2's initialisation.

    The weights are drawn from torch's global generator: seed it before, as the lesson does.
    """

    def __init__(self, config: GPTConfig, *, attention: str = "manual") -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": Embedding(config.vocab_size, config.n_embd),
                "wpe": Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(
                    Block(config, attention=attention) for _ in range(config.n_layer)
                ),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        # weight sharing: the classifier is the token embedding
        self.transformer.wte.weight = self.lm_head.weight
        for name, module in self.named_modules():
            self._init_weights(name, module)

    def _init_weights(self, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            std = 0.02
            if name.endswith("c_proj"):
                # 2 * n_layer projections add to the residual stream: keep its variance at 1
                std *= (2 * self.config.n_layer) ** -0.5
            nn.init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding) and name != "transformer.wte":
            nn.init.normal_(module.weight, mean=0.0, std=0.02)  # wte is filled as lm_head

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Predict the next token at every position.

        Args:
            idx: (B, T) token ids, T at most block_size.
            targets: (B, T) the ids that come next, or None.

        Returns:
            logits (B, T, vocab_size) and the mean cross-entropy in nats a token, or None.
        """
        _, T = idx.size()
        assert T <= self.config.block_size, f"T={T} above block_size={self.config.block_size}"
        pos = torch.arange(T, dtype=torch.long, device=idx.device)  # (T)
        pos_emb = self.transformer.wpe(pos)  # (T, n_embd)
        tok_emb = self.transformer.wte(idx)  # (B, T, n_embd)
        x = tok_emb + pos_emb
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)  # (B, T, vocab_size)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss

    def num_params(self) -> int:
        """How many weights there are; the tied ones count once."""
        return sum(p.numel() for p in self.parameters())
