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
        peers = self.parallel.peers
        if peers is not None and peers.serves(len(token_ids)):
            result = peers.begin_sum(EMBEDDING, len(token_ids))
            self._look_up(token_ids, result.part)
            return result.total()
        return self.parallel.all_reduce(self._look_up(token_ids))

    def _look_up(self, token_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The vectors of this rank's tokens, and zeros for the others', in few kernels."""
        rows = token_ids - self.rows.pieces[0].start
        present = rows.clamp(0, len(self.weight) - 1)
        vectors = torch.index_select(self.weight, 0, present, out=out)
        return vectors.masked_fill_((present != rows)[:, None], 0)


class LMHead(VocabEmbedding):
    """Hidden states [N, hidden_size] -> logits [N, vocab_size], on rank 0; what others get is of no use."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        peers = self.parallel.peers
        if peers is not None and peers.serves(len(hidden)):
            return peers.multiply_on_first(hidden, self.weight)[:, : self.rows.size]
        return self.parallel.gather_vocab(F.linear(hidden, self.weight), self.rows.size)
