"""Output tokens to text: of a whole output, or token by token."""

from collections.abc import Sequence
from typing import Any

# Tokens of the prompt's end that are decoded together with the output: enough for a character whose bytes
# are spread over tokens, and for tokenizers that treat the first token of a text differently.
_NUM_CONTEXT_TOKENS = 8
# What decoding shows in place of bytes that are no character, or not yet.
_REPLACEMENT = "\ufffd"


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
    return _added(before, whole)


class Detokenizer:
    """What token-by-token decoding knows about a tokenizer; one serves all requests of an engine.

    Attributes:
        is_byte_level: tokens are byte strings, and text is their concatenation as UTF-8: what follows a whole
            character doesn't depend on what came before it.
        byte_ids: tokens that stand for one byte in a tokenizer of text pieces. Such a tokenizer decodes a run of them
            as a whole: one wrong byte makes all of the run replacement characters.
        texts: those of single tokens, by whether special ones are left out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.is_byte_level = type(getattr(backend, "decoder", None)).__name__ == "ByteLevel"
        vocab = {} if self.is_byte_level else tokenizer.get_vocab()
        names = (f"<0x{byte:02X}>" for byte in range(256))
        self.byte_ids = frozenset(vocab[name] for name in names if name in vocab)
        self.texts = {skips: _TokenTexts(self, skips) for skips in (False, True)}

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """The text of tokens, exactly as the tokenizer gives it."""
        return _decode(self._tokenizer, token_ids, skip_special_tokens)


class _TokenTexts(dict[int, str | None]):
    """token id -> the text of that token alone; None if it holds bytes that are no character. Filled on demand."""

    def __init__(self, detokenizer: Detokenizer, skip_special_tokens: bool) -> None:
        self._detokenizer, self._skips_special = detokenizer, skip_special_tokens

    def __missing__(self, token_id: int) -> str | None:
        text = self._detokenizer.decode([token_id], self._skips_special)
        self[token_id] = None if _REPLACEMENT in text else text
        return self[token_id]


class IncrementalDetokenizer:
    """The text of one output as its tokens come, at a cost that doesn't grow with the output.

    At any time `decode_output` of the tokens so far begins with all that `push` has returned, and so will
    `decode_output` of any continuation: text is returned once no later token can change it.

    Attributes:
        unsettled: text beyond that, which holds if the output ends here: whole characters of a run of byte tokens.
    """

    __slots__ = (
        "_detokenizer",
        "_is_byte_level",
        "_is_in_run",
        "_seen",
        "_skips_special",
        "_text",
        "_texts",
        "_token_ids",
        "unsettled",
    )

    def __init__(self, detokenizer: Detokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._detokenizer = detokenizer
        self._skips_special = skip_special_tokens
        self._is_byte_level = detokenizer.is_byte_level
        self._texts = detokenizer.texts[skip_special_tokens]
        # The latest tokens, their text, and the beginning of it that was returned (or is the prompt's).
        self._token_ids = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._text = self._seen = detokenizer.decode(self._token_ids, skip_special_tokens)
        self._is_in_run = bool(self._token_ids) and self._token_ids[-1] in detokenizer.byte_ids
        self.unsettled = ""
        self._trim()

    def push(self, token_id: int) -> str:
        """Takes over the next token; returns the text that it settles."""
        if self._is_byte_level:
            own_text = self._texts[token_id]
            if own_text == "" or (own_text and not self._token_ids):
                return own_text
        self._token_ids.append(token_id)
        text = self._detokenizer.decode(self._token_ids, self._skips_special)
        if token_id in self._detokenizer.byte_ids:
            self._is_in_run = True
        elif text != self._text:  # a special token that is left out doesn't end a run
            self._is_in_run = False
        self._text = text
        if self._is_in_run:
            self.unsettled = "" if text.endswith(_REPLACEMENT) else _added(self._seen, text)
            return ""
        self.unsettled = ""
        settled = text[:-1] if text.endswith(_REPLACEMENT) else text  # it may become a character
        if self._seen.startswith(settled):
            return ""
        new_text = _added(self._seen, settled)
        self._seen = settled
        self._trim()
        return new_text

    def _trim(self) -> None:
        """Forgets tokens that the next ones can be decoded without."""
        detokenizer, kept = self._detokenizer, []
        if self._text.endswith(_REPLACEMENT):
            # Bytes without end that are no text. A character has at most four, so those before don't matter.
            if not self._is_byte_level or len(self._token_ids) <= 2 * _NUM_CONTEXT_TOKENS:
                return
            kept = self._token_ids[-_NUM_CONTEXT_TOKENS:]
            self._text = detokenizer.decode(kept, self._skips_special)
            self._token_ids, self._seen = kept, self._text[:-1]
            return
        text = ""
        if not self._is_byte_level:
            # One token in front, so that the next is not the first of a text, which loses its space.
            kept = self._token_ids[-1:]
            text = self._texts[kept[0]] or "" if kept else ""
            if self._is_in_run or not text:
                return
        self._token_ids, self._text, self._seen = kept, text, text


def _added(before: str, whole: str) -> str:
    """What `whole` has more than its beginning `before`. Where tokens completed a character of `before`, the two differ
    from that character's stand-in (U+FFFD) on, and it counts as added."""
    if whole.startswith(before):
        return whole[len(before) :]
    num_common = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(whole))
    return whole[num_common:]


def _decode(tokenizer: Any, token_ids: list[int], skip_special_tokens: bool) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # the layers above it take three times as long
        text = backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
    else:
        text = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
