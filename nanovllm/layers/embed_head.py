"""Token embedding and output head, two ends of the vocabulary."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.utils.context import get_forward_context


class VocabEmbedding(nn.Module):
    """Token ids [T] -> vectors [T, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


class LMHead(VocabEmbedding):
    """Hidden states [T, hidden_size] -> logits [N, vocab_size] of the rows that the step samples from."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        indices = get_forward_context().logits_indices
        return F.linear(hidden if indices is None else hidden[indices], self.weight)
