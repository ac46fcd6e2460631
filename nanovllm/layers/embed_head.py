"""Token embedding and output head, two ends of the vocabulary."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.parallel import SINGLE, Parallel
from nanovllm.layers.peers import EMBEDDING


class VocabEmbedding(nn.Module):
    """Token ids [T] -> vectors [T, hidden_size]. A rank holds the rows of its tokens, then rows of no token."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: Parallel = SINGLE) -> None:
        super().__init__()
        self.parallel, self.rows = parallel, parallel.shard_vocab(vocab_size)
        num_rows = parallel.padded_vocab(vocab_size)
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size), requires_grad=False)
        self.weight[len(self.rows) :] = 0

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.parallel.size == 1:
            return F.embedding(token_ids, self.weight)
        (own,) = self.rows.pieces
        is_own = (token_ids >= own.start) & (token_ids < own.stop)
        vectors = F.embedding(torch.where(is_own, token_ids - own.start, 0), self.weight)
        vectors.masked_fill_(~is_own[:, None], 0)
        peers = self.parallel.peers
        if peers is not None and peers.serves(len(token_ids)):
            result = peers.begin_sum(EMBEDDING, len(token_ids))
            result.part.copy_(vectors)
            return result.total()
        return self.parallel.all_reduce(vectors)


class LMHead(VocabEmbedding):
    """Hidden states [N, hidden_size] -> logits [N, vocab_size], on rank 0; what others get is of no use."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        peers = self.parallel.peers
        if peers is not None and peers.serves(len(hidden)):
            return peers.multiply_on_first(hidden, self.weight)[:, : self.rows.size]
        return self.parallel.gather_vocab(F.linear(hidden, self.weight), self.rows.size)
