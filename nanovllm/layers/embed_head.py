"""Token embedding and output head, two ends of the vocabulary."""

import torch
import torch.nn.functional as F
from torch import nn


class VocabEmbedding(nn.Module):
    """Token ids [T] -> vectors [T, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


class LMHead(VocabEmbedding):
    """Hidden states [N, hidden_size] -> logits [N, vocab_size]."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight)
