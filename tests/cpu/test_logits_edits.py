"""Everything that edits logits, against one row at a time in plain Python."""

import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.layers.logits import add_biases_, apply_masks_, apply_penalties_, ban_words_
from tests.cpu.naive import INF, edit_naively

TOKEN = st.integers(0, 6)
ROW = st.tuples(
    st.lists(st.one_of(st.floats(-50, 50, width=32), st.just(-INF)), min_size=7, max_size=7),
    st.lists(TOKEN, min_size=1, max_size=12),
    st.lists(TOKEN, max_size=20),
    st.builds(
        SamplingParams,
        repetition_penalty=st.floats(0.25, 4),
        frequency_penalty=st.floats(-2, 2),
        presence_penalty=st.floats(-2, 2),
        logit_bias=st.dictionaries(TOKEN, st.floats(-100, 100), max_size=3),
        bad_words=st.lists(st.lists(TOKEN, min_size=2, max_size=3).map(tuple), max_size=4),
        allowed_token_ids=st.one_of(st.none(), st.lists(TOKEN, min_size=1)),
    ),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(ROW, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_edits_equal_naive(rows: list[Any], rng: random.Random) -> None:
    """Whatever rows have, in whatever order and slots; what lies behind a history in the table means nothing."""
    logits = torch.tensor([row[0] for row in rows])
    expected = torch.stack([edit_naively(torch.tensor(row), *rest) for row, *rest in rows])
    order, slots = rng.sample(range(len(rows)), len(rows)), rng.sample(range(9), len(rows))
    histories = torch.tensor([[rng.randrange(7) for _ in range(40)] for _ in range(9)], dtype=torch.int32)
    biases, words = [], []
    for place, row in enumerate(order):
        _, prompt, output, params = rows[row]
        histories[slots[place], : len(prompt + output)] = torch.tensor(prompt + output, dtype=torch.int32)
        biases += [(row, token, value) for token, value in dict(params.logit_bias).items()]
        words += [(place, [-1] * (3 - len(word)) + list(word)) for word in params.bad_words]
        if params.allowed_token_ids is not None:
            mask = sum(1 << token for token in set(params.allowed_token_ids))
            apply_masks_(logits, torch.tensor([row]), torch.tensor([[mask]], dtype=torch.int32))

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    if biases:
        bias_rows, ids, values = zip(*biases, strict=True)
        add_biases_(logits, ints(bias_rows), ints(ids), torch.tensor(values))
    prompt_lens = ints(len(rows[row][1]) for row in order)
    lens = prompt_lens + ints(len(rows[row][2]) for row in order)
    if words:
        of_words = ints(place for place, _ in words)
        word_ids = ints(word for _, word in words)
        args = (word_ids[:, :2], word_ids[:, 2], histories, ints(slots)[of_words])
        ban_words_(logits, ints(order)[of_words], *args, prompt_lens[of_words], lens[of_words])
    columns = zip(*((p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, _, _, p in
                    (rows[row] for row in order)), strict=True)  # fmt: skip
    repetition, frequency, presence = (torch.tensor(column, dtype=torch.float32) for column in columns)
    penalties = (repetition, frequency, presence)
    apply_penalties_(logits, ints(order), histories, ints(slots), prompt_lens, lens, int(lens.max()), penalties)
    torch.testing.assert_close(logits, expected.float(), rtol=1e-5, atol=1e-4)
