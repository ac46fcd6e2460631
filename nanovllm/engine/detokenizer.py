"""Output tokens to text."""

from collections.abc import Sequence
from typing import Any

# Tokens of the prompt's end that are decoded together with the output: enough for a character whose bytes
# are spread over tokens, and for tokenizers that treat the first token of a text differently.
_NUM_CONTEXT_TOKENS = 8


def decode_output(
    tokenizer: Any,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    skip_special_tokens: bool,
) -> str:
    """The text that the output adds to the prompt, as decoding both together shows it.

    A character that begins in the prompt and ends in the output counts as output.
    """
    context = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
    before = _decode(tokenizer, context, skip_special_tokens)
    whole = _decode(tokenizer, context + list(output_token_ids), skip_special_tokens)
    # Where the output completes a character, the two differ from that character's stand-in (U+FFFD) on.
    num_common = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), None)
    return whole[min(len(before), len(whole)) if num_common is None else num_common :]


def _decode(tokenizer: Any, token_ids: list[int], skip_special_tokens: bool) -> str:
    text = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
